// A cell's history as plain keys and values: coded pages decoded, exact tokens copied, as attention libraries read them.
// One warp a task and kv head. No lane needs another's data, and a lane asks for all of a page's before it decodes.
#pragma once

#include "descriptor.h"
#include "simt.cuh"

namespace loopkv {

constexpr int kExpandWarps = 4;
constexpr int kExpandPage = 32;     // tokens of a page, and of any other task
constexpr int kExpandColumns = 16;  // of a row's record

// Columns of a row's record (kernels/expand.py).
enum ExpandColumn : int32_t { kRow, kComputed, kNew, kStart, kExactFirst, kExactAt, kCodedAt, kCoded, kTailAt };

struct Halves8 {
  Vec4 bits;
  LKV_DEVICE float operator[](int i) const {
    const uint32_t word = i < 2 ? bits.x : i < 4 ? bits.y : i < 6 ? bits.z : bits.w;
    return half_float(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
  }
};
struct Halves4 {
  Vec2 bits;
  LKV_DEVICE float operator[](int i) const {
    const uint32_t word = i < 2 ? bits.x : bits.y;
    return half_float(static_cast<uint16_t>(i % 2 ? word >> 16 : word));
  }
};

LKV_DEVICE Vec4 pack_bfloat8(const float (&x)[8]) {
  Vec4 v;
  v.x = pack_bfloat2(x[0], x[1]), v.y = pack_bfloat2(x[2], x[3]);
  v.z = pack_bfloat2(x[4], x[5]), v.w = pack_bfloat2(x[6], x[7]);
  return v;
}

// The code that begins SHIFT bits up in w, times 2^SHIFT: exact.
template <int BITS, int SHIFT>
LKV_DEVICE float code_float(uint32_t w) {
  static_assert(SHIFT + BITS <= 23);
  return bits_float(0x4b000000u | (w & (((1u << BITS) - 1) << SHIFT))) - 8388608.0f;
}
constexpr float inverse_power(int shift) { return 1.0f / static_cast<float>(1 << shift); }

// Where the tokens of a page go: elements before the token `coded`, and after it.
struct ExpandPlace {
  int64_t before, after;
  int32_t coded;   // of the page's first token on
  int32_t stride;  // of a token

  LKV_DEVICE int64_t operator()(int token) const { return (token < coded ? before : after) + token * stride; }
};

// Channels AT .. AT + 127 of a page of one head.
template <int BITS, int D, int AT>
LKV_DEVICE void expand_block(const uint8_t* part, const ExpandPlace& place, uint16_t* keys, uint16_t* values) {
  constexpr int TOKENS = kExpandPage;
  const int lane = lane_id();

  // keys: lane 16 i + u holds channels 8 u .. 8 u + 7 of every second token
  const int unit = lane & 15, odd = lane >> 4;
  const uint8_t* words = part + TOKENS * AT * BITS / 8 + odd * (16 * BITS) + unit * BITS / 4 * 4;
  uint32_t word[TOKENS / 2];
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) word[i] = load_streamed_word(words + 2 * i * (16 * BITS));
  const uint8_t* key_scales = part + TOKENS * D * BITS / 8 + 2 * (AT + 8 * unit);
  const Halves8 key_scale{load_streamed(key_scales)}, key_zero{load_streamed(key_scales + 2 * D)};

  // values: lane 16 m + 4 t + u holds channels 8 u .. 8 u + 7 of all four groups, of tokens 16 m + 8 k + 2 t + e
  const int u = lane & 3, t = lane >> 2 & 3, m = lane >> 4;
  const uint8_t* scales = part + TOKENS * D * BITS / 8 + 4 * D;
  const uint8_t* planes = scales + 4 * D;
  Vec4 high[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) high[r] = load_streamed(planes + 8 * AT + m * 512 + (2 * u + r) * 64 + t * 16);
  Vec2 low[4];
  if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // token 2 k + e
      low[i] = load_streamed_pair(planes + 8 * D + AT / 4 + ((2 * m + (i >> 1)) * 8 + (i & 1) * 4 + t) * (D / 4) + 8 * u);
    }
  }
  Halves4 scale[4], zero[4];
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    const uint8_t* at = scales + 2 * (AT + 32 * g + t * 8 + m * 4);
    scale[g].bits = load_streamed_pair(at);
    zero[g].bits = load_streamed_pair(at + 2 * D);
  }

  float key_s[8], key_z[8];  // of channels 2 j, 2 j + 1, where the code is BITS j up in its half word
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    key_s[j] = key_scale[j] * inverse_power(BITS * (j >> 1));
    key_z[j] = key_zero[j];
  }
