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
// V precision acts in decode steps. A task then waits for the row's largest sink score. The warp with the sink
// publishes it together with the launch's epoch before it reads the window; it waits on nothing. Should it not run (a
// warp may wait for a block that was never started), the task computes the same number itself after a while.
#pragma once

#include "descriptor.h"
#include "exact.cuh"
#include "page.cuh"
#include "row.cuh"
#include "simt.cuh"

namespace loopkv {

constexpr int kPatienceCycles = 200000;  // about 100 us: longer than any sink chunk takes
constexpr int kReports = 4;  // tasks a warp writes before it reports them: one fence serves all
constexpr int kNotesBytes = 640;  // of a warp
constexpr int kControlTicket = 0, kControlExits = 1, kControlEpoch = 2;

// SINGLE: one query per kv head, so that only column 0 of a tile carries anything.
template <int D_, int BITS_, bool PRECISION_, bool MIXED_, int NT_, bool SINGLE_, int WARPS_, int RING_BYTES_>
struct AttendConfig {
  static constexpr int D = D_, BITS = BITS_, NT = NT_, WARPS = WARPS_;
  static constexpr bool PRECISION = PRECISION_, MIXED = MIXED_, CODED = BITS != 16;
  static_assert(!(PRECISION && MIXED), "prefill reads both planes");
  static constexpr bool SINGLE = SINGLE_;
  static constexpr int COLUMNS = SINGLE ? 1 : 2;
  // Pages of a turn. What is paid once a turn is paid half as often with two, and the time goes with the instructions.
  // V precision has no room for two pages more, and int4 must be read alike with and without it: not a bit may differ
  // where every token is hot. Heads of several channel blocks have no registers for it.
  static constexpr int PAGES = SINGLE && block_number(D) == 1 && BITS == 2 && !MIXED ? 2 : 1;
  using Page = HeadPage<D, CODED ? BITS : 4>;
  // With V precision the low plane, which comes in token by token, has a place of its own.
  static constexpr int kStageBytes = PRECISION ? Page::kMainBytes : Page::kBytes;
  static constexpr int kLowBytes = PRECISION ? Page::kLowBytes : 0;
  static constexpr int kFit = CODED ? (RING_BYTES_ - kLowBytes) / kStageBytes : 1;
  static constexpr int STAGES = kFit < 8 ? kFit : 8;
  static_assert(!CODED || STAGES > (PRECISION ? 2 : PAGES), "in use, with V precision waiting for values, on its way");
  static constexpr int kRingBytes = RING_BYTES_ / 128 * 128;
  using Queries = CodedQueries<D, NT_, SINGLE_>;
  static constexpr int kPageQueryBytes = (Queries::kSharedBytes + 127) / 128 * 128;
  static constexpr int kQueryBytes = PAGES * kPageQueryBytes;
  static constexpr int kWarpBytes = kRingBytes + kQueryBytes + kNotesBytes;
  using Slots = TileSlots<D, kRingBytes>;
  // Queries of a tile of a mixed step.
  static constexpr int tile_queries(int group_queries) { return MIXED ? 8 * NT / group_queries : 1; }
  static constexpr int kTableOffset = WARPS * kWarpBytes;
  // [memory of the warps][tile table: 3 integers a tile, two more in a mixed step]
  static constexpr int shared_bytes(int tiles) { return kTableOffset + ((MIXED ? 5 : 3) * tiles + 4) * 4; }
};

// What a warp writes down in shared memory instead of keeping it in registers: it is needed once a task.
struct WarpNotes {
  uint64_t barriers[8];  // of the stages
  int64_t addresses[8];  // where the low plane of the page in each stage lies
  int64_t known[32];     // pages of the split being copied in: number i, i + 32, .. of them
  int32_t tile, head, part, all;   // of the task in hand: its first part, all parts of its tile and head
  int32_t row, place;              // its row, and the first of its pages
  int32_t split_tasks, tasks;      // number of the first task after the splits, and of all
  uint32_t epoch;
  float ended[16], ended_lift;     // largest scores of a split whose values are still summed, by column, and its lift
  int32_t ended_splits;            // of the task
  uint32_t hot;                    // tokens of the task
  int32_t written;                  // tasks written but not yet reported
  int32_t written_place[kReports];  // of each: tile << 16 | head,
  int32_t written_parts[kReports];  // its parts,
  int32_t written_all[kReports];    // and all parts of its tile and head
};
static_assert(sizeof(WarpNotes) <= kNotesBytes);

// Per block: the tiles of the step and running totals of their tasks.
struct TileTable {
  int count;           // tiles of this launch
  int* chunks_before;  // [count + 1] chunks but the first of each tile
  int* groups_before;  // [count + 1] groups of splits
  int* tokens;         // [count] the first query of the tile sees; group_shift of the tile in the highest bits
  int* rows;           // [count], mixed steps only
  int* first_query;    // [count], mixed steps only: inside the row
};

// Splits are read in groups of 2^shift neighbours: a warp that goes from one to the next of the same row keeps its
// queries and its stream of pages, and reports once. What is computed stays the same, so the size may follow the load:
// large while every warp has much to do, single splits at the end, so that the warps finish together.
constexpr int kMostShift = 3;
constexpr int kTokenBits = 28;
LKV_DEVICE int group_shift(int64_t splits_left, int warps) {
  int shift = 0;
  while (shift < kMostShift && splits_left >= static_cast<int64_t>(warps) * (4 << shift)) ++shift;
  return shift;
}

LKV_DEVICE QueryTile tile_of(const AttendArgs& a, const TileTable& table, int index, int tile_queries) {
  QueryTile tile;
  tile.tokens = table.tokens[index] & ((1 << kTokenBits) - 1);
  if (a.query_start == nullptr) {
    tile.row = tile.first_query = index;
    tile.queries = 1;
    tile.computed = tile.tokens - 1;
    return tile;
  }
  tile.row = table.rows[index];
  const int start = a.query_start[tile.row], count = a.query_start[tile.row + 1] - start;
  const int inside = table.first_query[index];
  tile.first_query = start + inside;
  tile.queries = count - inside < tile_queries ? count - inside : tile_queries;
  tile.computed = a.cache.seq_lens[tile.row] - count;
  return tile;
}

// Decode: a row is a tile.
LKV_DEVICE void build_rows(const AttendArgs& a, TileTable& table) {
  table.count = a.rows;
  for (int row = thread_id(); row < a.rows; row += block_threads()) {
    const int tokens = a.cache.seq_lens[row] > 0 ? a.cache.seq_lens[row] : 0;
    const Span span = span_of(a.geometry, tokens, 1);
    table.tokens[row] = tokens;
    table.chunks_before[row] = tokens > 0 ? span.chunks - 1 : 0;
    table.groups_before[row] = tokens > 0 ? span.splits : 0;
  }
}

// From running totals of splits to such of groups of splits; one warp.
LKV_DEVICE void group_splits(const AttendArgs& a, TileTable& table, int warps) {
  const int lane = lane_id(), H = a.geometry.kv_heads, total = table.groups_before[table.count];
  if (group_shift(static_cast<int64_t>(total) * H, warps) == 0) return;
  for (int base = 0; base < table.count; base += 32) {
    const int row = base + lane;
    int before = 0, splits = 0;
    if (row < table.count) {
      before = table.groups_before[row];
      splits = table.groups_before[row + 1] - before;
    }
    sync_warp();
    if (row < table.count) {
      const int shift = group_shift(static_cast<int64_t>(total - before) * H, warps);
      table.groups_before[row] = (splits + (1 << shift) - 1) >> shift;
      if (splits > 0) table.tokens[row] |= shift << kTokenBits;
    }
  }
  sync_warp();
  running_total(table.groups_before, table.count);
}

// Mixed: tiles of up to `tile_queries` queries, rows in order; this launch takes those from first_tile on. One warp.
LKV_DEVICE void build_tiles(const AttendArgs& a, TileTable& table, int tile_queries) {
  const int lane = lane_id();
  int total = 0;  // tiles of the rows before
  for (int base = 0; base < a.rows; base += 32) {
    const int row = base + lane;
    int start = 0, count = 0, tokens = 0;
    if (row < a.rows) {
      start = a.query_start[row];
      count = a.query_start[row + 1] - start;
      tokens = a.cache.seq_lens[row];
    }
    if (tokens <= 0 || count <= 0) count = 0;
    int sum = (count + tile_queries - 1) / tile_queries;
    const int mine = sum;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int before = shfl_up(sum, delta);
      if (lane >= delta) sum += before;
    }
    const int first = total + sum - mine - a.first_tile;
    for (int i = 0; i < mine; ++i) {
      if (first + i >= 0 && first + i < a.max_tiles) {
        const int inside = i * tile_queries, left = count - inside;
        const int sees = tokens - count + inside + 1;
        const Span span = span_of(a.geometry, sees, left < tile_queries ? left : tile_queries);
        table.rows[first + i] = row;
        table.first_query[first + i] = inside;
        table.tokens[first + i] = sees;
        table.chunks_before[first + i] = span.chunks - 1;
        table.groups_before[first + i] = span.splits;
      }
    }
    total += shfl(sum, 31);
  }
  const int left = total - a.first_tile;
  table.count = left < 0 ? 0 : left < a.max_tiles ? left : a.max_tiles;
}

