// A matrix stage: the block's rows of the stage's matrix times the stage's input, tile by tile from
// the ring.
#pragma once

#include "choice.cuh"

namespace twin {

__device__ __forceinline__ constexpr int least(int a, int b) { return a < b ? a : b; }

// What a stage's end needs from the plan, looked up before its inputs are there: nothing between
// the last poll and the publication may wait for memory.
struct Work {
  Span own;  // rows of the stage's matrix
  int unit;
  Output out;

  // Are the elements of each batch of its rows whole fours of the value?
  __device__ bool fours(const Stage& stage) const {
    return ((own.lo | own.hi | stage.batch) & (4 * unit - 1)) == 0;
  }
};

__device__ __forceinline__ Work work_of(const Block& b, const Stage& stage, int unit) {
  Work work = {b.plan.owned_of(stage.owned, b.block), unit, output_of(b, stage)};
  TWIN_KEEP(work.own.lo);
  TWIN_KEEP(work.own.hi);
  TWIN_KEEP(work.out.own);
  return work;
}

// An element of the block's rows, which neighbouring threads publish side by side: four of them in
// one store where a platform has such stores.
template <class Threads = Core>
__device__ __forceinline__ void publish_row(const Block& b, const Stage& stage, const Work& work,
                                            int element, float value) {
  if constexpr (Threads::FOURS) {
    if (work.fours(stage)) {
      const Pack<4> four = Threads::of_four(unlike_sentinel(value));
      if (element % 4 == 0) publish_four(b, work.out, element, four);
      return;
    }
  }
  publish(b, work.out, element, value);
}

__device__ __forceinline__ float unscaled() { return 1.0f; }

// Partial sums of rows lo..hi-1 of the stage's matrix. Where no loader brings experts' tiles, a
// block reads them where they lie.
template <class Stage, class Vector, class Ahead>
__device__ __forceinline__ void dot_tiles(Block& b, const Stage& stage, const Vector& x, int lo,
                                          int hi, float* sums, int batch, Ahead& ahead) {
  if constexpr (Experts::ANY && !Core::EXPERTS_IN_RING) {
    if (stage.expert_rows) {
      const u8* first = b.memory.stream + u64(stage.expert_page) * PAGE_BYTES;
      const int own = b.plan.owned_of(stage.owned, b.block).lo;
      return dot_expert_tiles(
          b.core, stage, first, choice_of(b.plan, b.scratch).expert, x, lo, hi, sums,
          [&](int row, int rows, int slice) {
            if constexpr (CODED) return coded_place(stage, b.block, own, row, rows, slice);
            return 0u;
          });
    }
  }
  b.core.dot_tiles(stage, x, lo, hi, sums, batch, ahead);
}

// Calls emit(element, sums of its `unit` rows times the factor) once for each element of the block,
// in row order per thread. `ahead`: weights of the first rows that were taken from the ring before
// x was there. factor() is requested behind a barrier.
//
// Rows are taken in batches whose partial sums fit one half of the scratch: within a batch warps
// take tiles without any barrier, then each row's parts are added in a fixed order, so the result
// does not depend on who was faster. The other half serves the next batch, so one barrier a batch
// is enough. False: a wait before was given up.
template <class Vector, class Ahead, class Factor, class Emit>
__device__ __forceinline__ bool multiply(Block& b, const Stage& stage, const Work& work,
                                         const Vector& x, Ahead& ahead, Factor factor, Emit emit) {
  const Span own = work.own;
  float by = 1.0f;
  int begin = own.lo;  // as the kernels of experts were measured; without, they are as large
  if constexpr (Experts::ANY) TWIN_KEEP(begin);
  b.core.quantise(stage, x, ahead);
  TWIN_ONCE
  for (int lo = own.lo; lo < own.hi; lo += stage.batch) {
    const int batch = stage.batch, hi = least(lo + batch, own.hi);
    float* const sums = b.scratch + b.half * b.plan.half_floats;  // [parts][batch]
    b.half ^= 1;
    TWIN_HOLDS((x.parts(stage) - 1) * batch + hi - lo <= b.plan.half_floats);
    dot_tiles(b, stage, x, lo, hi, sums, batch, ahead);
    b.core.barrier();
    if (b.core.gave_up()) return false;
    if (lo == begin) {
      by = factor();
      b.core.cleared();
    }
    // 1 or 2; a division at run time would take 0.05 us
    const int unit = work.unit, first = lo >> (unit - 1);
    TWIN_ONCE
    TWIN_EACH(i, (hi - lo) >> (unit - 1)) {
      const float* at = sums + i * unit;
      emit(first + i, by * x.total(stage, at, batch), by * x.total(stage, at + unit - 1, batch));
    }
  }
  return true;
}

// Walks the tiles of stages first..last-1 in the order in which they are consumed, for a platform
// whose loader fills the ring: fill(bytes, late) for each tile of a matrix, `late` where the LM
// head's own window counts; cached(stage) for what a stage reads of the cache, experts(stage, rows)
// for what it multiplies of experts; passed(bytes) of what passes alone multiply. Ends early when
// one says so.
template <class Fill, class Cached, class Chosen, class Passed>
__device__ bool stream_stages(const Plan& plan, int block, int first, int last, bool with_head,
                              Fill fill, Cached cached, Chosen experts, Passed passed) {
  for (int s = first; s < last; ++s) {
    const Stage& stage = plan.stages_at(s);
    if (stage.kind == int(StageKind::ATTENTION) && !cached(stage)) return false;
    if (stage.owned < 0 || (stage.kind == int(StageKind::LM_HEAD) && !with_head)) continue;
    const Span own = plan.owned_of(stage.owned, block);
    if (routed(stage.kind)) {
      if (!experts(stage, own)) return false;
      continue;
    }
    const int high = stage.tile_rows, wide = stage.tile_cols * type_bytes(WEIGHT),
              cols = stage.cols, most = stage.tile_cols;
    const bool head = plan.head_rows > 0 && stage.kind == int(StageKind::LM_HEAD);
    for (int row = own.lo; row < own.hi; row += high) {
      const bool late = head && row >= own.lo + plan.head_rows;
      const int rows = least(high, own.hi - row);
      for (int left = cols; left > 0; left -= most) {
        const int bytes = CODED ? coded_bytes(stage, rows, left >= most)
                                : rows * (left < most ? left * type_bytes(WEIGHT) : wide);
        const bool by_passes = Scores::ANY && stage.kind == int(StageKind::ROUTER);
        if (!(by_passes ? passed(bytes) : fill(bytes, late))) return false;
      }
    }
  }
  return true;
}

}  // namespace twin
