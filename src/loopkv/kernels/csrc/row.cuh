// How one row's tokens are divided: exact tokens in chunks, history in splits. Functions of the row's length only.
#pragma once

#include "descriptor.h"
#include "simt.cuh"

namespace loopkv {

constexpr int kPolicyPageTokens = 32;
constexpr int kChunkTokens = 64;  // exact tokens of one task; the sink lies in the first

LKV_DEVICE int history_end(const CacheGeometry& g, int tokens) {
  const int beyond = tokens > g.window_tokens ? (tokens - g.window_tokens) / kPolicyPageTokens * kPolicyPageTokens : 0;
  return beyond > g.sink_tokens ? beyond : g.sink_tokens;
}

// Consecutive queries of one row that are answered together: the query number `first_query` of the batch sees `tokens`
// tokens, the one after it one more, and so on. In a decode step a row has one.
struct QueryTile {
  int row;
  int first_query;
  int tokens;
  int queries;
  int computed;  // tokens of the row before this step; the others come from the step's own keys and values
};

// What a tile of queries reads: tokens [0, sink) and [recent, last) exact, pages of [sink, history_end) coded. Where the
// boundary moves inside the tile, tokens in between are read both ways and each query takes one.
struct Span {
  int last;    // tokens the last query sees
  int sink;    // sink tokens that exist
  int recent;  // first exact token after the sink: the first query's history ends there
  int exact;   // exact tokens
  int chunks;  // tasks over them
  int pages;   // of the history
  int split_pages;  // fewest pages a split that give at most max_splits, and at least min_split_pages
  int splits;  // of the history

  LKV_DEVICE int parts() const { return chunks + splits; }
  // Token number `index` of the exact ones.
  LKV_DEVICE int exact_token(int index) const { return index < sink ? index : recent + index - sink; }
};

LKV_DEVICE Span span_of(const CacheGeometry& g, int tokens, int queries) {
  Span span;
  span.last = tokens + queries - 1;
  span.sink = span.last < g.sink_tokens ? span.last : g.sink_tokens;
  span.recent = history_end(g, tokens);
  const int end = history_end(g, span.last);
  span.exact = span.last <= span.recent ? span.sink : span.sink + span.last - span.recent;
  span.chunks = (span.exact + kChunkTokens - 1) / kChunkTokens;
  span.pages = span.last <= end ? 0 : (end - g.sink_tokens) / kPolicyPageTokens;
  span.split_pages = (span.pages + g.max_splits - 1) / g.max_splits;
  if (span.split_pages < g.min_split_pages) span.split_pages = g.min_split_pages;
  span.splits = (span.pages + span.split_pages - 1) / span.split_pages;
  return span;
}

// Exclusive running total of values[0 .. count) in place, the sum behind it; one warp.
LKV_DEVICE void running_total(int* values, int count) {
  const int lane = lane_id();
  int total = 0;
  for (int base = 0; base < count; base += 32) {
    const int mine = base + lane < count ? values[base + lane] : 0;
    int sum = mine;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
      const int before = shfl_up(sum, delta);
      if (lane >= delta) sum += before;
    }
    if (base + lane < count) values[base + lane] = total + sum - mine;
    total += shfl(sum, 31);
  }
  if (lane == 0) values[count] = total;
}

// Entry whose item number `index` is, by a running total; all lanes of a warp take part.
LKV_DEVICE int find_tile(const int* before, int count, int index) {
  int low = 0, high = count;  // before[low] <= index < before[high]
  while (high - low > 32) {
    const int middle = (low + high) / 2;
    (before[middle] <= index ? low : high) = middle;
  }
  const int candidate = low + lane_id();
  return low + popcount(ballot(candidate < high && before[candidate + 1] <= index));
}

}  // namespace loopkv