LKV_DEVICE int64_t part_index(const AttendArgs& a, int tile, int head, int part) {
  return (static_cast<int64_t>(tile) * a.geometry.kv_heads + head) * a.workspace.max_parts + part;
}

// Byte offset of the exact keys of a token and head in the pool; the values follow `window_values_bytes` later.
template <int D>
LKV_DEVICE int64_t window_offset(const AttendArgs& a, int row, int head, int token) {
  const int bw = a.geometry.window_block_tokens, index = token / bw;
  const int64_t block = a.cache.window_table[row * a.cache.window_table_stride + index];
  const int64_t place = static_cast<int64_t>(token - index * bw) * a.geometry.kv_heads + head;
  return block * a.geometry.block_bytes + a.cell.window_offset_bytes + place * (2 * D);
}

// The columns of a tile: query i of the tile and query head g of the kv head are column i * G + g.
template <typename Config>
struct Columns {
  static constexpr int D = Config::D, NT = Config::NT, COLUMNS = Config::COLUMNS;
  const AttendArgs& a;
  const QueryTile& tile;
  const int head, count;

  LKV_DEVICE Columns(const AttendArgs& args, const QueryTile& tile_, int head_)
      : a(args), tile(tile_), head(head_), count(Config::SINGLE ? 1 : tile_.queries * args.geometry.group_queries) {}
  LKV_DEVICE int query(int column) const { return Config::MIXED ? column / a.geometry.group_queries : 0; }
  LKV_DEVICE int64_t place(int column, int64_t stride) const {
    const int query_ = query(column), g = column - query_ * a.geometry.group_queries;
    return (tile.first_query + query_) * stride +
           (static_cast<int64_t>(head) * a.geometry.group_queries + g) * D;
  }
  LKV_DEVICE const uint16_t* q(int column) const {
    return static_cast<const uint16_t*>(a.q) + place(column, a.q_stride);
  }
  // Tokens that the query of a column sees.
  LKV_DEVICE int tokens(int column) const { return tile.tokens + query(column); }
};

// Largest score of each query column over the row's sink: the very sums that the sink's own warp makes.
template <typename Config>
LKV_NOINLINE void sink_maximum(const AttendArgs& a, const QueryTile& tile, int head,
                               float (&best)[Config::NT][Config::COLUMNS]) {
  constexpr int D = Config::D, NT = Config::NT, COLUMNS = Config::COLUMNS;
  const int row = tile.row;
  uint32_t q[NT][D / 8];
  load_exact_queries<D, NT>(q, Columns<Config>(a, tile, head));
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) best[nt][c] = bits_float(0xff800000u);
  }
  const int r = lane_id() >> 2, t = lane_id() & 3;
  for (int first = 0; first < a.geometry.sink_tokens; first += kTileTokens) {
    const uint8_t* k0 = a.cache.pool + window_offset<D>(a, row, head, first + r) + 4 * t;
    const uint8_t* k1 = a.cache.pool + window_offset<D>(a, row, head, first + r + 8) + 4 * t;
    float s[NT][4];
    exact_scores<D, NT>(s, q, a.scale_log2, [&](int step) {
      return Vec4{load_word(k0 + 32 * step), load_word(k1 + 32 * step), load_word(k0 + 32 * step + 16),
                  load_word(k1 + 32 * step + 16)};
    });
    column_maximum<NT, COLUMNS>(best, s);
  }
}

