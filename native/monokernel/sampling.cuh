// The next token; its definition is twin/engine/sampling.py.
//
// Each block divides its own logits into buckets and says in four words how much it has. The block
// that draws adds these up, so it looks at the logits of one bucket and of one block, not at all.
// Weights are whole numbers, whose sums do not depend on who adds first.
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

// ---- what each block makes of its logits --------------------------------------------------------

// A block's shelf in the memory of its rank. Its readers find it filled once they see the block's
// summary, so its words need no sentinel and no reset. Steps take two shelves in turn: one is
// filled again when all readers of the other have said so (docs/kernel.md).
//   [BUCKETS][count, mass (2 words), of the first one: the block's first token]  all up to here
//   [rows] logits, in the order of the vocabulary
//   [rows] logits, by bucket
constexpr int BUCKETS = facts::SAMPLE_BUCKETS, LEVEL = facts::LEVEL_FLOATS;
constexpr int SUMMARY = facts::SUMMARY_FLOATS;  // best logit, its token; mass, in two floats
constexpr int LISTED = facts::SAMPLE_LISTED;    // logits that are compared one by one
constexpr int MEETING = facts::MEETING_FLOATS;  // of the scratch: a value of each warp
constexpr int PROBES = 16, ADDERS = 16;         // buckets asked for at once; threads of each
constexpr float SHARPNESS = 16.0f;              // buckets of one temperature
constexpr float OUTERMOST = 0x1p23f;            // beyond it floats would skip buckets

static_assert(PROBES * PROBES == BUCKETS, "a bucket is found in two rounds");

__device__ __forceinline__ int shelf_rows(const Plan& plan) {
  return ((plan.shard_vocab + plan.blocks - 1) / plan.blocks + 3) / 4 * 4;
}
__device__ __forceinline__ float* shelf_of(const Block& b, int rank, int block) {
  const int size = LEVEL * BUCKETS + 2 * shelf_rows(b.plan);
  return b.launch.ranks[rank].shelves + long((b.at.step & 1) * b.plan.blocks + block) * size;
}
// Where the head's logits lie in the scratch meanwhile: behind its sums, and behind the buckets.
__device__ __forceinline__ float* head_logits(const Block& b) {
  const int sums = 2 * b.plan.half_floats, buckets = MEETING + LEVEL * BUCKETS;
  return b.scratch + (sums > buckets ? sums : buckets);
}

__device__ __forceinline__ bool cuts(const Block& b) {
  const Request& wanted = b.launch.request;
  return (wanted.top_k > 0 && wanted.top_k < b.plan.shard_vocab * b.plan.ranks) ||
         wanted.top_p < 1.0;
}

// The bucket of a logit, higher ones first. The same borders in every block, whatever it has.
__device__ __forceinline__ int bucket_of(float logit, float temperature) {
  const float wide = SHARPNESS / temperature, per = wide < 1e30f ? wide : 1e30f;
  float at = logit * per;
  at = at > -OUTERMOST ? at : -OUTERMOST;
  at = at < OUTERMOST ? at : OUTERMOST;
  const int whole = int(at);
  return whole - (float(whole) > at);
}

// A logit's weight beside that of the best one, 2**39. So few bits, that the weights of 2**24
// tokens fit 64; so many, that a weight has those of FP32 down to 2**-15.
__device__ __forceinline__ u64 weight_of(float logit, float best, float temperature) {
  const float weight = exp32((logit - best) / temperature);
  return weight > 0.0f ? u64(weight * 0x1p39f) : 0;
}

using i64 = long long;

__device__ __forceinline__ u64 whole_of(u32 low, u32 high) { return u64(low) | u64(high) << 32; }

// Adds to a number of two words that the block's threads share.
__device__ __forceinline__ void add_whole(Block& b, u32* at, u64 more) {
  const u32 low = u32(more), old = b.core.count(at, low),
            high = u32(more >> 32) + u32(u32(old + low) < old);
  if (high) b.core.count(at + 1, high);
}

