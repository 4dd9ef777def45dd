// The history reader where a tile has several columns, that is, for grouped queries and for mixed steps: the splits of
// one task, page by page, in halves (halves.cuh). Weights and sums are relative to the largest score of a split so far.
#pragma once

#include "halves.cuh"
#include "ring.cuh"
#include "seed.cuh"
#include "tiles.cuh"

namespace loopkv {

// Queries as halves, scaled by a power of two into [-1, 1], so that products with any fp16 scale stay finite; `unscale`
// is what a score of this lane's columns 2 t, 2 t + 1 is multiplied with.
template <typename Config>
LKV_DEVICE void load_coded_queries(CodedQueries<Config::D, Config::NT>& queries, float (&unscale)[Config::NT][2],
                                   const Columns<Config>& columns, float scale_log2) {
  constexpr int D = Config::D, BITS = Config::BITS, NT = Config::NT, WORDS = D / 8;
  const int lane = lane_id(), r = lane >> 2, t = lane & 3;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const bool real = 8 * nt + r < columns.count;
    const uint16_t* mine = columns.q(real ? 8 * nt + r : 0);
    uint32_t raw[WORDS];
    int at = 0;
#pragma unroll
    for (int b = 0; b < block_number(D); ++b) {
#pragma unroll
      for (int i = 0; i < block_channels(D, b) / 32; ++i) {
        Vec4 v = {0, 0, 0, 0};
        if (real) v = load_streamed(mine + block_start(D, b) + t * (block_channels(D, b) / 4) + 8 * i);
        raw[at++] = v.x;
        raw[at++] = v.y;
        raw[at++] = v.z;
        raw[at++] = v.w;
      }
    }
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      largest = max_float(largest, bits_float((raw[i] << 16) & 0x7fffffffu));
      largest = max_float(largest, bits_float(raw[i] & 0x7fff0000u));
    }
#pragma unroll
    for (int across = 1; across < 4; across *= 2) largest = max_float(largest, shfl_xor(largest, across));
    // 2^(e + 1) > largest for a normal float with exponent e; zero and subnormal queries stay as they are.
    const uint32_t exponent = float_bits(largest) >> 23;
    const bool usual = exponent > 0 && exponent < 253;
    const float down = usual ? bits_float((253u - exponent) << 23) : 1.0f;
    const float up = usual ? bits_float((exponent + 1u) << 23) : 1.0f;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const float low = bits_float(raw[i] << 16) * down, high = bits_float(raw[i] & 0xffff0000u) * down;
      const float factor = 1.0f / (i & 1 ? odd_division<BITS> : 1.0f);
      queries.q[nt][query_place(i)] = pack_half2(low * factor, high * factor);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) unscale[nt][c] = shfl(up, 4 * (2 * t + c)) * scale_log2;
  }
}

// Reads splits of one tile and head and writes a partial for each of them.
template <typename Config>
struct GroupedSplit {
  static constexpr int D = Config::D, BITS = Config::BITS, NT = Config::NT, STAGES = Config::STAGES;
  static_assert(Config::COLUMNS == 2 && Config::PAGES == 1);
  using Page = typename Config::Page;
  static constexpr int kCopyBytes = Page::kTokenPlaneBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopies = Page::kTokenPlaneBytes / kCopyBytes;  // of a token's low plane; also rounds of a warp

  const AttendArgs& a;
  Ring<Config>& ring;
  const QueryTile& queries;
  const Columns<Config> columns;
  const int G, lane, r, t;  // G: columns with a query
  const int head;

  CodedQueries<D, NT> q;
  float unscale[NT][2];
  float out[NT][D / 16][4], extra[NT][4];  // extra: rows 0-7 sums of weight * zero by group, row 8 sums of weights
  float best[NT][2];
  float bar[NT][2];  // seed of V precision; +inf for columns without a query
  static constexpr float kLift = 14.0f;
  float lift = kLift;  // weights are halves times 2^lift: small ones stay normal; scales of 2 and more need the room

