// What a warp writes down in shared memory instead of keeping it in registers: most of it is needed once a task.
#pragma once

#include "simt.cuh"

namespace loopkv {

constexpr int kReports = 4;       // tasks a warp writes before it reports them: one fence serves all
constexpr int kNotesBytes = 640;  // of a warp

struct WarpNotes {
  uint64_t barriers[8];  // of the stages
  int64_t addresses[8];  // where the low plane of the page in each stage lies
  int64_t known[32];     // pages of the task being copied in: number i, i + 32, .. of them
  int32_t tile, head, part, all;   // of the task in hand: its first part, all parts of its tile and head
  int32_t row, place;              // its row, and the first of its pages
  int32_t split_tasks, tasks;      // number of the first task after the splits, and of all
  uint32_t epoch;
  float ended[16], ended_lift;     // largest scores of a split whose values are still summed, by column, and its lift
  int32_t ended_splits;            // of the task
  uint32_t hot;                    // tokens of the task (grouped queries)
  int32_t written;                 // tasks written but not yet reported
  int32_t written_place[kReports];  // of each: tile << 16 | head,
  int32_t written_parts[kReports];  // its parts,
  int32_t written_all[kReports];    // and all parts of its tile and head
};
static_assert(sizeof(WarpNotes) <= kNotesBytes);

}  // namespace loopkv
