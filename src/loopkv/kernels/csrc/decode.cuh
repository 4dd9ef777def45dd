// Fused decode attention of one cell: one launch reads sink, window and history of every row and merges them.
//
// Work is cut into tasks of one warp: (row, head, chunk of 64 exact tokens) first, then (row, head, split of the
// history). A warp's first task follows from its place in the grid, every later one from a ticket. A task writes a
// partial; the warp that completes a (row, head) merges its partials in their order. What is computed, and in which
// order it is added, depends on the row alone: neither on the batch nor on timing.
//
// A split needs the row's largest sink score (V precision) only after the keys of its first page. The warp with the
// sink publishes it together with the launch's epoch before it reads the window; it waits on nothing. Should it not run
// (a warp may wait for a block that was never started), the split computes the same number itself after a while.
#pragma once

#include "descriptor.h"
#include "exact.cuh"
#include "page.cuh"
#include "row.cuh"
#include "simt.cuh"

namespace loopkv {

constexpr int kPatienceCycles = 200000;  // about 100 us: longer than any sink chunk takes
constexpr int kControlTicket = 0, kControlExits = 1, kControlEpoch = 2;

template <int D_, int BITS_, bool PRECISION_, int NT_, int WARPS_, int STAGES_>
struct DecodeConfig {
  static constexpr int D = D_, BITS = BITS_, NT = NT_, WARPS = WARPS_, STAGES = STAGES_;
  static constexpr bool PRECISION = PRECISION_;
  static constexpr bool CODED = BITS != 16;
  static constexpr int kStageBytes = CODED ? HeadPage<D, CODED ? BITS : 4>::kBytes : 0;
  static constexpr int kRingBytes = WARPS * STAGES * kStageBytes;
  // [ring][barriers and page addresses of every stage][chunk and split counts of the rows, and their lengths]
  static constexpr int kTableOffset = kRingBytes + WARPS * STAGES * 16;
  static constexpr int shared_bytes(int rows) { return kTableOffset + (3 * rows + 4) * 4; }
};

// Per block: running totals of chunks and splits over the rows.
struct RowTable {
  int* chunks_before;  // [rows + 1]
  int* splits_before;  // [rows + 1]
  int* tokens;         // [rows]
};

// Row whose task number `index` is, by a running total; all lanes of a warp take part.
LKV_DEVICE int find_row(const int* before, int rows, int index) {
  int row = 0;
  for (int base = 0; base < rows; base += 32) {
    const int candidate = base + lane_id();
    const uint32_t passed = ballot(candidate < rows && before[candidate + 1] <= index);
    row += popcount(passed);
    if (passed != 0xffffffffu) break;
  }
  return row;
}

LKV_DEVICE void build_row_table(const DecodeArgs& a, const RowTable& table) {
  for (int row = thread_id(); row < a.rows; row += block_threads()) {
    const int tokens = a.cache.seq_lens[row];
    const RowSpan span = row_span(a.geometry, tokens > 0 ? tokens : 0);
    table.tokens[row] = tokens > 0 ? tokens : 0;
    table.chunks_before[row + 1] = span.chunks;
    table.splits_before[row + 1] = span.splits;
  }
  sync_block();
  if (thread_id() < 32) {
    const int lane = lane_id();
    int chunks = 0, splits = 0;
    for (int base = 0; base < a.rows; base += 32) {
      const bool real = base + lane < a.rows;
      int c = real ? table.chunks_before[base + lane + 1] : 0;
      int s = real ? table.splits_before[base + lane + 1] : 0;
#pragma unroll
      for (int delta = 1; delta < 32; delta *= 2) {
        const int before_c = shfl_up(c, delta), before_s = shfl_up(s, delta);
        if (lane >= delta) {
          c += before_c;
          s += before_s;
        }
      }
      if (real) {
        table.chunks_before[base + lane + 1] = chunks + c;
        table.splits_before[base + lane + 1] = splits + s;
      }
      chunks += shfl(c, 31);
      splits += shfl(s, 31);
    }
    if (lane == 0) table.chunks_before[0] = table.splits_before[0] = 0;
  }
  sync_block();
}

LKV_DEVICE int64_t part_index(const DecodeArgs& a, int row, int head, int part) {
  return (static_cast<int64_t>(row) * a.geometry.kv_heads + head) * a.workspace.max_parts + part;
}

// Byte offset of the exact keys of a token and head in the pool; the values follow `window_values_bytes` later.
template <int D>
LKV_DEVICE int64_t window_offset(const DecodeArgs& a, int row, int head, int token) {
  const int bw = a.geometry.window_block_tokens, index = token / bw;
  const int64_t block = a.cache.window_table[row * a.cache.window_table_stride + index];
  const int64_t place = static_cast<int64_t>(token - index * bw) * a.geometry.kv_heads + head;
  return block * a.geometry.block_bytes + a.cell.window_offset_bytes + place * (2 * D);
}

// Largest score of each query column over the row's sink, computed as the sink's own warp does.
template <int D, int NT>
LKV_NOINLINE void sink_maximum(const DecodeArgs& a, int row, int head, float (&best)[NT][2]) {
  uint32_t q[NT][D / 8];
  const uint16_t* rows = static_cast<const uint16_t*>(a.q) + row * a.q_stride;
  load_exact_queries<D, NT>(q, rows + static_cast<int64_t>(head) * a.geometry.group_queries * D,
                            a.geometry.group_queries);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) best[nt][0] = best[nt][1] = bits_float(0xff800000u);
  for (int first = 0; first < a.geometry.sink_tokens; first += 16) {
    const int token = first + (lane_id() >> 2);
    Vec4 k0[D / 32], k1[D / 32];
    load_token<D>(k0, a.cache.pool + window_offset<D>(a, row, head, token), true);
    load_token<D>(k1, a.cache.pool + window_offset<D>(a, row, head, token + 8), true);
    float s[NT][4];
    exact_scores<D, NT>(s, q, k0, k1, a.scale_log2);
    column_maximum<NT>(best, s);
  }
}