// The seed of V precision for this lane's query columns.
template <typename Config>
LKV_DEVICE void read_seed(const AttendArgs& a, const QueryTile& tile, int head, uint32_t epoch,
                          float (&seed)[Config::NT][Config::COLUMNS]) {
  constexpr int NT = Config::NT, COLUMNS = Config::COLUMNS;
  const float none = bits_float(0xff800000u);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) seed[nt][c] = none;
  }
  if (a.seed_mode == kSeedNone || a.geometry.sink_tokens == 0) return;
  const int G = a.geometry.group_queries, t = lane_id() & 3;
  const uint64_t* flags = a.workspace.seeds + (static_cast<int64_t>(tile.row) * a.geometry.kv_heads + head) * G;
  const int64_t start = clock_cycles(), limit = a.seed_mode == kSeedTimed ? a.timed_cycles : kPatienceCycles;
  bool late = false;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int column = 8 * nt + 2 * t + c;
      while (column < G) {
        const uint64_t flag = load_flag(flags + column);
        if (static_cast<uint32_t>(flag >> 32) == epoch) {
          seed[nt][c] = bits_float(static_cast<uint32_t>(flag));
          break;
        }
        if (clock_cycles() - start > limit) {
          late = true;
          break;
        }
        spin_pause();
      }
    }
  }
  if (any(late)) {  // all queries of the head or none: the rule joins them
    float own[NT][COLUMNS];  // its address leaves this function; that of the seed must not
    if (a.seed_mode == kSeedSink) sink_maximum<Config>(a, tile, head, own);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) seed[nt][c] = a.seed_mode == kSeedSink ? own[nt][c] : none;
    }
  }
}

// A finite score for what a query may not read: alone in a part it makes a partial that weighs nothing.
constexpr float kHidden = -1e30f;

// Sink and window: one chunk of a tile's exact tokens. `between` runs while the first rows come in.
template <typename Config, typename Between>
LKV_DEVICE void exact_chunk(const AttendArgs& a, typename Config::Slots& slots, const WarpNotes& notes,
                            const QueryTile& queries, const Span& span, int head, int chunk, Between between) {
  constexpr int D = Config::D, NT = Config::NT, COLUMNS = Config::COLUMNS;
  using Slots = typename Config::Slots;
  const Columns<Config> columns(a, queries, head);
  const int lane = lane_id(), r = lane >> 2, t = lane & 3;
  const int first = chunk * kChunkTokens;
  const int count = span.exact - first < kChunkTokens ? span.exact - first : kChunkTokens;
  const int newest = !Config::MIXED && a.k_new != nullptr ? span.exact - 1 - first : -1;  // here, if below count
  const int64_t values = static_cast<int64_t>(a.geometry.window_block_tokens) * a.geometry.kv_heads * (2 * D);
  const uint8_t* from[kChunkTokens / kTileTokens];
#pragma unroll
  for (int tile = 0; tile < kChunkTokens / kTileTokens; ++tile) {
    const int index = kTileTokens * tile + (lane & 15);
    from[tile] = a.cache.pool;
    if (index < count) {
      const int token = span.exact_token(first + index);
      if (Config::MIXED ? token >= queries.computed : index == newest) {
        const uint16_t* step = static_cast<const uint16_t*>(lane < 16 ? a.k_new : a.v_new);
        const int64_t query = queries.first_query + token - (queries.tokens - 1);
        from[tile] = reinterpret_cast<const uint8_t*>(step + query * a.kv_stride + static_cast<int64_t>(head) * D);
      } else {
        from[tile] += window_offset<D>(a, queries.row, head, token) + (lane < 16 ? 0 : values);
      }
    }
  }
  uint32_t q[NT][D / 8];
  load_exact_queries<D, NT>(q, columns);
  ExactState<D, NT, COLUMNS> state;
  state.clear();
  auto rows = [&](int tile) { return tile < 2 ? (tile == 0 ? from[0] : from[1]) : (tile == 2 ? from[2] : from[3]); };
  auto hide = [&](int tile, float(&s)[NT][4]) {
    if constexpr (Config::MIXED) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          const int sees = columns.tokens(8 * nt + 2 * t + c), recent = history_end(a.geometry, sees);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int token = span.exact_token(first + kTileTokens * tile + 8 * half + r);
            const bool visible = token < sees && (token < a.geometry.sink_tokens || token >= recent);
            if (!visible) s[nt][2 * half + c] = kHidden;
          }
        }
      }
    }
  };
  auto arrived = [&](int tile, int half, const uint8_t* slot) {
    const int index = newest - kTileTokens * tile;  // the window gets the new token; nobody else reads it in this launch
    if (index < 0 || index >= kTileTokens || newest >= count) return;
    uint8_t* to = a.cache.pool + window_offset<D>(a, queries.row, head, span.last - 1) + (half ? values : 0);
    if (16 * lane < 2 * D) {
      *reinterpret_cast<Vec4*>(to + 16 * lane) =
          *reinterpret_cast<const Vec4*>(slot + index * Slots::kRowBytes + 16 * lane);
    }
  };
  auto after = [&](int tile) {
    if (Config::MIXED || chunk != 0 || kTileTokens * (tile + 1) != a.geometry.sink_tokens || span.splits == 0) return;
    uint64_t* flags =
        a.workspace.seeds + (static_cast<int64_t>(queries.row) * a.geometry.kv_heads + head) * columns.count;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int column = 8 * nt + 2 * t + c;
        if (r == 0 && column < columns.count) {
          store_flag(flags + column, static_cast<uint64_t>(notes.epoch) << 32 | float_bits(state.best[nt][c]));
        }
      }
    }
  };
  exact_tiles<D, NT, COLUMNS>(state, slots, q, count, a.scale_log2, rows, hide, arrived, after, between);
  const int64_t part = part_index(a, notes.tile, notes.head, notes.part) * (Config::MIXED ? 8 * NT : columns.count);
  write_exact<D, NT, COLUMNS>(state, a.workspace.partial_o + part * D, a.workspace.partial_ml + part * 2,
                              columns.count);
}

