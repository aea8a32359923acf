// The next token. Thresholds are found by bisection on the ordered bits of FP32 logits, so nothing
// is sorted and every thread of the block takes part; the definition is twin/engine/sampling.py.
#pragma once

#include "handoff.cuh"

namespace twin {

// NaN first, to be noticed
__device__ __forceinline__ bool wins(const Candidate& a, const Candidate& b) {
  if (a.logit != a.logit) return b.logit == b.logit || a.index < b.index;
  return a.logit > b.logit || (a.logit == b.logit && a.index < b.index);
}

__device__ __forceinline__ bool finite(float x) { return x - x == 0.0f; }

// Order-preserving map between FP32 and unsigned integers.
__device__ __forceinline__ u32 key_of(float x) {
  const u32 bits = bits_as<u32>(x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float value_of(u32 key) {
  return bits_as<float>(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// A number in [0, 1) from (seed, generated position), a multiple of 2**-24: splitmix64.
__device__ __forceinline__ double uniform(u64 seed, u64 position) {
  constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;
  u64 z = (seed ^ (position * GOLDEN)) + GOLDEN;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return double((z ^ (z >> 31)) >> 40) / double(1 << 24);
}

struct Logits {
  const float* logit;        // [count]
  const float* probability;  // [count]
  int count;
};

// neighbours that a thread adds side by side: independent sums, 16-byte loads
constexpr int PACK = 8;

// Sum over the block of term(i), in a fixed order.
template <class T, class Term>
__device__ __forceinline__ T block_sum(Block& b, int count, Term term) {
  T part[PACK] = {};
  const int stride = b.core.threads() * PACK;
  int i = b.core.thread() * PACK;
  for (; i + PACK <= count; i += stride)
    for (int j = 0; j < PACK; ++j) part[j] += term(i + j);
  for (int j = 0; i + j < count; ++j) part[0] += term(i + j);  // at most one thread has a tail
  T sum = part[0];
  for (int j = 1; j < PACK; ++j) sum += part[j];
  return b.core.sum(sum);
}

// What is kept: logits above `threshold`, and of those equal to it the first `ties`.
struct Kept {
  float threshold;
  int ties;
};

__device__ __forceinline__ Kept keep_top_k(Block& b, const Logits& all, float top, int k) {
  u32 lo = key_of(-infinity()), hi = key_of(top);
  while (lo < hi) {  // the largest threshold that at least k logits reach
    const u32 middle = lo + (hi - lo + 1) / 2;
    const float threshold = value_of(middle);
    if (block_sum<int>(b, all.count, [&](int i) { return int(all.logit[i] >= threshold); }) >= k) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  const float threshold = value_of(lo);
  return {threshold,
          k - block_sum<int>(b, all.count, [&](int i) { return int(all.logit[i] > threshold); })};
}

__device__ __forceinline__ double mass_above(Block& b, const Logits& all, float threshold) {
  return block_sum<double>(b, all.count, [&](int i) {
    return all.logit[i] > threshold ? double(all.probability[i]) : 0.0;
  });
}

// The smallest set of the most probable kept tokens that reaches top_p of what top-k left;
// probability_of(logit) is a tied one's.
template <class Probability>
__device__ __forceinline__ Kept keep_top_p(Block& b, const Logits& all, float top, Kept kept,
                                           double top_p, Probability probability_of) {
  const double wanted = top_p * (mass_above(b, all, kept.threshold) +
                                 double(kept.ties) * double(probability_of(kept.threshold)));
  u32 lo = key_of(kept.threshold), hi = key_of(top);
  while (lo < hi) {
    const u32 middle = lo + (hi - lo + 1) / 2;
    const float threshold = value_of(middle);
    const double mass = block_sum<double>(b, all.count, [&](int i) {
      return all.logit[i] >= threshold ? double(all.probability[i]) : 0.0;
    });
    if (mass >= wanted) {
      lo = middle;
    } else {
      hi = middle - 1;
    }
  }
  const float threshold = value_of(lo);
  const int most =
      threshold == kept.threshold
          ? kept.ties
          : block_sum<int>(b, all.count, [&](int i) { return int(all.logit[i] == threshold); });
  const double each = double(probability_of(threshold));
  double mass = mass_above(b, all, threshold) + each;
  int ties = 1;
  for (; ties < most && mass < wanted; ++ties) mass += each;
  return {threshold, ties};
}

// Adds the kept probabilities of logits lo..hi-1 to `mass`, in order, until it passes `target` at
// `token`.
__device__ __forceinline__ double add_kept(const Logits& all, Kept kept, int lo, int hi,
                                           double mass, double target, int& token) {
  for (int i = lo; i < hi; ++i) {
    if (all.logit[i] < kept.threshold || (all.logit[i] == kept.threshold && kept.ties-- <= 0))
      continue;
    mass += double(all.probability[i]);
    token = i;
    if (mass > target) break;
  }
  return mass;
}

// The first token in vocabulary order whose cumulative kept probability passes `u` of the whole.
// Each thread adds one pack of neighbours; packs are added in order.
__device__ __forceinline__ int pick(Block& b, const Logits& all, Kept kept, double u) {
  double* masses = reinterpret_cast<double*>(b.scratch);          // [threads]
  int* tied = reinterpret_cast<int*>(masses + b.core.threads());  // [threads]
  const int threads = b.core.threads(), me = b.core.thread();
  const int size = (all.count + threads - 1) / threads;
  const int first = me * size < all.count ? me * size : all.count,
            last = first + size < all.count ? first + size : all.count;
  int here = 0;
  for (int i = first; i < last; ++i) here += all.logit[i] == kept.threshold;
  tied[me] = here;
  b.core.barrier();
  for (int t = 0; t < me; ++t) kept.ties -= tied[t];
  int token = 0;
  masses[me] = add_kept(all, kept, first, last, 0.0, double(infinity()), token);
  b.core.barrier();
  double before = 0, total = 0;
  for (int t = 0; t < threads; ++t) {
    if (t == me) before = total;
    total += masses[t];
  }
  const double target = u * total, mine = masses[me];
  if (mine > 0 && before <= target && target < before + mine) {
    add_kept(all, kept, first, last, before, target, token);
    b.at.token = token;
  }
  b.core.barrier();
  return b.at.token;
}

// Sample from logits that this block has gathered into its rank's `probabilities` [2][count]:
// logits, then room.
__device__ __forceinline__ int draw(Block& b, int count, u64 position) {
  float* logits = b.memory.probabilities;
  float* probabilities = logits + count;
  const Request& wanted = b.launch.request;
  Candidate mine = {-infinity(), 0x7FFFFFFF};
  TWIN_EACH(i, count) {
    const Candidate other = {logits[i], i};
    if (wins(other, mine)) mine = other;
  }
  const Candidate top = b.core.best(mine, wins);
  if (!finite(top.logit)) return -1;
  if (wanted.temperature == 0.0f) return top.index;
  auto weight = [&](float logit) { return exp32((logit - top.logit) / wanted.temperature); };
  TWIN_EACH(i, count) probabilities[i] = weight(logits[i]);
  b.core.barrier();
  const float norm =
      float(1.0 / block_sum<double>(b, count, [&](int i) { return double(probabilities[i]); }));
  b.core.barrier();
  TWIN_EACH(i, count) probabilities[i] *= norm;
  b.core.barrier();
  const Logits all = {logits, probabilities, count};
  Kept kept = {-infinity(), count};
  const bool cut = wanted.top_k > 0 && wanted.top_k < count;
  if (cut) kept = keep_top_k(b, all, top.logit, wanted.top_k);
  if (wanted.top_p < 1.0)
    kept = keep_top_p(b, all, top.logit, kept, wanted.top_p,
                      [&](float logit) { return weight(logit) * norm; });
  return pick(b, all, kept, uniform(wanted.seed, position));
}

}  // namespace twin