// The seed of V precision for this lane's query columns.
template <int D, int NT>
LKV_DEVICE void read_seed(const DecodeArgs& a, int row, int head, uint32_t epoch, float (&seed)[NT][2]) {
  const float none = bits_float(0xff800000u);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) seed[nt][0] = seed[nt][1] = none;
  if (a.seed_mode == kSeedNone || a.geometry.sink_tokens == 0) return;
  const int G = a.geometry.group_queries, t = lane_id() & 3;
  const uint64_t* flags = a.workspace.seeds + (static_cast<int64_t>(row) * a.geometry.kv_heads + head) * G;
  const int64_t start = clock_cycles(), limit = a.seed_mode == kSeedTimed ? a.timed_cycles : kPatienceCycles;
  bool late = false;
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int column = 8 * nt + 2 * t + c;
      if (column >= G) continue;
      while (true) {
        const uint64_t flag = load_flag(flags + column);
        if (static_cast<uint32_t>(flag >> 32) == epoch) {
          seed[nt][c] = bits_float(static_cast<uint32_t>(flag));
          break;
        }
        if (clock_cycles() - start > limit) {
          late = true;
          break;
        }
        spin_pause();
      }
    }
  }
  if (any(late)) {  // all queries of the head or none: the rule joins them
    if (a.seed_mode == kSeedTimed) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) seed[nt][0] = seed[nt][1] = none;
    } else {
      float own[NT][2];  // its address leaves this function; that of the seed must not
      sink_maximum<D, NT>(a, row, head, own);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        seed[nt][0] = own[nt][0];
        seed[nt][1] = own[nt][1];
      }
    }
  }
}

