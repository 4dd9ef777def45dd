// Exact attention over tiles of 16 tokens in the engine's dtype (bf16), one warp a head: sink and window, and the
// history of cells that keep it exact. Tokens are the rows of the tensor-core tile, queries its columns. The keys and
// values of a tile come into slots of shared memory, several half tiles ahead.
#pragma once

#include "simt.cuh"

namespace loopkv {

constexpr int kTileTokens = 16;

// Running attention of one warp: lane 4 r + t holds query columns 2 t (and 2 t + 1) of every tile of 8 queries.
template <int D, int NT, int COLUMNS>
struct ExactState {
  float out[NT][D / 16][4];
  float best[NT][COLUMNS];  // largest score, log2 units
  float sum[NT][COLUMNS];   // of weights, over this lane's tokens only

  LKV_DEVICE void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[nt][i][j] = 0.0f;
      }
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        best[nt][c] = bits_float(0xff800000u);
        sum[nt][c] = 0.0f;
      }
    }
  }
};

// q of query column lane / 4 as operand B; columns without a query are zero.
template <int D, int NT, typename Columns>
LKV_DEVICE void load_exact_queries(uint32_t (&q)[NT][D / 8], const Columns& columns) {
  const int column = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const bool real = 8 * nt + column < columns.count;
    const uint16_t* row = columns.q(real ? 8 * nt + column : 0) + 2 * t;
#pragma unroll
    for (int i = 0; i < D / 8; ++i) q[nt][i] = real ? load_word(row + 8 * i) : 0u;
  }
}

// Scores [NT][4] of 16 tokens, log2 units. `keys(step)` gives operand A of channels 16 step .. 16 step + 15.
template <int D, int NT, typename Keys>
LKV_DEVICE void exact_scores(float (&s)[NT][4], const uint32_t (&q)[NT][D / 8], float scale_log2, Keys keys) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[nt][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < D / 16; ++step) {
    const Vec4 a = keys(step);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mma_bf16(s[nt], a.x, a.y, a.z, a.w, q[nt][2 * step], q[nt][2 * step + 1]);
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[nt][i] *= scale_log2;
  }
}

// Largest of the scores of each query column over the tile, and of `best`.
template <int NT, int COLUMNS>
LKV_DEVICE void column_maximum(float (&best)[NT][COLUMNS], const float (&s)[NT][4]) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      float m = max_float(s[nt][c], s[nt][2 + c]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) m = max_float(m, shfl_xor(m, step));
      best[nt][c] = max_float(best[nt][c], m);
    }
  }
}

// A warp's slots for half tiles: the keys or the values of 16 tokens, rows padded so that matrix loads meet no bank
// twice. Slots are filled and used in turn.
template <int D, int BYTES>
struct TileSlots {
  static constexpr int kRowBytes = 2 * D + 16;
  static constexpr int kSlotBytes = kTileTokens * kRowBytes;
  static constexpr int kSlots = BYTES / kSlotBytes < 8 ? BYTES / kSlotBytes : 8;
  static_assert(kSlots >= 2, "keys and values of a tile need a slot each");
  uint8_t* memory;
  int next_fill = 0, next_use = 0;

  LKV_DEVICE uint8_t* slot(int index) const { return memory + index * kSlotBytes; }

  // Starts to copy 16 rows, of which lane 16 * half + i knows where the i-th lies; rows beyond `rows` become zeros. All
  // lanes have left the slot. (Bulk copies of single rows were tried: the copy engine takes too long over each.)
  LKV_DEVICE void fill(int half, int rows, const uint8_t* from) {
    constexpr int kPieces = 2 * D / 16;  // of 16 bytes a row
    const int lane = lane_id();
    uint8_t* to = slot(next_fill);
    const int64_t mine = reinterpret_cast<int64_t>(from);
#pragma unroll
    for (int i = 0; i < kTileTokens * kPieces / 32; ++i) {
      const int piece = 32 * i + lane, row = piece / kPieces;
      const int64_t source = shfl(mine, 16 * half + row) + piece % kPieces * 16;
      copy_async<16>(to + row * kRowBytes + piece % kPieces * 16, reinterpret_cast<const void*>(source),
                     row < rows ? 16 : 0);
    }
    copy_async_commit();
    next_fill = next_fill + 1 == kSlots ? 0 : next_fill + 1;
  }
  // Keeps the count of copy groups where there is nothing to fill.
  LKV_DEVICE void skip() { copy_async_commit(); }
  LKV_DEVICE const uint8_t* wait() {
    const int index = next_use;
    copy_async_wait<kSlots - 1>();
    sync_warp();
    next_use = index + 1 == kSlots ? 0 : index + 1;
    return slot(index);
  }
};

