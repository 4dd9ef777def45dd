// The history reader's arithmetic where a kv head has one query: integers.
//
// Codes are bytes of operand A (of m16n8k32) as they lie in a page: one AND makes four of them, times a power of two by
// their place in the byte. Operand B has eight columns and there is one query, so further columns hold further digits of
// a fixed-point number in base 256, and every sum is exact:
//
//     scores [tokens, digits]            = codes of K [tokens, channels] x digits of q * scale [channels, digits]
//     output [channels, (group, digits)] = codes of V [channels, tokens] x digits of weight * scale [tokens, (group, ..)]
//
// A place's power of two is taken out of q * scale (K), or of the rows of the output (V).
//
// Lane 4 r + t of a warp speaks for token 8 t + r of a page.
#pragma once

#include "page.cuh"
#include "simt.cuh"

namespace loopkv {

// Shared memory of a page in hand: digits of its products, then the weights of its tokens.
template <int D>
struct IntegerShared {
  static constexpr int kDigitRow = D / 4 + 4;  // words from one digit of the products to the next: no bank twice
  static constexpr int kWeightRow = 48;        // words from one group's weights to the next
  static constexpr int kBytes = D / 32 * kWeightRow * 4;
  static_assert(kBytes >= 3 * kDigitRow * 4);
};

// The four channels of a block whose products lane i < C / 4 makes: those of one word of operand B, that is, those whose
// codes one mask takes from a word of the keys. Two pairs of neighbours in the order of the scales.
template <int C, int BITS>
struct ChannelShare {
  static constexpr bool kNarrow = BITS == 2 && C == 32;  // a lane's codes of a token fill half a word
  static constexpr int kMasks = kNarrow ? 2 : 8 / BITS;  // of a word of keys
  LKV_DEVICE static int first_pair(int lane) { return 2 * lane - (kNarrow ? 0 : lane % kMasks); }
  static constexpr int kSecond = kNarrow ? 1 : kMasks;  // pairs from the first to the second
  // The largest power of two that any code carries, divided by this lane's.
  LKV_DEVICE static float lift(int lane) {
    const int mask = lane % kMasks;
    return BITS == 4 ? (mask == 0 ? 16.0f : 1.0f) : static_cast<float>(64 >> (kNarrow ? 4 : 2) * mask);
  }
};
template <int BITS>
constexpr float kMostFactor = BITS == 4 ? 16.0f : 64.0f;

// What a lane needs in every page and would otherwise make anew each time: offsets in bytes, and factors.
template <int D, int BITS>
struct LaneConstants {
  static constexpr int kFirst = block_channels(D, 0);
  int lane;
  int wide;           // 16 lane
  int scale;          // of its token among a group's value scales
  int low;            // of its words in a low plane
  int digits;         // of its digit of the products
  int weights;        // of its words of the first group's weights
  uint32_t selector;  // of its digit of two weights
  uint32_t factor, more;  // of the sums in its two columns
  uint32_t token;         // its token as a bit of a page's hot ones
  int copied;         // the bit of the token whose low plane it copies first

  LKV_DEVICE void make(int lane_) {
    lane = lane_;
    const int r = lane >> 2, t = lane & 3, digit = r & 3;
    wide = forget(16 * lane);
    scale = forget(2 * ((r >> 1) * 8 + t * 2 + (r & 1)));
    low = forget(t * (D / 4) + r * (kFirst / 32));
    digits = forget(4 * ((digit < 3 ? digit : 0) * IntegerShared<D>::kDigitRow + t * (kFirst / 16)));
    weights = forget(4 * ((r >> 2) * IntegerShared<D>::kWeightRow + 8 * t));
    selector = static_cast<uint32_t>(forget(0x40 + digit * 0x11));
    factor = static_cast<uint32_t>(forget(t & 1 ? 65536 : 1));
    more = static_cast<uint32_t>(forget(t & 1 ? 0 : 256));
    token = static_cast<uint32_t>(forget(1 << lane));
    const int from = slot_token(lane / (D % 64 == 0 ? D / 64 : 3));
    copied = forget(4 * (from & 7) + (from >> 3));
  }
};

// A query, spread over a warp by ChannelShare.
template <int D>
struct IntegerQuery {
  static constexpr int kBlocks = block_number(D);
  float x[kBlocks][4];         // in [-1, 1]: first pair, second pair
  uint32_t whole[kBlocks][2];  // the same as halves, for the zeros
  float lift[kBlocks];
  int first[kBlocks];          // offset in bytes of the first pair's scales
};

// A query's products with a page's K scales, this lane's share of them.
template <int D, int BITS>
struct KeyProducts {
  using Page = HeadPage<D, BITS>;
  float x[block_number(D)][4];