// Sink and window: one chunk of a row's exact tokens.
template <int D, int NT>
LKV_DEVICE void exact_chunk(const DecodeArgs& a, const RowSpan& row, int row_index, int head, int chunk, uint32_t epoch,
                            float* o, float* ml) {
  const int G = a.geometry.group_queries, lane = lane_id(), r = lane >> 2, t = lane & 3;
  const int first = chunk * kChunkTokens;
  const int count = row.exact - first < kChunkTokens ? row.exact - first : kChunkTokens;
  const int newest = a.k_new != nullptr ? row.exact - 1 - first : -1;
  int64_t offset[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int index = lane + 32 * i;
    offset[i] = index < count ? window_offset<D>(a, row_index, head, row.exact_token(first + index)) : 0;
  }
  const int64_t values =
      static_cast<int64_t>(a.geometry.window_block_tokens) * a.geometry.kv_heads * (2 * D);
  uint32_t q[NT][D / 8];
  const uint16_t* rows = static_cast<const uint16_t*>(a.q) + row_index * a.q_stride;
  load_exact_queries<D, NT>(q, rows + static_cast<int64_t>(head) * G * D, G);
  ExactState<D, NT> state;
  state.clear();
#pragma unroll
  for (int tile = 0; tile < kChunkTokens / 16; ++tile) {
    if (16 * tile >= count) break;
    Vec4 k[2][D / 32], v[2][D / 32];
    bool valid[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int index = 16 * tile + 8 * half + r;
      valid[half] = index < count;
      uint8_t* key = a.cache.pool + shfl(offset[tile / 2], index & 31);
      const bool fresh = index == newest;
      const int64_t place = row_index * a.kv_stride + static_cast<int64_t>(head) * D;
      const uint8_t* k_from =
          fresh ? reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(a.k_new) + place) : key;
      const uint8_t* v_from =
          fresh ? reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(a.v_new) + place) : key + values;
      load_token<D>(k[half], k_from, valid[half]);
      load_token<D>(v[half], v_from, valid[half]);
      if (fresh) {  // the window gets the new token, which nobody else reads in this launch
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
          *reinterpret_cast<Vec4*>(key + 64 * j + 16 * t) = k[half][j];
          *reinterpret_cast<Vec4*>(key + values + 64 * j + 16 * t) = v[half][j];
        }
      }
    }
    exact_tile<D, NT>(state, q, k[0], k[1], v[0], v[1], valid[0], valid[1], a.scale_log2);
    if (chunk == 0 && 16 * (tile + 1) == a.geometry.sink_tokens && row.splits > 0) {
      uint64_t* flags =
          a.workspace.seeds + (static_cast<int64_t>(row_index) * a.geometry.kv_heads + head) * G;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * nt + 2 * t + c;
          if (r == 0 && column < G) {
            store_flag(flags + column, static_cast<uint64_t>(epoch) << 32 | float_bits(state.best[nt][c]));
          }
        }
      }
    }
  }
  write_exact<D, NT>(state, o, ml, G);
}

// History kept exact: one split, page = [keys, values][token][head][channel].
template <int D, int NT>
LKV_DEVICE void exact_split(const DecodeArgs& a, const RowSpan& row, int row_index, int head, int split, float* o,
                            float* ml) {
  const int G = a.geometry.group_queries, r = lane_id() >> 2;
  const int first = split * row.split_pages;
  const int last = first + row.split_pages < row.pages ? first + row.split_pages : row.pages;
  const int sink_pages = a.geometry.sink_tokens / kPageTokens, ppb = a.geometry.pages_per_block;
  const int64_t token_bytes = static_cast<int64_t>(a.geometry.kv_heads) * (2 * D);
  uint32_t q[NT][D / 8];
  const uint16_t* rows = static_cast<const uint16_t*>(a.q) + row_index * a.q_stride;
  load_exact_queries<D, NT>(q, rows + static_cast<int64_t>(head) * G * D, G);
  ExactState<D, NT> state;
  state.clear();
  for (int page = first; page < last; ++page) {
    const int place = sink_pages + page;
    const int64_t block = a.cache.history_table[row_index * a.cache.history_table_stride + place / ppb];
    const uint8_t* base = a.cache.pool + block * a.geometry.block_bytes + (place % ppb) * a.geometry.page_bytes +
                          a.cell.history_offset_bytes + static_cast<int64_t>(head) * (2 * D);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Vec4 k[2][D / 32], v[2][D / 32];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint8_t* token = base + (16 * tile + 8 * half + r) * token_bytes;
        load_token<D>(k[half], token, true);
        load_token<D>(v[half], token + kPageTokens * token_bytes, true);
      }
      exact_tile<D, NT>(state, q, k[0], k[1], v[0], v[1], true, true, a.scale_log2);
    }
  }
  write_exact<D, NT>(state, o, ml, G);
}