// The sum of what the threads before this one have, and of what all have. Ends with a barrier.
template <class T>
__device__ __forceinline__ T sum_before(Block& b, T mine, T& total) {
  T* const met = reinterpret_cast<T*>(b.scratch);
  T before = 0, sum = mine;
  TWIN_ONCE
  for (int apart = 1; apart < b.core.warp_threads(); apart *= 2) {
    const T other = b.core.thread_apart(sum, apart);
    if (b.core.warp_thread() & apart) before += other;
    sum += other;
  }
  if (b.core.warp_thread() == 0) met[b.core.warp()] = sum;
  b.core.barrier();
  total = 0;
  T warps_before = 0;
  for (int w = 0; w < b.core.warps(); ++w) {
    if (w == b.core.warp()) warps_before = total;
    total += met[w];
  }
  b.core.barrier();
  return warps_before + before;
}

// A thread's neighbours of `count` things.
__device__ __forceinline__ Span neighbours(const Block& b, int count) {
  const int size = (count + b.core.threads() - 1) / b.core.threads(),
            lo = b.core.thread() * size < count ? b.core.thread() * size : count;
  return {lo, lo + size < count ? lo + size : count};
}

// The block's logits as the sampler wants them, onto its shelf; what it publishes of them, in every
// thread. Only thread 0 may publish it, and at once: the last barrier has ordered the shelf.
__device__ __forceinline__ Pack<SUMMARY> summarize(Block& b, const float* logit, int rows,
                                                   int first) {
  const Request& wanted = b.launch.request;
  const float heat = wanted.temperature;
  Candidate mine = {-infinity(), first};
  TWIN_EACH(i, rows) {
    const Candidate other = {logit[i], first + i};
    if (wins(other, mine)) mine = other;
  }
  const Candidate best = b.core.best(mine, wins);
  Pack<SUMMARY> said = {{best.logit, float(best.index), 0.0f, 0.0f}};
  if (heat == 0.0f) return said;
  const bool cut = cuts(b);
  const int room = shelf_rows(b.plan), top = bucket_of(best.logit, heat);
  TWIN_HOLDS(rows <= room);
  float *const shelf = shelf_of(b, b.rank, b.block), *const logits = shelf + LEVEL * BUCKETS,
               *const ranked = logits + room;
  u32* const bucket = reinterpret_cast<u32*>(b.scratch + MEETING);  // [BUCKETS][LEVEL]
  if (cut) {
    TWIN_EACH(i, LEVEL * BUCKETS) bucket[i] = 0;
    b.core.barrier();
  }
  u64 mass = 0;
  int tail = 0;  // of this thread: most logits are in the last bucket, and would all meet there
  TWIN_EACH(i, room) {
    const float one = i < rows ? logit[i] : -infinity();
    store_shared(logits + i, one);
    const u64 weight = weight_of(one, best.logit, heat);
    mass += weight;
    if (!cut || i >= rows) continue;
    const int at = top - bucket_of(one, heat);
    if (at < BUCKETS - 1) {
      b.core.count(bucket + LEVEL * at, 1);
      add_whole(b, bucket + LEVEL * at + 1, weight);
    } else {
      ++tail;
    }
  }
  mass = b.core.sum(mass);
  if (b.core.thread() == 0) store_shared(shelf + LEVEL - 1, bits_as<float>(first));
  if (cut) {
    const Span own = neighbours(b, BUCKETS);
    int count = 0, counted;
    u64 weight = 0, weighed;
    for (int k = own.lo; k < own.hi; ++k) {
      count += int(bucket[LEVEL * k]);
      weight += whole_of(bucket[LEVEL * k + 1], bucket[LEVEL * k + 2]);
    }
    int reached = sum_before(b, count, counted);
    u64 reached_mass = sum_before(b, weight, weighed);
    for (int k = own.lo; k < own.hi; ++k) {
      const bool last = k == BUCKETS - 1;
      u32* const at = bucket + LEVEL * k;
      at[LEVEL - 1] = u32(reached);  // where its next logit goes
      reached = last ? rows : reached + int(at[0]);
      reached_mass = last ? mass : reached_mass + whole_of(at[1], at[2]);
      store_shared(shelf + LEVEL * k, bits_as<float>(reached));
      store_shared(shelf + LEVEL * k + 1, bits_as<float>(u32(reached_mass)));
      store_shared(shelf + LEVEL * k + 2, bits_as<float>(u32(reached_mass >> 32)));
    }
    int tails, place = sum_before(b, tail, tails);
    place += rows - tails;
    TWIN_EACH(i, rows) {
      const int at = top - bucket_of(logit[i], heat);
      const int to =
          at < BUCKETS - 1 ? int(b.core.count(bucket + LEVEL * at + LEVEL - 1, 1)) : place++;
      store_shared(ranked + to, logit[i]);
    }
    b.core.barrier();
    b.core.confirm(shelf, LEVEL * BUCKETS + 2 * room);
  } else {
    b.core.confirm(shelf, LEVEL);
    b.core.confirm(logits, room);
  }
  b.core.barrier();
  said.at[2] = float(mass);
  said.at[3] = float(i64(mass) - i64(said.at[2]));
  return said;
}

