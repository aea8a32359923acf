// A mixture of experts: which of them a token uses, and their down projection. ROUTER and ROUTED_UP
// are `from_residual`.
#pragma once

#include "stages.cuh"

namespace twin {

// What an expert is chosen by: its logit, or its score and a bias of the choice alone. The thread's
// first bias is there before the logits are.
struct ChosenBy {
  static constexpr bool BIASED = Experts::CHOICE_BIASED;

  const float* biases;
  float own;

  // a table needs none
  template <class Stage>
  __device__ __forceinline__ static bool biased(const Stage& stage) {
    return BIASED && !(Experts::HASHED && stage.chosen >= 0);
  }
  template <class Stage>
  __device__ __forceinline__ ChosenBy(const Block& b, const Stage& stage)
      : biases(biased(stage) ? constants(b, stage.choice_bias) : nullptr),
        own(biased(stage) && b.core.thread() < Experts::COUNT ? biases[b.core.thread()] : 0.0f) {}
  __device__ __forceinline__ float of(const Block& b, const Shares& shares, int expert) const {
    const float logit = b.scratch[expert];
    if (!BIASED) return logit;
    return shares.of(logit) + (expert == b.core.thread() ? own : biases[expert]);
  }
};

// Numbers by which experts' weights are multiplied, behind the keys of a choice. A thread requests
// its first before the logits are there.
struct ExpertScales {
  static constexpr bool ANY = Experts::SCALED;
  static constexpr int FIRST = Contest::FIRST + Contest::FLOATS;

  const float* stored;
  float own;

