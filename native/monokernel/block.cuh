// One block: where it stands in the step, and its memory in shared memory.
#pragma once

#include "../platform/platform.h"

namespace twin {

// What a launch passes to every block.
struct Launch {
  Plan plan;
  RankMemory ranks[MAX_RANKS];
  Request request;
  Control* control;  // the host reads and writes it while the kernel runs
};

// What a block remembers between stages. With one kernel per stage it lies in global memory between
// them.
struct Progress {
  int step;
  int token;  // of this step
  // by the last SAMPLE: a scheduler warp hands it out while the next step's EMBED writes `token`
  int chosen;
  int stop;        // the token before it was the last one
  u32 grid_local;  // arrivals of this rank's blocks that the grid barrier has waited for
  u32 grid_all;    // the same of all ranks, stages that pushed
  float checksum;  // probes: keeps their results alive
};

static_assert((sizeof(Progress) + 15) / 16 * 16 == facts::PROGRESS_BYTES,
              "PROGRESS_BYTES in twin/schedule/memory.py is another");

struct Block {
  Core core;
  const Launch& launch;
  const Plan& plan;
  Control* control;
  const RankMemory& memory;  // of the block's own rank
  int rank;
  int block;
  Progress& at;
  // [hidden] the whole residual of the rank, between the stages that use it
  Core::Residual residual;
  // [input_floats] what the stage computes with, where vectors lie in memory; probes: what they
  // gathered
  float* input;
  float* scratch;  // [scratch_floats] partials, sums, q k v: each stage's own use
  int half;        // 0 or 1: which half of the sums the next batch of rows uses
};

// First index, stride: `for (int i = first; i < n; i += stride)` shares a loop among the block's
// threads.
#define TWIN_EACH(i, n) for (int i = b.core.thread(); i < (n); i += b.core.threads())

}  // namespace twin
