// A router that each block multiplies with what it makes of the residual itself, as soon as it has:
// its rows of the output projection. Blocks add up their parts of each logit in memory, so nobody
// waits for the whole residual before, and ROUTE for nothing but it and the sums. They are integers:
// the order in which they are added does not matter.
#pragma once

#include "biases.cuh"

namespace twin {

// A sum's word: how many blocks have added to it, how many of these could not say their part, and
// the parts in units of 2^-UNIT times the residual's last norm, rounded down to a power of two.
struct SumWord {
  static constexpr u64 EMPTY = u64(SENTINEL) << 32 | SENTINEL;  // what resets write
  static constexpr int UNIT = 26, COUNT = 8, PARTS = 2 * COUNT;
  // of one block: with 255 of them a sum stays below 2^47
  static constexpr float MOST = float(1ull << 38);

  __device__ static __forceinline__ u64 of(float part) {
    const bool sound = part > -MOST && part < MOST;  // no NaN is
    const long long whole = sound ? (long long)(part) : 0;
    return (u64(whole) << PARTS) + (sound ? 1u : 1u + (1u << COUNT));
  }
  __device__ static __forceinline__ int blocks(u64 seen) { return int(seen - EMPTY) & 0xFF; }
  // NaN: a block could not say its part
  __device__ static __forceinline__ float sum(u64 seen) {
    const u64 made = seen - EMPTY;
    return made >> COUNT & 0xFFu ? bits_as<float>(PUBLISHED_NAN)
                                 : float((long long)(made) >> PARTS);
  }
  // Units of a norm whose inverse is `factor`.
  __device__ static __forceinline__ float units(float factor) {
    return bits_as<float>((bits_as<u32>(factor) & 0x7F800000u) + (u32(UNIT) << 23));
  }
  // Where a sum lies, in words.
  __device__ static __forceinline__ int place(int number) {
    return number / facts::SUMS_TOGETHER * facts::SUMS_PITCH + number % facts::SUMS_TOGETHER * 2;
  }
};

// Does a block's output projection end with its parts of logits?
template <class B>
__device__ __forceinline__ bool scores_behind(const B& b, int index) {
  return b.plan.stages_at(index + 1).kind == int(StageKind::ROUTER);
}

// [ROWS] what a block makes of the residual, times the norm's weights; behind it the factor by which
// the residual was normed last.
struct OwnRows {
  static constexpr int ROWS = 2 * Scores::PARTS * Scores::PAIRS;

  float* at;

  template <class B>
  __device__ __forceinline__ explicit OwnRows(const B& b) : at(b.scratch + b.plan.scored) {}
  __device__ __forceinline__ float& factor() const { return at[ROWS]; }
};

// All blocks compute the same factor: they add up in the same units.
template <class B>
__device__ __forceinline__ float kept_factor(const B& b, float factor) {
  if constexpr (Scores::ANY)
    if (b.core.thread() == 0) OwnRows(b).factor() = factor;
  return factor;
}

// A block's parts of the logits. The router's columns are requested before the stage's inputs are
// there.
template <bool ANY>
struct OwnScores {
  template <class B>
  __device__ __forceinline__ OwnScores(B&, int, Span) {}
  __device__ __forceinline__ void put(int, float) {}
  template <class B>
  __device__ __forceinline__ bool add(B&, int, bool done) { return done; }
};

template <>
struct OwnScores<true> {
  static constexpr int PARTS = Scores::PARTS, PAIRS = Scores::PAIRS, ROUNDS = Scores::ROUNDS;

  struct alignas(8) Pair {
    float low, high;
  };

  bool any;
  Span own;
  OwnRows rows;
  Bias weight;  // the norm's
  float scale;  // of what is added to the residual
  float* sums;
  u32 words[ROUNDS][PAIRS];