// ---- what one block draws -----------------------------------------------------------------------

struct Share {      // one block of one rank, in the order of the vocabulary
  double scale;    // of its weights beside those of the best logit of all
  u32 kept[2];     // the mass of what is kept
  float best;      // its best logit
  int start;       // of the bucket that is looked at: its first logit
  int before;      // and how many logits other items have before it
  int equal;       // of its logits: as high as the lowest one kept
};

struct Tally {
  double mass;  // beside the best logit's weight
  int count;
};

struct Found {      // which logit is the lowest one kept
  double mass;      // of those above it, of the bucket
  double together;  // of all as high as it
  int count;        // above it
  int equal;        // as high
  u32 key;
};

struct Listed {
  u64 weight;
  u32 key;
};

// What is kept: logits above `threshold`, and of those equal to it the first `ties`. The threshold
// lies in `bucket`; `mass` of all that.
struct Kept {
  double mass;
  float threshold;
  int ties, bucket;
};

// e to the power of x <= 0, to 1e-15
__device__ __forceinline__ double exp64(double x) {
  if (!(x > -700.0)) return 0.0;
  const int n = int(x * 1.4426950408889634 - 0.5);
  const double r = x - n * 0.6931471805599453;
  double sum = 1.0;
  TWIN_ONCE
  for (int k = 16; k > 0; --k) sum = 1.0 + sum * r / double(k);
  return sum * bits_as<double>(u64(1023 + n) << 52);
}

// The block that draws. All its functions are called by all threads.
struct Drawing {
  Block& b;
  const Request& wanted;
  const int count;  // of items
  Share* const items;
  float* const room;  // scratch behind the items
  float top;          // the best logit of all
  int top_bucket;

  __device__ __forceinline__ explicit Drawing(Block& block)
      : b(block),
        wanted(block.launch.request),
        count(block.plan.blocks * block.plan.ranks),
        items(reinterpret_cast<Share*>(block.scratch + MEETING)),
        room(block.scratch + MEETING + facts::ITEM_FLOATS * count) {
    static_assert(sizeof(Share) == 4 * facts::ITEM_FLOATS, "ITEM_FLOATS in layout.py is another");
  }

  __device__ __forceinline__ const float* shelf(int item) const {
    return shelf_of(b, item / b.plan.blocks, item % b.plan.blocks);
  }
  __device__ __forceinline__ void put(int item, const Pack<SUMMARY>& said) const {
    const double mass = double(said.at[2]) + double(said.at[3]);
    const u64 whole = mass > 0 ? u64(mass) : 0;
    items[item].best = said.at[0];
    items[item].kept[0] = u32(whole), items[item].kept[1] = u32(whole >> 32);
  }
  __device__ __forceinline__ bool far() const { return b.plan.ranks > 1; }
  __device__ __forceinline__ const float* logits(int item) const {
    return shelf(item) + LEVEL * BUCKETS;
  }
  // beside those of the item
  __device__ __forceinline__ u64 weight(const Share& item, float logit) const {
    return weight_of(logit, item.best, wanted.temperature);
  }
  // beside those of all
  __device__ __forceinline__ u64 common(const Share& item, float logit) const {
    return u64(double(weight(item, logit)) * item.scale);
  }
  static __device__ __forceinline__ u32 key(float logit) { return key_of(logit + 0.0f); }

