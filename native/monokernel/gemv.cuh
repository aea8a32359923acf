// A matrix stage: the block's rows of the stage's matrix times the stage's input, tile by tile from the ring.
#pragma once

#include "handoff.cuh"

namespace twin {

__device__ __forceinline__ int least(int a, int b) { return a < b ? a : b; }

// Calls emit(element, sums of its `unit` rows) once for each element of the block, in row order per thread.
//
// Rows are taken in batches whose partial sums fit the scratch: within a batch warps take tiles in turn without any
// barrier, then each row's slices are added from left to right, so the result does not depend on who was faster.
template <class Emit>
__device__ void multiply(Block& b, const Stage& stage, Emit emit) {
  const Span own = b.plan.owned_at(stage.owned + b.block);
  const int slices = (stage.cols + stage.tile_cols - 1) / stage.tile_cols;
  const int group_floats = slices * stage.tile_rows;
  const int batch_rows = b.plan.scratch_floats / group_floats * stage.tile_rows;
  for (int lo = own.lo; lo < own.hi; lo += batch_rows) {
    const int hi = least(lo + batch_rows, own.hi);
    float* sums = b.scratch;  // [row groups][slices][tile_rows]
    for (int row = lo; row < hi; row += stage.tile_rows) {
      const int rows = least(stage.tile_rows, hi - row);
      for (int col = 0; col < stage.cols; col += stage.tile_cols, sums += stage.tile_rows) {
        const int cols = least(stage.tile_cols, stage.cols - col);
        if (b.core.ring.mine()) {
          b.core.dot_tile(b.core.ring.acquire(), rows, cols, b.input + col, sums);
          b.core.ring.release();
        }
        b.core.ring.next(rows * cols * type_bytes(WEIGHT));
      }
    }
    b.core.barrier();
    auto total = [&](int row) {
      const int group = (row - lo) / stage.tile_rows;
      const float* at = b.scratch + group * group_floats + (row - lo) % stage.tile_rows;
      float sum = *at;
      for (int slice = 1; slice < slices; ++slice) sum += at[slice * stage.tile_rows];
      return sum;
    };
    const int first = lo / stage.unit, elements = (hi - lo) / stage.unit;
    TWIN_EACH(i, elements) emit(first + i, total(lo + i * stage.unit), total(lo + (i + 1) * stage.unit - 1));
    b.core.barrier();
  }
}

// Walks the tiles of a whole step in the order in which `multiply` consumes them, for a platform whose loader fills the ring.
template <class Fill>
__device__ void stream_step(const Plan& plan, int block, bool with_head, Fill fill) {
  for (int s = 0; s < plan.stage_count; ++s) {
    const Stage& stage = plan.stages_at(s);
    if (stage.owned < 0 || (stage.kind == int(StageKind::LM_HEAD) && !with_head)) continue;
    const Span own = plan.owned_at(stage.owned + block);
    for (int row = own.lo; row < own.hi; row += stage.tile_rows)
      for (int col = 0; col < stage.cols; col += stage.tile_cols)
        if (!fill(least(stage.tile_rows, own.hi - row) * least(stage.tile_cols, stage.cols - col) * type_bytes(WEIGHT))) return;
  }
}

}  // namespace twin