#pragma unroll
  for (int i = 0; i < TOKENS / 2; ++i) {
    const uint32_t w = BITS == 4 ? word[i] : word[i] >> ((unit & 1) * 8), v = w >> 16;
    float x[8];
    x[0] = fma_float(code_float<BITS, 0>(w), key_s[0], key_z[0]);
    x[1] = fma_float(code_float<BITS, 0>(v), key_s[1], key_z[1]);
    x[2] = fma_float(code_float<BITS, BITS>(w), key_s[2], key_z[2]);
    x[3] = fma_float(code_float<BITS, BITS>(v), key_s[3], key_z[3]);
    x[4] = fma_float(code_float<BITS, 2 * BITS>(w), key_s[4], key_z[4]);
    x[5] = fma_float(code_float<BITS, 2 * BITS>(v), key_s[5], key_z[5]);
    x[6] = fma_float(code_float<BITS, 3 * BITS>(w), key_s[6], key_z[6]);
    x[7] = fma_float(code_float<BITS, 3 * BITS>(v), key_s[7], key_z[7]);
    store_vector(keys + place(2 * i + odd) + AT + 8 * unit, pack_bfloat8(x));
  }

#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int k = i >> 1, e = i & 1;
    uint16_t* to = values + place(16 * m + 8 * k + 2 * t + e) + AT + 8 * u;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      // 16 codes: four of group 2 pair, four of the next, of channels 8 u .. 8 u + 3; then of the four channels after
      const uint32_t h0 = k ? (pair ? high[0].w : high[0].z) : (pair ? high[0].y : high[0].x);
      const uint32_t h1 = k ? (pair ? high[1].w : high[1].z) : (pair ? high[1].y : high[1].x);
      const uint32_t h = e ? permute_bytes<0x7632>(h0, h1) : permute_bytes<0x5410>(h0, h1);
      uint32_t even = h & 0x33333333u, other = h >> 2 & 0x33333333u;  // a nibble for every second code
      if constexpr (BITS == 4) {
        const uint32_t l = pair ? permute_bytes<0x7632>(low[i].x, low[i].y) : permute_bytes<0x5410>(low[i].x, low[i].y);
        even = even << 2 | (l & 0x33333333u);
        other = (h & 0xccccccccu) | (l >> 2 & 0x33333333u);
      }
      const uint32_t even_up = even >> 16, other_up = other >> 16;
      {
        const float s = scale[2 * pair][i], z = zero[2 * pair][i], s4 = s * inverse_power(4);
        float x[8];
        x[0] = fma_float(code_float<4, 0>(even), s, z), x[1] = fma_float(code_float<4, 0>(other), s, z);
        x[2] = fma_float(code_float<4, 4>(even), s4, z), x[3] = fma_float(code_float<4, 4>(other), s4, z);
        x[4] = fma_float(code_float<4, 0>(even_up), s, z), x[5] = fma_float(code_float<4, 0>(other_up), s, z);
        x[6] = fma_float(code_float<4, 4>(even_up), s4, z), x[7] = fma_float(code_float<4, 4>(other_up), s4, z);
        store_vector(to + 64 * pair, pack_bfloat8(x));
      }
      {
        const float s = scale[2 * pair + 1][i] * inverse_power(8), z = zero[2 * pair + 1][i], s4 = s * inverse_power(4);
        float x[8];
        x[0] = fma_float(code_float<4, 8>(even), s, z), x[1] = fma_float(code_float<4, 8>(other), s, z);
        x[2] = fma_float(code_float<4, 12>(even), s4, z), x[3] = fma_float(code_float<4, 12>(other), s4, z);
        x[4] = fma_float(code_float<4, 8>(even_up), s, z), x[5] = fma_float(code_float<4, 8>(other_up), s, z);
        x[6] = fma_float(code_float<4, 12>(even_up), s4, z), x[7] = fma_float(code_float<4, 12>(other_up), s4, z);
        store_vector(to + 64 * pair + 32, pack_bfloat8(x));
      }
    }
  }
}

