// The same attention without tensor cores and without fusion, in fp32 throughout: for engines in fp32 or fp16, as the
// unfused path of ablations, and as a second opinion on the fused kernel. Slow and plain: one block a (query, head,
// part), every code fetched by its address, a second launch that merges.
#pragma once

#include "code.cuh"
#include "descriptor.h"
#include "page.cuh"
#include "row.cuh"
#include "simt.cuh"

namespace loopkv {

constexpr int kScalarThreads = 128;
constexpr int kScalarTile = 32;  // tokens: a page

LKV_DEVICE float load_value(const uint8_t* p, int type) {
  if (type == kFloat32) return bits_float(*reinterpret_cast<const uint32_t*>(p));
  const uint16_t bits = *reinterpret_cast<const uint16_t*>(p);
  return type == kBfloat16 ? bits_float(static_cast<uint32_t>(bits) << 16) : half_float(bits);
}
LKV_DEVICE void store_value(uint8_t* p, float x, int type) {
  if (type == kFloat32) {
    *reinterpret_cast<uint32_t*>(p) = float_bits(x);
  } else {
    *reinterpret_cast<uint16_t*>(p) =
        type == kBfloat16 ? static_cast<uint16_t>(pack_bfloat2(x, 0.0f)) : float_half(x);
  }
}

LKV_DEVICE uint32_t code_at(const uint8_t* plane, int index, int bits) {
  return plane[index * bits / 8] >> (index * bits % 8) & ((1u << bits) - 1);
}

// Place of a code in its plane: the inverses of key_place, high_place and low_channel (code.cuh).
template <int D, int BITS, int BLOCK = 0>
LKV_DEVICE int key_index(int token, int channel) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  constexpr int UNIT = 32 / BITS < C / 4 ? 32 / BITS : C / 4;
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (channel >= START + C) return key_index<D, BITS, BLOCK + 1>(token, channel);
  }
  const int x = channel - START, y = x % UNIT;
  return kPageTokens * START + token * C + x - y + (y & 1 ? UNIT / 2 + y / 2 : y / 2);
}
template <int D, int BLOCK = 0>
LKV_DEVICE int high_index(int token, int channel) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (channel >= START + C) return high_index<D, BLOCK + 1>(token, channel);
  }
  const int m = token >> 4, k = token >> 3 & 1, t = token >> 1 & 3, e = token & 1;
  const int x = channel - START, group = x / 32, h = group / 2, g = group % 2, r = x % 32 / 4;
  int quad;
  if constexpr (C == 128) {
    quad = ((((((m * 8 + r) * 4 + t) * 2 + k) * 2 + h) * 2 + e) * 2) + g;
  } else if constexpr (C == 64) {
    quad = (((((r * 4 + t) * 2 + m) * 2 + k) * 2 + e) * 2) + g;
  } else {
    quad = (((r * 4 + t) * 2 + m) * 2 + k) * 2 + e;
  }
  return kPageTokens * START + quad * 4 + x % 4;
}
template <int D, int BLOCK = 0>
LKV_DEVICE int low_index(int token, int channel) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK), GROUPS = C / 32;
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (channel >= START + C) return low_index<D, BLOCK + 1>(token, channel);
  }
  const int x = channel - START;
  return value_slot(token) * D + START + (x % 32 / 4 * GROUPS + x / 32) * 4 + x % 4;
}

template <int D, int BITS>
LKV_DEVICE float coded_key(const uint8_t* page, int token, int channel) {
  using Page = HeadPage<D, BITS>;
  const float scale = half_float(reinterpret_cast<const uint16_t*>(page + Page::kKeyScales)[channel]);
  const float zero = half_float(reinterpret_cast<const uint16_t*>(page + Page::kKeyZeros)[channel]);
  return fma_float(scale, static_cast<float>(code_at(page, key_index<D, BITS>(token, channel), BITS)), zero);
}
template <int D, int BITS>
LKV_DEVICE float coded_value(const uint8_t* page, int token, int channel, bool hot) {
  using Page = HeadPage<D, BITS>;
  const int place = channel / 32 * kPageTokens + (token & 7) / 2 * 8 + token / 8 * 2 + (token & 1);
  const float scale = half_float(reinterpret_cast<const uint16_t*>(page + Page::kValueScales)[place]);
  const float zero = half_float(reinterpret_cast<const uint16_t*>(page + Page::kValueZeros)[place]);
  float steps = static_cast<float>(code_at(page + Page::kValueCodes, high_index<D>(token, channel), 2));
  if constexpr (BITS == 4) {
    const float low =
        hot ? static_cast<float>(code_at(page + Page::kMainBytes, low_index<D>(token, channel), 2)) : 1.5f;
    steps = 4.0f * steps + low;
  }
  return fma_float(scale, steps, zero);
}

