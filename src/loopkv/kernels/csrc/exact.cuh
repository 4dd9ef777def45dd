// Exact attention over tiles of 16 tokens in the engine's dtype (bf16), one warp a head: sink and window, and the
// history of cells that keep it exact. Tokens are the rows of the tensor-core tile, queries its columns.
#pragma once

#include "simt.cuh"

namespace loopkv {

// Running attention of one warp: lane 4 r + t holds query columns 2 t and 2 t + 1 of every tile of 8 queries.
template <int D, int NT>
struct ExactState {
  float out[NT][D / 16][4];
  float best[NT][2];  // largest score, log2 units
  float sum[NT][2];   // of weights, over this lane's tokens only

  LKV_DEVICE void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[nt][i][j] = 0.0f;
      }
      best[nt][0] = best[nt][1] = bits_float(0xff800000u);
      sum[nt][0] = sum[nt][1] = 0.0f;
    }
  }
};

// q of query column lane / 4, channels 32 j + 8 t .. + 7, as pairs; columns beyond G are zero.
template <int D, int NT>
LKV_DEVICE void load_exact_queries(uint32_t (&q)[NT][D / 8], const uint16_t* head_q, int group_queries) {
  const int column = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const bool real = 8 * nt + column < group_queries;
    const uint16_t* row = head_q + (8 * nt + column) * D + 8 * t;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      Vec4 v = {0, 0, 0, 0};
      if (real) v = load_streamed(row + 32 * j);
      q[nt][4 * j] = v.x;
      q[nt][4 * j + 1] = v.y;
      q[nt][4 * j + 2] = v.z;
      q[nt][4 * j + 3] = v.w;
    }
  }
}

// One half of a tile (tokens r or r + 8) of keys or values: this lane's 16-byte pieces of a token's row.
template <int D>
LKV_DEVICE void load_token(Vec4 (&x)[D / 32], const uint8_t* token, bool valid) {
  const int t = lane_id() & 3;
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    x[j] = {0, 0, 0, 0};
    if (valid) x[j] = load_streamed(token + 64 * j + 16 * t);
  }
}

// Scores [NT][4] of 16 tokens, log2 units; rows of invalid tokens are not masked.
template <int D, int NT>
LKV_DEVICE void exact_scores(float (&s)[NT][4], const uint32_t (&q)[NT][D / 8], const Vec4 (&k0)[D / 32],
                             const Vec4 (&k1)[D / 32], float scale_log2) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[nt][i] = 0.0f;
#pragma unroll
    for (int j = 0; j < D / 32; ++j) {
      mma_bf16(s[nt], k0[j].x, k1[j].x, k0[j].y, k1[j].y, q[nt][4 * j], q[nt][4 * j + 1]);
      mma_bf16(s[nt], k0[j].z, k1[j].z, k0[j].w, k1[j].w, q[nt][4 * j + 2], q[nt][4 * j + 3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) s[nt][i] *= scale_log2;
  }
}

// Largest of the scores of each query column over the tile.
template <int NT>
LKV_DEVICE void column_maximum(float (&best)[NT][2], const float (&s)[NT][4]) {
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float m = max_float(s[nt][c], s[nt][2 + c]);
#pragma unroll
      for (int step = 4; step < 32; step *= 2) m = max_float(m, shfl_xor(m, step));
      best[nt][c] = max_float(best[nt][c], m);
    }
  }
}

// One tile: keys k0, k1 and values v0, v1 of tokens r and r + 8; `valid` says which of the two exist (at least one of
// the tile's 16 must).
template <int D, int NT>
LKV_DEVICE void exact_tile(ExactState<D, NT>& state, const uint32_t (&q)[NT][D / 8], const Vec4 (&k0)[D / 32],
                           const Vec4 (&k1)[D / 32], const Vec4 (&v0)[D / 32], const Vec4 (&v1)[D / 32], bool valid0,
                           bool valid1, float scale_log2) {
  float s[NT][4];
  exact_scores<D, NT>(s, q, k0, k1, scale_log2);
  const float none = bits_float(0xff800000u);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    if (!valid0) s[nt][0] = s[nt][1] = none;
    if (!valid1) s[nt][2] = s[nt][3] = none;
  }
  float old[NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    old[nt][0] = state.best[nt][0];
    old[nt][1] = state.best[nt][1];
  }
  column_maximum<NT>(state.best, s);
  uint32_t p[NT][2];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    float weight[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] = exp2_fast(s[nt][i] - state.best[nt][i & 1]);
    float alpha[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      alpha[c] = exp2_fast(old[nt][c] - state.best[nt][c]);
      state.sum[nt][c] = state.sum[nt][c] * alpha[c] + (weight[c] + weight[2 + c]);
    }
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) state.out[nt][i][j] *= alpha[j & 1];
    }
    p[nt][0] = transpose_8x8(pack_bfloat2(weight[0], weight[1]));
    p[nt][1] = transpose_8x8(pack_bfloat2(weight[2], weight[3]));
  }
#pragma unroll
  for (int j = 0; j < D / 32; ++j) {
    // Transposed pairs i of 32 channels: row r is channel 32 j + 8 (r / 2) + 2 i + r % 2.
    const uint32_t a[4] = {transpose_8x8(v0[j].x), transpose_8x8(v0[j].y), transpose_8x8(v0[j].z),
                           transpose_8x8(v0[j].w)};
    const uint32_t b[4] = {transpose_8x8(v1[j].x), transpose_8x8(v1[j].y), transpose_8x8(v1[j].z),
                           transpose_8x8(v1[j].w)};
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      mma_bf16(state.out[nt][2 * j], a[0], a[1], b[0], b[1], p[nt][0], p[nt][1]);
      mma_bf16(state.out[nt][2 * j + 1], a[2], a[3], b[2], b[3], p[nt][0], p[nt][1]);
    }
  }
}

// Writes the partial: o [G, D] relative to the best score, and (best, sum) [G, 2].
template <int D, int NT>
LKV_DEVICE void write_exact(const ExactState<D, NT>& state, float* o, float* ml, int group_queries) {
  const int r = lane_id() >> 2, t = lane_id() & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float sum = state.sum[nt][c];
#pragma unroll
      for (int step = 4; step < 32; step *= 2) sum += shfl_xor(sum, step);
      const int column = 8 * nt + 2 * t + c;
      if (column < group_queries) {
        float* row = o + static_cast<int64_t>(column) * D;
#pragma unroll
        for (int tile = 0; tile < D / 16; ++tile) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * (tile & 1) + half;
            row[32 * (tile / 2) + 8 * (r / 2) + 2 * i + (r & 1)] = state.out[nt][tile][2 * half + c];
          }
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
