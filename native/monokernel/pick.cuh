// What each block keeps, which block's share a random number falls in, and which token of it.
#pragma once

#include "drawing.cuh"

namespace twin {

// Of the logits as high as the lowest one kept, the first of the vocabulary are.
__device__ TWIN_LARGE void Drawing::share_ties(const Kept& kept) {
  const Span own = neighbours(b, count);
  int mine = 0, total;
  TWIN_ONCE
  for (int i = own.lo; i < own.hi; ++i) mine += int(shares[i].equal);
  int before = sum_before(b, mine, total);
  TWIN_ONCE
  for (int i = own.lo; i < own.hi; ++i) {
    Share& share = shares[i];
    const int left = kept.ties > before ? kept.ties - before : 0, equal = int(share.equal);
    share.taken = left < equal ? left : equal;
    before += equal;
    if (!share.taken) continue;
    const u64 mass =
        mass_of(share) + u64(share.taken) * heat.weight(kept.threshold, share.best);
    share.kept[0] = u32(mass), share.kept[1] = u32(mass >> 32);
  }
  b.core.barrier();
}

// The mass of what shares keep, of logits as high as the lowest one all of them.
__device__ TWIN_LARGE double Drawing::kept_mass(float lowest) const {
  const Span own = neighbours(b, count);
  double mine = 0, total;
  TWIN_ONCE
  for (int i = own.lo; i < own.hi; ++i) {
    const Share& share = shares[i];
    mine += share.scale * (double(mass_of(share)) +
                           double(share.equal) * double(heat.weight(lowest, share.best)));
  }
  sum_before(b, mine, total);
  return total;
}

// The share in which `u` of all that is kept falls, and how far into its mass.
__device__ TWIN_LARGE int Drawing::choose(double u, u64& into) {
  double* const starts = reinterpret_cast<double*>(room);  // [shares]
  const Span own = neighbours(b, count);
  double mine = 0, total;
  TWIN_ONCE
  for (int i = own.lo; i < own.hi; ++i) mine += shares[i].scale * double(mass_of(shares[i]));
  double before = sum_before(b, mine, total);
  const double target = u * total;
  // the last one that begins before it: with rounded sums it may end there, too
  Candidate last = {-1.0f, 0};
  TWIN_ONCE
  for (int i = own.lo; i < own.hi; ++i) {
    const double mass = shares[i].scale * double(mass_of(shares[i]));
    starts[i] = before;
    if (mass > 0 && before <= target) last = {float(i), i};
    before += mass;
  }
  const int number = b.core.best(last, higher).index;
  const u64 all = mass_of(shares[number]);
  const double inside = (target - starts[number]) / shares[number].scale;
  into = inside > 0 ? u64(inside) : 0;
  into = into < all ? into : all - 1;
  return number;
}

// The token in vocabulary order whose weight takes the share's kept mass past `into`. Threads
// have neighbouring quads of logits: the first round counts ties, where only some of them are
// kept, the second one weighs, and the thread in whose quads the token lies looks for it.
__device__ TWIN_LARGE int Drawing::pick(int number, u64 into, bool cut, const Kept& kept) {
  const Share& share = shares[number];
  const float* const from = logits(number);
  const Span own = neighbours(b, b.plan.block_logits / 4);
  const int taken = cut ? share.taken : 0;
  const bool some = taken > 0 && taken < int(share.equal);
  int ties_before = 0, all_ties, token = -1, loaded = -1;
  u64 reached = 0, all;
  const int first = bits_as<int>(load_shared(buffer(number), far()));
  Pack<4> seen = {};
  TWIN_ONCE
  for (int round = some ? 0 : 1; round < 3; ++round) {
    int tied = 0;
    u64 mine = 0;
    TWIN_ONCE
    for (int q = own.lo; q < own.hi; ++q) {
      if (q != loaded) seen = load_pack<4, 16>(from + 4 * q, far());
      loaded = q;
      TWIN_UNROLL
      for (int j = 0; j < 4; ++j) {
        const float logit = seen.at[j];
        const bool tie = cut && logit == kept.threshold;
        tied += tie;
        const bool in = tie ? taken > 0 && (!some || ties_before + tied <= taken)
                            : !cut || logit > kept.threshold;
        if (round > 0 && in) mine += heat.weight(logit, share.best);
        if (round == 2 && token < 0 && reached + mine > into) token = 4 * q + j;
      }
    }
    if (round == 0) ties_before = sum_before(b, tied, all_ties);
    if (round != 1) continue;
    reached = sum_before(b, mine, all);
    if (!(reached <= into && into < reached + mine)) break;
  }
  if (token >= 0) b.at.token = first + token;
  b.core.barrier();
  return b.at.token;
}

}  // namespace twin