  // What a page's scores leave for its values.
  uint32_t weight[NT][4];      // pairs of halves: column lane / 4, tokens 8 k + {2 t, 2 t + 1}
  float alpha[NT][2];          // what the output before the page is worth
  uint32_t hot = 0xffffffffu;  // bit 4 j + k: token 8 k + j
  int due = 0;                 // its stage

  // A page's scores (score_block).
  float codes[NT][2][4], zeros[NT][2][4];

  LKV_DEVICE GroupedSplit(const AttendArgs& args, Ring<Config>& ring_, const QueryTile& tile, int head_)
      : a(args), ring(ring_), queries(tile), columns(args, tile, head_), G(columns.count), lane(lane_id()),
        r(lane >> 2), t(lane & 3), head(head_) {}

  LKV_DEVICE void score(int stage) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[nt][0][j] = codes[nt][1][j] = zeros[nt][0][j] = zeros[nt][1][j] = 0.0f;
    }
    score_page<D, BITS, NT>(forget(lane), ring.stage(stage), q, codes, zeros);
  }

  // Any value scale of 2 or more in the page?
  LKV_DEVICE bool wide(int stage) const {
    uint32_t bits = 0;
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(ring.stage(stage) + Page::kValueScales);
#pragma unroll
    for (int word = 0; word < D / 2; word += 32) {
      if (word + 32 <= D / 2 || word + lane < D / 2) bits |= scales[word + lane];
    }
    return any((bits & 0x40004000u) != 0);
  }

  // Multiplies what was summed so far by alpha.
  LKV_DEVICE void rescale() {
    bool changed = false;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) changed |= alpha[nt][c] != 1.0f;
    }
    if (!any(changed)) return;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        extra[nt][c] *= alpha[nt][c];
        extra[nt][2 + c] *= alpha[nt][c];
#pragma unroll
        for (int tile = 0; tile < D / 16; ++tile) {
          out[nt][tile][c] *= alpha[nt][c];
          out[nt][tile][2 + c] *= alpha[nt][c];
        }
      }
    }
  }

  // Half of the values of the page whose weights are held.
  template <int MT>
  LKV_DEVICE void half_values(uint32_t here) {
    const uint8_t* page = ring.stage(due);
    const uint8_t* low = Config::PRECISION ? ring.low() : page + Page::kMainBytes;
    const uint32_t row = here >> 2, pair = here & 3, group = row % (D / 32);
    const uint32_t ones = row == 0 ? 0x3c003c00u : 0u;
    uint32_t zero[2];
    load_words<8>(zero, page + Page::kValueZeros + group * 64 + pair * 16 + 8 * MT);
    if constexpr (Config::PRECISION) {  // a cold token decodes to the middle of its bucket: 1.5 steps more
      uint32_t scale[2];
      load_words<8>(scale, page + Page::kValueScales + group * 64 + pair * 16 + 8 * MT);
      const uint32_t cold = ~hot >> (8 * pair);
      const uint32_t halves = (cold & 0xfu) | (cold & 0xf0u) << 12;
#pragma unroll
      for (int kk = 0; kk < 2; ++kk) {
        zero[kk] = fma_half2(scale[kk], (halves >> (2 * MT + kk) & 0x00010001u) * 0x3e00u, zero[kk]);
      }
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      mma_f16(extra[nt], zero[0], ones, zero[1], ones, weight[nt][2 * MT], weight[nt][2 * MT + 1]);
    }
    value_tile<D, BITS, NT, MT>(here, page, low, weight, out);
  }
  LKV_DEVICE void values() {
    const uint32_t here = forget(lane);
    half_values<0>(here);
    half_values<1>(here);
  }

  // Scores of the page in hand in log2 units, the new maxima, and alpha.
  // `end`: first token after the page; queries whose history ends before it do not read it.
  LKV_DEVICE void maximum(float (&s)[NT][4][2], float (&fresh)[NT][2], float lifted, int end, bool hide) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float odd = zeros[nt][1][2 + c] * odd_division<BITS>;
        const float zero = (zeros[nt][0][c] + odd) * unscale[nt][c];
        const float step = unscale[nt][c] * kSubnormal;