// Attention over `count` tokens in tiles. `rows(tile)` gives this lane's row of a tile: lane i the keys of its token i,
// lane 16 + i the values. `hide(tile, scores)` lowers what a query may not read, `arrived(tile, half, slot)` sees each half tile when it has come, `after(tile)` the state when
// the tile is in it; `between()` runs while the first rows are on their way.
template <int D, int NT, int COLUMNS, typename Slots, typename Rows, typename Hide, typename Arrived, typename After,
          typename Between>
LKV_DEVICE void exact_tiles(ExactState<D, NT, COLUMNS>& state, Slots& slots, const uint32_t (&q)[NT][D / 8], int count,
                            float scale_log2, Rows rows, Hide hide, Arrived arrived, After after, Between between) {
  const int lane = lane_id(), r = lane >> 2, matrix = lane >> 3, line = lane & 7;
  const int tiles = (count + kTileTokens - 1) / kTileTokens;
  auto fill = [&](int half_tile) {
    const int tile = half_tile >> 1, left = count - kTileTokens * tile;
    if (half_tile < 2 * tiles) {
      slots.fill(half_tile & 1, left < kTileTokens ? left : kTileTokens, rows(tile));
    } else {
      slots.skip();
    }
  };
  sync_warp();
  for (int i = 0; i < Slots::kSlots; ++i) fill(i);
  between();
  for (int tile = 0; tile < tiles; ++tile) {
    const uint8_t* keys = slots.wait();
    arrived(tile, 0, keys);
    const uint8_t* mine = keys + ((matrix & 1) * 8 + line) * Slots::kRowBytes + (matrix >> 1) * 16;
    float s[NT][4];
    exact_scores<D, NT>(s, q, scale_log2, [&](int step) { return load_matrices<false>(mine + 32 * step); });
    sync_warp();
    fill(2 * tile + Slots::kSlots);
    hide(tile, s);
    if (count - kTileTokens * tile < kTileTokens) {
      const bool valid0 = kTileTokens * tile + r < count, valid1 = kTileTokens * tile + 8 + r < count;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (!valid0) s[nt][c] = bits_float(0xff800000u);
          if (!valid1) s[nt][2 + c] = bits_float(0xff800000u);
        }
      }
    }
    float old[NT][COLUMNS];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) old[nt][c] = state.best[nt][c];
    }
    column_maximum<NT, COLUMNS>(state.best, s);
    uint32_t p[NT][2];
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float weight[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        weight[c] = exp2_fast(s[nt][c] - state.best[nt][c]);
        weight[2 + c] = exp2_fast(s[nt][2 + c] - state.best[nt][c]);
        const float alpha = exp2_fast(old[nt][c] - state.best[nt][c]);
        state.sum[nt][c] = state.sum[nt][c] * alpha + (weight[c] + weight[2 + c]);
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          state.out[nt][i][c] *= alpha;
          state.out[nt][i][2 + c] *= alpha;
        }
      }
      p[nt][0] = transpose_8x8(pack_bfloat2(weight[0], weight[1]));
      p[nt][1] = transpose_8x8(pack_bfloat2(weight[2], weight[3]));
    }
    const uint8_t* values = slots.wait();
    arrived(tile, 1, values);
    mine = values + ((matrix >> 1) * 8 + line) * Slots::kRowBytes + (matrix & 1) * 16;
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const Vec4 a = load_matrices<true>(mine + 32 * i);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) mma_bf16(state.out[nt][i], a.x, a.y, a.z, a.w, p[nt][0], p[nt][1]);
    }
    sync_warp();
    fill(2 * tile + 1 + Slots::kSlots);
    after(tile);
  }
  copy_async_wait<0>();
}

// Writes the partial: o [G, D] relative to the best score, and (best, sum) [G, 2].
template <int D, int NT, int COLUMNS>
LKV_DEVICE void write_exact(const ExactState<D, NT, COLUMNS>& state, float* o, float* ml, int group_queries) {
  const int r = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      float sum = state.sum[nt][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += shfl_xor(sum, step);
      const int column = 8 * nt + 2 * t + c;
      if (column < group_queries) {
        float* row = o + static_cast<int64_t>(column) * D + r;
#pragma unroll
        for (int i = 0; i < D / 16; ++i) {
          row[16 * i] = state.out[nt][i][c];
          row[16 * i + 8] = state.out[nt][i][2 + c];
        }
        if (r == 0) {
          ml[2 * column] = state.best[nt][c];
          ml[2 * column + 1] = sum;
        }
      }
    }
  }
}

}  // namespace loopkv