// This warp's ring of page buffers in shared memory.
template <typename Config>
struct Ring {
  uint8_t* stages;
  uint64_t* barriers;
  int64_t* addresses;  // of the page in each stage: where its low plane lies
  uint64_t policy;
  int next_fill = 0, next_use = 0;
  uint32_t phase = 0;

  LKV_DEVICE void open(uint8_t* shared, int warp) {
    stages = shared + warp * Config::STAGES * Config::kStageBytes;
    barriers = reinterpret_cast<uint64_t*>(shared + Config::kRingBytes) + warp * Config::STAGES;
    addresses = reinterpret_cast<int64_t*>(shared + Config::kRingBytes + Config::WARPS * Config::STAGES * 8) +
                warp * Config::STAGES;
#if LOOPKV_BULK_COPY
    policy = stream_policy();
    if (lane_id() == 0) {
      for (int i = 0; i < Config::STAGES; ++i) barrier_init(barriers + i);
      barrier_init_done();
    }
#endif
    sync_warp();
  }
  LKV_DEVICE uint8_t* stage(int index) const { return stages + index * Config::kStageBytes; }

  // Starts the copy of a head's page at `from` (same in all lanes) into the next stage, which all lanes have left.
  LKV_DEVICE void fill(const uint8_t* from, bool real) {
    using Page = HeadPage<Config::D, Config::BITS>;
    constexpr int kBytes = Config::PRECISION ? Page::kMainBytes : Page::kBytes;
#if LOOPKV_BULK_COPY
    if (real && lane_id() == 0) {
      addresses[next_fill] = reinterpret_cast<int64_t>(from);
      bulk_copy(stage(next_fill), from, kBytes, barriers + next_fill, policy);
    }
#else
    if (real) {
      if (lane_id() == 0) addresses[next_fill] = reinterpret_cast<int64_t>(from);
      for (int i = 16 * lane_id(); i < kBytes; i += 512) copy_async<16>(stage(next_fill) + i, from + i, true);
    }
    copy_async_commit();
#endif
    if (real) next_fill = next_fill + 1 == Config::STAGES ? 0 : next_fill + 1;
  }

  // Waits for the next page and returns its stage.
  LKV_DEVICE int wait() {
    const int index = next_use;
#if LOOPKV_BULK_COPY
    barrier_wait(barriers + index, phase);
#else
    copy_async_wait<Config::PRECISION ? 2 * (Config::STAGES - 2) : Config::STAGES - 1>();
#endif
    sync_warp();
    next_use = index + 1 == Config::STAGES ? 0 : index + 1;
    if (next_use == 0) phase ^= 1;
    return index;
  }
};

// What the scores of a page leave behind for its values.
template <int NT>
struct PageWeights {
  uint32_t weight[NT][4];  // pairs of halves: column lane / 4, tokens 8 k + {2 t, 2 t + 1}; times 2^lift
  float alpha[NT][2];      // what the output so far is worth
  uint32_t hot;            // bit 4 j + k: token 8 k + j
  int stage;
};