  template <int BLOCK = 0>
  LKV_DEVICE float multiply(int lane, const uint8_t* page, const IntegerQuery<D>& query, float (&zeros)[4]) {
    constexpr int C = block_channels(D, BLOCK);
    uint32_t scale[2] = {0, 0}, zero[2] = {0, 0};
    if (C == 128 || lane < C / 4) {
      constexpr int SECOND = 4 * ChannelShare<C, BITS>::kSecond, ZEROS = Page::kKeyZeros - Page::kKeyScales;
      const uint8_t* mine = page + Page::kKeyScales + query.first[BLOCK];
      scale[0] = *reinterpret_cast<const uint32_t*>(mine);
      scale[1] = *reinterpret_cast<const uint32_t*>(mine + SECOND);
      zero[0] = mul_half2(query.whole[BLOCK][0], *reinterpret_cast<const uint32_t*>(mine + ZEROS));
      zero[1] = mul_half2(query.whole[BLOCK][1], *reinterpret_cast<const uint32_t*>(mine + ZEROS + SECOND));
    }
    constexpr uint32_t kOnes = 0x3c003c00u;
    mma_f16(zeros, kOnes, kOnes, kOnes, kOnes, zero[0], zero[1]);
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[BLOCK][i] = query.x[BLOCK][i] * half_float(i & 1 ? scale[i >> 1] >> 16 : scale[i >> 1] & 0xffff);
      most = max_float(most, abs_float(x[BLOCK][i]));
    }
    if constexpr (BLOCK + 1 < block_number(D)) {
      most = max_float(most, multiply<BLOCK + 1>(lane, page, query, zeros));
    }
    return most;
  }

  // `up`: products become integers below 2^15 in size, times the lane's lift.
  template <int BLOCK = 0>
  LKV_DEVICE void write_digits(int lane, float up, const float (&lift)[block_number(D)], uint8_t* mine) const {
    constexpr int C = block_channels(D, BLOCK), ROW = IntegerShared<D>::kDigitRow;
    using Share = ChannelShare<C, BITS>;
    uint32_t n[4];  // low bytes: the integer, with 2^15 + 2^7 so that lower digits may be negative
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      n[i] = float_bits(fma_float(x[BLOCK][i], up * lift[BLOCK], 12582912.0f + 32896.0f));  // 1.5 2^23
    }
    // The order of their codes in a word of keys.
    const uint32_t second = Share::kNarrow ? n[1] : n[2], third = Share::kNarrow ? n[2] : n[1];
    const uint32_t a = permute_bytes<0x5140>(n[0], second), b = permute_bytes<0x5140>(third, n[3]);
    const uint32_t c = permute_bytes<0x0062>(n[0], second), d = permute_bytes<0x0062>(third, n[3]);
    if (C == 128 || lane < C / 4) {
      uint32_t* to = reinterpret_cast<uint32_t*>(mine + block_start(D, BLOCK));
      to[0] = permute_bytes<0x5410>(a, b) ^ 0x80808080u;
      to[ROW] = permute_bytes<0x7632>(a, b) ^ 0x80808080u;
      to[2 * ROW] = (permute_bytes<0x5410>(c, d) + 0x40404040u) ^ 0x80808080u;
    }
    if constexpr (BLOCK + 1 < block_number(D)) write_digits<BLOCK + 1>(lane, up, lift, mine);
  }
};

// Writes the digits of the products with a page's K scales and returns the value of their unit; adds the products with
// its zeros to `zeros`: every row gets, in column c, the sum over lanes 4 c .. 4 c + 3.
template <int D, int BITS>
LKV_DEVICE float write_products(const LaneConstants<D, BITS>& at, const uint8_t* page, const IntegerQuery<D>& query,
                                uint8_t* shared, float (&zeros)[4]) {
  KeyProducts<D, BITS> products;
  const float most = products.multiply(at.lane, page, query, zeros);
  uint32_t exponent = warp_max(float_bits(most)) >> 23;  // 2^(exponent - 126) is larger
  exponent = exponent > 31 ? exponent : 31;  // products of nothing: `up` times a lift must stay finite
  products.write_digits(at.lane, bits_float((268u - exponent) << 23), query.lift, shared + at.wide / 4);
  return bits_float((exponent - 14u) << 23) * (1.0f / kMostFactor<BITS>);
}

