// Where everything lies in one head's part of a coded page (codec/pages.py), and how codes become matrix fragments.
//
// Both products of attention run with the codes as the matrix of 16 x 16 tiles (operand A of m16n8k16) and the queries
// as the 8 columns of operand B, so grouped queries cost nothing:
//
//     scores [tokens, queries]   = codes of K [tokens, channels] x (q * scale) [channels, queries]
//     output [channels, queries] = codes of V [channels, tokens] x (weight * scale) [tokens, queries]
//
// Lane 4 r + t of a warp holds rows r, r + 8 and columns {2 t, 2 t + 1}, {2 t + 8, 2 t + 9} of A. Which channel (K) or
// token (V) is called "column 2 t" is free as long as B agrees, so the packing puts the codes a lane needs into words
// of its own, two neighbours in the two halves of a word. A pair of codes then becomes a pair of halves by one AND: the
// bits of a code, read as a half, are the subnormal number code * 4^i * 2^-24, which tensor cores multiply exactly. The
// power of four is folded into B (K) or into the result (V).
#pragma once

#include "simt.cuh"

#ifndef LOOPKV_CHAINS
#define LOOPKV_CHAINS 1
#endif

namespace loopkv {

constexpr int kPageTokens = 32;
constexpr int kChains = LOOPKV_CHAINS;  // sums of scores that run beside each other
constexpr float kSubnormal = 16777216.0f;  // 2^24: value of a code over the value of its bits read as a half

constexpr int largest_block(int channels) { return channels >= 128 ? 128 : channels >= 64 ? 64 : 32; }

// Channel block number `index` of a head of D channels: 128 as often as it fits, then 64, then 32.
constexpr int block_channels(int D, int index) {
  return index == 0 ? largest_block(D) : block_channels(D - largest_block(D), index - 1);
}
constexpr int block_start(int D, int index) {
  return index == 0 ? 0 : block_start(D, index - 1) + block_channels(D, index - 1);
}
constexpr int block_number(int D) { return D == 0 ? 0 : 1 + block_number(D - largest_block(D)); }

// Byte offsets in one head's part of a page.
template <int D, int BITS>
struct HeadPage {
  static constexpr int kKeyScales = kPageTokens * D * BITS / 8;
  static constexpr int kKeyZeros = kKeyScales + 2 * D;
  static constexpr int kValueScales = kKeyZeros + 2 * D;
  static constexpr int kValueZeros = kValueScales + 2 * D;
  static constexpr int kValueCodes = kValueZeros + 2 * D;
  static constexpr int kMainBytes = kValueCodes + kPageTokens * D / 4;  // all that is always read
  static constexpr int kLowBytes = BITS == 4 ? kPageTokens * D / 4 : 0;
  static constexpr int kBytes = kMainBytes + kLowBytes;
  static constexpr int kTokenPlaneBytes = D / 4;  // one token in a 2-bit plane
};

// Slot of a token in the low value plane: of eight neighbours, those of even number first.
LKV_DEVICE int value_slot(int token) { return (token & ~7) | ((token & 1) << 2) | ((token >> 1) & 3); }
LKV_DEVICE uint32_t slot_token(uint32_t slot) { return (slot & ~7) | ((slot & 3) << 1) | ((slot >> 2) & 1); }

// Eight codes of a lane are four pairs, pair i in halves as the bits of a code read as a half. A code alone takes a mask;
// the last pair of a byte with all pairs below it takes none once the byte stands alone. So pairs come as prefixes: pair
// i times pair_factor(i), plus every earlier pair of its byte. Products are linear: differences of the queries (K:
// scale_queries, score_block) or of the sums (V: undo_prefixes) take the earlier pairs out again.
LKV_DEVICE uint32_t upper_bytes(uint32_t word) { return permute_bytes<0x4341>(word, 0u); }
// Prefixes in the low bytes of `word`'s halves; MASKED: the high ones are zero.
template <int BITS, bool MASKED>
LKV_DEVICE uint32_t code_prefix(uint32_t word, int i) {
  const uint32_t mask = (1u << (BITS * (i + 1))) - 1;
  return MASKED && BITS * (i + 1) == 8 ? word : word & (mask | mask << 16);
}
constexpr int pairs_of_byte(int BITS) { return 8 / BITS; }
template <int BITS>
constexpr float pair_factor(int i) {
  return BITS == 4 ? (i & 1 ? 16.0f : 1.0f) : static_cast<float>(1 << (2 * i));
}
// Reciprocal of the factor, as a pair of halves.
template <int BITS>
constexpr uint32_t pair_unscale(int i) {
  return BITS == 4 ? (i & 1 ? 0x2c002c00u : 0x3c003c00u)
                   : (i == 0 ? 0x3c003c00u : i == 1 ? 0x34003400u : i == 2 ? 0x2c002c00u : 0x24002400u);
}

// BYTES bytes of shared memory as words (2 bytes: spread over the two halves of one).
template <int BYTES>
LKV_DEVICE void load_words(uint32_t* out, const uint8_t* p) {
  if constexpr (BYTES >= 16) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const Vec4 v = reinterpret_cast<const Vec4*>(p)[i];
      out[4 * i] = v.x;
      out[4 * i + 1] = v.y;
      out[4 * i + 2] = v.z;
      out[4 * i + 3] = v.w;
    }
  } else if constexpr (BYTES == 8) {
    const Vec2 v = *reinterpret_cast<const Vec2*>(p);
    out[0] = v.x;
    out[1] = v.y;
  } else if constexpr (BYTES == 4) {
    out[0] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    static_assert(BYTES == 2);
    const uint32_t x = *reinterpret_cast<const uint16_t*>(p);
    out[0] = (x | (x << 8)) & 0x00ff00ffu;
  }
}

