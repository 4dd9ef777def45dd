// How coded pages come into shared memory: a ring of page buffers per warp, filled several pages ahead of their use.
#pragma once

#include "notes.cuh"
#include "page.cuh"
#include "tiles.cuh"

namespace loopkv {

// Notes where a head's parts of pages first .. first + 31 of a row lie, as far as they are below `end`.
template <typename Config>
LKV_DEVICE void note_pages(const AttendArgs& a, WarpNotes& notes, int row, int head, int first, int end) {
  const int place = first + lane_id();
  if (place < end) {
    const int ppb = a.geometry.pages_per_block, block = place / ppb;
    const int64_t id = a.cache.history_table[row * a.cache.history_table_stride + block];
    notes.known[lane_id()] = reinterpret_cast<int64_t>(a.cache.pool) + id * a.geometry.block_bytes +
                             (place - block * ppb) * a.geometry.page_bytes + a.cell.history_offset_bytes +
                             static_cast<int64_t>(head) * Config::Page::kBytes;
  }
}

// Notes the pages of group number `number` and returns how many it has. Out of line: it is needed once a group, and its
// registers would be missed in every turn.
template <typename Config>
LKV_NOINLINE int note_group(const AttendArgs& a, WarpNotes& notes, const TileTable& table, int number) {
  const int H = a.geometry.kv_heads, cut = number / H;
  const int index = find_tile(table.groups_before, table.count, cut);
  const QueryTile tile = tile_of(a, table, index, Config::tile_queries(a.geometry.group_queries));
  const Span span = span_of(a.geometry, tile.tokens, tile.queries);
  const int group_pages = span.split_pages << (table.tokens[index] >> kTokenBits);
  const int first = (cut - table.groups_before[index]) * group_pages, sink = a.geometry.sink_tokens / kPageTokens;
  const int count = span.pages - first < group_pages ? span.pages - first : group_pages;
  const int head = number % H;
  note_pages<Config>(a, notes, tile.row, head, sink + first, sink + first + count);
  if (lane_id() < Config::D / 64) prefetch_line(Columns<Config>(a, tile, head).q(0) + 64 * lane_id());
  sync_warp();
  return count;
}

// This warp's ring of page buffers in shared memory, and the task whose pages are being copied in. Pages of the next
// task follow those of the last, so that copies never pause between two tasks.
template <typename Config>
struct Ring {
  uint8_t* memory;
  int next_fill = 0, next_use = 0;
  uint32_t phase = 0;
  bool ahead = false;        // the pages being copied are those of the task after the one in hand
  int index = 0, count = 0;  // of their next page, and of their pages

  LKV_DEVICE WarpNotes& notes() const {
    return *reinterpret_cast<WarpNotes*>(memory + Config::kRingBytes + Config::kQueryBytes);
  }
  LKV_DEVICE uint8_t* queries() const { return memory + Config::kRingBytes; }
  LKV_DEVICE uint8_t* stage(int at) const { return memory + at * Config::kStageBytes; }
  LKV_DEVICE uint8_t* low() const { return stage(Config::STAGES); }

