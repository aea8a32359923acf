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
  const int batch_rows = b.plan.scratch_floats / slices / stage.tile_rows * stage.tile_rows;
  float* const sums = b.scratch;  // [slices][batch_rows]
  for (int lo = own.lo; lo < own.hi; lo += batch_rows) {
    const int hi = least(lo + batch_rows, own.hi);
    for (int row = lo; row < hi; row += stage.tile_rows) {
      const int rows = least(stage.tile_rows, hi - row);
      float* to = sums + (row - lo);
      for (int col = 0; col < stage.cols; col += stage.tile_cols, to += batch_rows) {
        const int cols = least(stage.tile_cols, stage.cols - col);
        if (b.core.ring.mine()) {
          b.core.dot_tile(b.core.ring.acquire(), rows, cols, b.input + col, to);
          b.core.ring.release();
        }
        b.core.ring.next(rows * cols * type_bytes(WEIGHT));
      }
    }
    b.core.barrier();
    auto total = [&](int row) {
      float sum = sums[row];
      for (int slice = 1; slice < slices; ++slice) sum += sums[slice * batch_rows + row];
      return sum;
    };
    const int unit = stage.unit, first = lo / unit;
    TWIN_EACH(i, (hi - lo) / unit) emit(first + i, total(i * unit), total(i * unit + unit - 1));
    b.core.barrier();
  }
}

// Walks the tiles of stages first..last-1 in the order in which `multiply` consumes them, for a platform whose loader
// fills the ring. Ends early when fill(bytes) says so.
template <class Fill>
__device__ bool stream_stages(const Plan& plan, int block, int first, int last, bool with_head, Fill fill) {
  for (int s = first; s < last; ++s) {
    const Stage& stage = plan.stages_at(s);
    if (stage.owned < 0 || (stage.kind == int(StageKind::LM_HEAD) && !with_head)) continue;
    const Span own = plan.owned_at(stage.owned + block);
    for (int row = own.lo; row < own.hi; row += stage.tile_rows)
      for (int col = 0; col < stage.cols; col += stage.tile_cols)
        if (!fill(least(stage.tile_rows, own.hi - row) * least(stage.tile_cols, stage.cols - col) * type_bytes(WEIGHT))) return false;
  }
  return true;
}

}  // namespace twin