template <int D, int BITS, int BLOCK = 0>
LKV_DEVICE void score_blocks(const LaneConstants<D, BITS>& at, const uint8_t* page, const uint8_t* digits,
                             int (&sums)[2][4]) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  constexpr int LANE_BYTES = C * BITS / 32, WORDS = LANE_BYTES >= 4 ? LANE_BYTES / 4 : 1;
  uint32_t k[4][WORDS], b[C / 16];
  const uint8_t* plane = page + kPageTokens * START * BITS / 8 + at.wide * LANE_BYTES / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // tokens r + 8 i
    if constexpr (LANE_BYTES == 2) {  // the upper half: the same, moved by one mask
      const uint32_t narrow = *reinterpret_cast<const uint16_t*>(plane + i * C * BITS);
      k[i][0] = narrow | narrow << 14;
    } else {
      load_words<LANE_BYTES>(k[i], plane + i * C * BITS);
    }
  }
  load_words<C / 4>(b, digits + (START == 0 ? 0 : START + (at.lane & 3) * (C - at.kFirst) / 4));
#pragma unroll
  for (int m = 0; m < C / 32; ++m) {
    constexpr bool NARROW = ChannelShare<C, BITS>::kNarrow;
    const int word = BITS == 4 ? m : m >> 1;
    const uint32_t low = BITS == 4 ? 0x0f0f0f0fu : 0x03030303u << (4 * (m & 1)), high = low << (NARROW ? 4 : BITS);
#pragma unroll
    for (int mt = 0; mt < 2; ++mt) {
      mma_u8s8(sums[mt], k[2 * mt][word] & low, k[2 * mt + 1][word] & low, k[2 * mt][word] & high,
               k[2 * mt + 1][word] & high, b[2 * m], b[2 * m + 1]);
    }
  }
  if constexpr (BLOCK + 1 < block_number(D)) score_blocks<D, BITS, BLOCK + 1>(at, page, digits, sums);
}

// The sum over channels of product times code, in units, of this lane's token.
template <int D, int BITS>
LKV_DEVICE int score_tokens(const LaneConstants<D, BITS>& at, const uint8_t* page, const uint8_t* shared) {
  int sums[2][4] = {};
  score_blocks<D, BITS>(at, page, shared + at.digits, sums);
  // Even lanes have digits 0 and 1 of four tokens, odd ones digit 2: a pair of lanes joins those of one token each.
  const bool upper = at.lane & 2, odd = at.lane & 1;
  auto join = [&](int low, int high) {
    return static_cast<uint32_t>(low) * at.factor + static_cast<uint32_t>(high) * at.more;
  };
  const uint32_t x = join(upper ? sums[1][0] : sums[0][0], upper ? sums[1][1] : sums[0][1]);
  const uint32_t y = join(upper ? sums[1][2] : sums[0][2], upper ? sums[1][3] : sums[0][3]);
  return static_cast<int>((odd ? y : x) + shfl_xor(odd ? x : y, 1));  // the sum fits, terms may wrap round
}

// The weights of a page as operand B: [two groups each][half of the tokens]; four columns a group, three of them digits.
template <int D>
struct WeightDigits {
  static constexpr int kPairs = (D / 32 + 1) / 2;
  uint32_t b[kPairs][2];

  // From rows of a word a lane: tokens 2 t, then 2 t + 1, each with those 8, 16 and 24 further on.
  template <int BITS>
  LKV_DEVICE void gather(const LaneConstants<D, BITS>& at, const uint8_t* shared) {
    constexpr int ROW = 4 * IntegerShared<D>::kWeightRow;
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      uint32_t even[4], odd[4];
      const uint8_t* row = shared + at.weights + 2 * pair * ROW;
      if (2 * pair + 1 >= D / 32 && at.lane >= 16) row -= ROW;  // there is no second group: any
      load_words<16>(even, row);
      load_words<16>(odd, row + 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        b[pair][half] = permute_bytes<0x5410>(permute_bytes(even[2 * half], odd[2 * half], at.selector),
                                              permute_bytes(even[2 * half + 1], odd[2 * half + 1], at.selector));
      }
    }
  }
};

