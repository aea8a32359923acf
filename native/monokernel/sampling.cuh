// The next token; its definition is twin/engine/sampling.py.
//
// Each block divides its own logits into buckets and says in four words how much it has
// (logits_buffer.cuh). The block that draws adds these up, so it looks at the logits of one bucket
// (crossing.cuh) and of one block (pick.cuh), not at all. Weights are integers, whose sums do
// not depend on who adds first.
#pragma once

#include "crossing.cuh"
#include "pick.cuh"

namespace twin {

// Shares have their best logits and their mass; `best` is the best of them.
__device__ __forceinline__ int Drawing::token(const Candidate& best, u64 position) {
  if (!finite(best.logit)) return -1;
  if (wanted.temperature == 0.0f) return best.index;
  const float lowest = float(double(best.logit) - wanted.margin);  // that min_p keeps
  const bool some = wanted.top_k > 0 && wanted.top_k < all_tokens(b.plan),
             low = lowest > -infinity(), part = wanted.top_p < 1.0, cut = some || low || part;
  Kept kept = {weigh(best.logit), -infinity(), 0, -1};
  // top-k, min-p, top-p, then what shares keep
  TWIN_ONCE
  for (int round = 0; cut && round < 4; ++round) {
    if ((round == 0 && !some) || (round == 2 && !part)) continue;
    const Kept before = kept;
    const bool shared_out = round & 1;
    if (round == 1) {
      if (!(lowest > kept.threshold)) continue;
      const int down = heat.bucket(best.logit) - heat.bucket(lowest);
      kept = {0.0, lowest, 0x7FFFFFFF, down < BUCKETS - 1 ? down : BUCKETS - 1};
      if (!part) continue;
    }
    by_count = round == 0;
    needed = wanted.top_p * kept.mass;
    Tally above = {0.0, 0};
    const int bucket = shared_out ? kept.bucket : crossing(above);
    search(shared_out, bucket, above, kept);
    if (round == 1) {
      kept.mass = kept_mass(lowest);
      opened = -1;  // shares have more than what lies above the bucket
    }
    // of ties that top-k cut
    if (round == 2 && (some || low) &&
        (kept.threshold < before.threshold ||
         (kept.threshold == before.threshold && kept.ties > before.ties)))
      kept = before;
  }
  if (cut) share_ties(kept);
  u64 into = 0;
  const int number = choose(uniform(wanted.seed, position), into);
  return pick(number, into, cut, kept);
}

}  // namespace twin