// 32 tokens of one head, 16 bytes a lane and turn: `from` gives where a token's keys lie (null: nowhere) and how many
// bytes later its values, `place` where it goes.
template <int D, typename From, typename Place>
LKV_DEVICE void copy_tokens(From from, Place place, uint16_t* keys, uint16_t* values) {
  constexpr int LANES = D / 8, TURN = 32 / LANES, TURNS = kExpandPage / TURN, TOGETHER = TURNS < 8 ? TURNS : 8;
  const int lane = lane_id(), channel = lane % LANES * 8;
#pragma unroll 1
  for (int first = 0; first < TURNS; first += TOGETHER) {
    Vec4 key[TOGETHER], value[TOGETHER];
    bool there[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      int64_t apart = 0;
      const uint8_t* p = from((first + i) * TURN + lane / LANES, apart);
      there[i] = p != nullptr;
      if (there[i]) {
        key[i] = load_streamed(p + 2 * channel);
        value[i] = load_streamed(p + apart + 2 * channel);
      }
    }
#pragma unroll
    for (int i = 0; i < TOGETHER; ++i) {
      if (!there[i]) continue;
      const int64_t to = place((first + i) * TURN + lane / LANES) + channel;
      store_vector(keys + to, key[i]);
      store_vector(values + to, value[i]);
    }
  }
}

inline int expand_blocks(const ExpandArgs& args) {
  return args.task_count * ((args.geometry.kv_heads + kExpandWarps - 1) / kExpandWarps);
}

template <int BITS, int D>
LKV_DEVICE void expand_body(const ExpandArgs& args) {
  const int heads = args.geometry.kv_heads, groups = (heads + kExpandWarps - 1) / kExpandWarps;
  const int task = block_id() / groups, head = block_id() % groups * kExpandWarps + thread_id() / 32;
  const int record = args.tasks[2 * task], piece = args.tasks[2 * task + 1];
  if (record < 0 || head >= heads) return;
  const int32_t* info = args.info + record * kExpandColumns;
  const int64_t row = info[kRow], stride = static_cast<int64_t>(heads) * D;
  uint16_t *coded_k = static_cast<uint16_t*>(args.coded_k), *coded_v = static_cast<uint16_t*>(args.coded_v);
  const bool history = piece >= 0;
  const int history_first = piece * kExpandPage, coded = info[kCoded];
  const ExpandPlace place{(info[kCodedAt] + history_first) * stride + head * D,
                          (info[kTailAt] + history_first - coded) * stride + head * D, coded - history_first,
                          static_cast<int32_t>(stride)};
  if (!history || piece < args.geometry.sink_tokens / kExpandPage) {
    const int32_t* table = args.cache.window_table + row * args.cache.window_table_stride;
    const int computed = info[kComputed], end = computed + info[kNew], start = info[kStart];
    const int exact_first = info[kExactFirst], window = args.geometry.window_block_tokens;
    const int first = history ? history_first : exact_first + (-1 - piece) * kExpandPage;
    const uint8_t *k_new = static_cast<const uint8_t*>(args.k_new), *v_new = static_cast<const uint8_t*>(args.v_new);
    auto from = [&](int i, int64_t& apart) -> const uint8_t* {
      const int token = first + i;
      if (token >= end) return nullptr;
      if (token >= computed) {
        apart = v_new - k_new;
        return k_new + 2 * ((start + token - computed) * args.kv_stride + head * D);
      }
      apart = 2 * window * stride;
      const int64_t block = table[token / window];
      return args.cache.pool + block * args.geometry.block_bytes + args.cell.window_offset_bytes +
             2 * (token % window * stride + head * D);
    };
    if (history) {
      copy_tokens<D>(from, place, coded_k, coded_v);
    } else {
      const int64_t to = info[kExactAt] + first - exact_first;
      copy_tokens<D>(from, [&](int i) { return (to + i) * stride + head * D; }, static_cast<uint16_t*>(args.exact_k),
                     static_cast<uint16_t*>(args.exact_v));
    }
    return;
  }
  const int pages = args.geometry.pages_per_block;
  const int64_t block = args.cache.history_table[row * args.cache.history_table_stride + piece / pages];
  const uint8_t* page = args.cache.pool + block * args.geometry.block_bytes + piece % pages * args.geometry.page_bytes +
                        args.cell.history_offset_bytes;
  if constexpr (BITS == 16) {
    auto from = [&](int i, int64_t& apart) -> const uint8_t* {
      apart = 2 * kExpandPage * stride;
      return page + 2 * (i * stride + head * D);
    };
    copy_tokens<D>(from, place, coded_k, coded_v);
  } else {
    const uint8_t* part = page + head * (2 * kExpandPage * D * BITS / 8 + 8 * D);
    expand_block<BITS, D, 0>(part, place, coded_k, coded_v);
    if constexpr (D > 128) expand_block<BITS, D, 128>(part, place, coded_k, coded_v);
  }
}

}  // namespace loopkv