  template <class B>
  __device__ __forceinline__ OwnScores(B& b, int index, Span own)
      : any(scores_behind(b, index)),
        own(own),
        rows(b),
        weight(any ? constants(b, b.plan.stages_at(index + 1).own_norm) : nullptr, b, own),
        scale(1.0f),
        sums(nullptr) {
    if (!any) return;
    sums = output_of(b, b.plan.stages_at(index + 1)).own;
    const float* const from = constants(b, b.plan.stages_at(index + 1).columns) +
                              b.block * ROUNDS * PAIRS * b.core.threads() + b.core.thread();
    TWIN_UNROLL
    for (int r = 0; r < ROUNDS; ++r)
      TWIN_UNROLL
      for (int k = 0; k < PAIRS; ++k)
        words[r][k] = bits_as<u32>(from[(r * PAIRS + k) * b.core.threads()]);
    scale = b.plan.reads_at(b.plan.stages_at(index + 2).first_read).scale;
    auto residual = b.residual.open(b.core);
    residual.each(b.core, [&](int i, float& value) {
      if (i >= own.lo && i < own.hi) rows.at[i - own.lo] = value;
    });
    TWIN_EACH(i, OwnRows::ROWS)
      if (i >= own.hi - own.lo) rows.at[i] = 0.0f;
  }
  // Of the thread whose row it is, behind a barrier.
  __device__ __forceinline__ void put(int row, float made) {
    if (!any) return;
    float& at = rows.at[row - own.lo];
    at = (at + scale * made) * weight.of(row);
  }
  // The stage ROUTER, behind all rows of the one before.
  template <class B>
  __device__ __forceinline__ bool add(B& b, int index, bool done) {
    if (!any || !done) return done;
    begin(b, index + 1, b.plan.stages_at(index + 1));
    b.core.barrier();
    const float units = SumWord::units(rows.factor());
    u64 made[ROUNDS];
    TWIN_UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
      const Pair* const x =
          reinterpret_cast<const Pair*>(rows.at) + b.core.thread() % PARTS * PAIRS;
      float sum = 0.0f;
      TWIN_UNROLL
      for (int k = 0; k < PAIRS; ++k) {
        float low, high;
        b.core.halves(words[r][k], low, high);
        sum += low * x[k].low + high * x[k].high;
      }
      TWIN_UNROLL
      for (int mask = PARTS / 2; mask; mask /= 2) sum += b.core.shuffle_xor(sum, mask);
      made[r] = SumWord::of(sum * units);
    }
    b.core.cleared();
    TWIN_UNROLL
    for (int r = 0; r < ROUNDS; ++r) {
      const int item = b.core.thread() + r * b.core.threads(), number = item / PARTS;
      if (item % PARTS == 0 && number < Scores::SUMS)
        b.core.add_sum(sums + SumWord::place(number), made[r]);
    }
    return true;
  }
};

// The residual, then the logits by the sums into the scratch. False, to all threads alike: a wait
// was given up. In this order: once experts are chosen their weights stream, and what is gathered
// then comes late (Qwen3-30B-A3B took an H200 2 % longer).
template <class B, class Stage>
__device__ __forceinline__ bool read_scores(B& b, int index, const Stage& stage) {
  const Bias bias(constants(b, b.plan.stages_at(index - 1).bias), b, {0, Scores::SUMS});
  const auto& added = b.plan.reads_at(stage.first_read);
  const int summed = b.plan.reads_at(stage.first_read + 1).value;
  const float* const sums = b.memory.exchange + b.plan.values_at(summed).offset;
  const float unit = 1.0f / SumWord::units(OwnRows(b).factor());
  auto x = decltype(b.core)::Hidden::in(b.input, b.plan.hidden);
  if (!gather_vector(b, index, added, x)) return false;
  auto residual = b.residual.open(b.core);
  residual.add(b.core, 1.0f, x, added.scale);
  b.residual.close(b.core, residual);
  const auto squares = residual.begin_squares(b.core);
  Patience patience;
  bool good = true;
  TWIN_EACH(i, Scores::SUMS) {
    u64 seen = b.core.load_sum(sums + SumWord::place(i));
    while (good && SumWord::blocks(seen) != b.plan.blocks) {
      good = keep_waiting(b, patience, {index, summed, 0, i});
      seen = b.core.load_sum(sums + SumWord::place(i));
    }
    b.scratch[i] = SumWord::sum(seen) * unit;
  }
  b.core.agree(good);
  b.core.barrier();
  if (b.core.gave_up()) return false;
  const float factor = norm_factor(b, decltype(b.core)::Hidden::end_squares(b.core, squares));
  begin(b, index, stage);
  TWIN_EACH(i, Scores::SUMS) b.scratch[i] = b.scratch[i] * factor + bias.of(i);
  b.core.barrier();
  return true;
}

}  // namespace twin