  // Starts the copy of the next page, if there is one, into the next stage, which all lanes have left.
  LKV_DEVICE void fill() {
    const bool real = index < count;
#if LOOPKV_BULK_COPY
    if (real && lane_id() == 0) {
      const int64_t from = notes().known[index & 31];
      if (Config::PRECISION) notes().addresses[next_fill] = from + Config::Page::kMainBytes;
      barrier_expect(notes().barriers + next_fill, Config::kStageBytes);
      bulk_copy(stage(next_fill), reinterpret_cast<const void*>(from), Config::kStageBytes,
                notes().barriers + next_fill, stream_policy());
    }
#else
    if (real) {
      const int64_t from = notes().known[index & 31];
      if (Config::PRECISION && lane_id() == 0) notes().addresses[next_fill] = from + Config::Page::kMainBytes;
      for (int i = 16 * lane_id(); i < Config::kStageBytes; i += 512) {
        copy_async<16>(stage(next_fill) + i, reinterpret_cast<const uint8_t*>(from) + i);
      }
    }
    copy_async_commit();
#endif
    if (real) {
      ++index;
      next_fill = next_fill + 1 == Config::STAGES ? 0 : next_fill + 1;
    }
  }

#if LOOPKV_BULK_COPY
  // The same for two pages that are known to exist: one branch, fewer instructions.
  LKV_DEVICE void fill_two() {
    static_assert(!Config::PRECISION, "would have to note the addresses of low planes");
    const int second = next_fill + 1 == Config::STAGES ? 0 : next_fill + 1;
    if (lane_id() == 0) {
      const int stages[2] = {next_fill, second};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t from = notes().known[(index + i) & 31];
        barrier_expect(notes().barriers + stages[i], Config::kStageBytes);
        bulk_copy(stage(stages[i]), reinterpret_cast<const void*>(from), Config::kStageBytes,
                  notes().barriers + stages[i], stream_policy());
      }
    }
    index += 2;
    next_fill = second + 1 == Config::STAGES ? 0 : second + 1;
  }
#endif

  // Waits for the next page and returns its stage. Without bulk copies: PENDING groups may still be on their way.
  template <int PENDING>
  LKV_DEVICE int wait() {
    const int at = next_use;
#if LOOPKV_BULK_COPY
    barrier_wait(notes().barriers + at, phase);
#else
    copy_async_wait<PENDING>();
#endif
    sync_warp();
    next_use = at + 1 == Config::STAGES ? 0 : at + 1;
    if (next_use == 0) phase ^= 1;
    return at;
  }
};

// Brings the pages of a task, splits `split` .. `split + splits - 1` of a tile and head, through the ring, whatever its
// reader makes of them. Making one begins the first copies; the reader then does what needs no page, calls begin_next()
// and, for every page, Ring::wait and advance(). `cross` begins the copies of the next task once all of this one's have
// begun.
template <typename Config, typename Cross>
struct PageFeed {
  const AttendArgs& a;
  Ring<Config>& ring;
  Cross& cross;
  int place, count;  // number of its first page in the row, whose sink counts as pages too; and of its pages

  LKV_DEVICE PageFeed(const AttendArgs& args, Ring<Config>& ring_, const QueryTile& tile, int head, const Span& span,
                      int split, int splits, Cross& cross_)
      : a(args), ring(ring_), cross(cross_) {
    const int first = split * span.split_pages, most = splits * span.split_pages;
    place = a.geometry.sink_tokens / kPageTokens + first;
    count = span.pages - first < most ? span.pages - first : most;
    if (lane_id() == 0) {
      ring.notes().row = tile.row;
      ring.notes().place = place;
      ring.notes().ended_splits = 0;
    }
    if (!ring.ahead) {
      ring.index = 0;
      ring.count = count;
      note_pages<Config>(a, ring.notes(), tile.row, head, place, place + count);
    }
    ring.ahead = false;
    sync_warp();  // the stages were left by all lanes
    for (int i = ring.index; i < Config::STAGES; ++i) ring.fill();
  }

  // Goes on to the next task if the copies of all pages of this one have begun.
  LKV_DEVICE void begin_next() {
    if (LOOPKV_BULK_COPY && ring.index == ring.count) cross();
  }

  // Starts the next copy: all lanes have left a stage.
  LKV_DEVICE void advance() {
    if (!ring.ahead && ring.index < ring.count) {
      if ((ring.index & 31) == 0 && ring.index > 0) {
        const WarpNotes& notes = ring.notes();
        const int from = notes.place;
        note_pages<Config>(a, ring.notes(), notes.row, notes.head, from + ring.index, from + ring.count);
        sync_warp();
      }
      ring.fill();
      begin_next();
    } else {
      ring.fill();
    }
  }
};

}  // namespace loopkv