// History kept exact: one split, page = [keys, values][token][head][channel].
template <typename Config, typename Between>
LKV_DEVICE void exact_split(const AttendArgs& a, typename Config::Slots& slots, const WarpNotes& notes,
                            const QueryTile& queries, const Span& span, int head, int split, Between between) {
  constexpr int D = Config::D, NT = Config::NT, COLUMNS = Config::COLUMNS;
  const Columns<Config> columns(a, queries, head);
  const int lane = lane_id(), t = lane & 3;
  const int first = split * span.split_pages;
  const int count = (first + span.split_pages < span.pages ? first + span.split_pages : span.pages) - first;
  const int ppb = a.geometry.pages_per_block, place0 = a.geometry.sink_tokens / kPageTokens + first;
  const int32_t* table = a.cache.history_table + queries.row * a.cache.history_table_stride;
  const int64_t token_bytes = static_cast<int64_t>(a.geometry.kv_heads) * (2 * D);
  const int64_t in_page = a.cell.history_offset_bytes + static_cast<int64_t>(head) * (2 * D) +
                          (lane & 15) * token_bytes + (lane < 16 ? 0 : kPageTokens * token_bytes);
  uint32_t q[NT][D / 8];
  load_exact_queries<D, NT>(q, columns);
  ExactState<D, NT, COLUMNS> state;
  state.clear();
  int64_t known = 0;  // lane i: where page i, i + 32, .. of the split starts
  int known_from = -32;
  auto rows = [&](int tile) {  // tiles are asked for in order, each twice
    const int page = tile >> 1;
    if (page >= known_from + 32) {
      known_from = page & ~31;
      if (known_from + lane < count) {
        const int place = place0 + known_from + lane, block = place / ppb;
        known = table[block] * a.geometry.block_bytes + (place - block * ppb) * a.geometry.page_bytes;
      }
    }
    return a.cache.pool + shfl(known, page & 31) + in_page + (tile & 1) * kTileTokens * token_bytes;
  };
  auto hide = [&](int tile, float(&s)[NT][4]) {
    if constexpr (Config::MIXED) {
      const int end = (place0 + (tile >> 1) + 1) * kPageTokens;
      if (end <= span.recent) return;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          if (end > history_end(a.geometry, columns.tokens(8 * nt + 2 * t + c))) s[nt][c] = s[nt][2 + c] = kHidden;
        }
      }
    }
  };
  exact_tiles<D, NT, COLUMNS>(
      state, slots, q, count * kPageTokens, a.scale_log2, rows, hide, [](int, int, const uint8_t*) {}, [](int) {},
      between);
  const int64_t part = part_index(a, notes.tile, notes.head, notes.part) * (Config::MIXED ? 8 * NT : columns.count);
  write_exact<D, NT, COLUMNS>(state, a.workspace.partial_o + part * D, a.workspace.partial_ml + part * 2,
                              columns.count);
}

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
  LKV_DEVICE uint8_t* masks() const {
    if constexpr (Config::SINGLE) return queries() + Config::Queries::kMasks;
    return nullptr;
  }
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

// Queries as halves, scaled by a power of two into [-1, 1], so that products with any fp16 scale stay finite; `unscale`
// is what a score of this lane's columns 2 t, 2 t + 1 is multiplied with.
template <typename Config>
LKV_DEVICE void load_coded_queries(typename Config::Queries& queries,
                                   float (&unscale)[Config::NT][Config::COLUMNS], const Columns<Config>& columns,
                                   float scale_log2) {
  constexpr int D = Config::D, BITS = Config::BITS, NT = Config::NT, COLUMNS = Config::COLUMNS;
  constexpr bool SINGLE = Config::SINGLE;
  constexpr int WORDS = SINGLE ? 2 * block_number(D) : D / 8;
  const int lane = lane_id(), r = lane >> 2, t = lane & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const bool real = SINGLE || 8 * nt + r < columns.count;
    const uint16_t* mine = columns.q(SINGLE || !real ? 0 : 8 * nt + r);
    uint32_t raw[WORDS];
    int at = 0;
#pragma unroll
    for (int b = 0; b < block_number(D); ++b) {
      if constexpr (SINGLE) {
        const int pairs = shared_pairs(block_channels(D, b));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool share = i < pairs && has_share(block_channels(D, b), lane);
          raw[at++] = share ? load_word(mine + block_start(D, b) + 2 * (pairs * lane + i)) : 0u;
        }
      } else {
#pragma unroll
        for (int i = 0; i < block_channels(D, b) / 32; ++i) {
          Vec4 v = {0, 0, 0, 0};
          if (real) v = load_streamed(mine + block_start(D, b) + t * (block_channels(D, b) / 4) + 8 * i);
          raw[at++] = v.x;
          raw[at++] = v.y;
          raw[at++] = v.z;
          raw[at++] = v.w;
        }
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      largest = max_float(largest, bits_float((raw[i] << 16) & 0x7fffffffu));
      largest = max_float(largest, bits_float(raw[i] & 0x7fff0000u));
    }
#pragma unroll
    for (int across = 1; across < (SINGLE ? 32 : 4); across *= 2) {
      largest = max_float(largest, shfl_xor(largest, across));
    }
    // 2^(e + 1) > largest for a normal float with exponent e; zero and subnormal queries stay as they are.
    const uint32_t exponent = float_bits(largest) >> 23;
    const bool usual = exponent > 0 && exponent < 253;
    const float down = usual ? bits_float((253u - exponent) << 23) : 1.0f;
    const float up = usual ? bits_float((exponent + 1u) << 23) : 1.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const float low = bits_float(raw[i] << 16) * down, high = bits_float(raw[i] & 0xffff0000u) * down;
      if constexpr (SINGLE) {
        const int pair = (shared_pairs(block_channels(D, i / 2)) * lane + i % 2) & 3;  // of its eight codes
        const float factor = 1.0f / (pair < 2 ? (pair == 0 ? pair_factor<BITS>(0) : pair_factor<BITS>(1))
                                              : (pair == 2 ? pair_factor<BITS>(2) : pair_factor<BITS>(3)));
        queries.whole[i / 2][i % 2] = pack_half2(low, high);
        queries.divided[i / 2][i % 2] = pack_half2(low * factor, high * factor);
      } else {
        const float factor = 1.0f / (i & 1 ? odd_division<BITS, SINGLE> : 1.0f);
        queries.q[nt][query_place(i)] = pack_half2(low * factor, high * factor);
      }
    }
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) unscale[nt][c] = (SINGLE ? up : shfl(up, 4 * (2 * t + c))) * scale_log2;
  }
}

