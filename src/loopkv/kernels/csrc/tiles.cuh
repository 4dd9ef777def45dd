// The tiles of a step, that is, consecutive queries of one row that are answered together (row.cuh): the table of them
// that every block makes for itself, and where a tile's queries, exact tokens and partials lie.
#pragma once

#include "descriptor.h"
#include "row.cuh"
#include "simt.cuh"

namespace loopkv {

// Per block: the tiles of the step and running totals of their tasks.
struct TileTable {
  int count;           // tiles of this launch
  int* chunks_before;  // [count + 1] chunks but the first of each tile
  int* groups_before;  // [count + 1] groups of splits
  int* tokens;         // [count] tokens that the tile's first query sees; group_shift of the tile in the highest bits
  int* rows;           // [count], mixed steps only
  int* first_query;    // [count], mixed steps only: inside the row
};

// Splits are read in groups of 2^shift neighbours: a warp that goes from one to the next of the same row keeps its
// queries and its stream of pages, and reports once. What is computed stays the same, so the size may follow the load:
// large while every warp has much to do, single splits at the end, so that the warps finish together.
constexpr int kMostShift = 3;
constexpr int kTokenBits = 28;
LKV_DEVICE int group_shift(int64_t splits_left, int warps) {
  int shift = 0;
  while (shift < kMostShift && splits_left >= static_cast<int64_t>(warps) * (4 << shift)) ++shift;
  return shift;
}

LKV_DEVICE QueryTile tile_of(const AttendArgs& a, const TileTable& table, int index, int tile_queries) {
  QueryTile tile;
  tile.tokens = table.tokens[index] & ((1 << kTokenBits) - 1);
  if (a.query_start == nullptr) {
    tile.row = tile.first_query = index;
    tile.queries = 1;
    tile.computed = tile.tokens - 1;
    return tile;
  }
  tile.row = table.rows[index];
  const int start = a.query_start[tile.row], count = a.query_start[tile.row + 1] - start;
  const int inside = table.first_query[index];
  tile.first_query = start + inside;
  tile.queries = count - inside < tile_queries ? count - inside : tile_queries;
  tile.computed = a.cache.seq_lens[tile.row] - count;
  return tile;
}

// Decode: a row is a tile.
LKV_DEVICE void build_rows(const AttendArgs& a, TileTable& table) {
  table.count = a.rows;
  for (int row = thread_id(); row < a.rows; row += block_threads()) {
    const int tokens = a.cache.seq_lens[row] > 0 ? a.cache.seq_lens[row] : 0;
    const Span span = span_of(a.geometry, tokens, 1);
    table.tokens[row] = tokens;
    table.chunks_before[row] = tokens > 0 ? span.chunks - 1 : 0;
    table.groups_before[row] = tokens > 0 ? span.splits : 0;
  }
}

// From running totals of splits to such of groups of splits; one warp.
LKV_DEVICE void group_splits(const AttendArgs& a, TileTable& table, int warps) {
  const int lane = lane_id(), H = a.geometry.kv_heads, total = table.groups_before[table.count];
  if (group_shift(static_cast<int64_t>(total) * H, warps) == 0) return;
  for (int base = 0; base < table.count; base += 32) {
    const int row = base + lane;
    int before = 0, splits = 0;
    if (row < table.count) {
      before = table.groups_before[row];
      splits = table.groups_before[row + 1] - before;
    }
    sync_warp();
    if (row < table.count) {
      const int shift = group_shift(static_cast<int64_t>(total - before) * H, warps);
      table.groups_before[row] = (splits + (1 << shift) - 1) >> shift;
      if (splits > 0) table.tokens[row] |= shift << kTokenBits;
    }
  }
  sync_warp();
  running_total(table.groups_before, table.count);
}

// Mixed: tiles of up to `tile_queries` queries, rows in order; this launch takes those from first_tile on. One warp.
LKV_DEVICE void build_tiles(const AttendArgs& a, TileTable& table, int tile_queries) {
  const int lane = lane_id();
  int total = 0;  // tiles of the rows before
  for (int base = 0; base < a.rows; base += 32) {
    const int row = base + lane;
    int start = 0, count = 0, tokens = 0;
    if (row < a.rows) {
      start = a.query_start[row];
      count = a.query_start[row + 1] - start;
      tokens = a.cache.seq_lens[row];
    }
    if (tokens <= 0 || count <= 0) count = 0;
    int sum = (count + tile_queries - 1) / tile_queries;
    const int mine = sum;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int before = shfl_up(sum, delta);
      if (lane >= delta) sum += before;
    }
    const int first = total + sum - mine - a.first_tile;
    for (int i = 0; i < mine; ++i) {
      if (first + i >= 0 && first + i < a.max_tiles) {
        const int inside = i * tile_queries, left = count - inside;
        const int sees = tokens - count + inside + 1;
        const Span span = span_of(a.geometry, sees, left < tile_queries ? left : tile_queries);
        table.rows[first + i] = row;
        table.first_query[first + i] = inside;
        table.tokens[first + i] = sees;
        table.chunks_before[first + i] = span.chunks - 1;
        table.groups_before[first + i] = span.splits;
      }
    }
    total += shfl(sum, 31);
  }
  const int left = total - a.first_tile;
  table.count = left < 0 ? 0 : left < a.max_tiles ? left : a.max_tiles;
}

// Number of a part of a tile and head among the partials of a launch.
LKV_DEVICE int64_t part_index(const AttendArgs& a, int tile, int head, int part) {
  return (static_cast<int64_t>(tile) * a.geometry.kv_heads + head) * a.workspace.max_parts + part;
}

// Byte offset of the exact keys of a token and head in the pool; the values follow behind all keys of the block.
template <int D>
LKV_DEVICE int64_t window_offset(const AttendArgs& a, int row, int head, int token) {
  const int bw = a.geometry.window_block_tokens, index = token / bw;
  const int64_t block = a.cache.window_table[row * a.cache.window_table_stride + index];
  const int64_t place = static_cast<int64_t>(token - index * bw) * a.geometry.kv_heads + head;
  return block * a.geometry.block_bytes + a.cell.window_offset_bytes + place * (2 * D);
}

// The columns of a tile: query i of the tile and query head g of the kv head are column i * G + g.
template <typename Config>
struct Columns {
  static constexpr int D = Config::D, NT = Config::NT, COLUMNS = Config::COLUMNS;
  const AttendArgs& a;
  const QueryTile& tile;
  const int head, count;

  LKV_DEVICE Columns(const AttendArgs& args, const QueryTile& tile_, int head_)
      : a(args), tile(tile_), head(head_), count(Config::SINGLE ? 1 : tile_.queries * args.geometry.group_queries) {}
  LKV_DEVICE int query(int column) const { return Config::MIXED ? column / a.geometry.group_queries : 0; }
  LKV_DEVICE int64_t place(int column, int64_t stride) const {
    const int query_ = query(column), g = column - query_ * a.geometry.group_queries;
    return (tile.first_query + query_) * stride +
           (static_cast<int64_t>(head) * a.geometry.group_queries + g) * D;
  }
  LKV_DEVICE const uint16_t* q(int column) const {
    return static_cast<const uint16_t*>(a.q) + place(column, a.q_stride);
  }
  // Tokens that the query of a column sees.
  LKV_DEVICE int tokens(int column) const { return tile.tokens + query(column); }
};

// A finite score for what a query may not read: alone in a part it makes a partial that weighs nothing.
constexpr float kHidden = -1e30f;

}  // namespace loopkv
