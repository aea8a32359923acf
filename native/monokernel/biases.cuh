// What a stage adds beside its products: biases of rows, of experts' rows, and sinks of a softmax.
// A thread asks for its first ones before the stage's inputs are there: looked up behind the sums
// they would be waited for.
#pragma once

#include "attention.cuh"

namespace twin {

__device__ __forceinline__ const float* constants(const Block& b, int at) {
  return at < 0 ? nullptr : b.memory.constants + at;
}

// What is added to a block's rows. A thread has that of its first row before the stage's inputs are
// there; the others are looked up.
struct Bias {
  const float* rows;  // null: none
  int first;
  float own;

  __device__ __forceinline__ Bias(const float* rows, const Block& b, Span owned)
      : rows(rows),
        first(owned.lo + b.core.thread()),
        own(rows && first < owned.hi ? rows[first] : 0.0f) {}
  __device__ __forceinline__ Bias(const Block& b, const Stage& stage, Span owned)
      : Bias(b.plan.biased ? constants(b, stage.bias) : nullptr, b, owned) {}
  __device__ __forceinline__ float of(int row) const {
    return !rows ? 0.0f : row == first ? own : rows[row];
  }
};

// The same of a stage where few models have one.
template <bool ANY>
struct OutputBias {
  __device__ __forceinline__ OutputBias(const Block&, const Stage&, Span) {}
  __device__ __forceinline__ float added(int, float sum) const { return sum; }
};

template <>
struct OutputBias<true> : Bias {
  __device__ __forceinline__ OutputBias(const Block& b, const Stage& stage, Span owned)
      : Bias(constants(b, stage.bias), b, owned) {}
  __device__ __forceinline__ float added(int row, float sum) const { return sum + of(row); }
};

// Biases of a model whose experts have some: of rows, and of the chosen experts' pairs of a gate
// and of what passes it, which follow each other. Of its first row or pair a thread has them before the
// weights are there, and nothing else: wide vectors leave few registers.
template <bool ANY, class P = Plan>  // a parameter: without experts nobody asks for their choice
struct FirstBias {
  __device__ __forceinline__ FirstBias(const Block&, const Stage&, Span) {}
  __device__ __forceinline__ void add(const Block&, const Stage&, Span, int, float&, float&) const {
  }
  __device__ __forceinline__ float added(const Block&, const Stage&, Span, int, float sum) const {
    return sum;
  }
};

template <class P>
struct FirstBias<true, P> {
  float gate, up;  // or a row's, and nothing

  __device__ __forceinline__ FirstBias(const Block& b, const Stage& stage, Span own)
      : gate(0.0f), up(0.0f) {
    const bool pairs = routed(stage.kind);
    const int first = (pairs ? own.lo / 2 : own.lo) + b.core.thread();
    if (stage.bias < 0 || first >= (pairs ? own.hi / 2 : own.hi)) return;
    const float* const at = pairs ? pair(b, stage, first) : constants(b, stage.bias) + first;
    gate = at[0];
    if (pairs) up = at[1];
  }
  // rows are [experts][WIDTH][2]
  __device__ static __forceinline__ const float* pair(const Block& b, const Stage& stage,
                                                      int number) {
    const int place = number / Experts::WIDTH;
    const P& plan = b.plan;
    const Choice choice = choice_of(plan, b.scratch);
    return constants(b, stage.bias) +
           2 * (choice.expert[place] * Experts::WIDTH + number - place * Experts::WIDTH);
  }
  __device__ __forceinline__ void add(const Block& b, const Stage& stage, Span own, int number,
                                      float& to_gate, float& to_up) const {
    const bool mine = number == own.lo / 2 + b.core.thread();
    to_gate += mine ? gate : pair(b, stage, number)[0];
    to_up += mine ? up : pair(b, stage, number)[1];
  }
  __device__ __forceinline__ float added(const Block& b, const Stage& stage, Span own, int row,
                                         float sum) const {
    if (stage.bias < 0) return sum;
    return sum + (row == own.lo + b.core.thread() ? gate : constants(b, stage.bias)[row]);
  }
};

// The weighted biases of all chosen experts, in the order of the choice. Of its first row a thread
// has them before the inputs are there.
template <bool ANY, class P = Plan>
struct SumBias {
  __device__ __forceinline__ SumBias(const Block&, const Stage&, Span) {}
  __device__ __forceinline__ float added(const Block&, const Stage&, Span, int, float sum) const {
    return sum;
  }
};

template <class P>
struct SumBias<true, P> {
  float own;

  __device__ __forceinline__ SumBias(const Block& b, const Stage& stage, Span rows)
      : own(rows.lo + b.core.thread() < rows.hi ? of(b, stage, rows.lo + b.core.thread()) : 0.0f) {}
  // rows are [experts][all rows]
  __device__ static __forceinline__ float of(const Block& b, const Stage& stage, int row) {
    const P& plan = b.plan;
    const Choice choice = choice_of(plan, b.scratch);
    const float* const rows = constants(b, stage.bias) + row;
    float sum = 0.0f;
    TWIN_UNROLL
    for (int i = 0; i < Experts::TOP_K; ++i)
      sum += choice.weight[i] * rows[long(choice.expert[i]) * stage.rows];
    return sum;
  }
  __device__ __forceinline__ float added(const Block& b, const Stage& stage, Span rows, int row,
                                         float sum) const {
    return sum + (row == rows.lo + b.core.thread() ? own : of(b, stage, row));
  }
};

constexpr bool CLAMPED = Additions::EXPERT_BIAS || Additions::LIMIT > 0.0f ||
                         Additions::GAIN != 1.0f || Additions::OFFSET != 0.0f;

// A NaN passes.
__device__ __forceinline__ float through_gate(float gate, float up) {
  constexpr float LIMIT = Additions::LIMIT;
  if constexpr (LIMIT > 0.0f) {
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
  }
  return gate / (1.0f + exp32(-Additions::GAIN * gate)) * (up + Additions::OFFSET);
}

// Logits that join the softmaxes of a block's query heads.
template <bool ANY, class S = Stage>  // a parameter: without sinks a stage does not name them
struct Sinks {
  __device__ __forceinline__ Sinks(const Block&, const Stage&, int, int) {}
  __device__ __forceinline__ void put(Block&, float*) const {}
};

template <class S>
struct Sinks<true, S> {
  const float* from;
  int count;
  float own;  // the thread's first

  __device__ __forceinline__ Sinks(const Block& b, const S& stage, int head, int heads)
      : from(b.memory.constants + stage.sinks + head),
        count(heads),
        own(b.core.thread() < count ? from[b.core.thread()] : 0.0f) {}
  __device__ __forceinline__ void put(Block& b, float* to) const {
    TWIN_EACH(i, count) to[i] = i == b.core.thread() ? own : from[i];
  }
};

}  // namespace twin
