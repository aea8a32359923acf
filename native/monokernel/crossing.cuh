// Which logit is the lowest one kept: the bucket in which the count or the mass is reached, then
// the logit among those of that bucket.
#pragma once

#include "drawing.cuh"

namespace twin {

// The first bucket up to which there is enough, and what lies above it.
__device__ TWIN_LARGE int Drawing::crossing(Tally& above) {
  constexpr int AT_ONCE = 9;  // 132 blocks in one round
  Tally* const part = reinterpret_cast<Tally*>(room);  // [PROBES][ADDERS]
  Tally* const reached = part + PROBES * ADDERS;        // [PROBES]
  int first = 0;
  above = {0.0, 0};
  TWIN_ONCE
  for (int step = PROBES; step; step /= PROBES) {
    TWIN_ONCE
    TWIN_EACH(k, PROBES * ADDERS) {
      const int at = first + (k / ADDERS + 1) * step - 1;
      Tally sum = {0.0, 0};
      TWIN_ONCE
      for (int i = k % ADDERS; i < count; i += ADDERS * AT_ONCE) {
        Pack<4> seen[AT_ONCE];
        bool any[AT_ONCE];
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
          const int share = i + j * ADDERS;
          seen[j] = level(share < count ? share : i, at, any[j]);
          any[j] = any[j] && share < count;
        }
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
          if (!any[j]) continue;
          sum.mass += shares[i + j * ADDERS].scale *
                      double(whole_of(bits_as<u32>(seen[j].at[1]), bits_as<u32>(seen[j].at[2])));
          sum.count += bits_as<int>(seen[j].at[0]);
        }
      }
      part[k] = sum;
    }
    b.core.barrier();
    TWIN_EACH(p, PROBES) {
      Tally sum = {0.0, 0};
      TWIN_UNROLL
      for (int i = 0; i < ADDERS; ++i) {
        sum.mass += part[p * ADDERS + i].mass;
        sum.count += part[p * ADDERS + i].count;
      }
      reached[p] = sum;
    }
    b.core.barrier();
    int p = 0;
    TWIN_UNROLL
    for (int i = 0; i < PROBES - 1; ++i) p += !enough(reached[i]);
    if (p) above = reached[p - 1];
    first += p * step;
  }
  b.core.barrier();  // the room may be used again
  return first;
}