// One split of a history in coded pages.
template <typename Config>
struct CodedSplit {
  static constexpr int D = Config::D, BITS = Config::BITS, NT = Config::NT, STAGES = Config::STAGES;
  static constexpr int COLUMNS = Config::COLUMNS, PAGES = Config::PAGES;
  using Page = typename Config::Page;
  static constexpr int kCopyBytes = Page::kTokenPlaneBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopies = Page::kTokenPlaneBytes / kCopyBytes;  // of a token's low plane; also rounds of a warp

  const AttendArgs& a;
  Ring<Config>& ring;
  const QueryTile& queries;
  const Columns<Config> columns;
  const int G, lane, r, t;  // G: columns with a query
  const int head;

  typename Config::Queries q;
  float unscale[NT][COLUMNS];
  static constexpr int TILES = value_tiles<D, Config::SINGLE>;
  float out[NT][TILES][4], extra[NT][4];  // extra: rows 0-7 sums of weight * zero by group, row 8 sums of weights
  float best[NT][COLUMNS];
  float bar[NT][COLUMNS];  // seed of V precision; +inf for columns without a query
  static constexpr float kLift = 14.0f;
  float lift = kLift;  // weights are halves times 2^lift: small ones stay normal; scales of 2 and more need the room

  // What a turn's scores leave for its values.
  uint32_t weight[PAGES][NT][4];  // pairs of halves: column lane / 4, tokens 8 k + {2 t, 2 t + 1}
  float alpha[NT][COLUMNS];  // what the output before the turn is worth
  uint32_t hot = 0xffffffffu;  // bit 4 j + k: token 8 k + j
  int due[PAGES] = {};         // stages

  // A turn's scores.
  float codes[PAGES][NT][2][kChains][4], zeros[PAGES][NT][2][4];

  LKV_DEVICE CodedSplit(const AttendArgs& args, Ring<Config>& ring_, const QueryTile& tile, int head_)
      : a(args), ring(ring_), queries(tile), columns(args, tile, head_), G(columns.count), lane(lane_id()),
        r(lane >> 2), t(lane & 3), head(head_) {}

  LKV_DEVICE void score(const int (&stages)[PAGES]) {
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
#pragma unroll
          for (int chain = 0; chain < kChains; ++chain) codes[p][nt][0][chain][j] = codes[p][nt][1][chain][j] = 0.0f;
          zeros[p][nt][0][j] = zeros[p][nt][1][j] = 0.0f;
        }
      }
    }
    const uint32_t here = forget(lane);
    if constexpr (Config::SINGLE) {
#pragma unroll
      for (int p = 0; p < PAGES; ++p) {
        auto mine = q;
        mine.shared += p * Config::kPageQueryBytes;
        scale_queries<D, BITS, NT>(here, ring.stage(stages[p]), mine, zeros[p][0][0]);
      }
      sync_warp();
    }
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      auto mine = q;
      if constexpr (Config::SINGLE) mine.shared += p * Config::kPageQueryBytes;
      score_page<D, BITS, NT, Config::SINGLE>(forget(lane), ring.stage(stages[p]), mine, codes[p], zeros[p]);
    }
    if constexpr (Config::SINGLE) {  // the eight columns' sums in all lanes
#pragma unroll
      for (int p = 0; p < PAGES; ++p) {
        float& sum = zeros[p][0][0][0];
        sum += zeros[p][0][0][1];
        sum += shfl_xor(sum, 1);
        sum += shfl_xor(sum, 2);
      }
    }
  }

  // Any value scale of 2 or more in the pages?
  LKV_DEVICE bool wide(const int (&stages)[PAGES]) const {
    uint32_t bits = 0;
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      const uint32_t* scales = reinterpret_cast<const uint32_t*>(ring.stage(stages[p]) + Page::kValueScales);
#pragma unroll
      for (int word = 0; word < D / 2; word += 32) {
        if (word + 32 <= D / 2 || word + lane < D / 2) bits |= scales[word + lane];
      }
    }
    return any((bits & 0x40004000u) != 0);
  }

  // Multiplies what was summed so far by alpha.
  LKV_DEVICE void rescale() {
    bool changed = false;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) changed |= alpha[nt][c] != 1.0f;
    }
    if (!Config::SINGLE && !any(changed)) return;  // SINGLE: a few products are sooner made than avoided
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        extra[nt][c] *= alpha[nt][c];
        extra[nt][2 + c] *= alpha[nt][c];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
          const int column = Config::SINGLE ? tile / 2 : c;  // the one of a lane's two that means anything
          out[nt][tile][column] *= alpha[nt][c];
          out[nt][tile][2 + column] *= alpha[nt][c];
        }
      }
    }
  }

  // Half of the values of page p of the turn whose weights are held.
  template <int MT>
  LKV_DEVICE void half_values(int p, uint32_t here) {
    const uint8_t* page = ring.stage(due[p]);
    const uint8_t* low = Config::PRECISION ? ring.low() : page + Page::kMainBytes;
    const uint32_t row = here >> 2, pair = here & 3, group = row % (D / 32);
    const uint32_t ones = row == 0 ? 0x3c003c00u : 0u;
    uint32_t zero[2];
    load_words<8>(zero, page + Page::kValueZeros + group * 64 + pair * 16 + 8 * MT);
    if constexpr (Config::PRECISION) {  // a cold token decodes to the middle of its bucket: 1.5 steps more
      uint32_t scale[2];
      load_words<8>(scale, page + Page::kValueScales + group * 64 + pair * 16 + 8 * MT);
      const uint32_t cold = ~hot >> (8 * pair);
      const uint32_t halves = (cold & 0xfu) | (cold & 0xf0u) << 12;
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) {
        zero[kk] = fma_half2(scale[kk], (halves >> (2 * MT + kk) & 0x00010001u) * 0x3e00u, zero[kk]);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      mma_f16(extra[nt], zero[0], ones, zero[1], ones, weight[p][nt][2 * MT], weight[p][nt][2 * MT + 1]);
    }
    value_tile<D, BITS, NT, Config::SINGLE, MT>(here, page, low, ring.masks(), weight[p], out);
  }
  LKV_DEVICE void values() {
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      const uint32_t here = forget(lane);
      half_values<0>(p, here);
      half_values<1>(p, here);
    }
  }

  // Scores of the pages in hand in log2 units, the new maxima, and alpha.
  // `end`: first token after the page; queries whose history ends before it do not read it.
  // `two`: false where a split ends with one page: the second is the first again and weighs nothing.
  LKV_DEVICE void maximum(float (&s)[PAGES][NT][4][COLUMNS], float (&fresh)[NT][COLUMNS], float lifted, int end,
                          bool hide, bool two) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        float m = best[nt][c];
