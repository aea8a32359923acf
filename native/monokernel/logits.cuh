// Logits for a host that reads them while the kernel runs. Their rows are used in turn.
//
// What orders a row before its token: every block that wrote of it stands behind a fence of the
// host's scope before it says what it has; the block that chooses stands behind another one before
// it hands the token on; the token itself goes out behind a third (`store_host`). What orders the
// host's reads before the row is written again: the block that chooses waits for the host's word,
// and all others wait for that block's token.
#pragma once

#include "handoff.cuh"

namespace twin {

// A GPU's kernel that only takes the best logit (`Request::DRAWS`) has no code for any of it.
__device__ __forceinline__ int logit_row(const Request& wanted, int step) {
  if constexpr (Request::DRAWS)
    if (wanted.logit_rows) return step % wanted.logit_rows;
  return step;
}

__device__ __forceinline__ void order_logits(const Request& wanted) {
  if constexpr (Request::DRAWS)
    if (wanted.logit_rows) host_fence();
}

// Waits until the host has taken the row that the next step will write. Half as long as other
// blocks wait for the token, so that this report comes first.
__device__ __forceinline__ bool row_is_free(Block& b, int index) {
  const Request& wanted = b.launch.request;
  // the next step's generated position is at most so many rows ahead of those taken
  const int needed = b.at.step + 2 - (wanted.forced - 1) - wanted.logit_rows;
  if (!wanted.logit_rows || needed <= 0) return true;
  bool good = true;
  if (b.core.thread() == 0) {
    const u64 deadline = now_ns() + wanted.watchdog_ns / 2;
    u32 polls = 0;
    TWIN_ONCE
    while (good && load_host(&b.control->taken) < needed) {
      b.core.relax(++polls);
      good = !load_host(wanted.abort);
      if (!good || now_ns() < deadline) continue;
      report_hang(b.launch, b.rank, b.block, b.at.step, {index, facts::LOGITS_TAKEN, -1, -1});
      good = false;
    }
  }
  return !b.core.any(!good);
}

}  // namespace twin
