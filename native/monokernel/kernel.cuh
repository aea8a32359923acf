// The monokernel: every stage of every step, in one launch or in one launch per stage.
#pragma once

#include "experts.cuh"
#include "prompt.cuh"
#include "stages.cuh"

namespace twin {

// Does the plan have such stages? Known when a device's kernel is compiled, which then has no code
// for others.
__device__ __forceinline__ bool has(const Block& b, StageKind kind) {
  return b.plan.kinds >> int(kind) & 1;
}

__device__ __forceinline__ bool compute(Block& b, int index, const Stage& stage) {
  switch (way_of(stage.kind)) {
    case StageKind::EMBED: return has(b, StageKind::EMBED) && embed(b, index, stage);
    case StageKind::QKV:
    case StageKind::GATE_UP:
    case StageKind::LM_HEAD: return (Compressed::ANY || has(b, StageKind::QKV)) && from_residual(b, index, stage);
    case StageKind::ATTENTION: return has(b, StageKind::ATTENTION) && attention(b, index, stage);
    case StageKind::O_PROJ: return has(b, StageKind::O_PROJ) && o_proj(b, index, stage);
    case StageKind::DOWN: return has(b, StageKind::DOWN) && down(b, index, stage);
    case StageKind::SAMPLE: return has(b, StageKind::SAMPLE) && sample(b, index, stage);
    case StageKind::REDUCE:
      return has(b, StageKind::REDUCE) && !scheduler_sums(b.plan) && sum_late_parts(b, index, stage);
    case StageKind::COLLECTIVE: return has(b, StageKind::COLLECTIVE) && collective(b, index, stage);
    case StageKind::LANE_MEAN: return has(b, StageKind::LANE_MEAN) && lane_mean(b, index, stage);
    case StageKind::STREAM: return has(b, StageKind::STREAM) && stream(b, index, stage);
    case StageKind::EXCHANGE: return has(b, StageKind::EXCHANGE) && exchange(b, index, stage);
    // others are simulated only: no plan with them reaches a kernel
    default: return compute_experts(b, index, stage);
  }
  return false;
}

__device__ __forceinline__ bool run_stage(Block& b, int index) {
  const Stage& stage = b.plan.stages_at(TWIN_SAME(index));
  b.core.forget();
  const bool done = compute(b, index, stage) && finish(b, index, stage);
  b.core.published();
  if constexpr (TRACE) mark(b, index, 1);
  return done;
}

// False: the generation is over.
__device__ __forceinline__ bool end_step(Block& b) {
  const Request& wanted = b.launch.request;
  bool ended = false;
  b.core.barrier();
  if (b.core.thread() == 0) {
    if (b.plan.probe) {
      const u64 blocks = u64(b.plan.ranks) * u64(b.plan.blocks),
                me = u64(b.rank) * u64(b.plan.blocks) + u64(b.block);
      TWIN_GLOBAL(wanted.block_stamps)[u64(b.at.step) * blocks + me] = now_ns();
      TWIN_GLOBAL(wanted.checksums)[me] = b.at.checksum;
    }
    ++b.at.step;
    ended = b.at.step >= wanted.steps || b.core.abort_requested(wanted.abort);
  }
  b.core.ring.rewind();
  return !b.core.any(ended);
}

// All steps of a generation whose prompt has been read.
__device__ __forceinline__ void run_steps(Block& b) {
  do {
    for (int index = 0; index < b.plan.stage_count; index = next_stage(b.plan, index))
      if (!run_stage(b, index) || b.at.stop) return;
  } while (end_step(b));
}

// The whole generation.
__device__ __forceinline__ void run(Block& b) {
  const Request& wanted = b.launch.request;
  const bool passes = b.plan.prompt_chunk > 1 && wanted.read > wanted.kept;
  if (passes && !read_prompt(b)) return;
  b.plan.drafts && wanted.drafts ? run_rounds(b) : run_steps(b);
}

}  // namespace twin
