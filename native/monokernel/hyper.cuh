// Hyper-connections: a block holds several residuals of the rank. Before a module they collapse to
// the one that it reads; behind it they take its output in, and mix.
#pragma once

#include "combine.cuh"

namespace twin {

// In the block's scratch, from step to step.
struct Residuals {
  static constexpr int COUNT = Hyper::RESIDUALS, MIXES = Hyper::MIXES;

  float* at;       // [COUNT][hidden]
  float* inward;   // [COUNT] of the module under way: by which they collapse to its input,
  float* outward;  // [COUNT] its output is spread over them,
  float* mix;      // [COUNT][COUNT] and the first ones join the second ones
  float* sums;     // [MIXES]

  __device__ __forceinline__ static Residuals of(const Block& b) {
    float* const at = b.scratch + b.plan.residuals;
    float* const behind = at + COUNT * b.plan.hidden;
    return {at, behind, behind + COUNT, behind + 2 * COUNT, behind + (2 + COUNT) * COUNT};
  }
};

// All of them begin as the token's embedding.
__device__ __forceinline__ void begin_residuals(Block& b) {
  if constexpr (Hyper::ANY) {
    const Residuals own = Residuals::of(b);
    const int hidden = b.plan.hidden;
    auto residual = b.residual.open(b.core);
    residual.each(b.core, [&](int i, float& value) {
      for (int r = 0; r < Residuals::COUNT; ++r) own.at[r * hidden + i] = value;
    });
    b.residual.close(b.core, residual);
  }
}

// Of a matrix of square sums, rows and columns are divided by these in turns.
__device__ __forceinline__ void balance(float* mix) {
  constexpr int N = Residuals::COUNT;
  for (int r = 0; r < N; ++r) {
    float* const row = mix + r * N;
    float most = row[0], total = 0.0f;
    for (int c = 1; c < N; ++c) most = row[c] > most ? row[c] : most;
    for (int c = 0; c < N; ++c) total += row[c] = exp32(row[c] - most);
    for (int c = 0; c < N; ++c) row[c] = row[c] / total + Hyper::EPS;
  }
  for (int round = 0; round < Hyper::ROUNDS; ++round) {
    for (int r = 0; round && r < N; ++r) {
      float total = Hyper::EPS;
      for (int c = 0; c < N; ++c) total += mix[r * N + c];
      for (int c = 0; c < N; ++c) mix[r * N + c] /= total;
    }
    for (int c = 0; c < N; ++c) {
      float total = Hyper::EPS;
      for (int r = 0; r < N; ++r) total += mix[r * N + c];
      for (int r = 0; r < N; ++r) mix[r * N + c] /= total;
    }
  }
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + exp32(-x)); }

// A module's input into the block's residual, from the products of the mixing matrix that the stage
// before published.
template <class Stage>
__device__ __forceinline__ bool collapse(Block& b, int index, const Stage& stage) {
  if constexpr (Hyper::ANY) {
    constexpr int N = Residuals::COUNT;
    const Residuals own = Residuals::of(b);
    const Stage& mixed = b.plan.stages_at(index - 1);
    const int products = mixed.rows, mixes = products / (N * Hyper::PARTS), hidden = b.plan.hidden;
    b.core.barrier();  // the stage before may still read the scratch
    if (!gather_spans(b, index, b.plan.reads_at(stage.first_read), b.scratch)) return false;
    float squares = 0.0f;
    for (int r = 0; r < N; ++r) {
      const auto one = Core::Hidden::in(own.at + r * hidden, hidden);
      const auto begun = one.begin_squares(b.core);
      b.core.barrier();
      squares += Core::Hidden::end_squares(b.core, begun);
    }
    const float factor = inverse_root(squares / float(N * hidden) + b.plan.norm_eps);
    const float *const base = constants(b, mixed.mix_base),
                *const scale = constants(b, mixed.mix_scale);
    TWIN_EACH(m, mixes) {
      float sum = 0.0f;
      for (int i = m; i < products; i += mixes) sum += b.scratch[i];
      const int kind = m < N ? 0 : m < 2 * N ? 1 : 2;
      const float logit = sum * factor * scale[kind] + base[m];
      if (kind == 0) own.inward[m] = sigmoid(logit) + Hyper::EPS;
      if (kind == 1) own.outward[m - N] = 2.0f * sigmoid(logit);
      if (kind == 2) own.mix[m - 2 * N] = logit;
    }
    b.core.barrier();
    if (mixes > N && b.core.thread() == 0) balance(own.mix);
    auto residual = b.residual.open(b.core);
    residual.each(b.core, [&](int i, float& value) {
      value = 0.0f;
      for (int r = 0; r < N; ++r) value += own.inward[r] * own.at[r * hidden + i];
    });
    b.residual.close(b.core, residual);
    return true;
  }
  return false;
}

// Does the stage read how several residuals collapse?
template <class Stage>
__device__ __forceinline__ bool collapses(const Block& b, int index, const Stage& stage) {
  return Hyper::ANY && stage.reads && b.plan.stages_at(index - 1).kind == int(StageKind::HYPER);
}

// The rows of a matrix that is several side by side: of(group) is the input of each `each` rows.
template <class Stage, class Of, class Emit>
__device__ __forceinline__ bool multiply_groups(Block& b, const Stage& stage, const Work& work,
                                                int each, Of of, Emit emit) {
  const auto x = Core::Hidden::in(nullptr, stage.cols);
  for (int lo = work.own.lo; lo < work.own.hi; lo += stage.batch) {
    const int batch = stage.batch, hi = least(lo + batch, work.own.hi);
    float* const sums = b.scratch + b.half * b.plan.half_floats;
    b.half ^= 1;
    dot_group_tiles(b.core, stage, each, of, lo, hi, sums, batch);
    b.core.barrier();
    if (b.core.gave_up()) return false;
    if (lo == work.own.lo) b.core.cleared();
    TWIN_EACH(i, hi - lo) emit(lo + i, x.total(stage, sums + i, batch));
  }
  return true;
}

// The module's output joins the residuals, and each meets its columns of the mixing matrix.
template <class Stage>
__device__ __forceinline__ bool hyper(Block& b, int index, const Stage& stage) {
  if constexpr (Hyper::ANY) {
    constexpr int N = Residuals::COUNT;
    const Residuals own = Residuals::of(b);
    const int hidden = b.plan.hidden;
    const Work work = work_of(b, stage, 1);
    Core::Hidden made = Core::Hidden::in(b.input, hidden);
    for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i) {
      const Read& read = b.plan.reads_at(i);
      if (skipped(b, read.previous_step)) continue;
      if (!gather_vector(b, index, read, made)) return false;
      made.each(b.core, [&](int d, float& value) {
        float held[N];
        for (int r = 0; r < N; ++r) held[r] = own.at[r * hidden + d];
        for (int to = 0; to < N; ++to) {
          float sum = own.outward[to] * value;
          for (int r = 0; r < N; ++r) sum += own.mix[r * N + to] * held[r];
          own.at[to * hidden + d] = sum;
        }
      });
    }
    begin(b, index, stage);
    const int each = stage.rows / (N * Hyper::PARTS);
    return multiply_groups(
        b, stage, work, each, [&](int group) { return own.at + group % N * hidden; },
        [&](int row, float sum) { publish(b, work.out, row, sum); });
  }
  return false;
}

}  // namespace twin
