// How one row's tokens are divided: exact tokens in chunks, history in splits. Functions of the row's length only.
#pragma once

#include "descriptor.h"
#include "simt.cuh"

namespace loopkv {

constexpr int kPolicyPageTokens = 32;
constexpr int kChunkTokens = 64;  // exact tokens of one task; the sink lies in the first

// Tokens [0, sink) and [history_end, tokens) are exact, in between coded.
struct RowSpan {
  int tokens;
  int sink;         // sink tokens that exist
  int history_end;  // first token after the history (policy.py)
  int exact;        // exact tokens
  int chunks;       // tasks over them
  int pages;        // of the history
  int split_pages;
  int splits;       // tasks over them

  LKV_DEVICE int parts() const { return chunks + splits; }
  // Token number `index` of the exact ones.
  LKV_DEVICE int exact_token(int index) const { return index < sink ? index : history_end + index - sink; }
};

LKV_DEVICE int history_end(const CacheGeometry& g, int tokens) {
  const int beyond = tokens > g.window_tokens ? (tokens - g.window_tokens) / kPolicyPageTokens * kPolicyPageTokens : 0;
  return beyond > g.sink_tokens ? beyond : g.sink_tokens;
}

LKV_DEVICE RowSpan row_span(const CacheGeometry& g, int tokens) {
  RowSpan row;
  row.tokens = tokens;
  row.sink = tokens < g.sink_tokens ? tokens : g.sink_tokens;
  row.history_end = history_end(g, tokens);
  row.exact = tokens <= g.sink_tokens ? tokens : row.sink + tokens - row.history_end;
  row.chunks = (row.exact + kChunkTokens - 1) / kChunkTokens;
  row.pages = tokens <= row.history_end ? 0 : (row.history_end - g.sink_tokens) / kPolicyPageTokens;
  row.split_pages = g.min_split_pages;
  while (row.split_pages * g.max_splits < row.pages) row.split_pages *= 2;
  row.splits = (row.pages + row.split_pages - 1) / row.split_pages;
  return row;
}

}  // namespace loopkv