  template <class Stage>
  __device__ __forceinline__ ExpertScales(const Block& b, const Stage& stage)
      : stored(ANY ? constants(b, stage.expert_scales) : nullptr),
        own(ANY && b.core.thread() < Experts::COUNT ? stored[b.core.thread()] : 0.0f) {}
  __device__ __forceinline__ void put(Block& b) const {
    if constexpr (ANY) {
      TWIN_HOLDS(FIRST + Experts::COUNT <= b.plan.choice);
      TWIN_EACH(i, Experts::COUNT)
        b.scratch[FIRST + i] = i == b.core.thread() ? own : stored[i];
    }
  }
  __device__ static __forceinline__ float of(const Block& b, int expert) {
    return ANY ? b.scratch[FIRST + expert] : 1.0f;
  }
};

// The block's choice from its logits, which lie in the scratch; behind them is room for keys.
__device__ __forceinline__ void choose(Block& b, const Choice& choice, const ChosenBy& by) {
  if constexpr (Experts::VISITED > Experts::TOP_K)
    TWIN_EACH(i, Experts::VISITED - Experts::TOP_K)
      choice.expert[Experts::TOP_K + i] = Experts::COUNT + i;
  const Shares shares(b.scratch);
  if constexpr (Contest::DIVIDED) {
    constexpr int EACH = Contest::EACH, COUNT = Experts::COUNT, TOP_K = Experts::TOP_K,
                  FINAL = Contest::FINAL;
    TWIN_HOLDS(Contest::FIRST + Contest::FLOATS <= b.plan.choice);
    const Contest of = {reinterpret_cast<u64*>(b.scratch + Contest::FIRST)};
    u64* const finals = of.finals();
    TWIN_ONCE
    TWIN_EACH(i, COUNT + COUNT % 2) of.all[i] = i < COUNT ? Contest::key(by.of(b, shares, i), i) : 0;
    if (FINAL % 2 && b.core.thread() == 0) finals[FINAL] = 0;
    b.core.barrier();
    TWIN_ONCE
    TWIN_EACH(i, COUNT) {
      const int group = i / EACH, first = group * EACH;
      const int place =
          Contest::place(of.all + first, least(EACH, COUNT - first), of.all[i]);
      if (place < TOP_K) finals[group * TOP_K + place] = of.all[i];
    }
    b.core.barrier();
    TWIN_ONCE
    TWIN_EACH(i, FINAL) {
      const int place = Contest::place(finals, FINAL, finals[i]);
      if (place < TOP_K) choice.expert[place] = Contest::expert(finals[i]);
    }
  } else {
    const float* keys = b.scratch;
    if constexpr (ChosenBy::BIASED) {
      float* const made = b.scratch + Contest::FIRST;
      TWIN_EACH(i, Experts::COUNT) made[i] = by.of(b, shares, i);
      b.core.barrier();
      keys = made;
    }
    TWIN_EACH(i, Experts::COUNT) {
      const int place = place_of(keys, i);
      if (place < Experts::TOP_K) choice.expert[place] = i;
    }
  }
}

// The same where a table says which experts a token visits.
template <class Stage>
__device__ __forceinline__ void look_up(Block& b, const Stage& stage, const Choice& choice) {
  if constexpr (Experts::HASHED) {
    const float* const row = constants(b, stage.chosen) + long(b.at.token) * Experts::TOP_K;
    TWIN_EACH(i, Experts::VISITED)
      choice.expert[i] =
          i < Experts::TOP_K ? int(row[i]) : Experts::COUNT + i - Experts::TOP_K;
  }
}

// Every block chooses for itself: all have the logits, and the choice is theirs without another
// hand-off.
template <class Stage>
__device__ __forceinline__ bool route(Block& b, int index, const Stage& stage) {
  if constexpr (Experts::ANY) {
    b.core.barrier();  // the stage before may still read the scratch
    const ChosenBy by(b, stage);
    const ExpertScales scales(b, stage);
    scales.put(b);
    if constexpr (Scores::ANY) {
      if (!read_scores(b, index, stage)) return false;
    } else {
      if (!gather_parts(b, index, b.plan.reads_at(stage.first_read), b.scratch)) return false;
      begin(b, index, stage);
    }
    const Choice choice = choice_of(b.plan, b.scratch);
    if (Experts::HASHED && stage.chosen >= 0) {
      look_up(b, stage, choice);
    } else {
      choose(b, choice, by);
    }
    b.core.barrier();
    b.core.chosen(choice.made);
    if constexpr (NonRouted::SHARED && NonRouted::GATED)
      if (b.core.thread() == 0) kept_of(b.plan, b.scratch)[0] = shared_gate(b.scratch);
    TWIN_EACH(i, Experts::VISITED)
      choice.weight[i] = Experts::VISITED == Experts::TOP_K || i < Experts::TOP_K
                             ? weight_of(b.scratch, choice, i) *
                                   ExpertScales::of(b, choice.expert[i])
                             : shared_gate(b.scratch);
    b.core.barrier();
    return true;
  }
  return false;
}

// The shared experts' rows stay in the block, which adds them to those of the chosen ones; those of
// a dense MLP next to the experts are published.
template <class Stage>
__device__ __forceinline__ bool shared_down(Block& b, int index, const Stage& stage) {
  if constexpr (NonRouted::SHARED) {
    Core::Shared x = Core::Shared::in(b.input, stage.cols);
    const Span own = b.plan.owned_of(stage.owned, b.block);
    auto ahead = b.core.prefetch<Core::Shared>(stage, own, true);
    if (!gather_vector(b, index, b.plan.reads_at(stage.first_read), x)) return false;
    begin(b, index, stage);
    if constexpr (NonRouted::PARALLEL) {
      const Work made = {own, 1, output_of(b, stage)};
      return multiply(b, stage, made, x, ahead, unscaled,
                      [&](int row, float sum, float) { publish(b, made.out, row, sum); });
    }
    float* const kept = kept_of(b.plan, b.scratch);
    const float by = NonRouted::GATED ? kept[0] : 1.0f;
    const Work work = {own, 1, {}};
    return multiply(b, stage, work, x, ahead, unscaled, [&](int row, float sum, float) {
      kept[facts::KEPT_FIRST + row - own.lo] = by * sum;
    });
  }
  return false;
}

// A row's sum with that of the shared experts.
__device__ __forceinline__ float with_shared(const Block& b, const Span& own, int row, float sum) {
  if constexpr (NonRouted::SHARED && !NonRouted::PARALLEL)
    return sum + kept_of(b.plan, b.scratch)[facts::KEPT_FIRST + row - own.lo];
  return sum;
}

// The weighted rows of all chosen experts: one product, whose input is what each made, times its
// weight.
template <class Stage>
__device__ __forceinline__ bool routed_down(Block& b, int index, const Stage& stage) {
  if constexpr (Experts::ANY) {
    Core::Ffn x = Core::Ffn::in(b.input, stage.cols);
    auto ahead = b.core.prefetch<Core::Ffn>(stage, b.plan.owned_of(stage.owned, b.block), true);
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const SumBias bias(b, stage, own);
    if (!gather_vector(b, index, b.plan.reads_at(stage.first_read), x)) return false;
    begin(b, index, stage);
    const Choice choice = choice_of(b.plan, b.scratch);
    x.times<Experts::WIDTH>(b.core, [&](int place) { return choice.weight[place]; });
    const Work work = {b.plan.owned_of(stage.owned, b.block), 1, output_of(b, stage)};
    return multiply(b, stage, work, x, ahead, unscaled, [&](int row, float sum, float) {
      publish(b, work.out, row,
              with_shared(b, own, row, bias.added(b, stage, own, row, sum)));
    });
  }
  return false;
}

// The stages of a layer of experts that no other layer has.
template <class Stage>
__device__ __forceinline__ bool compute_experts(Block& b, int index, const Stage& stage) {
  if constexpr (Delta::ANY) {
    switch (StageKind(stage.kind)) {
      case StageKind::DELTA: return delta(b, index, stage);
      default: break;
    }
  }
  if constexpr (NonRouted::SHARED) {
    switch (StageKind(stage.kind)) {
      case StageKind::SHARED_DOWN: return shared_down(b, index, stage);
      default: break;
    }
  }
  if constexpr (Hyper::ANY) {
    switch (StageKind(stage.kind)) {
      case StageKind::HYPER: return hyper(b, index, stage);
      default: break;
    }
  }
  if constexpr (Compressed::ANY) {
    switch (StageKind(stage.kind)) {
      case StageKind::QUERY: return query(b, index, stage);
      case StageKind::INDEX: return score_entries(b, index, stage);
      case StageKind::HEAD_OUT: return head_out(b, index, stage);
      default: break;
    }
  }
  if constexpr (Experts::ANY) {
    switch (StageKind(stage.kind)) {
      case StageKind::ROUTER: return Scores::ANY;  // the output projection before did it
      case StageKind::ROUTE: return route(b, index, stage);
      case StageKind::ROUTED_DOWN: return routed_down(b, index, stage);
      default: return false;
    }
  }
  return false;
}

}  // namespace twin
