// What a stage adds next to its products: biases of rows, of experts' rows, and sinks of a softmax.
// A thread requests its first ones before the stage's inputs are there: looked up behind the sums
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
// and of what passes it, which follow each other. Of its first row or pair a thread has them before
// the weights are there, and nothing else: wide vectors leave few registers.
struct FirstBias {
  static constexpr bool ANY = Additions::EXPERT_BIAS;

  float gate, up;  // or a row's, and nothing

  __device__ __forceinline__ FirstBias(const Block& b, const Stage& stage, Span own)
      : gate(0.0f), up(0.0f) {
    if (!ANY) return;
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
    const Choice choice = choice_of(b.plan, b.scratch);
    return constants(b, stage.bias) +
           2 * (choice.expert[place] * Experts::WIDTH + number - place * Experts::WIDTH);
  }
  __device__ __forceinline__ void add(const Block& b, const Stage& stage, Span own, int number,
                                      float& to_gate, float& to_up) const {
    if (!ANY) return;
    const bool mine = number == own.lo / 2 + b.core.thread();
    to_gate += mine ? gate : pair(b, stage, number)[0];
    to_up += mine ? up : pair(b, stage, number)[1];
  }
  __device__ __forceinline__ float added(const Block& b, const Stage& stage, Span own, int row,
                                         float sum) const {
    if (!ANY || stage.bias < 0) return sum;
    return sum + (row == own.lo + b.core.thread() ? gate : constants(b, stage.bias)[row]);
  }
};

// The weighted biases of all chosen experts, in the order of the choice. Of its first row a thread
// has them before the inputs are there.
struct SumBias {
  static constexpr bool ANY = Additions::EXPERT_BIAS;

  float own;

  __device__ __forceinline__ SumBias(const Block& b, const Stage& stage, Span rows)
      : own(ANY && rows.lo + b.core.thread() < rows.hi ? of(b, stage, rows.lo + b.core.thread())
                                                       : 0.0f) {}
  // rows are [experts][all rows]
  __device__ static __forceinline__ float of(const Block& b, const Stage& stage, int row) {
    const Choice choice = choice_of(b.plan, b.scratch);
    const float* const rows = constants(b, stage.bias) + row;
    float sum = 0.0f;
    TWIN_UNROLL
    for (int i = 0; i < Experts::TOP_K; ++i)
      sum += choice.weight[i] * rows[long(choice.expert[i]) * stage.rows];
    return sum;
  }
  __device__ __forceinline__ float added(const Block& b, const Stage& stage, Span rows, int row,
                                         float sum) const {
    if (!ANY) return sum;
    return sum + (row == rows.lo + b.core.thread() ? own : of(b, stage, row));
  }
};

// Logits that join the softmaxes of a block's query heads.
struct Sinks {
  static constexpr bool ANY = Additions::SINKS;

  const float* from;
  int count;
  float own;  // the thread's first

  __device__ __forceinline__ Sinks(const Block& b, const Stage& stage, int head, int heads)
      : from(ANY ? b.memory.constants + stage.sinks + head : nullptr),
        count(heads),
        own(ANY && b.core.thread() < count ? from[b.core.thread()] : 0.0f) {}
  __device__ __forceinline__ void put(Block& b, float* to) const {
    if (!ANY) return;
    TWIN_EACH(i, count) to[i] = i == b.core.thread() ? own : from[i];
  }
};

}  // namespace twin