// Words of a value plane of a block: [group][half of the tokens], four codes of each of the four tokens 2 t, 2 t + 1,
// 2 t + 8, 2 t + 9 of the half, a byte a token.
template <int C>
LKV_DEVICE void load_high_bytes(uint32_t (&words)[C / 32][2], int wide, const uint8_t* plane) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if constexpr (C == 32) {
      words[0][half] = *reinterpret_cast<const uint32_t*>(plane + wide / 2 + 4 * half);
    } else {
      constexpr int PAIRS = C / 64;
      uint32_t v[2 * PAIRS];
      load_words<8 * PAIRS>(v, plane + wide + (C == 128 ? 512 : 8) * half);
#pragma unroll
      for (int h = 0; h < PAIRS; ++h) {
        words[2 * h][half] = permute_bytes<0x6420>(v[h], v[PAIRS + h]);
        words[2 * h + 1][half] = permute_bytes<0x7531>(v[h], v[PAIRS + h]);
      }
    }
  }
}
template <int D, int C>
LKV_DEVICE void load_low_bytes(uint32_t (&words)[C / 32][2], const uint8_t* mine) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t l[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint8_t* slot = mine + 16 * half * (D / 4) + i * D;
      l[i] = C == 128  ? *reinterpret_cast<const uint32_t*>(slot)
             : C == 64 ? *reinterpret_cast<const uint16_t*>(slot)
                       : *slot;
    }
    const uint32_t a = permute_bytes<0x5140>(l[0], l[1]), b = permute_bytes<0x5140>(l[2], l[3]);
    words[0][half] = permute_bytes<0x5410>(a, b);
    if constexpr (C >= 64) words[1][half] = permute_bytes<0x7632>(a, b);
    if constexpr (C == 128) {
      const uint32_t c = permute_bytes<0x7362>(l[0], l[1]), d = permute_bytes<0x7362>(l[2], l[3]);
      words[2][half] = permute_bytes<0x5410>(c, d);
      words[3][half] = permute_bytes<0x7632>(c, d);
    }
  }
}

// Adds a page's values to `out` [group][u]: channels u (rows 0-7) and u + 2 (rows 8-15) of lane row r in the group; the
// columns are those of WeightDigits.
template <int D, int BITS, int BLOCK = 0>
LKV_DEVICE void add_values(const LaneConstants<D, BITS>& at, const uint8_t* page, const uint8_t* low_plane,
                           const WeightDigits<D>& weights, int (&out)[D / 32][2][4]) {
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  uint32_t high[C / 32][2], low[C / 32][2];
  load_high_bytes<C>(high, at.wide, page + HeadPage<D, BITS>::kValueCodes + kPageTokens * START / 4);
  if constexpr (BITS == 4) {
    const int other = START == 0 ? 0 : START / 4 + (at.lane >> 2) * (C - at.kFirst) / 32;
    load_low_bytes<D, C>(low, low_plane + at.low + other);
  }
#pragma unroll
  for (int g = 0; g < C / 32; ++g) {
    constexpr int FIRST = START / 32;
    uint32_t words[2][2];  // [u][half of the tokens]
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t h = high[g][half];
      if constexpr (BITS == 4) {
        const uint32_t l = low[g][half];
        words[0][half] = select_bits<0xccccccccu>(h << 2, l);
        words[1][half] = select_bits<0xccccccccu>(h, l >> 2);
      } else {
        words[0][half] = words[1][half] = h;
      }
    }
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint32_t first = BITS == 4 ? 0x0f0f0f0fu : 0x03030303u << (2 * u), second = first << 4;
      const auto& b = weights.b[(FIRST + g) >> 1];
      mma_u8u8(out[FIRST + g][u], words[u][0] & first, words[u][0] & second, words[u][1] & first,
               words[u][1] & second, b[0], b[1]);
    }
  }
  if constexpr (BLOCK + 1 < block_number(D)) add_values<D, BITS, BLOCK + 1>(at, page, low_plane, weights, out);
}

// 1 over the power of two that channel i of a lane and group carries.
template <int BITS>
constexpr float integer_unscale(int i) {
  return 1.0f / (BITS == 4 ? (i < 2 ? 1.0f : 16.0f) : static_cast<float>(1 << (2 * i)));
}

}  // namespace loopkv
