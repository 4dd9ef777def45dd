// Fused attention of one cell: one launch reads sink, window and history of every row and merges them. In a decode step
// a row has one query; in a mixed step its queries are answered in tiles of up to 16, each with its own boundary
// between coded and exact tokens (row.cuh), and everything below that says "row" means a tile.
//
// Work is cut into tasks of one warp: (row, head, first chunk of 64 exact tokens: the sink), then (row, head, split of
// the history, or several in a row), then (row, head, other chunks), which are short and end the launch evenly. A
// warp's first task follows from its place in the grid, every later one from a ticket. A chunk and a split write a
// partial each; the warp that completes a (row, head) merges its partials in their order. What is computed, and in
// which order it is added, depends on the row alone: neither on the batch nor on timing.
//
// V precision acts in decode steps: a task over pages of int4 waits for the row's largest sink score (seed.cuh).
#pragma once

#include <type_traits>

#include "descriptor.h"
#include "exact_tasks.cuh"
#include "grouped_split.cuh"
#include "merge.cuh"
#include "notes.cuh"
#include "page.cuh"
#include "ring.cuh"
#include "single_split.cuh"
#include "tiles.cuh"

namespace loopkv {

constexpr int kControlTicket = 0, kControlExits = 1, kControlEpoch = 2;

// SINGLE: one query per kv head, so that only column 0 of a tile carries anything.
template <int D_, int BITS_, bool PRECISION_, bool MIXED_, int NT_, bool SINGLE_, int WARPS_, int RING_BYTES_>
struct AttendConfig {
  static constexpr int D = D_, BITS = BITS_, NT = NT_, WARPS = WARPS_;
  static constexpr bool PRECISION = PRECISION_, MIXED = MIXED_, CODED = BITS != 16;
  static_assert(!(PRECISION && MIXED), "prefill reads both planes");
  static constexpr bool SINGLE = SINGLE_;
  static constexpr int COLUMNS = SINGLE ? 1 : 2;
  static_assert(!(SINGLE && MIXED), "a tile of a mixed step has several columns");
  static constexpr bool INTEGER = SINGLE && CODED;  // read by single_split.cuh
  // Pages of a turn. What is paid once a turn is paid half as often with two, and the time goes with the instructions.
  // V precision has no room for two pages more, and int4 must be read alike with and without it: not a bit may differ
  // where every token is hot. Heads of several channel blocks have no registers for it, several queries neither.
  static constexpr int PAGES = INTEGER && block_number(D) == 1 && BITS == 2 ? 2 : 1;
  using Page = HeadPage<D, CODED ? BITS : 4>;
  // With V precision the low plane, which comes in token by token, has a place of its own.
  static constexpr int kStageBytes = PRECISION ? Page::kMainBytes : Page::kBytes;
  static constexpr int kLowBytes = PRECISION ? Page::kLowBytes : 0;
  static constexpr int kFit = CODED ? (RING_BYTES_ - kLowBytes) / kStageBytes : 1;
  static constexpr int STAGES = kFit < 8 ? kFit : 8;
  static_assert(!CODED || STAGES > (PRECISION ? 2 : PAGES), "in use, with V precision waiting for values, on its way");
  static constexpr int kRingBytes = RING_BYTES_ / 128 * 128;
  static constexpr int kPageQueryBytes = INTEGER ? (IntegerShared<D>::kBytes + 127) / 128 * 128 : 0;
  static constexpr int kQueryBytes = PAGES * kPageQueryBytes;
  static constexpr int kWarpBytes = kRingBytes + kQueryBytes + kNotesBytes;
  using Slots = TileSlots<D, kRingBytes>;
  // Queries of a tile of a mixed step.
  static constexpr int tile_queries(int group_queries) { return MIXED ? 8 * NT / group_queries : 1; }
  static constexpr int kTableOffset = WARPS * kWarpBytes;
  // [memory of the warps][tile table: 3 integers a tile, two more in a mixed step]
  static constexpr int shared_bytes(int tiles) { return kTableOffset + ((MIXED ? 5 : 3) * tiles + 4) * 4; }
};

template <typename Config>
LKV_DEVICE void attend_body(const AttendArgs& a, uint8_t* shared) {
  using Slots = typename Config::Slots;
  const int warp = thread_id() >> 5, lane = lane_id(), H = a.geometry.kv_heads;
  const int tile_queries = Config::tile_queries(a.geometry.group_queries);
  const int most = Config::MIXED ? a.max_tiles : a.rows;
  int* words = reinterpret_cast<int*>(shared + Config::kTableOffset);
  TileTable table = {0,
                     words,
                     words + most + 1,
                     words + 2 * most + 2,
                     Config::MIXED ? words + 3 * most + 2 : nullptr,
                     Config::MIXED ? words + 4 * most + 2 : nullptr};
  const uint32_t now = load_coherent(a.workspace.control + kControlEpoch) + 1;

  Ring<Config> ring;
  Slots slots;
  slots.memory = ring.memory = shared + warp * Config::kWarpBytes;  // pages and half tiles take turns in it
  WarpNotes& notes = ring.notes();
  if (lane == 0) {
    notes.written = 0;
    notes.epoch = now;
#if LOOPKV_BULK_COPY
    for (int i = 0; i < Config::STAGES; ++i) barrier_init(notes.barriers + i);
    barrier_init_done();
#endif
  }
  if constexpr (Config::MIXED) {
    if (warp == 0) {
      build_tiles(a, table, tile_queries);
      if (lane == 0) words[5 * most + 2] = table.count;
    }
    sync_block();
    table.count = words[5 * most + 2];
  } else {
    build_rows(a, table);
    sync_block();
  }
  if (warp == 0) {
    running_total(table.groups_before, table.count);
    if (Config::CODED && !Config::MIXED) {
      sync_warp();
      group_splits(a, table, block_count() * Config::WARPS);
    }
  }
  if (warp == Config::WARPS - 1) running_total(table.chunks_before, table.count);
  sync_block();

  const int first_tasks = table.count * H;  // a padded row's are passed over
  if (lane == 0) {
    notes.split_tasks = first_tasks + table.groups_before[table.count] * H;
    notes.tasks = notes.split_tasks + table.chunks_before[table.count] * H;
  }
  sync_warp();
  const int fixed = block_count() * Config::WARPS;  // tasks given by place in the grid
  int task = warp * block_count() + block_id();
  auto report = [&] {
    if (notes.written == kReports) report_parts<Config, 8>(a, table, notes);
  };
  while (task < notes.tasks) {
    const int split_tasks = notes.split_tasks;
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomic_add(a.workspace.control + kControlTicket, 1);
    const bool exact = task < first_tasks || task >= split_tasks;
    const int index = task < first_tasks ? task : task < split_tasks ? task - first_tasks : task - split_tasks;
    const int head = index % H, cut = index / H;
    int tile_index = cut, mine = 0;
    if (task >= first_tasks) {
      const int* before = exact ? table.chunks_before : table.groups_before;
      tile_index = find_tile(before, table.count, cut);
      mine = cut - before[tile_index] + (exact ? 1 : 0);
    } else if (table.tokens[tile_index] <= 0) {
      task = fixed + static_cast<int>(shfl(ticket, 0));
      continue;
    }
    const QueryTile tile = tile_of(a, table, tile_index, tile_queries);
    const Span span = span_of(a.geometry, tile.tokens, tile.queries);
    int parts = 1;
    if (!exact) {
      const int shift = table.tokens[tile_index] >> kTokenBits;
      mine <<= shift;
      parts = span.splits - mine < 1 << shift ? span.splits - mine : 1 << shift;
    }
    if (lane == 0) {
      notes.tile = tile_index;
      notes.head = head;
      notes.part = exact ? mine : span.chunks + mine;
      notes.all = span.parts();
    }
    int next = -1;
    if (exact) {
      exact_chunk<Config>(a, slots, notes, tile, span, head, mine, report);
    } else if constexpr (Config::CODED) {
      auto cross = [&] {  // the pages of the next task, so that the ring stays full
        next = fixed + static_cast<int>(shfl(ticket, 0));
        if (next >= notes.split_tasks) return;
        ring.count = note_group<Config>(a, notes, table, next - table.count * H);
        ring.ahead = true;
        ring.index = 0;
      };
      using Reader = std::conditional_t<Config::INTEGER, SingleSplit<Config>, GroupedSplit<Config>>;
      Reader reader(a, ring, tile, head);
      reader.run(span, mine, parts, report, cross);
    } else {
      exact_split<Config>(a, slots, notes, tile, span, head, mine, report);
    }
    sync_warp();
    if (lane == 0) {
      const int at = notes.written++;
      notes.written_place[at] = notes.tile << 16 | notes.head;
      notes.written_parts[at] = parts;
      notes.written_all[at] = notes.all;
    }
    task = next >= 0 ? next : fixed + static_cast<int>(shfl(ticket, 0));
    sync_warp();
  }
  if (notes.written > 0) {  // nothing else to hold in registers, and nothing to do meanwhile
    report_parts<Config, (Config::D <= 128 ? 16 : 8)>(a, table, notes);
  }
  sync_block();
  if (thread_id() == 0) {
    const uint32_t left = atomic_add(a.workspace.control + kControlExits, 1) + 1;
    if (left == static_cast<uint32_t>(block_count())) {  // the last block sets the stage for the next launch
      a.workspace.control[kControlTicket] = 0;
      a.workspace.control[kControlExits] = 0;
      a.workspace.control[kControlEpoch] = notes.epoch;
    }
  }
}

}  // namespace loopkv
