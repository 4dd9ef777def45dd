// Coding pages that leave the window, and writing new keys and values to it. Bit for bit what codec/kivi.py and
// codec/pages.py define: fp32 arithmetic, IEEE division, round half to even.
//
// One warp codes one head of one page of one cell. A lane holds four neighbouring channels: a key channel's extremes
// are its own, a value group's (32 channels of a token) those of eight lanes. Codes go through shared memory, one byte
// each, and come out in the order of the page's planes.
#pragma once

#include "descriptor.h"
#include "page.cuh"
#include "row.cuh"
#include "simt.cuh"

namespace loopkv {

constexpr int kCodeWarps = 4;

// A stored value in fp32; NaN becomes 0 and everything is clamped to the range of fp16. `changed` counts.
LKV_DEVICE float clean_value(float x, uint32_t& changed) {
  const float y = x != x ? 0.0f : min_float(max_float(x, -65504.0f), 65504.0f);
  if (!(y == x)) ++changed;
  return y;
}

// Four neighbouring values of the engine's dtype.
template <int TYPE>
LKV_DEVICE void load_values(float (&x)[4], const uint8_t* p) {
  if constexpr (TYPE == kFloat32) {
    const Vec4 v = *reinterpret_cast<const Vec4*>(p);
    x[0] = bits_float(v.x);
    x[1] = bits_float(v.y);
    x[2] = bits_float(v.z);
    x[3] = bits_float(v.w);
  } else {
    const Vec2 v = *reinterpret_cast<const Vec2*>(p);
    const uint32_t words[2] = {v.x, v.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t bits = (words[i / 2] >> (16 * (i & 1))) & 0xffffu;
      x[i] = TYPE == kBfloat16 ? bits_float(bits << 16) : half_float(static_cast<uint16_t>(bits));
    }
  }
}

struct Scale {
  uint16_t scale, zero;
};

LKV_DEVICE Scale make_scale(float low, float high, int bits) {
  const float top = static_cast<float>((1 << bits) - 1);
  return {float_half(divide_ieee(high - low, top)), float_half(low + 0.0f)};  // -0 becomes 0
}

LKV_DEVICE uint32_t code_value(float x, float scale, float zero, int bits) {
  if (scale == 0.0f) return 0;
  const float top = static_cast<float>((1 << bits) - 1);
  const float steps = round_half_even(divide_ieee(x - zero, scale));
  return static_cast<uint32_t>(min_float(max_float(steps, 0.0f), top));
}

// Token and channel of the code at place `i` of the high value plane (codec/pages.py: _high_order).
template <int D, int BLOCK = 0>
LKV_DEVICE void high_place(int i, int& token, int& channel) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (i >= kPageTokens * C) return high_place<D, BLOCK + 1>(i - kPageTokens * C, token, channel);
  }
  int m, k, t, e, h, g, r;
  const int quad = i & 3;
  i >>= 2;
  if constexpr (C == 128) {  // [m][r][t][k][h][e][g][quad]
    g = i & 1, e = i >> 1 & 1, h = i >> 2 & 1, k = i >> 3 & 1, t = i >> 4 & 3, r = i >> 6 & 7, m = i >> 9;
  } else if constexpr (C == 64) {  // [r][t][m][k][e][g][quad]
    g = i & 1, e = i >> 1 & 1, k = i >> 2 & 1, m = i >> 3 & 1, t = i >> 4 & 3, r = i >> 6, h = 0;
  } else {  // [r][t][m][k][e][quad]
    g = 0, e = i & 1, k = i >> 1 & 1, m = i >> 2 & 1, t = i >> 3 & 3, r = i >> 5, h = 0;
  }
  token = 16 * m + 8 * k + 2 * t + e;
  channel = START + 32 * (2 * h + g) + 4 * r + quad;
}

// Channel of the code at place `i` of a token's low plane: [block][r][group][quad].
template <int D, int BLOCK = 0>
LKV_DEVICE int low_channel(int i) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK), GROUPS = C / 32;
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (i >= C) return low_channel<D, BLOCK + 1>(i - C);
  }
  const int quad = i & 3, g = (i >> 2) % GROUPS, r = (i >> 2) / GROUPS;
  return START + 32 * g + 4 * r + quad;
}