// A query of the step: its row and how many tokens it sees.
struct ScalarQuery {
  int row, tokens, computed;
};

LKV_DEVICE ScalarQuery scalar_query(const AttendArgs& a, int query) {
  ScalarQuery found = {0, 0, 0};
  if (a.query_start == nullptr) {
    if (query >= a.rows) return found;
    found.row = query;
    found.tokens = a.cache.seq_lens[query];
    found.computed = found.tokens - 1;
    return found;
  }
  if (query >= a.query_start[a.rows]) return found;
  int low = 0, high = a.rows;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (a.query_start[middle] <= query ? low : high) = middle;
  }
  const int total = a.cache.seq_lens[low];
  if (total <= 0) return found;
  found.row = low;
  found.tokens = total - (a.query_start[low + 1] - query) + 1;
  found.computed = total - (a.query_start[low + 1] - a.query_start[low]);
  return found;
}

struct ScalarShared {
  float* q;       // [G, D]
  float* scores;  // [G, 32], then weights
  float* best;    // [G]
  float* sum;     // [G]
  float* seed;    // [G]
  int* hot;       // [32]
  uint8_t** keys;    // [32] rows of exact tokens, null beyond the last
  uint8_t** values;  // [32]
};

constexpr int scalar_shared_bytes(int group_queries, int D) {
  return group_queries * (D + 32 + 3) * 4 + 32 * 4 + 2 * 32 * 8 + 16;
}

// Scores of up to 32 tokens, log2 units: `key(token, channel)`.
template <int D, typename Key>
LKV_DEVICE void scalar_scores(const AttendArgs& a, const ScalarShared& s, int count, Key key) {
  const int G = a.geometry.group_queries, warp = thread_id() / 32, lane = lane_id();
  for (int token = warp; token < kScalarTile; token += kScalarThreads / 32) {
    for (int g = 0; g < G; ++g) {
      float dot = 0.0f;
      if (token < count) {
        for (int channel = lane; channel < D; channel += 32) {
          dot = fma_float(s.q[g * D + channel], key(token, channel), dot);
        }
      }
      for (int step = 16; step > 0; step /= 2) dot += shfl_xor(dot, step);
      if (lane == 0) s.scores[g * kScalarTile + token] = token < count ? dot * a.scale_log2 : bits_float(0xff800000u);
    }
  }
  sync_block();
}

// Takes the scores of a tile into the running softmax and adds its values.
template <int D, typename Value>
LKV_DEVICE void scalar_tile(const AttendArgs& a, const ScalarShared& s, int count, bool by_choice,
                            float (&out)[16][2], Value value) {
  const int G = a.geometry.group_queries, thread = thread_id();
  for (int g = 0; g < G; ++g) {  // the same in every thread: scores are shared
    float m = s.best[g];
    for (int token = 0; token < count; ++token) m = max_float(m, s.scores[g * kScalarTile + token]);
    const float alpha = exp2_fast(s.best[g] - m);
    out[g][0] *= alpha;
    out[g][1] *= alpha;
    sync_block();
    if (thread == 0) {
      s.sum[g] *= alpha;
      s.best[g] = m;
    }
    sync_block();
  }
  if (thread < kScalarTile) {
    bool hot = false;
    for (int g = 0; g < G; ++g) {
      hot |= s.scores[g * kScalarTile + thread] >= max_float(s.best[g], s.seed[g]) - a.tau;
    }
    s.hot[thread] = !by_choice || hot;
  }
  sync_block();
  for (int i = thread; i < G * kScalarTile; i += kScalarThreads) {
    s.scores[i] = i % kScalarTile < count ? exp2_fast(s.scores[i] - s.best[i / kScalarTile]) : 0.0f;
  }
  sync_block();
  if (thread < G) {
    float sum = s.sum[thread];
    for (int token = 0; token < count; ++token) sum += s.scores[thread * kScalarTile + token];
    s.sum[thread] = sum;
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    const int channel = thread + kScalarThreads * part;
    if (channel < D) {
      for (int token = 0; token < count; ++token) {
        const float v = value(token, channel, s.hot[token] != 0);
        for (int g = 0; g < G; ++g) out[g][part] = fma_float(s.scores[g * kScalarTile + token], v, out[g][part]);
      }
    }
  }
  sync_block();
}

