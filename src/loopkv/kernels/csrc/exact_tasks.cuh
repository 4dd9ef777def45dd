// The tasks over exact tokens: a chunk of sink and window, a split of a history kept exact. Arithmetic: exact.cuh.
#pragma once

#include "exact.cuh"
#include "notes.cuh"
#include "page.cuh"
#include "seed.cuh"
#include "tiles.cuh"

namespace loopkv {

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
    // The window gets the new token; nobody else reads it in this launch.
    const int index = newest - kTileTokens * tile;
    if (index < 0 || index >= kTileTokens || newest >= count) return;
    uint8_t* to = a.cache.pool + window_offset<D>(a, queries.row, head, span.last - 1) + (half ? values : 0);
    if (16 * lane < 2 * D) {
      *reinterpret_cast<Vec4*>(to + 16 * lane) =
          *reinterpret_cast<const Vec4*>(slot + index * Slots::kRowBytes + 16 * lane);
    }
  };
  auto after = [&](int tile) {
    if (Config::MIXED || chunk != 0 || kTileTokens * (tile + 1) != a.geometry.sink_tokens || span.splits == 0) return;
    publish_seed<Config>(a, queries, head, columns.count, notes.epoch, state.best);
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

}  // namespace loopkv