// Token and channel of the code at place `i` of the key plane: [block][token][unit: even channels, odd channels].
template <int D, int BITS, int BLOCK = 0>
LKV_DEVICE void key_place(int i, int& token, int& channel) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  constexpr int UNIT = 32 / BITS < C / 4 ? 32 / BITS : C / 4;
  if constexpr (BLOCK + 1 < block_number(D)) {
    if (i >= kPageTokens * C) return key_place<D, BITS, BLOCK + 1>(i - kPageTokens * C, token, channel);
  }
  token = i / C;
  const int place = i % C % UNIT;
  channel = START + i % C - place + (place < UNIT / 2 ? 2 * place : 2 * (place - UNIT / 2) + 1);
}

// A lane's share of a plane: words of 32 / WIDTH codes, each taken from `codes[token][channel]` by `pick`.
template <int WIDTH, typename Pick>
LKV_DEVICE void write_plane(uint8_t* to, int codes, Pick pick) {
  constexpr int PER_WORD = 32 / WIDTH;
  for (int word = lane_id(); word < codes / PER_WORD; word += 32) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < PER_WORD; ++i) bits |= pick(word * PER_WORD + i) << (WIDTH * i);
    reinterpret_cast<uint32_t*>(to)[word] = bits;
  }
}

// Codes one head of a page. `keys(token)` and `values(token)` give the head's row of a token.
template <int D, int BITS, int TYPE, typename Keys, typename Values>
LKV_DEVICE uint32_t code_head(uint8_t* page, uint8_t* codes, Keys keys, Values values) {
  using Page = HeadPage<D, BITS>;
  constexpr int ITEM = TYPE == kFloat32 ? 4 : 2;
  const int lane = lane_id();
  uint32_t changed = 0, ignored = 0;
#pragma unroll
  for (int start = 0; start < D; start += 128) {
    const int channel = start + 4 * lane;
    if (channel < D) {
      float low[4], high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) low[i] = bits_float(0x7f800000u), high[i] = bits_float(0xff800000u);
      for (int token = 0; token < kPageTokens; ++token) {
        float x[4];
        load_values<TYPE>(x, keys(token) + channel * ITEM);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float y = clean_value(x[i], changed);
          low[i] = min_float(low[i], y);
          high[i] = max_float(high[i], y);
        }
      }
      Scale s[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) s[i] = make_scale(low[i], high[i], BITS);
      for (int token = 0; token < kPageTokens; ++token) {
        float x[4];
        load_values<TYPE>(x, keys(token) + channel * ITEM);
        uint32_t word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          word |= code_value(clean_value(x[i], ignored), half_float(s[i].scale), half_float(s[i].zero), BITS)
                  << (8 * i);
        }
        *reinterpret_cast<uint32_t*>(codes + token * D + channel) = word;
      }
      uint16_t* scales = reinterpret_cast<uint16_t*>(page + Page::kKeyScales) + channel;
      uint16_t* zeros = reinterpret_cast<uint16_t*>(page + Page::kKeyZeros) + channel;
#pragma unroll
      for (int i = 0; i < 4; ++i) scales[i] = s[i].scale, zeros[i] = s[i].zero;
    }
  }
  sync_warp();
  write_plane<BITS>(page, kPageTokens * D, [&](int i) {
    int token, channel;
    key_place<D, BITS>(i, token, channel);
    return static_cast<uint32_t>(codes[token * D + channel]);
  });
  sync_warp();
#pragma unroll
  for (int start = 0; start < D; start += 128) {
    const int channel = start + 4 * lane;
    const bool real = channel < D;
    for (int token = 0; token < kPageTokens; ++token) {
      float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if (real) load_values<TYPE>(x, values(token) + channel * ITEM);
      float low = bits_float(0x7f800000u), high = bits_float(0xff800000u);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = clean_value(x[i], changed);
        low = min_float(low, x[i]);
        high = max_float(high, x[i]);
      }
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {  // eight lanes hold a group of 32 channels
        low = min_float(low, shfl_xor(low, step));
        high = max_float(high, shfl_xor(high, step));
      }
      const Scale s = make_scale(low, high, BITS);
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) word |= code_value(x[i], half_float(s.scale), half_float(s.zero), BITS) << (8 * i);
      if (real) {
        *reinterpret_cast<uint32_t*>(codes + token * D + channel) = word;
        if ((lane & 7) == 0) {  // [group][t][tile][token of the pair]
          const int place = channel / 32 * kPageTokens + (token & 7) / 2 * 8 + token / 8 * 2 + (token & 1);
          reinterpret_cast<uint16_t*>(page + Page::kValueScales)[place] = s.scale;
          reinterpret_cast<uint16_t*>(page + Page::kValueZeros)[place] = s.zero;
        }
      }
    }
  }
  sync_warp();
  write_plane<2>(page + Page::kValueCodes, kPageTokens * D, [&](int i) {
    int token, channel;
    high_place<D>(i, token, channel);
    return static_cast<uint32_t>(codes[token * D + channel]) >> (BITS - 2);
  });
  if constexpr (BITS == 4) {
    write_plane<2>(page + Page::kMainBytes, kPageTokens * D, [&](int i) {
      return static_cast<uint32_t>(codes[slot_token(i / D) * D + low_channel<D>(i % D)]) & 3u;
    });
  }
  sync_warp();
  return changed;
}