#pragma unroll
        for (int p = 0; p < PAGES; ++p) {
          const float odd = Config::SINGLE ? 0.0f : zeros[p][nt][1][2 + c] * odd_division<BITS, Config::SINGLE>;
          const float zero = (zeros[p][nt][0][c] + odd) * unscale[nt][c];
          const float step = unscale[nt][c] * kSubnormal;
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const int j = 2 * (k & 1) + c;
            s[p][nt][k][c] = zero;
#pragma unroll
            for (int chain = 0; chain < kChains; ++chain) {
              s[p][nt][k][c] = fma_float(codes[p][nt][k >> 1][chain][j], step, s[p][nt][k][c]);
            }
            if (p == 1) s[p][nt][k][c] = two ? s[p][nt][k][c] : bits_float(0xff800000u);
          }
          if (Config::MIXED && hide && end > history_end(a.geometry, columns.tokens(8 * nt + 2 * t + c))) {
#pragma unroll
            for (int k = 0; k < 4; ++k) s[p][nt][k][c] = kHidden;
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) m = max_float(m, s[p][nt][k][c]);
        }
#pragma unroll
        for (int across = 4; across < 32; across *= 2) m = max_float(m, shfl_xor(m, across));
        fresh[nt][c] = exp2_fast(best[nt][c] - m + (lifted - lift));
        best[nt][c] = m;
      }
    }
  }

  LKV_DEVICE uint32_t find_hot(const float (&s)[NT][4][COLUMNS]) {
    uint32_t found = 0;
    if constexpr (Config::SINGLE) {  // all four lanes of a row know all its tokens: each speaks for one
      const float even = t & 2 ? s[0][2][0] : s[0][0][0], odd = t & 2 ? s[0][3][0] : s[0][1][0];
      found = ballot((t & 1 ? odd : even) >= max_float(bar[0][0], best[0][0]) - a.tau);
    }
#pragma unroll
    for (int k = Config::SINGLE ? -1 : 3; k >= 0; --k) {
      bool mine = false;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) mine |= s[nt][k][c] >= max_float(bar[nt][c], best[nt][c]) - a.tau;
      }
      uint32_t lanes = ballot(mine);  // four lanes a token: they know different queries, or all the only one
      if (COLUMNS > 1) {
        lanes |= lanes >> 1;
        lanes |= lanes >> 2;
      }
      lanes &= 0x11111111u;
      found = found * 2 + lanes;
    }
    if (a.workspace.hot_values != nullptr && lane == 0) ring.notes().hot += popcount(found);
    return found;
  }

  LKV_DEVICE void fetch_low(int stage, uint32_t wanted) {
    const uint32_t here = forget(lane);
    const int64_t from = ring.notes().addresses[stage] + here * kCopyBytes;
    uint8_t* to = ring.low() + here * kCopyBytes;
    uint32_t first = 0;
    if constexpr (32 % kCopies == 0) {  // a lane's tokens are 32 / kCopies apart: 4 / kCopies bits of `wanted`
      const uint32_t token = slot_token(here / kCopies);
      first = wanted >> (4 * (token & 7) + (token >> 3));
    }
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      uint32_t bit;
      if constexpr (32 % kCopies == 0) {
        bit = first >> (copy * 4 / kCopies) & 1u;
      } else {
        const int token = slot_token((here + 32 * copy) / kCopies);
        bit = wanted >> (4 * (token & 7) + (token >> 3)) & 1u;
      }
      copy_async<kCopyBytes>(to + 32 * copy * kCopyBytes,
                             reinterpret_cast<const uint8_t*>(from) + 32 * copy * kCopyBytes, bit * kCopyBytes);
    }
    copy_async_commit();
  }

  LKV_DEVICE void weigh(const float (&s)[PAGES][NT][4][COLUMNS], const float (&fresh)[NT][COLUMNS]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float top[COLUMNS];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        top[c] = best[nt][c] - lift;
        alpha[nt][c] = fresh[nt][c];
      }
#pragma unroll
      for (int p = 0; p < PAGES; ++p) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float w[COLUMNS];
