// The history reader of decode steps with one query per kv head: one split after the other in coded pages, in integers.
#pragma once

#include "integers.cuh"
#include "ring.cuh"
#include "seed.cuh"
#include "tiles.cuh"

namespace loopkv {

// Reads splits of one row and head, one query, and writes a partial for each.
template <typename Config>
struct SingleSplit {
  static constexpr int D = Config::D, BITS = Config::BITS, STAGES = Config::STAGES, PAGES = Config::PAGES;
  static constexpr int GROUPS = D / 32;
  using Page = typename Config::Page;
  static constexpr int kCopyBytes = Page::kTokenPlaneBytes % 16 == 0 ? 16 : 8;
  static constexpr int kCopies = Page::kTokenPlaneBytes / kCopyBytes;  // of a token's low plane; also rounds of a warp
  static constexpr float kUnit = 1048576.0f;   // weights are counted in 2^-20
  static constexpr float kMostWeight = 7.9f;   // 2^23 units
  static constexpr float kCount = 8388608.0f;  // 2^23: the low bits of a float in [2^23, 2^24) are an integer

  const AttendArgs& a;
  Ring<Config>& ring;
  const QueryTile& queries;
  const Columns<Config> columns;
  const int lane, head;

  LaneConstants<D, BITS> at;
  IntegerQuery<D> q;
  float unscale;
  int out[GROUPS][2][4];
  float zero[GROUPS], sum;  // this lane's sums of weight * zero by group, and of weights
  float best;               // largest score
  float relative;           // what weights are relative to, in log2
  float bar;                // seed of V precision
  bool flushed;             // a part of the split's sums lies in its partial already
  uint32_t hot;             // tokens of the page whose weights are held: bit 4 r + t for token 8 t + r
  int hot_tokens;           // of the task
  WeightDigits<D> weights[PAGES];
  float s[PAGES], high[PAGES];  // scores of the pages in hand and their maxima
  int due[PAGES];

  LKV_DEVICE SingleSplit(const AttendArgs& args, Ring<Config>& ring_, const QueryTile& tile, int head_)
      : a(args), ring(ring_), queries(tile), columns(args, tile, head_), lane(lane_id()), head(head_) {
    at.make(lane);
  }

  LKV_DEVICE uint8_t* shared(int p) const { return ring.queries() + p * Config::kPageQueryBytes; }

  template <int BLOCK = 0>
  LKV_DEVICE uint32_t load_block(uint32_t (&raw)[block_number(D)][2]) {
    constexpr int C = block_channels(D, BLOCK);
    using Share = ChannelShare<C, BITS>;
    const int first = Share::first_pair(lane);
    uint32_t largest = 0;
    raw[BLOCK][0] = raw[BLOCK][1] = 0;
    if (C == 128 || lane < C / 4) {
      const uint16_t* mine = columns.q(0) + block_start(D, BLOCK) + 2 * first;
      raw[BLOCK][0] = load_word(mine);
      raw[BLOCK][1] = load_word(mine + 2 * Share::kSecond);
    }
    q.first[BLOCK] = forget(2 * block_start(D, BLOCK) + 4 * first);
    q.lift[BLOCK] = Share::lift(lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = raw[BLOCK][i] << 16 & 0x7fffffffu, upper = raw[BLOCK][i] & 0x7fff0000u;
      largest = largest > low ? largest : low;
      largest = largest > upper ? largest : upper;
    }
    if constexpr (BLOCK + 1 < block_number(D)) {
      const uint32_t more = load_block<BLOCK + 1>(raw);
      largest = largest > more ? largest : more;
    }
    return largest;
  }