// Pages of a row to code now, as page numbers [first, last).
struct Leaving {
  int first, last, computed, start;
};

LKV_DEVICE Leaving leaving_pages(const CodeArgs& a, int row) {
  Leaving pages = {0, 0, 0, row};
  const int tokens = a.cache.seq_lens[row];
  int count = 1;
  if (a.query_start != nullptr) {
    pages.start = a.query_start[row];
    count = a.query_start[row + 1] - pages.start;
  }
  if (tokens <= 0 || count <= 0) return pages;
  pages.computed = tokens - count;
  const int coded = history_end(a.geometry, pages.computed), end = history_end(a.geometry, tokens);
  // Pages below `known` have all their tokens from earlier steps.
  int known = pages.computed / kPolicyPageTokens * kPolicyPageTokens;
  known = known < end ? known : end;
  known = known > a.geometry.sink_tokens ? known : a.geometry.sink_tokens;
  const bool late = a.k_new != nullptr;
  pages.first = (late && known > coded ? known : coded) / kPolicyPageTokens;
  pages.last = (late ? end : known) / kPolicyPageTokens;
  if (pages.last < pages.first) pages.last = pages.first;
  return pages;
}

template <int D, int TYPE>
LKV_DEVICE void code_page(const CodeArgs& a, uint8_t* codes, const Leaving& pages, int row, int page, int cell_index,
                          int head) {
  constexpr int ITEM = TYPE == kFloat32 ? 4 : 2;
  const CellDescriptor cell = a.cells[cell_index];
  const CacheGeometry& g = a.geometry;
  if (!cell.owns_history) return;
  const int lane = lane_id(), bw = g.window_block_tokens;
  // Where each token's row lies: a lane knows one token's keys; the values are as far behind them as always.
  const int64_t values = static_cast<int64_t>(bw) * g.kv_heads * D * ITEM;
  const int token = page * kPageTokens + lane;
  const bool fresh = a.k_new != nullptr && token >= pages.computed;
  const uint8_t *my_keys, *my_values;
  if (fresh) {
    const int64_t place =
        (pages.start + token - pages.computed) * a.kv_stride + static_cast<int64_t>(head) * D;
    my_keys = static_cast<const uint8_t*>(a.k_new) + place * ITEM;
    my_values = static_cast<const uint8_t*>(a.v_new) + place * ITEM;
  } else {
    const int64_t block = a.cache.window_table[row * a.cache.window_table_stride + token / bw];
    my_keys = a.cache.pool + block * g.block_bytes + cell.window_offset_bytes +
              (static_cast<int64_t>(token % bw) * g.kv_heads + head) * (D * ITEM);
    my_values = my_keys + values;
  }
  const int64_t block = a.cache.history_table[row * a.cache.history_table_stride + page / g.pages_per_block];
  uint8_t* to = a.cache.pool + block * g.block_bytes + (page % g.pages_per_block) * g.page_bytes +
                cell.history_offset_bytes;
  // Rows of a token are asked for by whole warps for the same token, or by a lane subset: addresses go through memory.
  int64_t* addresses = reinterpret_cast<int64_t*>(codes + kPageTokens * D);
  addresses[lane] = reinterpret_cast<int64_t>(my_keys);
  addresses[32 + lane] = reinterpret_cast<int64_t>(my_values);
  sync_warp();
  auto keys_of = [&](int i) { return reinterpret_cast<const uint8_t*>(addresses[i]); };
  auto values_of = [&](int i) { return reinterpret_cast<const uint8_t*>(addresses[32 + i]); };
  if (cell.bits == 16) {  // [keys, values][token][head][channel]
    for (int i = lane; i < 2 * kPageTokens * (D * ITEM / 16); i += 32) {
      const int piece = i % (D * ITEM / 16), which = i / (D * ITEM / 16);
      const Vec4 v = *reinterpret_cast<const Vec4*>(reinterpret_cast<const uint8_t*>(addresses[which]) + 16 * piece);
      *reinterpret_cast<Vec4*>(to + (static_cast<int64_t>(which) * g.kv_heads + head) * (D * ITEM) + 16 * piece) = v;
    }
    sync_warp();
    return;
  }
  uint32_t changed;
  if (cell.bits == 4) {
    to += static_cast<int64_t>(head) * HeadPage<D, 4>::kBytes;
    changed = code_head<D, 4, TYPE>(to, codes, keys_of, values_of);
  } else {
    to += static_cast<int64_t>(head) * HeadPage<D, 2>::kBytes;
    changed = code_head<D, 2, TYPE>(to, codes, keys_of, values_of);
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) changed += shfl_xor(changed, step);
  if (lane == 0 && changed && a.counters != nullptr) atomic_add64(a.counters + 1, changed);
}