// Where a lane keeps its query pair number i.
constexpr int query_place(int i) { return (i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1); }

// The queries of a warp as operand B: columns are queries.
template <int D, int NT, bool SINGLE>
struct CodedQueries {
  static constexpr int kSharedBytes = 0;
  uint32_t q[NT][D / 8];  // pairs of halves, this lane's channels, odd pairs divided by odd_division; of every four the
                          // order is 0 2 1 3 (query_place)
};
// Behind the products of CodedQueries: which group of channels a column of the output is for, [4 columns][4 groups] pairs of ones or
// zeros. A product with it takes the multiplier; choosing would take the integer unit, which has more to do.
template <int D>
constexpr bool kMasked = D <= 128;
// Where a kv head has one query, every column is that query and all lanes of equal t need the same products with a
// page's scales: each lane makes a share of them, and they are spread through shared memory. (Reading all scales in all
// lanes would take most of what shared memory can deliver.)
template <int D, int NT>
struct CodedQueries<D, NT, true> {
  static constexpr int kStride = D == 96 ? 48 : D / 2 + 16;  // bytes; so that four lanes meet no bank twice
  static constexpr int kMasks = 4 * kStride, kSharedBytes = kMasks + (kMasked<D> ? 64 : 0);
  uint8_t* shared;  // products with the scales of the page in hand: [4 lanes t] pairs of halves of that lane
  // This lane's share in each channel block: pairs shared_pairs * lane and on.
  uint32_t whole[block_number(D)][2], divided[block_number(D)][2];  // by the factor of their codes

  LKV_DEVICE uint8_t* products(int t) const { return shared + t * kStride; }
};
constexpr int shared_pairs(int channels) { return channels >= 64 ? channels / 64 : 1; }  // of 32 channels: 16 lanes
LKV_DEVICE bool has_share(int channels, uint32_t lane) { return channels >= 64 || lane < 16; }
// What odd query pairs were divided by where they serve codes and zeros alike.
template <int BITS, bool SINGLE>
constexpr float odd_division = !SINGLE && BITS == 4 ? 16.0f : 1.0f;

// Adds one channel block of a page to the scores.
//   codes  [NT][2 token tiles][kChains][4] sums of q * scale * code * 2^-24
//   zeros  [NT][2][4] sums of q * zero: over even pairs in rows 0-7 of the first, over odd ones in rows 8-15 of the
//          second (times odd_division), alike in all those rows: as loaded, four pairs of zeros are operand A. SINGLE:
//          in the first, eight sums in its columns (scale_queries)
template <int D, int BITS, int NT, bool SINGLE, int BLOCK>
LKV_DEVICE void score_block(uint32_t lane, const uint8_t* page, const CodedQueries<D, NT, SINGLE>& queries,
                            float (&codes)[NT][2][kChains][4], float (&zeros)[NT][2][4]) {
  using Page = HeadPage<D, BITS>;
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK);
  constexpr int LANE_BYTES = C * BITS / 32, WORDS = LANE_BYTES >= 4 ? LANE_BYTES / 4 : 1;
  const uint32_t r = lane >> 2, t = lane & 3;
  uint32_t k[4][WORDS];  // tokens r, r + 8, r + 16, r + 24
  const uint8_t* plane = page + kPageTokens * START * BITS / 8 + r * (C * BITS / 8) + t * LANE_BYTES;
