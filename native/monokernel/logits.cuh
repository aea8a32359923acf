// Logits for a host that reads them while the kernel runs. Their rows are used in turn.
//
// What orders a row before its token: every block that wrote of it stands behind a fence of the
// host's scope before it says what it has; the block that chooses stands behind another one before
// it hands the token on; the token itself goes out behind a third (`store_host`). What orders the
// host's reads before the row is written again: the block that chooses waits for the host's word,
// and all others wait for that block's token.
//
// What the host adds to logits comes the other way: it writes a row, then its word.
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

// Waits until a word of the host has reached `needed`. Half as long as other blocks wait for the
// token, so that this report comes first.
__device__ TWIN_LARGE bool host_reached(Block& b, int index, const int* word, int needed,
                                        int what) {
  bool good = true;
  if (b.core.thread() == 0) {
    const u64 deadline = now_ns() + b.launch.request.watchdog_ns / 2;
    u32 polls = 0;
    TWIN_ONCE
    while (good && load_host(word) < needed) {
      b.core.relax(++polls);
      good = !load_host(b.launch.request.abort);
      if (!good || now_ns() < deadline) continue;
      report_hang(b.launch, b.rank, b.block, b.at.step, {index, what, -1, -1});
      good = false;
    }
  }
  return !b.core.any(!good);
}

// Waits until the host has taken the row that the next step will write.
__device__ __forceinline__ bool row_is_free(Block& b, int index) {
  const Request& wanted = b.launch.request;
  // the next step's generated position is at most so many rows ahead of those taken
  const int needed = b.at.step + 2 - (wanted.forced - 1) - wanted.logit_rows;
  if (!wanted.logit_rows || needed <= 0) return true;
  return host_reached(b, index, &b.control->taken, needed, facts::LOGITS_TAKEN);
}

// A logit with a word of the host: its repetition penalty, then its bias.
__device__ __forceinline__ float with_bias(const Request& wanted, float logit, u32 word) {
  if (wanted.repetition != 1.0f) {
    if (word & 1u) logit = logit > 0 ? logit / wanted.repetition : logit * wanted.repetition;
    word &= ~1u;
  }
  return logit + bits_as<float>(word);
}

// Adds what the host gave for this step's token to a block's logits [rows]. Two rows take turns: the
// host writes one again once the token of the step that read it has come out.
__device__ TWIN_LARGE bool add_bias(Block& b, int index, float* logit, int rows, int first) {
  const Request& wanted = b.launch.request;
  const int position = b.at.step - (wanted.forced - 1);
  if (wanted.bias_rows > 1 && position > 0 &&
      !host_reached(b, index, &b.control->biased, position, facts::BIAS_GIVEN))
    return false;
  const u32* const row =
      reinterpret_cast<const u32*>(wanted.bias) + u64(position % wanted.bias_rows) * b.plan.vocab;
  TWIN_EACH(i, rows) {
    if (first + i < b.plan.vocab) logit[i] = with_bias(wanted, logit[i], load_host(row + first + i));
  }
  b.core.barrier();
  return true;
}

}  // namespace twin
