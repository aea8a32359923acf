// Which experts a token uses, and which stages multiply them.
#pragma once

#include "handoff.cuh"
#include "row_batches.cuh"

#include "../platform/time_steps.h"  // behind the platform, whose arithmetic it uses

namespace twin {

__device__ __forceinline__ constexpr bool routed(int kind) {
  return Experts::ANY && (kind == int(StageKind::ROUTED_UP) || kind == int(StageKind::ROUTED_DOWN));
}

// A token's experts, in the order of their scores: from ROUTE until ROUTED_DOWN is over, in the
// block's scratch.
struct Choice {
  int* expert;    // [VISITED]
  float* weight;  // [VISITED]
  // choices so far, for loaders; behind it how many of them each loader has requested
  u32* made;
};

__device__ __forceinline__ Choice choice_of(const Plan& plan, float* scratch) {
  float* at = scratch + plan.choice;
  return {reinterpret_cast<int*>(at), at + Experts::VISITED,
          reinterpret_cast<u32*>(at + 2 * Experts::VISITED)};
}

// NaN has no order. It comes first and makes all weights NaN, which the end of the step reports: a
// wrong token without a sign would be worse.
__device__ __forceinline__ float orderly(float logit) {
  return logit == logit ? logit : infinity();
}

// How many experts come before one: those of higher logits, and of equal ones the lower numbers.
__device__ __forceinline__ int place_of(const float* logits, int expert) {
  const float mine = orderly(logits[expert]);
  int place = 0;
#pragma unroll 16  // loads that wait for each other took 0.05 us each
  for (int other = 0; other < Experts::COUNT; ++other) {
    const float logit = orderly(logits[other]);
    place += logit > mine || (logit == mine && other < expert);
  }
  return place;
}

// Many experts are compared inside groups first, then the first ones of each group: comparing each
// of 512 with all others took a block 16 us.
struct Contest {
  static constexpr int MOST = facts::CONTEST;  // experts of a group
  static constexpr int GROUPS = (Experts::COUNT + MOST - 1) / MOST,
                       EACH = ((Experts::COUNT + GROUPS - 1) / GROUPS + 1) / 2 * 2,
                       LAST = Experts::COUNT - (GROUPS - 1) * EACH;
  // in each group there are as many as a token chooses, or there is one group
  static constexpr bool DIVIDED = GROUPS > 1 && LAST >= Experts::TOP_K;
  static constexpr int FINAL = GROUPS * Experts::TOP_K;
  // of the scratch, where keys lie behind the logits; contest_floats in twin/kernel/experts.py
  static constexpr int FIRST = (Experts::COUNT + 1 + 15) / 16 * 16,
                       FLOATS = 2 * ((Experts::COUNT + 1) / 2 * 2 + (FINAL + 1) / 2 * 2);

  struct alignas(16) Pair {
    u64 at[2];
  };

  u64* all;  // of all experts; a zero where they are odd

  __device__ __forceinline__ u64* finals() const { return all + (Experts::COUNT + 1) / 2 * 2; }

  // The larger the earlier: higher logits first, of equal ones lower numbers. None is zero.
  __device__ static __forceinline__ u64 key(float logit, int expert) {
    const float value = orderly(logit);
    const u32 bits = value == 0.0f ? 0u : bits_as<u32>(value);
    return u64(bits >> 31 ? ~bits : bits | 0x80000000u) << 32 | ~u32(expert);
  }
  __device__ static __forceinline__ int expert(u64 key) { return int(~u32(key)); }
  // `count`: of keys, rounded up to pairs by a zero
  __device__ static __forceinline__ int place(const u64* keys, int count, u64 mine) {
    const Pair* const pairs = reinterpret_cast<const Pair*>(keys);
    int place = 0;
#pragma unroll 8
    for (int i = 0; i < (count + 1) / 2; ++i) {
      const Pair pair = pairs[i];
      place += int(pair.at[0] > mine) + int(pair.at[1] > mine);
    }
    return place;
  }
};

// Does a score depend on its own logit alone?
constexpr bool ALONE = Experts::SIGMOID || Experts::ROOTS;

__device__ __forceinline__ float score_of(float logit, float most) {
  if constexpr (Experts::ROOTS) return square_root(time_step(logit));  // of softplus
  return Experts::SIGMOID ? 1.0f / (1.0f + exp32(-logit)) : exp32(logit - most);
}

// By which a logit becomes what a bias of the choice is added to: its sigmoid, or its share of the
// scores of all experts.
struct Shares {
  static constexpr bool OF_ALL = Experts::CHOICE_BIASED && !ALONE;

  float most = 0.0f, total = 1.0f;

  __device__ __forceinline__ explicit Shares(const float* logits) {
    if constexpr (OF_ALL) {
      // loads that waited for each other took 6 us of ERNIE 4.5's 64 experts
      most = logits[0], total = 0.0f;
#pragma unroll 16
      for (int i = 1; i < Experts::COUNT; ++i) most = logits[i] > most ? logits[i] : most;
#pragma unroll 16
      for (int i = 0; i < Experts::COUNT; ++i) total += score_of(logits[i], most);
    }
  }
  __device__ __forceinline__ float of(float logit) const {
    const float score = score_of(logit, most);
    return OF_ALL ? score / total : score;
  }
};

// Weights of the chosen, in their order. Softmax over all experts, then over the chosen alone, is
// softmax over the chosen: only weights that are not normalised need all logits.
__device__ __forceinline__ float weight_of(const float* logits, const Choice& choice, int place) {
  const float most = logits[choice.expert[0]];
  float total = 0.0f;
  if (Experts::NORMALISED) {
#pragma unroll 4
    for (int i = 0; i < Experts::TOP_K; ++i) total += score_of(logits[choice.expert[i]], most);
  } else if (!ALONE) {
    TWIN_ONCE
    for (int i = 0; i < Experts::COUNT; ++i) total += score_of(logits[i], most);
  }
  const float score = score_of(logits[choice.expert[place]], most);
  return (Experts::NORMALISED || !ALONE ? score / total : score) * Experts::SCALING;
}

// What the shared experts' rows are multiplied by: the sigmoid of the logit behind the router's.
__device__ __forceinline__ float shared_gate(const float* logits) {
  return NonRouted::GATED ? 1.0f / (1.0f + exp32(-logits[Experts::COUNT])) : 1.0f;
}

// What a block keeps of the shared experts from ROUTE on until ROUTED_DOWN is over, behind its
// choice: their gate, and their sums of the rows that it owns.
__device__ __forceinline__ float* kept_of(const Plan& plan, float* scratch) {
  return scratch + plan.kept;
}

// Before the first.
template <int LOADERS>
__device__ __forceinline__ void no_choice(const Plan& plan, float* scratch) {
  if constexpr (Experts::ANY)
    for (int i = 0; i < 1 + LOADERS; ++i) choice_of(plan, scratch).made[i] = 0;
}

}  // namespace twin