#pragma unroll
  for (int i = 0; i < 4; ++i) load_words<LANE_BYTES>(k[i], plane + i * C * BITS);
  const uint8_t* scales = page + Page::kKeyScales + 2 * START + t * (C / 2);
  const uint8_t* offsets = page + Page::kKeyZeros + 2 * START + t * (C / 2);
#pragma unroll
  for (int unit = 0; unit < C / 32; ++unit) {  // eight channels of this lane: two steps of 16 channels
    const int place = START / 8 + 4 * unit;
    uint32_t product[4], scale[4], zero[4];
    if constexpr (SINGLE) {
      load_words<16>(product, queries.products(t) + 4 * place);
    } else {
      load_words<16>(scale, scales + 16 * unit);
      load_words<16>(zero, offsets + 16 * unit);
    }
    uint32_t prefix[4][4];  // of each token
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t word = BITS == 4 ? k[i][unit] : k[i][unit / 2];
      const uint32_t upper = upper_bytes(word);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int inside = j % pairs_of_byte(BITS);
        const bool up = BITS == 4 ? j >= 2 : unit & 1;
        prefix[i][j] = up ? code_prefix<BITS, true>(upper, inside) : code_prefix<BITS, false>(word, inside);
      }
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int i0 = 2 * step, i1 = 2 * step + 1;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        uint32_t b0, b1;
        if constexpr (SINGLE) {
          b0 = product[i0];
          b1 = product[i1];
        } else {
          const uint32_t* q = queries.q[nt] + place;  // even pairs, then odd ones
          b1 = mul_half2(q[2 + step], scale[i1]);
          if constexpr (BITS == 2) {
            b1 = mul_half2(b1, pair_unscale<BITS>(i1));
            b0 = mul_sub_half2(mul_half2(q[step], scale[i0]), pair_unscale<BITS>(i0), b1);
            if (step == 0) {
              const uint32_t next = mul_half2(mul_half2(q[1], scale[2]), pair_unscale<BITS>(2));
              b1 = mul_sub_half2(b1, 0x3c003c00u, next);
            }
          } else {
            b0 = mul_sub_half2(q[step], scale[i0], b1);
          }
        }
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
          mma_f16(codes[nt][mt][step % kChains], prefix[2 * mt][i0], prefix[2 * mt + 1][i0], prefix[2 * mt][i1],
                  prefix[2 * mt + 1][i1], b0, b1);
        }
      }
    }
    if constexpr (!SINGLE) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          mma_f16(zeros[nt][odd], zero[0], zero[1], zero[2], zero[3], queries.q[nt][place + 2 * odd],
                  queries.q[nt][place + 2 * odd + 1]);
        }
      }
    }
  }
}

// SINGLE: this lane's products of the queries with the scales of a page, for all lanes, and the sums of those with the
// zeros: with ones as operand A every row of `zeros` gets, in column c, the sum over the lanes 4 c .. 4 c + 3.
template <int D, int BITS, int NT, int BLOCK = 0>
LKV_DEVICE void scale_queries(uint32_t lane, const uint8_t* page, const CodedQueries<D, NT, true>& queries,
                              float (&zeros)[4]) {
  using Page = HeadPage<D, BITS>;
  constexpr uint32_t C = block_channels(D, BLOCK), START = block_start(D, BLOCK), PAIRS = shared_pairs(C);
  const uint32_t pair = PAIRS * lane, t = pair / (C / 8), place = START / 8 + pair % (C / 8);
  const bool share = has_share(C, lane);
  uint32_t sums[2] = {0, 0}, product[2] = {0, 0}, first = 0;  // less the next one of its byte
  if (share) {
    uint32_t scale[PAIRS], zero[PAIRS];
    load_words<4 * PAIRS>(scale, page + Page::kKeyScales + 2 * START + 4 * pair);
    load_words<4 * PAIRS>(zero, page + Page::kKeyZeros + 2 * START + 4 * pair);
#pragma unroll
    for (uint32_t i = 0; i < PAIRS; ++i) {
      sums[i] = mul_half2(queries.whole[BLOCK][i], zero[i]);
      product[i] = mul_half2(queries.divided[BLOCK][i], scale[i]);
    }
    if constexpr (PAIRS == 2) first = mul_sub_half2(queries.divided[BLOCK][0], scale[0], product[1]);
  }
  if constexpr (PAIRS == 1 || BITS == 2) {  // the pair after the last is another lane's
    const uint32_t next = shfl(product[0], lane + 1), last = PAIRS * lane + PAIRS - 1;
    const bool alone = last % pairs_of_byte(BITS) == pairs_of_byte(BITS) - 1;
    product[PAIRS - 1] = mul_sub_half2(product[PAIRS - 1], 0x3c003c00u, alone ? 0u : next);
  }
  if (share) {
    uint32_t* to = reinterpret_cast<uint32_t*>(queries.products(t)) + place;
    if constexpr (PAIRS == 2) {
      *reinterpret_cast<Vec2*>(to) = {first, product[1]};
    } else {
      *to = product[0];
    }
  }
  constexpr uint32_t kOnes = 0x3c003c00u;
  mma_f16(zeros, kOnes, kOnes, kOnes, kOnes, sums[0], sums[1]);
  if constexpr (BLOCK + 1 < block_number(D)) scale_queries<D, BITS, NT, BLOCK + 1>(lane, page, queries, zeros);
}

