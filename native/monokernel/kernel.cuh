// The monokernel: every stage of every step, in one launch or in one launch per stage.
#pragma once

#include "stages.cuh"

namespace twin {

__device__ inline bool compute(Block& b, int index, const Stage& stage) {
  switch (StageKind(stage.kind)) {
    case StageKind::EMBED: return embed(b, index, stage);
    case StageKind::QKV: return qkv(b, index, stage);
    case StageKind::ATTENTION: return attention(b, index, stage);
    case StageKind::O_PROJ: return o_proj(b, index, stage);
    case StageKind::GATE_UP: return gate_up(b, index, stage);
    case StageKind::DOWN: return down(b, index, stage);
    case StageKind::COLLECTIVE: return collective(b, index, stage);
    case StageKind::LANE_MEAN: return lane_mean(b, index, stage);
    case StageKind::LM_HEAD: return lm_head(b, index, stage);
    case StageKind::SAMPLE: return sample(b, index, stage);
    case StageKind::STREAM: return stream(b, index, stage);
    case StageKind::EXCHANGE: return exchange(b, index, stage);
  }
  return false;
}

__device__ inline bool run_stage(Block& b, int index) {
  const Stage& stage = b.plan.stages_at(index);
  const bool done = compute(b, index, stage) && finish(b, index, stage);
  b.core.published();
  if constexpr (TRACE) mark(b, index, 1);
  return done;
}

// False: the run is over.
__device__ inline bool end_step(Block& b) {
  const Request& wanted = b.launch.request;
  bool ended = false;
  b.core.barrier();
  if (b.core.thread() == 0) {
    if (b.plan.probe) {
      const u64 blocks = u64(b.plan.ranks) * u64(b.plan.blocks), me = u64(b.rank) * u64(b.plan.blocks) + u64(b.block);
      wanted.block_stamps[u64(b.at.step) * blocks + me] = now_ns();
      wanted.checksums[me] = b.at.checksum;
    }
    ++b.at.step;
    ended = b.at.step >= wanted.steps || load_host(wanted.abort);
  }
  b.core.ring.rewind();
  return !b.core.any(ended);
}

// The whole generation.
__device__ inline void run(Block& b) {
  do {
    for (int index = 0; index < b.plan.stage_count; ++index)
      if (!run_stage(b, index) || b.at.stop) return;
  } while (end_step(b));
}

}  // namespace twin