  LKV_DEVICE void load_query() {
    uint32_t raw[block_number(D)][2];
    const uint32_t exponent = warp_max(load_block(raw)) >> 23;
    // 2^(e + 1) > largest for a normal float with exponent e; zero and subnormal queries stay as they are.
    const bool usual = exponent > 0 && exponent < 253;
    const float down = usual ? bits_float((253u - exponent) << 23) : 1.0f;
    const float up = usual ? bits_float((exponent + 1u) << 23) : 1.0f;
#pragma unroll
    for (int b = 0; b < block_number(D); ++b) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        q.x[b][2 * i] = bits_float(raw[b][i] << 16) * down;
        q.x[b][2 * i + 1] = bits_float(raw[b][i] & 0xffff0000u) * down;
        q.whole[b][i] = pack_half2(q.x[b][2 * i], q.x[b][2 * i + 1]);
      }
    }
    unscale = up * a.scale_log2;
  }

  LKV_DEVICE void score(const int (&stages)[PAGES], bool two) {
    float unit[PAGES], zeros[PAGES][4];
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
#pragma unroll
      for (int i = 0; i < 4; ++i) zeros[p][i] = 0.0f;
      unit[p] = write_products<D, BITS>(at, ring.stage(stages[p]), q, shared(p), zeros[p]);
    }
    sync_warp();
    int units[PAGES];
#pragma unroll
    for (int p = 0; p < PAGES; ++p) units[p] = score_tokens<D, BITS>(at, ring.stage(stages[p]), shared(p));
    sync_warp();  // weights will take the place of the products
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      float all = zeros[p][0] + zeros[p][1];  // eight columns' sums in four lanes
      all += shfl_xor(all, 1);
      all += shfl_xor(all, 2);
      all *= unscale;
      const float step = unit[p] * unscale;
      s[p] = fma_float(static_cast<float>(units[p]), step, all);
      high[p] = fma_float(static_cast<float>(warp_max(units[p])), step, all);
      if (p == 1 && !two) s[p] = high[p] = bits_float(0xff800000u);
    }
  }

  // The weights of the pages whose scores are in hand as operand B.
  LKV_DEVICE void weigh(const int (&stages)[PAGES]) {
    float weight[PAGES], w[PAGES][GROUPS], offset[PAGES][GROUPS], most = 0.0f;
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      const uint8_t* mine = ring.stage(stages[p]) + Page::kValueScales + at.scale;
      weight[p] = exp2_fast(s[p] - relative);
      const float infinite = weight[p] * 1e-30f;  // triggers a rebase even if every scale is zero
      most = p == 0 ? infinite : max_float(most, infinite);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        const float scale = half_float(*reinterpret_cast<const uint16_t*>(mine + 64 * g));
        offset[p][g] =
            half_float(*reinterpret_cast<const uint16_t*>(mine + 64 * g + Page::kValueZeros - Page::kValueScales));
        if constexpr (Config::PRECISION) {  // a cold token decodes to the middle of its bucket
          offset[p][g] = fma_float(scale, hot & at.token ? 0.0f : 1.5f, offset[p][g]);
        }
        w[p][g] = weight[p] * scale;
        most = max_float(most, w[p][g]);
      }
    }
    if (any(most > kMostWeight)) rebase(stages, weight, w);
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      sum += weight[p];
      uint8_t* place = shared(p) + at.wide / 4;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        zero[g] = fma_float(weight[p], offset[p][g], zero[g]);
        reinterpret_cast<uint32_t*>(place)[g * IntegerShared<D>::kWeightRow] = float_bits(fma_float(w[p][g], kUnit, kCount));
      }
    }
    sync_warp();