#pragma unroll
          for (int c = 0; c < COLUMNS; ++c) w[c] = exp2_fast(s[p][nt][k][c] - top[c]);
          weight[p][nt][k] = transpose_8x8(pack_half2(w[0], w[COLUMNS - 1]));
        }
      }
    }
  }

  LKV_DEVICE void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[nt][i][j] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) extra[nt][j] = 0.0f;
    }
  }
  LKV_DEVICE void begin_split() {
    lift = kLift;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) best[nt][c] = bits_float(0xff800000u);
    }
  }

  // Notes what the sums of a split are relative to: it ends here.
  LKV_DEVICE void end_split() {
    WarpNotes& notes = ring.notes();
    if (r == 0) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) notes.ended[8 * nt + COLUMNS * t + c] = best[nt][c];
      }
    }
    if (lane == 0) notes.ended_lift = lift;
    sync_warp();
  }
  // The partial of the split that ended last.
  LKV_DEVICE void write() {
    WarpNotes& notes = ring.notes();
    const int number = notes.ended_splits;
    const float lifted = notes.ended_lift;
    const int64_t at = part_index(a, notes.tile, notes.head, notes.part + number) * (Config::MIXED ? 8 * NT : G);
    float* o = a.workspace.partial_o + at * D;
    float* ml = a.workspace.partial_ml + at * 2;
    const float drop = lifted == 0.0f ? 1.0f : 6.103515625e-05f;  // 2^-kLift
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        const int column = Config::SINGLE ? 0 : 8 * nt + 2 * t + c;
        float* row_o = o + static_cast<int64_t>(column) * D + 4 * r;
#pragma unroll
        for (int g = 0; g < D / 32; ++g) {
          const float zero = shfl(extra[nt][c], 4 * g + t) * drop;
          const int j = Config::SINGLE ? g & 1 : c;  // SINGLE: group g is in column g
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = out[nt][out_tile<Config::SINGLE>(g, i & 1)][2 * (i >> 1) + j];
          undo_prefixes<BITS>(x);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = fma_float(x[i], value_unscale<BITS>(i) * drop, zero);
          if (Config::SINGLE ? t == g / 2 : column < G) {
            *reinterpret_cast<Vec4*>(row_o + 32 * g) = {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]),
                                                        float_bits(x[3])};
          }
        }
        if (r == 0 && (Config::SINGLE ? t == 0 : column < G)) {
          ml[2 * column] = notes.ended[8 * nt + COLUMNS * t + c];
          ml[2 * column + 1] = extra[nt][2 + c] * drop;
        }
      }
    }
    sync_warp();
    if (lane == 0) notes.ended_splits = number + 1;
    sync_warp();
  }

  // Splits `split` .. `split + splits - 1`. `cross` begins the next task's copies once all of this one's
  // have begun; `before_computing` runs while the first page is on its way.
  template <typename Before, typename Cross>
  LKV_DEVICE void run(const Span& span, int split, int splits, Before before_computing, Cross cross) {
    const int first = split * span.split_pages, place0 = a.geometry.sink_tokens / kPageTokens + first;
    const int most = splits * span.split_pages, count = span.pages - first < most ? span.pages - first : most;
    if (lane == 0) {
      ring.notes().row = queries.row;
      ring.notes().place = place0;
      ring.notes().ended_splits = 0;
      ring.notes().hot = 0;
    }
    if (!ring.ahead) {
      ring.index = 0;
      ring.count = count;
      note_pages<Config>(a, ring.notes(), queries.row, head, place0, place0 + count);
    }
    ring.ahead = false;
    auto advance = [&] {
      if (!ring.ahead && ring.index < ring.count) {
        if ((ring.index & 31) == 0 && ring.index > 0) {
          const WarpNotes& notes = ring.notes();
          const int place = notes.place;
          note_pages<Config>(a, ring.notes(), notes.row, notes.head, place + ring.index, place + ring.count);
          sync_warp();
        }
        ring.fill();
        if (LOOPKV_BULK_COPY && ring.index == ring.count) cross();
      } else {
        ring.fill();
      }
    };
    sync_warp();  // the stages were left by all lanes
    for (int i = ring.index; i < STAGES; ++i) ring.fill();
    before_computing();
    if constexpr (Config::SINGLE) q.shared = ring.queries();
    load_coded_queries<Config>(q, unscale, columns, a.scale_log2);
    sync_warp();
    if (LOOPKV_BULK_COPY && ring.index == ring.count) cross();
    float s[PAGES][NT][4][COLUMNS], fresh[NT][COLUMNS];
    auto take = [&](int i, const int (&stages)[PAGES], bool two) {  // the scores of a turn into the running maximum
      const int end = (place0 + i + 1) * kPageTokens;
      const float lifted = wide(stages) ? 0.0f : kLift;
      maximum(s, fresh, lifted, end, end > span.recent, two);
      lift = lifted;
    };
    auto wait_turn = [&](bool two) {
      due[0] = ring.template wait<STAGES - 1>();
      if constexpr (PAGES == 2) due[1] = two ? ring.template wait<STAGES - 2>() : due[0];
    };
    auto advance_turn = [&](bool two) {
#if LOOPKV_BULK_COPY
      if constexpr (PAGES == 2) {  // neither the next task's pages nor more places are to be looked up
        const bool known = ring.ahead ? ring.index + 2 <= ring.count
                                      : ring.index + 2 < ring.count && ((ring.index + 1) & 31) > 1;
        if (two && known) {
          ring.fill_two();
          return;
        }
      }
#endif
#pragma unroll 1
      for (int left = PAGES == 2 && two ? 2 : 1; left > 0; --left) advance();
    };
    if constexpr (!Config::PRECISION) {
      int i = 0;
      while (i < count) {
        clear();
        begin_split();
        const int stop = i + span.split_pages < count ? i + span.split_pages : count;
        for (; i < stop; i += PAGES) {
          const bool two = PAGES == 2 && i + 1 < stop;
          wait_turn(two);
          score(due);
          take(i, due, two);
          weigh(s, fresh);
          rescale();
          values();
          sync_warp();
          advance_turn(two);
        }
        i = stop;
        end_split();
        write();
      }
    } else {
      // A page's values are used one turn after its scores: what is wanted of its low plane comes in meanwhile.
      read_seed<Config>(a, queries, head, ring.notes().epoch, bar);
      if (Config::SINGLE) bar[0][0] = shfl(bar[0][0], 0);  // the lane of the query's column knows it
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
          if (!Config::SINGLE && 8 * nt + 2 * t + c >= G) bar[nt][c] = bits_float(0x7f800000u);
        }
      }
      clear();
      // Copy groups (no bulk copies): a page's low plane and another's main part in every turn.
      constexpr int kMain = 2 * (STAGES - 2);
      static_assert(STAGES == 3 && PAGES == 1, "kMain holds for all turns");
      for (int i = 0, edge = 0; i <= count; ++i) {
        const bool more = i < count, turn = !more || i == edge;  // a split ended before
        if (i == edge) edge += span.split_pages;
        uint32_t wanted = 0;
        int stages[PAGES] = {};
        if (turn && i > 0) end_split();
        if (more) {
          stages[0] = ring.template wait<kMain>();
          score(stages);
          if (turn) begin_split();
          take(i, stages, false);
          wanted = find_hot(s[0]);
        }
        if (i > 0) {
          rescale();
          copy_async_wait<LOOPKV_BULK_COPY ? 0 : 1>();
          sync_warp();
          values();
          sync_warp();
          if (turn) {
            write();
            clear();
          }
        }
        if (more) {
          fetch_low(stages[0], wanted);
          if (i > 0) {
            advance();
          } else if (!LOOPKV_BULK_COPY) {
            copy_async_commit();
          }
          hot = wanted;
          due[0] = stages[0];
          weigh(s, fresh);
        }
      }
      if (a.workspace.hot_values != nullptr && lane == 0) atomic_add64(a.workspace.hot_values, ring.notes().hot);
    }
