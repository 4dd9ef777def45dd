// What the host tells a kernel. Python mirrors these structs (kernels/descriptor.py); a test compares both field by
// field. Sizes and offsets are bytes where the name says so; everything that can pass 2^31 is 64 bits wide.
#pragma once

#include <stdint.h>

namespace loopkv {

enum SeedMode : int32_t {
  kSeedSink = 0,   // wait for the largest sink score: deterministic
  kSeedTimed = 1,  // wait for it, but only for a while
  kSeedNone = 2,   // start from -inf
};

enum ExactType : int32_t {
  kBfloat16 = 0,
  kFloat16 = 1,
  kFloat32 = 2,
};

// One cell as the reader sees it: derived from a layout, never edited, never saved.
struct CellDescriptor {
  int64_t history_offset_bytes;  // of the holder's page inside a page of all cells
  int64_t window_offset_bytes;   // of the cell's exact keys inside a window block; the values follow
  int32_t bits;                  // of the history that is read: 16 means exact (the engine's dtype), else 4 or 2
  int32_t owns_history;          // 0: the pages belong to another cell, and this one codes nothing
};

// Constants of a layout.
struct CacheGeometry {
  int64_t block_bytes;
  int64_t page_bytes;  // of all cells
  int32_t pages_per_block;
  int32_t window_block_tokens;
  int32_t kv_heads;
  int32_t group_queries;
  int32_t head_dim;
  int32_t exact_type;
  int32_t sink_tokens;
  int32_t window_tokens;
  int32_t min_split_pages;
  int32_t max_splits;
};

// The cache in one step. Tables are [rows, stride] int32 block ids by position; 0 is the null block.
struct CacheView {
  uint8_t* pool;
  const int32_t* history_table;
  const int32_t* window_table;
  const int32_t* seq_lens;  // tokens of each row after this step; 0: padding
  int64_t history_table_stride;
  int64_t window_table_stride;
};

// Buffers that every launch leaves as it found them (zero), except for the epoch. A tile is a row of a decode step, or
// up to 16 queries of a row of a mixed one.
struct AttendWorkspace {
  float* partial_o;      // [tiles, H, parts, columns, D]
  float* partial_ml;     // [tiles, H, parts, columns, 2]: largest score (log2 units) and sum of weights
  uint64_t* seeds;       // [tiles, H, G]: epoch << 32 | bits of the largest sink score
  uint32_t* arrivals;    // [tiles, H]
  uint32_t* control;     // [4]: ticket, warps that left, epoch, unused
  uint64_t* hot_values;  // [1], or null: hot (token, kv head) pairs of V precision are counted
  int64_t max_parts;
};

// One cell of a step. In a decode step every row has one new token; in a mixed one as many as `query_start` says.
struct AttendArgs {
  CacheGeometry geometry;
  CellDescriptor cell;
  CacheView cache;
  AttendWorkspace workspace;
  const int32_t* query_start;  // [rows + 1] first query of each row; null in a decode step
  const void* q;               // [queries, H * G, D]
  const void* k_new;           // [queries, H, D] of the new tokens; a decode step writes them to the window as well
  const void* v_new;           // null (decode only): the window holds them already
  void* out;                   // [queries, H * G, D]
  int64_t q_stride;            // elements between queries
  int64_t kv_stride;
  int64_t out_stride;
  float scale_log2;  // D^-1/2 * log2(e): scores are kept in log2 units
  float tau;         // bits; infinite: every token is hot
  int32_t rows;
  int32_t seed_mode;
  int32_t first_tile;  // a mixed step is answered in launches of at most max_tiles tiles
  int32_t max_tiles;
  int64_t timed_cycles;
};

// Writing a step's new keys and values of one cell to its window blocks. Null blocks are passed over.
struct AppendArgs {
  CacheGeometry geometry;
  CellDescriptor cell;
  CacheView cache;
  const int32_t* query_start;  // [rows + 1]
  const void* k_new;           // [queries, H, D]
  const void* v_new;
  int64_t kv_stride;
  int32_t rows;
};

// Expanding a cell's history for prefill: coded pages decoded, exact tokens copied (kernels/expand.py has the columns of
// `info`). A task is a row's record and a page of its history, or -1 - i for the i-th 32 tokens of its exact buffer; a
// negative record is no task.
struct ExpandArgs {
  CacheGeometry geometry;
  CellDescriptor cell;
  CacheView cache;
  const int32_t* tasks;  // [task_count, 2]
  const int32_t* info;   // [records, 16]
  const void* k_new;     // [queries, H, D]
  const void* v_new;
  void* coded_k;  // [tokens, H, D] each
  void* coded_v;
  void* exact_k;
  void* exact_v;
  int64_t kv_stride;
  int32_t task_count;
};

// Coding pages that leave the window in a step of `query_start` new tokens per row (null: one each). All cells at the
// start of a step, pages whose tokens were all computed before it; or, with k_new, one cell after its append, pages
// that hold tokens of the step itself.
struct CodeArgs {
  CacheGeometry geometry;
  CacheView cache;
  const CellDescriptor* cells;  // [cell_count]
  const int32_t* query_start;
  const void* k_new;  // null: at the start of a step
  const void* v_new;
  uint64_t* counters;  // [2]: pages coded (a page of all cells once), values that were NaN or beyond fp16
  int64_t kv_stride;
  int32_t cell_count;
  int32_t rows;
};

}  // namespace loopkv