template <int D>
constexpr int code_shared_bytes(int rows) {
  return kCodeWarps * (kPageTokens * D + 512) + (rows + 2) * 4;
}

// Tasks: (row, page) by running total, then cell, then head.
template <int D, int TYPE>
LKV_DEVICE void code_body(const CodeArgs& a, uint8_t* shared) {
  const int warp = thread_id() >> 5, H = a.geometry.kv_heads;
  uint8_t* codes = shared + warp * (kPageTokens * D + 512);
  int* before = reinterpret_cast<int*>(shared + kCodeWarps * (kPageTokens * D + 512));
  bool mine = false;
  for (int row = thread_id(); row < a.rows; row += block_threads()) {
    const Leaving pages = leaving_pages(a, row);
    before[row] = pages.last - pages.first;
    mine |= pages.last > pages.first;
  }
  if (!any_in_block(mine)) return;  // nothing leaves
  if (warp == 0) running_total(before, a.rows);
  sync_block();
  const int pages_total = before[a.rows];
  const int64_t tasks = static_cast<int64_t>(pages_total) * a.cell_count * H;
  if (block_id() == 0 && thread_id() == 0 && a.counters != nullptr && a.k_new == nullptr) {
    atomic_add64(a.counters, pages_total);
  }
  for (int64_t task = block_id() * kCodeWarps + warp; task < tasks; task += block_count() * kCodeWarps) {
    const int head = static_cast<int>(task % H), cell = static_cast<int>(task / H % a.cell_count);
    const int index = static_cast<int>(task / H / a.cell_count);
    const int row = find_tile(before, a.rows, index);
    const Leaving pages = leaving_pages(a, row);
    code_page<D, TYPE>(a, codes, pages, row, pages.first + index - before[row], cell, head);
  }
}

// One block a query: its keys and values of all heads to its row's window block.
LKV_DEVICE void append_body(const AppendArgs& a) {
  const int query = block_id();
  if (query >= a.query_start[a.rows]) return;
  int low = 0, high = a.rows;  // query_start[low] <= query < query_start[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (a.query_start[middle] <= query ? low : high) = middle;
  }
  const int tokens = a.cache.seq_lens[low];
  if (tokens <= 0) return;
  const int token = tokens - (a.query_start[low + 1] - query), bw = a.geometry.window_block_tokens;
  const int64_t block = a.cache.window_table[low * a.cache.window_table_stride + token / bw];
  if (block == 0) return;  // leaves the window inside its own chunk
  const int item = a.geometry.exact_type == kFloat32 ? 4 : 2;
  const int64_t bytes = static_cast<int64_t>(a.geometry.kv_heads) * a.geometry.head_dim * item;
  uint8_t* to = a.cache.pool + block * a.geometry.block_bytes + a.cell.window_offset_bytes + (token % bw) * bytes;
  const uint8_t* keys = static_cast<const uint8_t*>(a.k_new) + query * a.kv_stride * item;
  const uint8_t* values = static_cast<const uint8_t*>(a.v_new) + query * a.kv_stride * item;
  for (int i = 16 * thread_id(); i < bytes; i += 16 * block_threads()) {
    *reinterpret_cast<Vec4*>(to + i) = *reinterpret_cast<const Vec4*>(keys + i);
    *reinterpret_cast<Vec4*>(to + bw * bytes + i) = *reinterpret_cast<const Vec4*>(values + i);
  }
}

}  // namespace loopkv
