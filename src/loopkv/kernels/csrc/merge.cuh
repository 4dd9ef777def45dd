// The end of a tile and head: its partials become the result, by the warp that reports the last of them.
#pragma once

#include "notes.cuh"
#include "tiles.cuh"

namespace loopkv {

constexpr int kMergeRounds = 4;  // of 32 parts: the most a row may have (descriptor.py checks it)

// Joins the partials of a (tile, head) in their order and writes the result. BATCH: partials on their way at a time.
template <typename Config, int BATCH>
LKV_DEVICE void merge_parts(const AttendArgs& a, const QueryTile& tile, int tile_index, int head, int parts) {
  constexpr int D = Config::D, PER_LANE = D / 32, WIDTH = Config::MIXED ? 8 * Config::NT : 0;
  const Columns<Config> columns(a, tile, head);
  const int G = columns.count, width = WIDTH ? WIDTH : G, lane = lane_id();
  const float* o = a.workspace.partial_o + part_index(a, tile_index, head, 0) * width * D;
  const float* ml = a.workspace.partial_ml + part_index(a, tile_index, head, 0) * width * 2;
  const int64_t stride = static_cast<int64_t>(width) * D;
  for (int g = 0; g < G; ++g) {
    const float* mine = o + static_cast<int64_t>(g) * D + lane * PER_LANE;
    float y[BATCH][PER_LANE];
    auto load = [&](int first) {
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        if (first + j < parts) load_floats<PER_LANE>(y[j], mine + (first + j) * stride);
      }
    };
    load(0);  // on its way while the weights are made
    float weight[kMergeRounds], part_sum[kMergeRounds], best = bits_float(0xff800000u);
#pragma unroll
    for (int round = 0; round < kMergeRounds; ++round) {
      const int part = 32 * round + lane;
      weight[round] = bits_float(0xff800000u);
      part_sum[round] = 0.0f;
      if (part < parts) {
        float pair[2];
        load_floats<2>(pair, ml + (part * width + g) * 2);
        weight[round] = pair[0];
        part_sum[round] = pair[1];
      }
      best = max_float(best, weight[round]);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) best = max_float(best, shfl_xor(best, step));
    float sum = 0.0f;
#pragma unroll
    for (int round = 0; round < kMergeRounds; ++round) {
      weight[round] = exp2_fast(weight[round] - best);
      sum += part_sum[round] * weight[round];
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += shfl_xor(sum, step);
    float x[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
    for (int first = 0; first < parts; first += BATCH) {
      if (first > 0) load(first);
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
        const int part = first + j, round = part >> 5;
        const float mine = round < 2 ? (round == 0 ? weight[0] : weight[1]) : (round == 2 ? weight[2] : weight[3]);
        const float w = shfl(mine, part & 31);
        if (part < parts) {
#pragma unroll
          for (int i = 0; i < PER_LANE; ++i) x[i] = fma_float(y[j][i], w, x[i]);
        }
      }
    }
    const float scale = 1.0f / sum;
    uint16_t* to = static_cast<uint16_t*>(a.out) + columns.place(g, a.out_stride) + lane * PER_LANE;
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

// Reports the parts this warp wrote since it last did; the warp that brings a (tile, head)'s last one merges them all.
template <typename Config, int BATCH>
LKV_NOINLINE void report_parts(const AttendArgs& a, const TileTable& table, WarpNotes& notes) {
  sync_warp();
  const int H = a.geometry.kv_heads, lane = lane_id();
  bool last = false;
  int place = 0, all = 0;
  if (lane < notes.written) {  // a lane each
    place = notes.written_place[lane];
    all = notes.written_all[lane];
    const uint32_t mine = notes.written_parts[lane];
    uint32_t* arrivals = a.workspace.arrivals + static_cast<int64_t>(place >> 16) * H + (place & 0xffff);
    last = static_cast<int>(atomic_add_release(arrivals, mine) + mine) == all;
    if (last) {
      fence_device();
      *arrivals = 0;  // for the next launch
    }
  }
  uint32_t complete = ballot(last);
  sync_warp();
  if (lane == 0) notes.written = 0;
  while (complete != 0) {
    const int from = popcount((complete & (0u - complete)) - 1u), which = shfl(place, from);
    const QueryTile tile = tile_of(a, table, which >> 16, Config::tile_queries(a.geometry.group_queries));
    merge_parts<Config, BATCH>(a, tile, which >> 16, which & 0xffff, shfl(all, from));
    complete &= complete - 1;
  }
  sync_warp();
}

}  // namespace loopkv