#pragma unroll
        for (int k = 0; k < 4; ++k) s[nt][k][c] = fma_float(codes[nt][k >> 1][2 * (k & 1) + c], step, zero);
        if (Config::MIXED && hide && end > history_end(a.geometry, columns.tokens(8 * nt + 2 * t + c))) {
#pragma unroll
          for (int k = 0; k < 4; ++k) s[nt][k][c] = kHidden;
        }
        float m = best[nt][c];
#pragma unroll
        for (int k = 0; k < 4; ++k) m = max_float(m, s[nt][k][c]);
#pragma unroll
        for (int across = 4; across < 32; across *= 2) m = max_float(m, shfl_xor(m, across));
        fresh[nt][c] = exp2_fast(best[nt][c] - m + (lifted - lift));
        best[nt][c] = m;
      }
    }
  }

  LKV_DEVICE uint32_t find_hot(const float (&s)[NT][4][2]) {
    uint32_t found = 0;
#pragma unroll
    for (int k = 3; k >= 0; --k) {
      bool mine = false;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) mine |= s[nt][k][c] >= max_float(bar[nt][c], best[nt][c]) - a.tau;
      }
      uint32_t lanes = ballot(mine);  // four lanes a token: they know different queries
      lanes |= lanes >> 1;
      lanes |= lanes >> 2;
      lanes &= 0x11111111u;
      found = found * 2 + lanes;
    }
    if (a.workspace.hot_values != nullptr && lane == 0) ring.notes().hot += popcount(found);
    return found;
  }

  LKV_DEVICE void fetch_low(int stage, uint32_t wanted) {
    const uint32_t here = forget(lane);
    const int64_t from = ring.notes().addresses[stage] + here * kCopyBytes;
    uint8_t* to = ring.low() + here * kCopyBytes;
    uint32_t first = 0;
    if constexpr (32 % kCopies == 0) {  // a lane's tokens are 32 / kCopies apart: 4 / kCopies bits of `wanted`
      const uint32_t token = slot_token(here / kCopies);
      first = wanted >> (4 * (token & 7) + (token >> 3));
    }
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      uint32_t bit;
      if constexpr (32 % kCopies == 0) {
        bit = first >> (copy * 4 / kCopies) & 1u;
      } else {
        const int token = slot_token((here + 32 * copy) / kCopies);
        bit = wanted >> (4 * (token & 7) + (token >> 3)) & 1u;
      }
      copy_async<kCopyBytes>(to + 32 * copy * kCopyBytes,
                             reinterpret_cast<const uint8_t*>(from) + 32 * copy * kCopyBytes, bit * kCopyBytes);
    }
    copy_async_commit();
  }

  LKV_DEVICE void weigh(const float (&s)[NT][4][2], const float (&fresh)[NT][2]) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      float top[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        top[c] = best[nt][c] - lift;
        alpha[nt][c] = fresh[nt][c];
      }
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float w0 = exp2_fast(s[nt][k][0] - top[0]), w1 = exp2_fast(s[nt][k][1] - top[1]);
        weight[nt][k] = transpose_8x8(pack_half2(w0, w1));
      }
    }
  }

  LKV_DEVICE void clear() {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[nt][i][j] = 0.0f;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) extra[nt][j] = 0.0f;
    }
  }
  LKV_DEVICE void begin_split() {
    lift = kLift;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) best[nt][c] = bits_float(0xff800000u);
    }
  }

  // Notes what the sums of a split are relative to: it ends here.
  LKV_DEVICE void end_split() {
    WarpNotes& notes = ring.notes();
    if (r == 0) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) notes.ended[8 * nt + 2 * t + c] = best[nt][c];
      }
    }
    if (lane == 0) notes.ended_lift = lift;
    sync_warp();
  }
  // The partial of the split that ended last.
  LKV_DEVICE void write() {
    WarpNotes& notes = ring.notes();
    const int number = notes.ended_splits;
    const float lifted = notes.ended_lift;
    const int64_t at = part_index(a, notes.tile, notes.head, notes.part + number) * (Config::MIXED ? 8 * NT : G);
    float* o = a.workspace.partial_o + at * D;
    float* ml = a.workspace.partial_ml + at * 2;
    const float drop = lifted == 0.0f ? 1.0f : 6.103515625e-05f;  // 2^-kLift
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * nt + 2 * t + c;
        float* row_o = o + static_cast<int64_t>(column) * D + 4 * r;
#pragma unroll
        for (int g = 0; g < D / 32; ++g) {
          const float zero = shfl(extra[nt][c], 4 * g + t) * drop;
          float x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = out[nt][2 * g + (i & 1)][2 * (i >> 1) + c];
          undo_prefixes<BITS>(x);
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = fma_float(x[i], value_unscale<BITS>(i) * drop, zero);
          if (column < G) {
            *reinterpret_cast<Vec4*>(row_o + 32 * g) = {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]),
                                                        float_bits(x[3])};
          }
        }
        if (r == 0 && column < G) {
          ml[2 * column] = notes.ended[column];
          ml[2 * column + 1] = extra[nt][2 + c] * drop;
        }
      }
    }
    sync_warp();
    if (lane == 0) notes.ended_splits = number + 1;
    sync_warp();
  }

  // Splits `split` .. `split + splits - 1`. `cross` begins the next task's copies once all of this one's
  // have begun; `before_computing` runs while the first page is on its way.
  template <typename Before, typename Cross>
  LKV_DEVICE void run(const Span& span, int split, int splits, Before before_computing, Cross cross) {
    PageFeed<Config, Cross> feed(a, ring, queries, head, span, split, splits, cross);
    const int count = feed.count;
    before_computing();
    load_coded_queries<Config>(q, unscale, columns, a.scale_log2);
    sync_warp();
    feed.begin_next();
    float s[NT][4][2], fresh[NT][2];
    auto take = [&](int i, int stage) {  // the scores of a page into the running maximum
      const int end = (feed.place + i + 1) * kPageTokens;
      const float lifted = wide(stage) ? 0.0f : kLift;
      maximum(s, fresh, lifted, end, end > span.recent);
      lift = lifted;
    };
    if constexpr (!Config::PRECISION) {
      for (int start = 0, stop; start < count; start = stop) {
        stop = start + span.split_pages < count ? start + span.split_pages : count;
        clear();
        begin_split();
        for (int i = start; i < stop; ++i) {
          due = ring.template wait<STAGES - 1>();
          score(due);
          take(i, due);
          weigh(s, fresh);
          rescale();
          values();
          sync_warp();
          feed.advance();
        }
        end_split();
        write();
      }
    } else {
      // A page's values are used one turn after its scores: what is wanted of its low plane comes in meanwhile.
      if (lane == 0) ring.notes().hot = 0;
      read_seed<Config>(a, queries, head, ring.notes().epoch, bar);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * nt + 2 * t + c >= G) bar[nt][c] = bits_float(0x7f800000u);
        }
      }
      clear();
      // Copy groups (no bulk copies): a page's low plane and another's main part in every turn.
      constexpr int kMain = 2 * (STAGES - 2);
      static_assert(STAGES == 3, "kMain holds for all turns");
      for (int i = 0, edge = 0; i <= count; ++i) {
        const bool more = i < count, turn = !more || i == edge;  // a split ended before
        if (i == edge) edge += span.split_pages;
        uint32_t wanted = 0;
        int stage = 0;
        if (turn && i > 0) end_split();
        if (more) {
          stage = ring.template wait<kMain>();
          score(stage);
          if (turn) begin_split();
          take(i, stage);
          wanted = find_hot(s);
        }
        if (i > 0) {
          rescale();
          copy_async_wait<LOOPKV_BULK_COPY ? 0 : 1>();
          sync_warp();
          values();
          sync_warp();
          if (turn) {
            write();
            clear();
          }
        }
        if (more) {
          fetch_low(stage, wanted);
          if (i > 0) {
            feed.advance();
          } else if (!LOOPKV_BULK_COPY) {
            copy_async_commit();
          }
          hot = wanted;
          due = stage;
          weigh(s, fresh);
        }
      }
      if (a.workspace.hot_values != nullptr && lane == 0) atomic_add64(a.workspace.hot_values, ring.notes().hot);
    }
#if !LOOPKV_BULK_COPY
    copy_async_wait<0>();
#endif
  }
};

}  // namespace loopkv