#if !LOOPKV_BULK_COPY
    copy_async_wait<0>();
#endif
  }
};

constexpr int kMergeRounds = 4;  // of 32 parts: the most a row may have (descriptor.py checks it)

// Joins the partials of a (tile, head) in their order and writes the result. BATCH: partials on their way at a time.
template <typename Config, int BATCH>
LKV_DEVICE void merge_parts(const AttendArgs& a, const QueryTile& tile, int tile_index, int head, int parts) {
  constexpr int D = Config::D, PER_LANE = D / 32, WIDTH = Config::MIXED ? 8 * Config::NT : 0;
  const Columns<Config> columns(a, tile, head);
  const int G = columns.count, width = WIDTH ? WIDTH : G, lane = lane_id();
  const float* o = a.workspace.partial_o + part_index(a, tile_index, head, 0) * width * D;
  const float* ml = a.workspace.partial_ml + part_index(a, tile_index, head, 0) * width * 2;
  const int64_t stride = static_cast<int64_t>(width) * D;
  for (int g = 0; g < G; ++g) {
    const float* mine = o + static_cast<int64_t>(g) * D + lane * PER_LANE;
    float y[BATCH][PER_LANE];
    auto load = [&](int first) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        if (first + j < parts) load_floats<PER_LANE>(y[j], mine + (first + j) * stride);
      }
    };
    load(0);  // on its way while the weights are made
    float weight[kMergeRounds], part_sum[kMergeRounds], best = bits_float(0xff800000u);
#pragma unroll
    for (int round = 0; round < kMergeRounds; ++round) {
      const int part = 32 * round + lane;
      weight[round] = bits_float(0xff800000u);
      part_sum[round] = 0.0f;
      if (part < parts) {
        float pair[2];
        load_floats<2>(pair, ml + (part * width + g) * 2);
        weight[round] = pair[0];
        part_sum[round] = pair[1];
      }
      best = max_float(best, weight[round]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) best = max_float(best, shfl_xor(best, step));
    float sum = 0.0f;
#pragma unroll
    for (int round = 0; round < kMergeRounds; ++round) {
      weight[round] = exp2_fast(weight[round] - best);
      sum += part_sum[round] * weight[round];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += shfl_xor(sum, step);
    float x[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
    for (int first = 0; first < parts; first += BATCH) {
      if (first > 0) load(first);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int part = first + j, round = part >> 5;
        const float mine = round < 2 ? (round == 0 ? weight[0] : weight[1]) : (round == 2 ? weight[2] : weight[3]);
        const float w = shfl(mine, part & 31);
        if (part < parts) {
#pragma unroll
          for (int i = 0; i < PER_LANE; ++i) x[i] = fma_float(y[j][i], w, x[i]);
        }
      }
    }
    const float scale = 1.0f / sum;
    uint16_t* to = static_cast<uint16_t*>(a.out) + columns.place(g, a.out_stride) + lane * PER_LANE;
    if constexpr (PER_LANE % 2 == 0) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i += 2) {
        *reinterpret_cast<uint32_t*>(to + i) = pack_bfloat2(x[i] * scale, x[i + 1] * scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) to[i] = static_cast<uint16_t>(pack_bfloat2(x[i] * scale, 0.0f));
    }
  }
}

// Reports the parts this warp wrote since it last did; the warp that brings a (tile, head)'s last one merges them all.
template <typename Config, int BATCH>
LKV_NOINLINE void report_parts(const AttendArgs& a, const TileTable& table, WarpNotes& notes) {
  sync_warp();
  const int H = a.geometry.kv_heads, lane = lane_id();
  bool last = false;
  int place = 0, all = 0;
  if (lane < notes.written) {  // a lane each
    place = notes.written_place[lane];
    all = notes.written_all[lane];
    const uint32_t mine = notes.written_parts[lane];
    uint32_t* arrivals = a.workspace.arrivals + static_cast<int64_t>(place >> 16) * H + (place & 0xffff);
    last = static_cast<int>(atomic_add_release(arrivals, mine) + mine) == all;
    if (last) {
      fence_device();
      *arrivals = 0;  // for the next launch
    }
  }
  uint32_t complete = ballot(last);
  sync_warp();
  if (lane == 0) notes.written = 0;
  while (complete != 0) {
    const int from = popcount((complete & (0u - complete)) - 1u), which = shfl(place, from);
    const QueryTile tile = tile_of(a, table, which >> 16, Config::tile_queries(a.geometry.group_queries));
    merge_parts<Config, BATCH>(a, tile, which >> 16, which & 0xffff, shfl(all, from));
    complete &= complete - 1;
  }
  sync_warp();
}

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
  if constexpr (Config::SINGLE && Config::CODED && kMasked<Config::D>) {
    if (lane < 4) {
      constexpr uint32_t kOnes = 0x3c003c00u;
      reinterpret_cast<Vec4*>(ring.masks())[lane] = {lane == 0 ? kOnes : 0, lane == 1 ? kOnes : 0,
                                                     lane == 2 ? kOnes : 0, lane == 3 ? kOnes : 0};
    }
  }
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
      CodedSplit<Config> reader(a, ring, tile, head);
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