// History in coded pages: one split.
template <typename Config>
LKV_DEVICE void coded_split(const DecodeArgs& a, Ring<Config>& ring, const RowSpan& row, int row_index, int head,
                            int split, uint32_t epoch, float* o, float* ml) {
  constexpr int D = Config::D, BITS = Config::BITS, NT = Config::NT, STAGES = Config::STAGES;
  constexpr int LAG = Config::PRECISION ? 1 : 0;  // pages between a page's scores and its values: its low plane comes in
  using Page = HeadPage<D, BITS>;
  const int G = a.geometry.group_queries, lane = lane_id(), r = lane >> 2, t = lane & 3;
  const int first = split * row.split_pages;
  const int count = (first + row.split_pages < row.pages ? first + row.split_pages : row.pages) - first;
  const int ppb = a.geometry.pages_per_block, place0 = a.geometry.sink_tokens / kPageTokens + first;
  const int32_t* table = a.cache.history_table + row_index * a.cache.history_table_stride;
  int32_t entry = 0;
  auto fill = [&](int i) {  // i counts up from 0; beyond the split nothing is copied
    const bool real = i < count;
    const uint8_t* from = nullptr;
    if (real) {
      if ((i & 31) == 0 && i + lane < count) entry = table[(place0 + i + lane) / ppb];
      const int64_t block = shfl(entry, i & 31);
      from = a.cache.pool + block * a.geometry.block_bytes + ((place0 + i) % ppb) * a.geometry.page_bytes +
             a.cell.history_offset_bytes + static_cast<int64_t>(head) * Page::kBytes;
    }
    ring.fill(from, real);
  };
  sync_warp();  // the stages were left by all lanes
  for (int i = 0; i < STAGES; ++i) {
    fill(i);
#if !LOOPKV_BULK_COPY
    if (Config::PRECISION) copy_async_commit();  // as many groups per page as in the loop below
#endif
  }

  // Queries as halves, scaled by a power of two into [-1, 1]: products with any fp16 scale stay finite.
  uint32_t q[NT][D / 8];
  float unscale[NT][2];  // what a score of this lane's columns 2 t, 2 t + 1 is multiplied with
  {
    const uint16_t* rows = static_cast<const uint16_t*>(a.q) + row_index * a.q_stride;
    const uint16_t* head_q = rows + static_cast<int64_t>(head) * G * D;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const bool real = 8 * nt + r < G;
      const uint16_t* mine = head_q + (8 * nt + r) * D;
      uint32_t raw[D / 8];
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
      for (int i = 0; i < D / 8; ++i) {
        largest = max_float(largest, bits_float((raw[i] << 16) & 0x7fffffffu));
        largest = max_float(largest, bits_float(raw[i] & 0x7fff0000u));
      }
      largest = max_float(largest, shfl_xor(largest, 1));
      largest = max_float(largest, shfl_xor(largest, 2));
      // 2^(e + 1) > largest for a normal float with exponent e; zero and subnormal queries stay as they are.
      const uint32_t exponent = float_bits(largest) >> 23;
      const bool usual = exponent > 0 && exponent < 253;
      const float down = usual ? bits_float((253u - exponent) << 23) : 1.0f;
      const float up = usual ? bits_float((exponent + 1u) << 23) : 1.0f;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        q[nt][i] = pack_half2(bits_float(raw[i] << 16) * down, bits_float(raw[i] & 0xffff0000u) * down);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) unscale[nt][c] = shfl(up, 4 * (2 * t + c)) * a.scale_log2;
    }
  }

  float out[NT][D / 16][4], extra[NT][4];  // extra: rows 0-7 sums of weight * zero by group, row 8 sums of weights
  float best[NT][2], bar[NT][2];           // bar: seed of V precision; +inf for columns without a query
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[nt][i][j] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) extra[nt][j] = 0.0f;
    best[nt][0] = best[nt][1] = bar[nt][0] = bar[nt][1] = bits_float(0xff800000u);
  }
  // Weights are kept as halves times 2^lift so that small ones stay normal numbers; scales of 2 and more need the room.
  float lift = 14.0f;
  uint32_t hot_total = 0;
  PageWeights<NT> now, before;

  for (int i = 0; i < count + LAG; ++i) {
    if (i < count) {
      now.stage = ring.wait();
      uint8_t* page = ring.stage(now.stage);
      float codes[NT][2][4], zeros[NT][4];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[nt][0][j] = codes[nt][1][j] = zeros[nt][j] = 0.0f;
      }
      score_page<D, BITS, NT>(page, q, codes, zeros);
      bool wide = false;
#pragma unroll
      for (int word = lane; word < D / 2; word += 32) {  // any scale of 2 or more?
        wide |= (reinterpret_cast<const uint32_t*>(page + Page::kValueScales)[word] & 0x40004000u) != 0;
      }
      const float lifted = any(wide) ? 0.0f : lift;
      uint32_t hot = 0xffffffffu;
      float s[NT][2][4];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const float zero = zeros[nt][c] * unscale[nt][c], step = unscale[nt][c] * kSubnormal;
          float m = best[nt][c];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float& score = s[nt][j >> 1][2 * (j & 1) + c];
            score = fma_float(codes[nt][j >> 1][2 * (j & 1) + c], step, zero);
            m = max_float(m, score);
          }