#pragma unroll
    for (int p = 0; p < PAGES; ++p) weights[p].gather(at, shared(p));
  }

  // Raises `relative`, because a weight no longer fits 23 bits; a split's first turn sets it here too.
  LKV_DEVICE void rebase(const int (&stages)[PAGES], float (&weight)[PAGES], float (&w)[PAGES][GROUPS]) {
    const float before = relative, top = PAGES == 2 ? max_float(high[0], high[PAGES - 1]) : high[0];
    float most = 0.0f;
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      const uint8_t* mine = ring.stage(stages[p]) + Page::kValueScales + at.scale;
      weight[p] = exp2_fast(s[p] - top);
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) {
        w[p][g] = weight[p] * half_float(*reinterpret_cast<const uint16_t*>(mine + 64 * g));
        most = max_float(most, w[p][g]);
      }
    }
    int exponent = static_cast<int>(warp_max(float_bits(most)) >> 23) - 126;
    exponent = exponent < -40 ? -40 : exponent;
    const float down = bits_float(static_cast<uint32_t>(127 - exponent) << 23);
    relative = top + static_cast<float>(exponent);
    const float alpha = exp2_fast(before - relative);
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      weight[p] *= down;
#pragma unroll
      for (int g = 0; g < GROUPS; ++g) w[p][g] *= down;
    }
    if (before > bits_float(0xff800000u)) flush(alpha);
    sum *= alpha;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) zero[g] *= alpha;
  }

  LKV_DEVICE void values() {
#pragma unroll
    for (int p = 0; p < PAGES; ++p) {
      const uint8_t* page = ring.stage(due[p]);
      add_values<D, BITS>(at, page, Config::PRECISION ? ring.low() : page + Page::kMainBytes, weights[p], out);
    }
  }

  LKV_DEVICE int64_t partial() const {
    const WarpNotes& notes = ring.notes();
    return part_index(a, notes.tile, notes.head, notes.part + notes.ended_splits);
  }

  // Moves the integers into the split's partial, times `alpha` with what lay there.
  LKV_DEVICE void flush(float alpha) { store(alpha, false); }

  // This lane's channels of each pair of groups: 4 r + 2 (t & 1) and the next of group t / 2 of the pair.
  LKV_DEVICE void store(float alpha, bool end) {
    constexpr int PAIRS = WeightDigits<D>::kPairs;
    const bool odd = lane & 1, second = lane & 2;
    const float low = odd ? 65536.0f : 1.0f, more = odd ? 0.0f : 256.0f;
    float* o = a.workspace.partial_o + partial() * D + (lane & ~3) + (odd ? 2 : 0) + (second ? 32 : 0);
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
      const int g0 = 2 * pair, g1 = 2 * pair + 1 < GROUPS ? 2 * pair + 1 : g0;
      float offset = 0.0f;
      if (end) {
        offset = (second ? zero[g1] : zero[g0]) + shfl_xor(second ? zero[g0] : zero[g1], 2);
        offset += shfl_xor(offset, 1);
        offset += shfl_xor(offset, 4);
        offset += shfl_xor(offset, 8);
        offset += shfl_xor(offset, 16);
      }
      float x[4];  // channel i: u = i & 1, rows i >> 1
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 2 * (i >> 1);
        const int c0 = second ? out[g1][i & 1][j] : out[g0][i & 1][j];
        const int c1 = second ? out[g1][i & 1][j + 1] : out[g0][i & 1][j + 1];
        x[i] = (static_cast<float>(c0) * low + static_cast<float>(c1) * more) * (integer_unscale<BITS>(i) / kUnit);
      }
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) y[i] = (odd ? x[2 + i] : x[i]) + shfl_xor(odd ? x[i] : x[2 + i], 1) + offset;
      if (g1 != g0 || !second) {
        float* to = o + 64 * pair;
        if (flushed) {
          y[0] += to[0];
          y[1] += to[1];
        }
        *reinterpret_cast<Vec2*>(to) = {float_bits(y[0] * alpha), float_bits(y[1] * alpha)};
      }
    }
    flushed = !end;
    clear_sums();
    if (end) {
      float all = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) all += shfl_xor(all, step);
      if (lane == 0) {
        float* ml = a.workspace.partial_ml + partial() * 2;
        ml[0] = relative;
        ml[1] = all;
      }
      clear();
      sync_warp();
      if (lane == 0) ++ring.notes().ended_splits;
      sync_warp();
    }
  }
  LKV_DEVICE void clear_sums() {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
      for (int i = 0; i < 8; ++i) out[g][i >> 2][i & 3] = 0;
    }
  }
  LKV_DEVICE void clear() {
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) zero[g] = 0.0f;
    sum = 0.0f;
    relative = bits_float(0xff800000u);
    flushed = false;
  }

  LKV_DEVICE void find_hot() {
    hot = ballot(s[0] >= max_float(bar, best) - a.tau);
    hot_tokens += popcount(hot);
  }

  LKV_DEVICE void fetch_low(int stage) {
    const int mine = kCopyBytes == 16 ? at.wide : at.wide / 2;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(ring.notes().addresses[stage] + mine);
    uint8_t* to = ring.low() + mine;
    const uint32_t first = hot >> at.copied;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      uint32_t bit;
      if constexpr (32 % kCopies == 0) {  // a lane's tokens are 32 / kCopies apart: 4 / kCopies bits
        bit = first >> (copy * 4 / kCopies) & 1u;
      } else {
        const int token = slot_token((lane + 32 * copy) / kCopies);
        bit = hot >> (4 * (token & 7) + (token >> 3)) & 1u;
      }
      copy_async<kCopyBytes>(to + 32 * copy * kCopyBytes, from + 32 * copy * kCopyBytes, bit * kCopyBytes);
    }
    copy_async_commit();
  }

  // Splits `split` .. `split + splits - 1`. `cross` begins the next task's copies once all of this one's
  // have begun; `before_computing` runs while the first page is on its way.
  template <typename Before, typename Cross>
  LKV_DEVICE void run(const Span& span, int split, int splits, Before before_computing, Cross cross) {
    PageFeed<Config, Cross> feed(a, ring, queries, head, span, split, splits, cross);
    const int count = feed.count;
    before_computing();
    load_query();
    sync_warp();
    feed.begin_next();
    auto wait_turn = [&](bool two) {
      due[0] = ring.template wait<STAGES - 1>();
      if constexpr (PAGES == 2) due[1] = two ? ring.template wait<STAGES - 2>() : due[0];
    };
    auto advance_turn = [&](bool two) {
#if LOOPKV_BULK_COPY
      if constexpr (PAGES == 2) {  // neither the next task's pages nor more places are to be looked up
        const bool known = ring.ahead ? ring.index + 2 <= ring.count
                                      : ring.index + 2 < ring.count && ((ring.index + 1) & 31) > 1;
        if (two && known) {
          ring.fill_two();
          return;
        }
      }
#endif
#pragma unroll 1
      for (int left = PAGES == 2 && two ? 2 : 1; left > 0; --left) feed.advance();
    };
    const float none = bits_float(0xff800000u);
    clear();
    clear_sums();
    hot_tokens = 0;
    if constexpr (!Config::PRECISION) {
      int i = 0;
      while (i < count) {
        const int stop = i + span.split_pages < count ? i + span.split_pages : count;
        for (; i < stop; i += PAGES) {
          const bool two = PAGES == 2 && i + 1 < stop;
          wait_turn(two);
          score(due, two);
          weigh(due);
          values();
          sync_warp();
          advance_turn(two);
        }
        i = stop;
        store(1.0f, true);
      }
    } else {
      // A page's values are used one turn after its scores: what is wanted of its low plane comes in meanwhile.
      float seed[1][1];
      read_seed<Config>(a, queries, head, ring.notes().epoch, seed);
      bar = shfl(seed[0][0], 0);  // the lane of the query's column knows it
      constexpr int kMain = 2 * (STAGES - 2);
      static_assert(STAGES == 3 && PAGES == 1, "kMain holds for all turns");
      for (int i = 0, edge = 0; i <= count; ++i) {
        const bool more = i < count, turn = !more || i == edge;  // a split ended before
        if (i == edge) edge += span.split_pages;
        int stages[PAGES] = {};
        if (more) {
          stages[0] = ring.template wait<kMain>();
          score(stages, false);
          if (turn) best = none;
          best = max_float(best, high[0]);
        }
        if (i > 0) {
          copy_async_wait<LOOPKV_BULK_COPY ? 0 : 1>();
          sync_warp();
          values();
          sync_warp();
          if (turn) store(1.0f, true);
        }
        if (more) {
          find_hot();
          fetch_low(stages[0]);
          if (i > 0) {
            feed.advance();
          } else if (!LOOPKV_BULK_COPY) {
            copy_async_commit();
          }
          due[0] = stages[0];
          weigh(stages);
        }
      }
      if (a.workspace.hot_values != nullptr && lane == 0) atomic_add64(a.workspace.hot_values, hot_tokens);
    }
#if !LOOPKV_BULK_COPY
    copy_async_wait<0>();
#endif
  }
};

}  // namespace loopkv
