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

// Buffers that every launch leaves as it found them (zero), except for the epoch.
struct DecodeWorkspace {
  float* partial_o;         // [rows, H, parts, G, D]
  float* partial_ml;        // [rows, H, parts, G, 2]: largest score (log2 units) and sum of weights
  uint64_t* seeds;          // [rows, H, G]: epoch << 32 | bits of the largest sink score
  uint32_t* arrivals;       // [rows, H]
  uint32_t* control;        // [4]: ticket, warps that left, epoch, unused
  uint64_t* hot_values;     // [1], or null: hot (token, kv head) pairs of V precision are counted
  int64_t max_parts;
};

struct DecodeArgs {
  CacheGeometry geometry;
  CellDescriptor cell;
  CacheView cache;
  DecodeWorkspace workspace;
  const void* q;      // [rows, H * G, D]
  const void* k_new;  // [rows, H, D] of the newest token, written to the window as well; null: it is there already
  const void* v_new;
  void* out;          // [rows, H * G, D]
  int64_t q_stride;   // elements between rows
  int64_t kv_stride;
  int64_t out_stride;
  float scale_log2;   // D^-1/2 * log2(e): scores are kept in log2 units
  float tau;          // bits; infinite: every token is hot
  int32_t rows;
  int32_t seed_mode;
  int64_t timed_cycles;
};

}  // namespace loopkv