// Where the exact rows of up to 32 tokens lie.
template <int D, typename Token>
LKV_DEVICE void scalar_rows(const AttendArgs& a, const ScalarShared& s, const ScalarQuery& query, int query_index,
                            int head, int count, Token token_of) {
  const int item = a.geometry.exact_type == kFloat32 ? 4 : 2, i = thread_id(), bw = a.geometry.window_block_tokens;
  if (i < count) {
    const int token = token_of(i);
    if (token >= query.computed && a.k_new != nullptr) {
      const int64_t place =
          (query_index + token - (query.tokens - 1)) * a.kv_stride + static_cast<int64_t>(head) * D;
      s.keys[i] = const_cast<uint8_t*>(static_cast<const uint8_t*>(a.k_new)) + place * item;
      s.values[i] = const_cast<uint8_t*>(static_cast<const uint8_t*>(a.v_new)) + place * item;
    } else {
      const int64_t block = a.cache.window_table[query.row * a.cache.window_table_stride + token / bw];
      s.keys[i] = a.cache.pool + block * a.geometry.block_bytes + a.cell.window_offset_bytes +
                  (static_cast<int64_t>(token % bw) * a.geometry.kv_heads + head) * (D * item);
      s.values[i] = s.keys[i] + static_cast<int64_t>(bw) * a.geometry.kv_heads * (D * item);
    }
  }
  sync_block();
}

// One part of one (query, head): block = part + max_parts * (head + H * query).
template <int D>
LKV_DEVICE void scalar_part(const AttendArgs& a, bool precision, uint8_t* shared) {
  const int H = a.geometry.kv_heads, G = a.geometry.group_queries, thread = thread_id();
  const int type = a.geometry.exact_type, item = type == kFloat32 ? 4 : 2;
  const int max_parts = static_cast<int>(a.workspace.max_parts);
  const int part = block_id() % max_parts, head = block_id() / max_parts % H, slice = block_id() / max_parts / H;
  const int query_index = a.first_tile + slice;
  const ScalarQuery query = scalar_query(a, query_index);
  if (query.tokens <= 0) return;
  const Span span = span_of(a.geometry, query.tokens, 1);
  if (part >= span.parts()) return;

  ScalarShared s;
  s.keys = reinterpret_cast<uint8_t**>(shared);
  s.values = s.keys + kScalarTile;
  s.q = reinterpret_cast<float*>(s.values + kScalarTile);
  s.scores = s.q + G * D;
  s.best = s.scores + G * kScalarTile;
  s.sum = s.best + G;
  s.seed = s.sum + G;
  s.hot = reinterpret_cast<int*>(s.seed + G);
  const uint8_t* q = static_cast<const uint8_t*>(a.q) +
                     (query_index * a.q_stride + static_cast<int64_t>(head) * G * D) * item;
  for (int i = thread; i < G * D; i += kScalarThreads) s.q[i] = load_value(q + i * item, type);
  if (thread < G) {
    s.best[thread] = s.seed[thread] = bits_float(0xff800000u);
    s.sum[thread] = 0.0f;
  }
  float out[16][2];
#pragma unroll
  for (int g = 0; g < 16; ++g) out[g][0] = out[g][1] = 0.0f;
  sync_block();
  auto exact_key = [&](int token, int channel) { return load_value(s.keys[token] + channel * item, type); };
  auto exact_value = [&](int token, int channel, bool) { return load_value(s.values[token] + channel * item, type); };

  if (part < span.chunks) {
    for (int first = part * kChunkTokens; first < (part + 1) * kChunkTokens && first < span.exact;
         first += kScalarTile) {
      const int count = span.exact - first < kScalarTile ? span.exact - first : kScalarTile;
      scalar_rows<D>(a, s, query, query_index, head, count, [&](int i) { return span.exact_token(first + i); });
      scalar_scores<D>(a, s, count, exact_key);
      scalar_tile<D>(a, s, count, false, out, exact_value);
    }
  } else {
    const bool by_choice = precision && a.cell.bits == 4;
    if (by_choice && a.seed_mode != kSeedNone) {
      for (int first = 0; first < span.sink; first += kScalarTile) {
        const int count = span.sink - first < kScalarTile ? span.sink - first : kScalarTile;
        scalar_rows<D>(a, s, query, query_index, head, count, [&](int i) { return first + i; });
        scalar_scores<D>(a, s, count, exact_key);
        if (thread < G) {
          for (int token = 0; token < count; ++token) {
            s.seed[thread] = max_float(s.seed[thread], s.scores[thread * kScalarTile + token]);
          }
        }
        sync_block();
      }
    }
    const int first = (part - span.chunks) * span.split_pages;
    const int last = first + span.split_pages < span.pages ? first + span.split_pages : span.pages;
    const int ppb = a.geometry.pages_per_block;
    int hot_total = 0;
    for (int i = first; i < last; ++i) {
      const int place = a.geometry.sink_tokens / kPageTokens + i;
      const int64_t block = a.cache.history_table[query.row * a.cache.history_table_stride + place / ppb];
      uint8_t* page = a.cache.pool + block * a.geometry.block_bytes + (place % ppb) * a.geometry.page_bytes +
                      a.cell.history_offset_bytes;
      if (a.cell.bits == 16) {
        const int64_t row_bytes = static_cast<int64_t>(D) * item;
        if (thread < kScalarTile) {
          s.keys[thread] = page + (static_cast<int64_t>(thread) * H + head) * row_bytes;
          s.values[thread] = s.keys[thread] + static_cast<int64_t>(kPageTokens) * H * row_bytes;
        }
        sync_block();
        scalar_scores<D>(a, s, kScalarTile, exact_key);
        scalar_tile<D>(a, s, kScalarTile, false, out, exact_value);
      } else if (a.cell.bits == 4) {
        const uint8_t* mine = page + static_cast<int64_t>(head) * HeadPage<D, 4>::kBytes;
        scalar_scores<D>(a, s, kScalarTile, [&](int t, int c) { return coded_key<D, 4>(mine, t, c); });
        scalar_tile<D>(a, s, kScalarTile, by_choice, out,
                       [&](int t, int c, bool hot) { return coded_value<D, 4>(mine, t, c, hot); });
        if (thread == 0) {
          for (int token = 0; token < kScalarTile; ++token) hot_total += s.hot[token];
        }
      } else {
        const uint8_t* mine = page + static_cast<int64_t>(head) * HeadPage<D, 2>::kBytes;
        scalar_scores<D>(a, s, kScalarTile, [&](int t, int c) { return coded_key<D, 2>(mine, t, c); });
        scalar_tile<D>(a, s, kScalarTile, false, out,
                       [&](int t, int c, bool hot) { return coded_value<D, 2>(mine, t, c, hot); });
      }
    }
    if (by_choice && thread == 0 && a.workspace.hot_values != nullptr) atomic_add64(a.workspace.hot_values, hot_total);
  }
  const int64_t at = ((static_cast<int64_t>(slice) * H + head) * a.workspace.max_parts + part) * G;
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int channel = thread + kScalarThreads * half;
      if (channel < D) a.workspace.partial_o[(at + g) * D + channel] = out[g][half];
    }
  }
  if (thread < G) {
    a.workspace.partial_ml[(at + thread) * 2] = s.best[thread];
    a.workspace.partial_ml[(at + thread) * 2 + 1] = s.sum[thread];
  }
}