#pragma unroll
          for (int across = 4; across < 32; across *= 2) m = max_float(m, shfl_xor(m, across));
          now.alpha[nt][c] = exp2_fast(best[nt][c] - m + (lifted - lift));
          best[nt][c] = m;
        }
      }
      lift = lifted;
      if constexpr (Config::PRECISION) {
        if (i == 0) {
          read_seed<D, NT>(a, row_index, head, epoch, bar);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              if (8 * nt + 2 * t + c >= G) bar[nt][c] = bits_float(0x7f800000u);
            }
          }
        }
        hot = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          bool mine = false;
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              mine |= s[nt][k >> 1][2 * (k & 1) + c] >= max_float(bar[nt][c], best[nt][c]) - a.tau;
            }
          }
          uint32_t lanes = ballot(mine);  // four lanes a token
          lanes |= lanes >> 1;
          lanes |= lanes >> 2;
          hot |= (lanes & 0x11111111u) << k;
        }
        hot_total += popcount(hot);
        constexpr int kCopy = Page::kTokenPlaneBytes % 16 == 0 ? 16 : 8, kCopies = Page::kTokenPlaneBytes / kCopy;
        const uint8_t* low = reinterpret_cast<const uint8_t*>(ring.addresses[now.stage]) + Page::kMainBytes;
#pragma unroll
        for (int copy = 0; copy < kCopies; ++copy) {
          const int place = lane + 32 * copy, token = slot_token(place / kCopies);
          copy_async<kCopy>(page + Page::kMainBytes + place * kCopy, low + place * kCopy,
                            (hot >> (4 * (token & 7) + (token >> 3))) & 1);
        }
      }
      now.hot = hot;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float w[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) w[c] = exp2_fast(s[nt][k >> 1][2 * (k & 1) + c] - best[nt][c] + lift);
          now.weight[nt][k] = transpose_8x8(pack_half2(w[0], w[1]));
        }
      }
    }
    if constexpr (Config::PRECISION) copy_async_commit();

    const PageWeights<NT>& due = LAG ? before : now;
    if (i >= LAG) {
      if constexpr (Config::PRECISION) {
#if LOOPKV_BULK_COPY
        copy_async_wait<1>();
#else
        copy_async_wait<2>();
#endif
        sync_warp();
      }
      const uint8_t* page = ring.stage(due.stage);
      bool changed = false;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) changed |= due.alpha[nt][0] != 1.0f || due.alpha[nt][1] != 1.0f;
      if (any(changed)) {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int j = 0; j < 4; ++j) extra[nt][j] *= due.alpha[nt][j & 1];