  // What an item has in buckets 0..at: the words of a level, and which of them count.
  __device__ __forceinline__ Pack<4> level(int item, int at, bool& any) const {
    const int down = top_bucket - bucket_of(items[item].best, wanted.temperature),
              own = at == BUCKETS - 1 ? at : at - down;
    any = own >= 0;
    return load_pack<4, 16>(shelf(item) + LEVEL * (any ? own : 0), far());
  }
  static __device__ __forceinline__ u64 mass_of(const Pack<4>& level) {
    return whole_of(bits_as<u32>(level.at[1]), bits_as<u32>(level.at[2]));
  }

  // All weights, scaled; what plain temperature keeps.
  __device__ __forceinline__ double weigh(float best) {
    top = best;
    top_bucket = bucket_of(top, wanted.temperature);
    const Span own = neighbours(b, count);
    double mine = 0, total;
    for (int i = own.lo; i < own.hi; ++i) {
      Share& item = items[i];
      item.scale = exp64((double(item.best) - double(top)) / double(wanted.temperature));
      mine += item.scale * double(whole_of(item.kept[0], item.kept[1]));
    }
    sum_before(b, mine, total);
    return total;
  }

  // The first bucket up to which there is enough, and what lies above it.
  template <class Enough>
  __device__ __forceinline__ int crossing(Enough enough, Tally& above) {
    constexpr int AT_ONCE = 9;  // 132 blocks in one round
    Tally* const part = reinterpret_cast<Tally*>(room);  // [PROBES][ADDERS]
    Tally* const reached = part + PROBES * ADDERS;         // [PROBES]
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
            const int item = i + j * ADDERS;
            seen[j] = level(item < count ? item : i, at, any[j]);
            any[j] = any[j] && item < count;
          }
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j) {
            if (!any[j]) continue;
            sum.mass += items[i + j * ADDERS].scale * double(mass_of(seen[j]));
            sum.count += bits_as<int>(seen[j].at[0]);
          }
        }
        part[k] = sum;
      }
      b.core.barrier();
      TWIN_EACH(p, PROBES) {
        Tally sum = {0.0, 0};
        for (int i = 0; i < ADDERS; ++i) {
          sum.mass += part[p * ADDERS + i].mass;
          sum.count += part[p * ADDERS + i].count;
        }
        reached[p] = sum;
      }
      b.core.barrier();
      int p = 0;
      for (; p < PROBES - 1 && !enough(reached[p]); ++p) above = reached[p];
      first += p * step;
    }
    return first;
  }

  // Looks at a bucket: where each item has it, and what it keeps above it. How many logits.
  __device__ __forceinline__ int open(int bucket) {
    const Span own = neighbours(b, count);
    int mine = 0, total;
    for (int i = own.lo; i < own.hi; ++i) {
      Share& item = items[i];
      bool some, any;
      const Pack<4> over = level(i, bucket ? bucket - 1 : 0, some), with = level(i, bucket, any);
      some = some && bucket > 0;
      item.start = some ? bits_as<int>(over.at[0]) : 0;
      item.kept[0] = some ? bits_as<u32>(over.at[1]) : 0;
      item.kept[1] = some ? bits_as<u32>(over.at[2]) : 0;
      item.equal = 0;
      item.before = any ? bits_as<int>(with.at[0]) - item.start : 0;
      mine += item.before;
    }
    int at = sum_before(b, mine, total);
    for (int i = own.lo; i < own.hi; ++i) {
      const int size = items[i].before;
      items[i].before = at;
      at += size;
    }
    b.core.barrier();
    return total;
  }

  // look(item, logit) of the bucket's logits, each by one thread.
  template <class Look>
  __device__ __forceinline__ void each(int logits_there, Look look) {
    constexpr int AT_ONCE = 4;
    const int stride = b.core.threads();
    TWIN_ONCE
    for (int k = b.core.thread(); k < logits_there; k += stride * AT_ONCE) {
      int item[AT_ONCE];
      float logit[AT_ONCE];
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) {
        const int at = k + j * stride < logits_there ? k + j * stride : k;
        int lo = 0, hi = count - 1;
        while (lo < hi) {
          const int middle = (lo + hi + 1) / 2;
          if (items[middle].before <= at) {
            lo = middle;
          } else {
            hi = middle - 1;
          }
        }
        item[j] = lo;
        logit[j] = load_shared(logits(lo) + shelf_rows(b.plan) + items[lo].start + at -
                                   items[lo].before,
                               far());
      }
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j)
        if (k + j * stride < logits_there) look(items[item[j]], logit[j]);
    }
  }

  // Logits are kept from the highest down until there is enough of them; ties_of(what lies above
  // the last one, what lies there) says how many of those as high as it.
  template <class Enough, class Ties>
  __device__ __forceinline__ Kept keep(Enough enough, Ties ties_of) {
    Tally above;
    const int bucket = crossing(enough, above), there = open(bucket);
    Found* const found = reinterpret_cast<Found*>(room);
    u32* const cursor = reinterpret_cast<u32*>(room + facts::FOUND_FLOATS - 1);
    static_assert(sizeof(Found) < 4 * facts::FOUND_FLOATS, "a cursor behind it");
    if (there == 0) return {above.mass, -infinity(), 0, bucket};  // rounding: all is too little
    u32* const part = reinterpret_cast<u32*>(room + facts::FOUND_FLOATS);
    u32 low = 0, high = 0xFFFFFFFFu;
    int left = there;  // logits of low..high
    if (left > LISTED) bounds(there, low, high);
    bool same = false;
    TWIN_ONCE
    while (left > LISTED && !same) {
      same = low == high;
      int shift = 0;
      while ((high - low) >> shift >= u32(BUCKETS)) ++shift;
      narrow(enough, above, there, left, low, high, shift, part, found);
      above.mass += found->mass;
      above.count += found->count;
      left = found->equal;
      const u32 down = found->key << shift, width = (1u << shift) - 1u;
      low = high - low - down <= width ? low : high - down - width;
      high -= down;
    }
    if (left > LISTED) {  // all the same, and all of them looked at
      b.core.barrier();
      if (b.core.thread() == 0) found->key = low;
      b.core.barrier();
    } else {
      compare(enough, above, there, left, low, high, cursor, found);
    }
    if (left <= LISTED) {
      above.mass += found->mass;
      above.count += found->count;
    }
    const int ties = ties_of(above, *found);
    const Kept kept = {above.mass + found->together / double(found->equal) * double(ties),
                       value_of(found->key), ties, bucket};
    b.core.barrier();
    return kept;
  }

  // The highest and the lowest of the bucket's logits.
  __device__ __forceinline__ void bounds(int there, u32& low, u32& high) {
    Candidate most = {-infinity(), 0}, least = {-infinity(), 0};
    each(there, [&](const Share&, float logit) {
      most.logit = logit > most.logit ? logit : most.logit;
      least.logit = -logit > least.logit ? -logit : least.logit;
    });
    high = key(b.core.best(most, wins).logit);
    low = key(-b.core.best(least, wins).logit);
  }

  // Which 256th of low..high the crossing lies in: as `key`, its logits as `equal`.
  template <class Enough>
  __device__ __forceinline__ void narrow(Enough enough, const Tally& above, int there, int left,
                                         u32 low, u32 high, int shift, u32* part, Found* found) {
    TWIN_EACH(i, LEVEL * BUCKETS) part[i] = 0;
    b.core.barrier();
    each(there, [&](const Share& item, float logit) {
      const u32 at = key(logit);
      if (at < low || at > high) return;
      u32* const to = part + u32(LEVEL) * ((high - at) >> shift);
      b.core.count(to, 1);
      add_whole(b, to + 1, common(item, logit));
    });
    b.core.barrier();
    const Span own = neighbours(b, BUCKETS);
    int number = 0, numbered;
    u64 weight = 0, weighed;
    for (int k = own.lo; k < own.hi; ++k) {
      number += int(part[LEVEL * k]);
      weight += whole_of(part[LEVEL * k + 1], part[LEVEL * k + 2]);
    }
    number = sum_before(b, number, numbered);
    weight = sum_before(b, weight, weighed);
    for (int k = own.lo; k < own.hi; ++k) {
      const int here = int(part[LEVEL * k]);
      const u64 weighs = whole_of(part[LEVEL * k + 1], part[LEVEL * k + 2]);
      const Tally so_far = {above.mass + double(weight), above.count + number},
                  with = {above.mass + double(weight + weighs), above.count + number + here};
      // where rounding leaves too little of all, up to the last
      if (here && !enough(so_far) && (enough(with) || number + here == left))
        *found = {double(weight), double(weighs), number, here, u32(k)};
      number += here;
      weight += weighs;
    }
    b.core.barrier();
  }

  // The same of few logits, each compared with all others.
  template <class Enough>
  __device__ __forceinline__ void compare(Enough enough, const Tally& above, int there, int left,
                                          u32 low, u32 high, u32* cursor, Found* found) {
    Listed* const list = reinterpret_cast<Listed*>(room + facts::FOUND_FLOATS);
    b.core.barrier();
    if (b.core.thread() == 0) *cursor = 0;
    b.core.barrier();
    each(there, [&](const Share& item, float logit) {
      const u32 at = key(logit);
      if (at >= low && at <= high) list[b.core.count(cursor, 1)] = {common(item, logit), at};
    });
    b.core.barrier();
    TWIN_EACH(i, left) {
      const u32 at = list[i].key;
      u64 higher = 0, same = 0;
      int number = 0, equal = 0;
      TWIN_ONCE
      for (int k = 0; k < left; ++k) {
        const Listed other = list[k];
        if (other.key > at) higher += other.weight, ++number;
        if (other.key == at) same += other.weight, ++equal;
      }
      const Tally so_far = {above.mass + double(higher), above.count + number},
                  with = {above.mass + double(higher + same), above.count + number + equal};
      // logits as high as this one say the same
      if (!enough(so_far) && (enough(with) || number + equal == left))
        *found = {double(higher), double(same), number, equal, at};
    }
    b.core.barrier();
  }

  // What each item keeps: of those as high as the lowest logit kept, the first of all.
  __device__ __forceinline__ void share_out(const Kept& kept, int there) {
    each(there, [&](Share& item, float logit) {
      if (logit > kept.threshold) add_whole(b, item.kept, weight(item, logit));
      if (logit == kept.threshold) b.core.count(reinterpret_cast<u32*>(&item.equal), 1);
    });
    b.core.barrier();
    const Span own = neighbours(b, count);
    int mine = 0, total;
    for (int i = own.lo; i < own.hi; ++i) mine += items[i].equal;
    int before = sum_before(b, mine, total);
    for (int i = own.lo; i < own.hi; ++i) {
      Share& item = items[i];
      const int left = kept.ties > before ? kept.ties - before : 0,
                taken = left < item.equal ? left : item.equal;
      before += item.equal;
      item.start = taken;
      const u64 mass = whole_of(item.kept[0], item.kept[1]) +
                       (taken ? u64(taken) * weight(item, kept.threshold) : 0);
      item.kept[0] = u32(mass), item.kept[1] = u32(mass >> 32);
    }
    b.core.barrier();
  }

  // The item in which `u` of all that is kept falls, and how far into its mass.
  __device__ __forceinline__ int choose(double u, u64& into) {
    double* const starts = reinterpret_cast<double*>(room);  // [items]
    const Span own = neighbours(b, count);
    double mine = 0, total;
    for (int i = own.lo; i < own.hi; ++i)
      mine += items[i].scale * double(whole_of(items[i].kept[0], items[i].kept[1]));
    double before = sum_before(b, mine, total);
    const double target = u * total;
    // the last one that begins before it: with rounded sums it may end there, too
    Candidate last = {-1.0f, 0};
    for (int i = own.lo; i < own.hi; ++i) {
      const double mass = items[i].scale * double(whole_of(items[i].kept[0], items[i].kept[1]));
      starts[i] = before;
      if (mass > 0 && before <= target) last = {float(i), i};
      before += mass;
    }
    const int item = b.core.best(last, wins).index;
    const u64 all = whole_of(items[item].kept[0], items[item].kept[1]);
    const double far_in = (target - starts[item]) / items[item].scale;
    into = far_in > 0 ? u64(far_in) : 0;
    into = into < all ? into : all - 1;
    return item;
  }

  // The token in vocabulary order whose weight takes the item's kept mass past `into`.
  __device__ __forceinline__ int pick(int number, u64 into, bool cut, const Kept& kept) {
    const Share& item = items[number];
    const float* const from = logits(number);
    const int quads = shelf_rows(b.plan) / 4;
    const Span own = neighbours(b, quads);
    // ties are counted where only some of them are kept
    const bool some = cut && item.start > 0 && item.start < item.equal;
    const float ties_from = item.start > 0 ? kept.threshold : infinity();
    int ties = 0;
    Pack<4> seen = {};
    if (some) {
      int mine = 0, all;
      for (int q = own.lo; q < own.hi; ++q) {
        seen = load_pack<4, 16>(from + 4 * q, far());
        for (int j = 0; j < 4; ++j) mine += seen.at[j] == kept.threshold;
      }
      ties = sum_before(b, mine, all);
    }
    const auto weigh_one = [&](float logit) -> u64 {
      if (cut && logit <= kept.threshold) {
        if (logit != ties_from) return 0;
        if (some && ties++ >= item.start) return 0;
      }
      return weight(item, logit);
    };
    const int ties_before = ties;
    u64 mine = 0, total;
    TWIN_ONCE
    for (int q = own.lo; q < own.hi; ++q) {
      seen = load_pack<4, 16>(from + 4 * q, far());
      TWIN_UNROLL
      for (int j = 0; j < 4; ++j) mine += weigh_one(seen.at[j]);
    }
    u64 reached = sum_before(b, mine, total);
    if (reached <= into && into < reached + mine) {
      int token = 0;
      ties = ties_before;
      TWIN_ONCE
      for (int q = own.lo; q < own.hi; ++q) {
        if (own.hi > own.lo + 1) seen = load_pack<4, 16>(from + 4 * q, far());
        TWIN_UNROLL
        for (int j = 0; j < 4; ++j) {
          const u64 weighs = weigh_one(seen.at[j]);
          if (reached <= into && into < reached + weighs) token = 4 * q + j;
          reached += weighs;
        }
      }
      b.at.token = token + bits_as<int>(load_shared(shelf(number) + LEVEL - 1, far()));
    }
    b.core.barrier();
    return b.at.token;
  }

  // Items have their best logits and their mass; `best` is the best of them.
  __device__ __forceinline__ int token(const Candidate& best, u64 position) {
    if (!finite(best.logit)) return -1;
    if (wanted.temperature == 0.0f) return best.index;
    const double all = weigh(best.logit);
    Kept kept = {all, -infinity(), 0, -1};
    const bool cut = cuts(b);
    if (wanted.top_k > 0 && wanted.top_k < b.plan.shard_vocab * b.plan.ranks)
      kept = keep([&](const Tally& seen) { return seen.count >= wanted.top_k; },
                  [&](const Tally& above, const Found&) { return wanted.top_k - above.count; });
    if (wanted.top_p < 1.0) {
      const double enough = wanted.top_p * kept.mass;
      const Kept before = kept;
      kept = keep([&](const Tally& seen) { return seen.mass >= enough; },
                  [&](const Tally& above, const Found& found) {
                    const double one = found.together / double(found.equal);
                    int ties = 1;
                    while (ties < found.equal && above.mass + double(ties) * one < enough) ++ties;
                    return ties;
                  });
      // of ties that top-k cut
      if (before.bucket >= 0 && (kept.threshold < before.threshold ||
                                 (kept.threshold == before.threshold && kept.ties > before.ties)))
        kept = before;
    }
    if (cut) share_out(kept, open(kept.bucket));
    u64 into = 0;
    const int item = choose(uniform(wanted.seed, position), into);
    return pick(item, into, cut, kept);
  }
};

}  // namespace twin