// Merges the parts of one (query, head): block = head + H * query.
template <int D>
LKV_DEVICE void scalar_merge(const AttendArgs& a) {
  const int H = a.geometry.kv_heads, G = a.geometry.group_queries, type = a.geometry.exact_type;
  const int item = type == kFloat32 ? 4 : 2, head = block_id() % H, slice = block_id() / H;
  const int query_index = a.first_tile + slice;
  const ScalarQuery query = scalar_query(a, query_index);
  if (query.tokens <= 0) return;
  const int parts = span_of(a.geometry, query.tokens, 1).parts();
  const int64_t at = (static_cast<int64_t>(slice) * H + head) * a.workspace.max_parts * G;
  for (int i = thread_id(); i < G * D; i += block_threads()) {
    const int g = i / D, channel = i % D;
    float best = bits_float(0xff800000u);
    for (int p = 0; p < parts; ++p) best = max_float(best, a.workspace.partial_ml[(at + p * G + g) * 2]);
    float x = 0.0f, sum = 0.0f;
    for (int p = 0; p < parts; ++p) {
      const float w = exp2_fast(a.workspace.partial_ml[(at + p * G + g) * 2] - best);
      sum = fma_float(a.workspace.partial_ml[(at + p * G + g) * 2 + 1], w, sum);
      x = fma_float(a.workspace.partial_o[(at + p * G + g) * D + channel], w, x);
    }
    uint8_t* out = static_cast<uint8_t*>(a.out) +
                   (query_index * a.out_stride + (static_cast<int64_t>(head) * G + g) * D + channel) * item;
    store_value(out, divide_ieee(x, sum), type);
  }
}

}  // namespace loopkv