#pragma unroll
          for (int tile = 0; tile < D / 16; ++tile) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[nt][tile][j] *= due.alpha[nt][j & 1];
          }
        }
      }
      {
        const int group = r < D / 32 ? r : D / 32 - 1;
        const uint32_t ones = r == 0 ? 0x3c003c00u : 0u;
        uint32_t zero[4];
        load_words<16>(zero, page + Page::kValueZeros + group * 64 + t * 16);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int mt = 0; mt < 2; ++mt) {
            mma_f16(extra[nt], zero[2 * mt], ones, zero[2 * mt + 1], ones, due.weight[nt][2 * mt],
                    due.weight[nt][2 * mt + 1]);
          }
        }
        if constexpr (Config::PRECISION) {
          if (due.hot != 0xffffffffu) {  // cold tokens decode to the middle of their bucket: 1.5 steps more
            uint32_t scale[4];
            load_words<16>(scale, page + Page::kValueScales + group * 64 + t * 16);
#pragma unroll
            for (int nt = 0; nt < NT; ++nt) {
              uint32_t middle[4];
#pragma unroll
              for (int k = 0; k < 4; ++k) {
                const uint32_t pair = due.hot >> (8 * t + k);
                const uint32_t cold = (pair & 1u ? 0u : 0xffffu) | (pair & 16u ? 0u : 0xffff0000u);
                middle[k] = mul_half2(due.weight[nt][k] & cold, 0x3e003e00u);
              }
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                mma_f16(extra[nt], scale[2 * mt], 0u, scale[2 * mt + 1], 0u, middle[2 * mt], middle[2 * mt + 1]);
              }
            }
          }
        }
      }
      value_page<D, BITS, NT>(page, due.weight, out);
      sync_warp();
    }
    if (i >= LAG) fill(i - LAG + STAGES);
#if !LOOPKV_BULK_COPY
    if (i < LAG) copy_async_commit();
#endif
    before = now;
  }
#if !LOOPKV_BULK_COPY
  copy_async_wait<0>();
#endif

  const float drop = lift == 0.0f ? 1.0f : 6.103515625e-05f;  // 2^-14
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
        for (int i = 0; i < 4; ++i) {
          x[i] = fma_float(out[nt][2 * g + (i & 1)][2 * (i >> 1) + c], value_unscale<BITS>(i) * drop, zero);
        }
        if (column < G) {
          *reinterpret_cast<Vec4*>(row_o + 32 * g) = {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]),
                                                      float_bits(x[3])};
        }
      }
      if (r == 0 && column < G) {
        ml[2 * column] = best[nt][c];
        ml[2 * column + 1] = extra[nt][2 + c] * drop;
      }
    }
  }
  if constexpr (Config::PRECISION) {
    if (a.workspace.hot_values != nullptr && lane == 0) atomic_add64(a.workspace.hot_values, hot_total);
  }
}

// Joins the partials of a (row, head) in their order and writes the result.
template <int D>
LKV_DEVICE void merge_parts(const DecodeArgs& a, int row, int head, int parts) {
  constexpr int PER_LANE = D / 32;
  const int G = a.geometry.group_queries, lane = lane_id();
  const float* o = a.workspace.partial_o + part_index(a, row, head, 0) * G * D;
  const float* ml = a.workspace.partial_ml + part_index(a, row, head, 0) * G * 2;
  uint16_t* out = static_cast<uint16_t*>(a.out) + row * a.out_stride + static_cast<int64_t>(head) * G * D;
  const int64_t stride = static_cast<int64_t>(G) * D;
  for (int g = 0; g < G; ++g) {
    float best = bits_float(0xff800000u);
    for (int part = lane; part < parts; part += 32) best = max_float(best, load_coherent(ml + (part * G + g) * 2));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) best = max_float(best, shfl_xor(best, step));
    float x[PER_LANE], sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
    const float* mine = o + static_cast<int64_t>(g) * D + lane * PER_LANE;
    for (int base = 0; base < parts; base += 32) {
      const int part = base + lane;
      float weight = 0.0f, part_sum = 0.0f;
      if (part < parts) {
        weight = exp2_fast(load_coherent(ml + (part * G + g) * 2) - best);
        part_sum = load_coherent(ml + (part * G + g) * 2 + 1) * weight;
      }
#pragma unroll
      for (int step = 1; step < 32; step *= 2) part_sum += shfl_xor(part_sum, step);
      sum += part_sum;
      const int here = parts - base < 32 ? parts - base : 32;
#pragma unroll 8
      for (int j = 0; j < here; ++j) {
        const float w = shfl(weight, j);
        float y[PER_LANE];
        load_floats<PER_LANE>(y, mine + (base + j) * stride);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) x[i] = fma_float(y[i], w, x[i]);
      }
    }
    const float scale = 1.0f / sum;
    uint16_t* to = out + static_cast<int64_t>(g) * D + lane * PER_LANE;
    if constexpr (PER_LANE % 2 == 0) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i += 2) {
        *reinterpret_cast<uint32_t*>(to + i) = pack_bfloat2(x[i] * scale, x[i + 1] * scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) to[i] = static_cast<uint16_t>(pack_bfloat2(x[i] * scale, 0.0f));
    }
  }
}