template <int D, int BITS, int NT, bool SINGLE, int BLOCK = 0>
LKV_DEVICE void score_page(uint32_t lane, const uint8_t* page, const CodedQueries<D, NT, SINGLE>& queries,
                           float (&codes)[NT][2][kChains][4], float (&zeros)[NT][2][4]) {
  score_block<D, BITS, NT, SINGLE, BLOCK>(lane, page, queries, codes, zeros);
  if constexpr (BLOCK + 1 < block_number(D)) {
    score_page<D, BITS, NT, SINGLE, BLOCK + 1>(lane, page, queries, codes, zeros);
  }
}

// The high plane: words[kk][h] holds groups 2 h and 2 h + 1 of token pair 2 mt + kk, a token in each half.
template <int C>
LKV_DEVICE void load_high(uint32_t lane, uint32_t (&words)[2][C == 128 ? 2 : 1], const uint8_t* plane, int mt) {
  uint32_t v[4];
  if constexpr (C == 128) {
    load_words<16>(v, plane + 512 * mt + 16 * lane);
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      words[kk][0] = v[2 * kk];
      words[kk][1] = v[2 * kk + 1];
    }
  } else if constexpr (C == 64) {
    load_words<8>(v, plane + 16 * lane + 8 * mt);
    words[0][0] = v[0];
    words[1][0] = v[1];
  } else {
    load_words<4>(v, plane + 8 * lane + 4 * mt);
    words[0][0] = permute_bytes<0x4140>(v[0], 0u);
    words[1][0] = permute_bytes<0x4342>(v[0], 0u);
  }
}

// The low plane of the same token pairs, from two slots each.
template <int D, int C>
LKV_DEVICE void load_low(uint32_t (&words)[2][C == 128 ? 2 : 1], const uint8_t* plane, int mt) {
#pragma unroll
  for (int kk = 0; kk < 2; ++kk) {
    const uint8_t* first = plane + (16 * mt + 8 * kk) * (D / 4);
    const uint8_t* second = first + D;
    if constexpr (C == 128) {
      const uint32_t a = *reinterpret_cast<const uint32_t*>(first), b = *reinterpret_cast<const uint32_t*>(second);
      words[kk][0] = permute_bytes<0x5410>(a, b);
      words[kk][1] = permute_bytes<0x7632>(a, b);
    } else if constexpr (C == 64) {
      words[kk][0] = *reinterpret_cast<const uint16_t*>(first) |
                     static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(second)) << 16;
    } else {
      words[kk][0] = *first | static_cast<uint32_t>(*second) << 16;
    }
  }
}

// Adds one channel block of half a page's values to the output.
//   low     the page's low plane (BITS 4)
//   masks   see CodedQueries (SINGLE)
//   weights [NT][4] pairs of halves: column lane / 4, tokens 8 k + {2 t, 2 t + 1}
//   out     [NT][value_tiles][4] sums of weight * scale * prefix of codes * 2^-24; rows of tile out_tile(g, u): channel
//           i = u (rows 0-7) and u + 2 (rows 8-15) of lane row r in group g. SINGLE: group g adds to column g only, so
//           that all groups share tiles; two pairs of them, for sums that run beside each other
template <int D, bool SINGLE>
constexpr int value_tiles = SINGLE ? 4 : D / 16;
template <bool SINGLE>
constexpr int out_tile(int group, int u) {
  return 2 * (SINGLE ? group & 1 : group) + u;
}
template <int D, int BITS, int NT, bool SINGLE, int MT, int BLOCK>
LKV_DEVICE void value_block(uint32_t lane, const uint8_t* page, const uint8_t* low_plane, const uint8_t* masks,
                            const uint32_t (&weights)[NT][4],
                            float (&out)[NT][value_tiles<D, SINGLE>][4]) {
  using Page = HeadPage<D, BITS>;
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK), GROUPS = C / 32, HALVES = C == 128 ? 2 : 1;
  constexpr int SCALED = SINGLE ? 1 : GROUPS;
  const uint32_t r = lane >> 2, t = lane & 3;
  uint32_t w[NT][SCALED][2];
