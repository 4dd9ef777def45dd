// The seed of V precision: the largest score of each query over its row's sink, for which tasks over the row's history
// wait. The warp with the sink publishes it together with the launch's epoch before it reads the window; it waits on
// nothing. Should it not run (a warp may wait for a block that was never started), the task computes the same number
// itself after a while.
#pragma once

#include "exact.cuh"
#include "tiles.cuh"

namespace loopkv {

constexpr int kPatienceCycles = 200000;  // about 100 us: longer than any sink chunk takes

// By the warp that has read the sink: `best` of this lane's columns.
template <typename Config>
LKV_DEVICE void publish_seed(const AttendArgs& a, const QueryTile& tile, int head, int columns, uint32_t epoch,
                             const float (&best)[Config::NT][Config::COLUMNS]) {
  uint64_t* flags = a.workspace.seeds + (static_cast<int64_t>(tile.row) * a.geometry.kv_heads + head) * columns;
  const int r = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int nt = 0; nt < Config::NT; ++nt) {
#pragma unroll
    for (int c = 0; c < Config::COLUMNS; ++c) {
      const int column = 8 * nt + 2 * t + c;
      if (r == 0 && column < columns) {
        store_flag(flags + column, static_cast<uint64_t>(epoch) << 32 | float_bits(best[nt][c]));
      }
    }
  }
}

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

}  // namespace loopkv