template <typename Config>
LKV_DEVICE void decode_body(const DecodeArgs& a, uint8_t* shared) {
  constexpr int D = Config::D, NT = Config::NT;
  const int warp = thread_id() >> 5, lane = lane_id(), H = a.geometry.kv_heads;
  int* words = reinterpret_cast<int*>(shared + Config::kTableOffset);
  const RowTable table = {words, words + a.rows + 1, words + 2 * a.rows + 2};
  const uint32_t epoch = load_coherent(a.workspace.control + kControlEpoch) + 1;
  Ring<Config> ring;
  if constexpr (Config::CODED) ring.open(shared, warp);
  build_row_table(a, table);

  const int chunk_tasks = table.chunks_before[a.rows] * H;
  const int tasks = chunk_tasks + table.splits_before[a.rows] * H;
  const int fixed = block_count() * Config::WARPS;  // tasks given by place in the grid
  int task = warp * block_count() + block_id();
  while (task < tasks) {
    uint32_t ticket = 0;
    if (lane == 0) ticket = atomic_add(a.workspace.control + kControlTicket, 1);
    const bool exact = task < chunk_tasks;
    const int index = exact ? task : task - chunk_tasks;
    const int* before = exact ? table.chunks_before : table.splits_before;
    const int head = index % H, cut = index / H;
    const int row_index = find_row(before, a.rows, cut);
    const int mine = cut - before[row_index];
    const RowSpan row = row_span(a.geometry, table.tokens[row_index]);
    const int part = exact ? mine : row.chunks + mine;
    const int64_t at = part_index(a, row_index, head, part) * a.geometry.group_queries;
    float* o = a.workspace.partial_o + at * D;
    float* ml = a.workspace.partial_ml + at * 2;
    if (exact) {
      exact_chunk<D, NT>(a, row, row_index, head, mine, epoch, o, ml);
    } else if constexpr (Config::CODED) {
      coded_split<Config>(a, ring, row, row_index, head, mine, epoch, o, ml);
    } else {
      exact_split<D, NT>(a, row, row_index, head, mine, o, ml);
    }
    fence_device();
    sync_warp();
    uint32_t arrived = 0;
    uint32_t* arrivals = a.workspace.arrivals + static_cast<int64_t>(row_index) * H + head;
    if (lane == 0) arrived = atomic_add(arrivals, 1) + 1;
    if (static_cast<int>(shfl(arrived, 0)) == row.parts()) {
      fence_device();
      merge_parts<D>(a, row_index, head, row.parts());
      if (lane == 0) *arrivals = 0;
    }
    task = fixed + static_cast<int>(shfl(ticket, 0));
  }
  if (lane == 0) {
    fence_device();
    const uint32_t left = atomic_add(a.workspace.control + kControlExits, 1) + 1;
    if (left == static_cast<uint32_t>(fixed)) {  // the last warp of the grid sets the stage for the next launch
      a.workspace.control[kControlTicket] = 0;
      a.workspace.control[kControlExits] = 0;
      a.workspace.control[kControlEpoch] = epoch;
    }
  }
}

}  // namespace loopkv