#pragma unroll
  for (int g = 0; g < SCALED; ++g) {
    uint32_t scale[2];
    load_words<8>(scale,
                  page + Page::kValueScales + (SINGLE ? r % (D / 32) : START / 32 + g) * 64 + t * 16 + 8 * MT);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) w[nt][g][kk] = mul_half2(weights[nt][2 * MT + kk], scale[kk]);
    }
  }
  uint32_t mask[4];
  if constexpr (SINGLE && kMasked<D>) load_words<16>(mask, masks + r % 4 * 16);
  uint32_t high[2][HALVES], low[2][HALVES];
  load_high<C>(lane, high, page + Page::kValueCodes + kPageTokens * START / 4, MT);
  if constexpr (BITS == 4) load_low<D, C>(low, low_plane + START / 4 + r * (C / 32) + t * (D / 4), MT);
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    uint32_t pair[2][4];  // prefixes
#pragma unroll
    for (int kk = 0; kk < 2; ++kk) {
      const uint32_t h = high[kk][g / 2];
      if constexpr (BITS == 4) {
        const uint32_t l = low[kk][g / 2];
        uint32_t word[2] = {select_bits<0xccccccccu>(h << 2, l), select_bits<0xccccccccu>(h, l >> 2)};
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          if (g & 1) word[odd] = upper_bytes(word[odd]);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            pair[kk][2 * i + odd] = g & 1 ? code_prefix<4, true>(word[odd], i) : code_prefix<4, false>(word[odd], i);
          }
        }
      } else {
        const uint32_t word = g & 1 ? upper_bytes(h) : h;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          pair[kk][i] = g & 1 ? code_prefix<2, true>(word, i) : code_prefix<2, false>(word, i);
        }
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      uint32_t b[2];
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) {
        b[kk] = w[nt][SINGLE ? 0 : g][kk];
        if constexpr (SINGLE && kMasked<D>) b[kk] = mul_half2(b[kk], mask[START / 32 + g]);
        if constexpr (SINGLE && !kMasked<D>) b[kk] = r == START / 32 + g ? b[kk] : 0u;
      }
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        mma_f16(out[nt][out_tile<SINGLE>(START / 32 + g, u)], pair[0][u], pair[0][u + 2], pair[1][u], pair[1][u + 2],
                b[0], b[1]);
      }
    }
  }
}

// The values of half a page: tokens 16 MT .. 16 MT + 15.
template <int D, int BITS, int NT, bool SINGLE, int MT, int BLOCK = 0>
LKV_DEVICE void value_tile(uint32_t lane, const uint8_t* page, const uint8_t* low, const uint8_t* masks,
                           const uint32_t (&weights)[NT][4], float (&out)[NT][value_tiles<D, SINGLE>][4]) {
  value_block<D, BITS, NT, SINGLE, MT, BLOCK>(lane, page, low, masks, weights, out);
  if constexpr (BLOCK + 1 < block_number(D)) {
    value_tile<D, BITS, NT, SINGLE, MT, BLOCK + 1>(lane, page, low, masks, weights, out);
  }
}

// From sums over prefixes to sums over codes times their factors: the four channels of a lane and group.
template <int BITS>
LKV_DEVICE void undo_prefixes(float (&x)[4]) {
  constexpr int BEFORE = BITS == 4 ? 2 : 1;
#pragma unroll
  for (int i = 3; i >= BEFORE; --i) x[i] -= x[i - BEFORE];
}

// 2^24 over the factor that the rows of channel i of a lane carry in `out`.
template <int BITS>
constexpr float value_unscale(int i) {
  return kSubnormal / (BITS == 4 ? (i < 2 ? 1.0f : 16.0f) : static_cast<float>(1 << (2 * i)));
}

}  // namespace loopkv
