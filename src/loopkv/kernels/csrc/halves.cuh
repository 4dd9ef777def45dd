// The arithmetic of a history reader with several columns: how codes become matrix fragments of halves.
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

#include "page.cuh"
#include "simt.cuh"

namespace loopkv {

constexpr float kSubnormal = 16777216.0f;  // 2^24: value of a code over the value of its bits read as a half

// Eight codes of a lane are four pairs, pair i in halves as the bits of a code read as a half. A code alone takes a
// mask; the last pair of a byte with all pairs below it takes none once the byte stands alone. So pairs come as
// prefixes: pair i times its power of four, plus every earlier pair of its byte. Products are linear: differences of
// the queries (K: score_block) or of the sums (V: undo_prefixes) take the earlier pairs out again.
LKV_DEVICE uint32_t upper_bytes(uint32_t word) { return permute_bytes<0x4341>(word, 0u); }
// Prefixes in the low bytes of `word`'s halves; MASKED: the high ones are zero.
template <int BITS, bool MASKED>
LKV_DEVICE uint32_t code_prefix(uint32_t word, int i) {
  const uint32_t mask = (1u << (BITS * (i + 1))) - 1;
  return MASKED && BITS * (i + 1) == 8 ? word : word & (mask | mask << 16);
}
constexpr int pairs_of_byte(int BITS) { return 8 / BITS; }
// 1 over the power of four of pair i, as a pair of halves.
template <int BITS>
constexpr uint32_t pair_unscale(int i) {
  return BITS == 4 ? (i & 1 ? 0x2c002c00u : 0x3c003c00u)
                   : (i == 0 ? 0x3c003c00u : i == 1 ? 0x34003400u : i == 2 ? 0x2c002c00u : 0x24002400u);
}

// Where a lane keeps its query pair number i.
constexpr int query_place(int i) { return (i & ~3) | ((i & 1) << 1) | ((i >> 1) & 1); }

// The queries of a warp as operand B: columns are queries.
template <int D, int NT>
struct CodedQueries {
  uint32_t q[NT][D / 8];  // pairs of halves, this lane's channels, odd pairs divided by odd_division; of every four the
                          // order is 0 2 1 3 (query_place)
};
// What odd query pairs were divided by where they serve codes and zeros alike.
template <int BITS>
constexpr float odd_division = BITS == 4 ? 16.0f : 1.0f;

// Adds one channel block of a page to the scores.
//   codes  [NT][2 token tiles][4] sums of q * scale * code * 2^-24
//   zeros  [NT][2][4] sums of q * zero: over even pairs in rows 0-7 of the first, over odd ones in rows 8-15 of the
//          second (times odd_division), alike in all those rows: as loaded, four pairs of zeros are operand A
template <int D, int BITS, int NT, int BLOCK>
LKV_DEVICE void score_block(uint32_t lane, const uint8_t* page, const CodedQueries<D, NT>& queries,
                            float (&codes)[NT][2][4], float (&zeros)[NT][2][4]) {
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
    uint32_t scale[4], zero[4];
    load_words<16>(scale, scales + 16 * unit);
    load_words<16>(zero, offsets + 16 * unit);
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
        const uint32_t* q = queries.q[nt] + place;  // even pairs, then odd ones
        uint32_t b0, b1 = mul_half2(q[2 + step], scale[i1]);
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
#pragma unroll
        for (int mt = 0; mt < 2; ++mt) {
          mma_f16(codes[nt][mt], prefix[2 * mt][i0], prefix[2 * mt + 1][i0], prefix[2 * mt][i1],
                  prefix[2 * mt + 1][i1], b0, b1);
        }
      }
    }
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

template <int D, int BITS, int NT, int BLOCK = 0>
LKV_DEVICE void score_page(uint32_t lane, const uint8_t* page, const CodedQueries<D, NT>& queries,
                           float (&codes)[NT][2][4], float (&zeros)[NT][2][4]) {
  score_block<D, BITS, NT, BLOCK>(lane, page, queries, codes, zeros);
  if constexpr (BLOCK + 1 < block_number(D)) score_page<D, BITS, NT, BLOCK + 1>(lane, page, queries, codes, zeros);
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
//   weights [NT][4] pairs of halves: column lane / 4, tokens 8 k + {2 t, 2 t + 1}
//   out     [NT][D / 16][4] sums of weight * scale * prefix of codes * 2^-24; rows of tile 2 g + u: channel i = u
//           (rows 0-7) and u + 2 (rows 8-15) of lane row r in group g
template <int D, int BITS, int NT, int MT, int BLOCK>
LKV_DEVICE void value_block(uint32_t lane, const uint8_t* page, const uint8_t* low_plane,
                            const uint32_t (&weights)[NT][4], float (&out)[NT][D / 16][4]) {
  using Page = HeadPage<D, BITS>;
  constexpr int C = block_channels(D, BLOCK), START = block_start(D, BLOCK), GROUPS = C / 32, HALVES = C == 128 ? 2 : 1;
  const uint32_t r = lane >> 2, t = lane & 3;
  uint32_t w[NT][GROUPS][2];
#pragma unroll
  for (int g = 0; g < GROUPS; ++g) {
    uint32_t scale[2];
    load_words<8>(scale, page + Page::kValueScales + (START / 32 + g) * 64 + t * 16 + 8 * MT);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) w[nt][g][kk] = mul_half2(weights[nt][2 * MT + kk], scale[kk]);
    }
  }
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
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        mma_f16(out[nt][2 * (START / 32 + g) + u], pair[0][u], pair[0][u + 2], pair[1][u], pair[1][u + 2],
                w[nt][g][0], w[nt][g][1]);
      }
    }
  }
}

// The values of half a page: tokens 16 MT .. 16 MT + 15.
template <int D, int BITS, int NT, int MT, int BLOCK = 0>
LKV_DEVICE void value_tile(uint32_t lane, const uint8_t* page, const uint8_t* low, const uint32_t (&weights)[NT][4],
                           float (&out)[NT][D / 16][4]) {
  value_block<D, BITS, NT, MT, BLOCK>(lane, page, low, weights, out);
  if constexpr (BLOCK + 1 < block_number(D)) value_tile<D, BITS, NT, MT, BLOCK + 1>(lane, page, low, weights, out);
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