// Where the crossing lies among a bucket's logits, or what shares keep of them.
__device__ TWIN_LARGE void Drawing::search(bool shared_out, int bucket, const Tally& over,
                                  Kept& kept) {
  open(bucket);
  if (there == 0) {  // rounding: all is too little
    if (!shared_out) kept = {over.mass, -infinity(), 0, bucket};
    return;
  }
  Found* const found = reinterpret_cast<Found*>(room);
  u32* const cursor = reinterpret_cast<u32*>(room + facts::FOUND_FLOATS - 1);
  static_assert(sizeof(Found) < 4 * facts::FOUND_FLOATS, "a cursor behind it");
  u32* const part = reinterpret_cast<u32*>(room + facts::FOUND_FLOATS);  // [BUCKETS][LEVEL]
  Listed* const list = reinterpret_cast<Listed*>(part);                  // [LISTED]
  Tally above = over;
  u32 low = 0, high = 0xFFFFFFFFu;  // keys of the logits that are left
  int left = there, shift = 0;
  Look look = shared_out ? Look::SHARE_OUT : there > LISTED ? Look::BOUNDS : Look::COMPARE;
  TWIN_ONCE
  for (bool ended = false; !ended;) {
    TWIN_ONCE
    TWIN_EACH(i, LEVEL * BUCKETS) part[i] = 0;
    if (b.core.thread() == 0) *cursor = 0;
    b.core.barrier();
    Candidate most = {-infinity(), 0}, least = {-infinity(), 0};
    each([&](Share& share, float logit) {
      const u32 key = key_of(logit + 0.0f);  // zeros are alike
      if (look == Look::BOUNDS) {
        most.logit = logit > most.logit ? logit : most.logit;
        least.logit = -logit > least.logit ? -logit : least.logit;
      } else if (look == Look::SHARE_OUT) {
        if (logit > kept.threshold) add_whole(b, share.kept, heat.weight(logit, share.best));
        if (logit == kept.threshold) b.core.count(&share.equal, 1);
      } else if (key >= low && key <= high) {
        const u64 weight = u64(double(heat.weight(logit, share.best)) * share.scale);
        if (look == Look::NARROW) {
          u32* const to = part + u32(LEVEL) * ((high - key) >> shift);
          b.core.count(to, 1);
          add_whole(b, to + 1, weight);
        } else {
          list[b.core.count(cursor, 1)] = {weight, key};
        }
      }
    });
    b.core.barrier();
    if (look == Look::SHARE_OUT) return;
    if (look == Look::BOUNDS) {
      high = key_of(b.core.best(most, higher).logit + 0.0f);
      low = key_of(-b.core.best(least, higher).logit + 0.0f);
      look = Look::NARROW;
    } else if (look == Look::NARROW) {
      narrow(above, left, part, found);
      ended = low == high;  // all the same
      if (!ended) {
        above.mass += found->mass;
        above.count += found->count;
        left = found->equal;
        const u32 down = found->key << shift, width = (1u << shift) - 1u;
        low = high - low - down <= width ? low : high - down - width;
        high -= down;
      }
      if (left <= LISTED) look = Look::COMPARE;
    } else {
      compare(above, left, list, found);
      ended = true;
    }
    shift = 0;
    TWIN_ONCE
    while ((high - low) >> shift >= u32(BUCKETS)) ++shift;
  }
  const Found last = *found;
  above.mass += last.mass;
  above.count += last.count;
  const double one = last.together / double(last.equal);
  int ties = wanted.top_k - above.count;
  if (!by_count) {
    const double more = (needed - above.mass) / one;
    ties = more < 1.0 ? 1 : more < double(last.equal) ? int(more) : last.equal;
    ties += ties < last.equal && above.mass + double(ties) * one < needed;
  }
  const u32 key = left > LISTED ? low : last.key;
  kept = {above.mass + one * double(ties), value_of(key), ties, bucket};
  b.core.barrier();
}

// Which 256th of what is left the crossing lies in: as `key`, its logits as `equal`.
__device__ TWIN_LARGE void Drawing::narrow(const Tally& above, int left, const u32* part,
                                  Found* found) {
  const Span own = neighbours(b, BUCKETS);
  const Content mine = tally_of(part, own);
  int numbered;
  u64 weighed;
  int number = sum_before(b, mine.count, numbered);
  u64 weight = sum_before(b, mine.weight, weighed);
  TWIN_ONCE
  for (int k = own.lo; k < own.hi; ++k) {
    const int here = int(part[LEVEL * k]);
    const u64 weighs = whole_of(part[LEVEL * k + 1], part[LEVEL * k + 2]);
    find(above, weight, weighs, number, here, left, u32(k), found);
    number += here;
    weight += weighs;
  }
  b.core.barrier();
}

// Few logits, each compared with all others.
__device__ TWIN_LARGE void Drawing::compare(const Tally& above, int left, const Listed* list,
                                   Found* found) {
  TWIN_ONCE
  TWIN_EACH(i, left) {
    const u32 at = list[i].key;
    u64 higher = 0, same = 0;
    int number = 0, equal = 0;
    TWIN_ONCE
    for (int k = 0; k < left; k += 4) {  // behind the last there are zeros
      TWIN_UNROLL
      for (int j = 0; j < 4; ++j) {
        const Listed other = list[k + j];
        if (other.key > at) higher += other.weight, ++number;
        if (other.key == at) same += other.weight, ++equal;
      }
    }
    // logits as high as this one say the same
    find(above, higher, same, number, equal, left, at, found);
  }
  b.core.barrier();
}

// Is there enough with these, and not without? Where rounding leaves too little, the last.
__device__ TWIN_LARGE void Drawing::find(const Tally& above, u64 before, u64 weight, int number,
                                int here, int left, u32 key, Found* found) const {
  const Tally without = {above.mass + double(before), above.count + number},
              with = {above.mass + double(before + weight), above.count + number + here};
  if (here && !enough(without) && (enough(with) || number + here == left))
    *found = {double(before), double(weight), number, here, key};
}

}  // namespace twin
