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

// the same of finite numbers that differ: less code
__device__ __forceinline__ bool higher(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit;
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
//   [4] its first token
//   [rows] logits, in the order of the vocabulary
//   [BUCKETS][count, mass (2 words)] of all up to each bucket
//   [rows] logits, by bucket
constexpr int BUCKETS = facts::SAMPLE_BUCKETS, LEVEL = facts::LEVEL_FLOATS;
constexpr int SUMMARY = facts::SUMMARY_FLOATS;  // best logit, its token; mass, in two floats
constexpr int LISTED = facts::SAMPLE_LISTED;    // logits that are compared one by one
constexpr int HELD = facts::SAMPLE_HELD;        // of a bucket, on the chip
constexpr int FIRST = 4;                        // words of a shelf before its logits
constexpr int MEETING = facts::MEETING_FLOATS;  // of the scratch: a value of each warp
constexpr int PROBES = 16, ADDERS = 16;         // buckets asked for at once; threads of each
constexpr float SHARPNESS = 16.0f;              // buckets of one temperature
constexpr float OUTERMOST = 0x1p23f;            // beyond it floats would skip buckets

static_assert(PROBES * PROBES == BUCKETS, "a bucket is found in two rounds");
static_assert(facts::FOUND_FLOATS + LEVEL * BUCKETS <= facts::PROBED_FLOATS,
              "what a crossing is found with may take the room of what it finds next");
static_assert(LISTED * 16 == LEVEL * BUCKETS * 4, "a list takes the room of the buckets");

__device__ __forceinline__ int shelf_rows(const Plan& plan) {
  return ((plan.shard_vocab + plan.blocks - 1) / plan.blocks + 3) / 4 * 4;
}
__device__ TWIN_APART float* shelf_of(const Block& b, int rank, int block) {
  const int size = FIRST + LEVEL * BUCKETS + 2 * shelf_rows(b.plan);
  return b.launch.ranks[rank].shelves + long((b.at.step & 1) * b.plan.blocks + block) * size;
}
// Where the head's logits lie in the scratch meanwhile: behind its sums, and behind the buckets.
__device__ __forceinline__ float* head_logits(const Block& b) {
  const int sums = 2 * b.plan.half_floats, buckets = MEETING + LEVEL * BUCKETS;
  return b.scratch + (sums > buckets ? sums : buckets);
}

__device__ __forceinline__ int all_tokens(const Plan& plan) {
  return plan.shard_vocab * plan.ranks;
}
__device__ TWIN_APART bool cuts(const Block& b) {
  const Request& wanted = b.launch.request;
  return (wanted.top_k > 0 && wanted.top_k < all_tokens(b.plan)) || wanted.top_p < 1.0 ||
         wanted.margin < double(infinity());
}

// A request's temperature, as logits are divided by it.
struct Heat {
  double by;  // rounded to FP32, a product with it is the quotient
  float per;  // buckets of one

  __device__ __forceinline__ explicit Heat(float temperature) : by(1.0 / double(temperature)) {
    const float wide = float(double(SHARPNESS) * by);
    per = wide < 1e30f ? wide : 1e30f;
  }

  // The bucket of a logit, higher ones last. The same borders in every block, whatever it has.
  __device__ TWIN_APART int bucket(float logit) const {
    float at = logit * per;
    at = at > -OUTERMOST ? at : -OUTERMOST;
    at = at < OUTERMOST ? at : OUTERMOST;
    const int whole = int(at);
    return whole - (float(whole) > at);
  }

  // A logit's weight beside that of the best one, 2**39. So few bits that the weights of 2**24
  // tokens fit 64; so many that a weight has those of FP32 down to 2**-15.
  __device__ TWIN_APART u64 weight(float logit, float best) const {
    const float weight = exp32(float(double(logit - best) * by));
    return weight > 0.0f ? u64(weight * 0x1p39f) : 0;
  }
};

using i64 = long long;

__device__ __forceinline__ u64 whole_of(u32 low, u32 high) { return u64(low) | u64(high) << 32; }

// Adds to a number of two words that the block's threads share.
__device__ TWIN_APART void add_whole(Block& b, u32* at, u64 more) {
  const u32 low = u32(more), old = b.core.count(at, low),
            high = u32(more >> 32) + u32(u32(old + low) < old);
  if (high) b.core.count(at + 1, high);
}

// The sum of what the threads before this one have, and of what all have. Ends with a barrier.
template <class T>
__device__ TWIN_APART T sum_before(Block& b, T mine, T& total) {
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
  TWIN_ONCE
  for (int w = 0; w < b.core.warps(); ++w) {
    if (w == b.core.warp()) warps_before = total;
    total += met[w];
  }
  b.core.barrier();
  return warps_before + before;
}

// A thread's neighbours of `count` things.
__device__ TWIN_APART Span neighbours(const Block& b, int count) {
  const int size = (count + b.core.threads() - 1) / b.core.threads(),
            lo = b.core.thread() * size < count ? b.core.thread() * size : count;
  return {lo, lo + size < count ? lo + size : count};
}

// What a thread's buckets hold.
struct Content {
  u64 weight;
  int count;
};
__device__ TWIN_APART Content tally_of(const u32* bucket, Span own) {
  Content all = {0, 0};
  TWIN_ONCE
  for (int k = own.lo; k < own.hi; ++k) {
    all.count += int(bucket[LEVEL * k]);
    all.weight += whole_of(bucket[LEVEL * k + 1], bucket[LEVEL * k + 2]);
  }
  return all;
}

// The block's logits as the sampler wants them, onto its shelf; what it publishes of them, in every
// thread. Only thread 0 may publish it, and at once: the last barrier has ordered the shelf.
__device__ TWIN_APART Pack<SUMMARY> summarize(Block& b, const float* logit, int rows,
                                              int first) {
  const Request& wanted = b.launch.request;
  Candidate mine = {-infinity(), first};
  TWIN_ONCE
  TWIN_EACH(i, rows) {
    const Candidate other = {logit[i], first + i};
    if (wins(other, mine)) mine = other;
  }
  const Candidate best = b.core.best(mine, wins);
  Pack<SUMMARY> said = {{best.logit, float(best.index), 0.0f, 0.0f}};
  if (wanted.temperature == 0.0f) return said;
  const Heat heat(wanted.temperature);
  const bool cut = cuts(b);
  const int room = shelf_rows(b.plan), top = heat.bucket(best.logit);
  TWIN_HOLDS(rows <= room);
  float *const shelf = shelf_of(b, b.rank, b.block), *const logits = shelf + FIRST,
               *const levels = logits + room, *const ranked = levels + LEVEL * BUCKETS;
  u32* const bucket = reinterpret_cast<u32*>(b.scratch + MEETING);  // [BUCKETS][LEVEL]
  if (cut) {
    TWIN_EACH(i, LEVEL * BUCKETS) bucket[i] = 0;
    b.core.barrier();
  }
  u64 mass = 0, ignored;
  // of this thread: most logits are in the last bucket, and would all meet there
  int tail = 0, tails;
  TWIN_ONCE
  TWIN_EACH(i, room) {
    const float one = i < rows ? logit[i] : -infinity();
    store_shared(logits + i, one);
    const u64 weight = heat.weight(one, best.logit);
    mass += weight;
    if (!cut || i >= rows) continue;
    const int at = top - heat.bucket(one);
    if (at < BUCKETS - 1) {
      b.core.count(bucket + LEVEL * at, 1);
      add_whole(b, bucket + LEVEL * at + 1, weight);
    } else {
      ++tail;
    }
  }
  mass = b.core.sum(mass);
  if (b.core.thread() == 0) store_shared(shelf, bits_as<float>(first));
  if (cut) {
    const Span own = neighbours(b, BUCKETS);
    Content mine = tally_of(bucket, own);
    int reached = sum_before(b, mine.count, tails);
    u64 reached_mass = sum_before(b, mine.weight, ignored);
    TWIN_ONCE
    for (int k = own.lo; k < own.hi; ++k) {
      const bool last = k == BUCKETS - 1;
      u32* const at = bucket + LEVEL * k;
      at[LEVEL - 1] = u32(reached);  // where its next logit goes
      reached = last ? rows : reached + int(at[0]);
      reached_mass = last ? mass : reached_mass + whole_of(at[1], at[2]);
      store_shared(levels + LEVEL * k, bits_as<float>(reached));
      store_shared(levels + LEVEL * k + 1, bits_as<float>(u32(reached_mass)));
      store_shared(levels + LEVEL * k + 2, bits_as<float>(u32(reached_mass >> 32)));
    }
    int place = sum_before(b, tail, tails);
    place += rows - tails;
    TWIN_ONCE
    TWIN_EACH(i, rows) {
      const int at = top - heat.bucket(logit[i]);
      const int to =
          at < BUCKETS - 1 ? int(b.core.count(bucket + LEVEL * at + LEVEL - 1, 1)) : place++;
      store_shared(ranked + to, logit[i]);
    }
    b.core.barrier();  // of all threads' words, before any is read back
  }
  b.core.confirm(shelf, FIRST + room + (cut ? LEVEL * BUCKETS + room : 0));
  b.core.barrier();
  said.at[2] = float(mass);
  said.at[3] = float(i64(mass) - i64(said.at[2]));
  return said;
}

// ---- what one block draws -----------------------------------------------------------------------

struct Share {   // one block of one rank, in the order of the vocabulary
  double scale;  // of its weights beside those of the best logit of all
  u32 kept[2];   // the mass of what is kept
  float best;    // its best logit
  int down;      // that one's bucket, from the best one of all
  int start;     // of the bucket that is looked at: its first logit
  int before;    // and how many logits other shares have before it
  u32 equal;     // of its logits: as high as the lowest one kept
  int taken;     // of those
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

// What is done with a bucket's logits, in this order: their highest and lowest, and a 256th of what
// lies between, as long as they are many; each compared with each; then what shares keep of them.
enum class Look { BOUNDS, NARROW, COMPARE, SHARE_OUT };

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
  const double r = x - n * 0.6931471805599453;  // -0.35 to 0.35
  double sum = 1.0 / 479001600.0;
  sum = sum * r + 1.0 / 39916800.0;
  sum = sum * r + 1.0 / 3628800.0;
  sum = sum * r + 1.0 / 362880.0;
  sum = sum * r + 1.0 / 40320.0;
  sum = sum * r + 1.0 / 5040.0;
  sum = sum * r + 1.0 / 720.0;
  sum = sum * r + 1.0 / 120.0;
  sum = sum * r + 1.0 / 24.0;
  sum = sum * r + 1.0 / 6.0;
  sum = sum * r + 0.5;
  sum = sum * r + 1.0;
  sum = sum * r + 1.0;
  return sum * bits_as<double>(u64(1023 + n) << 52);
}

// The block that draws. All its functions are called by all threads. Each stands in the code once:
// it is executed once a token, so it comes from far away.
struct Drawing {
  Block& b;
  const Request& wanted;
  const int count;  // of shares
  Share* const shares;
  float* const room;  // scratch behind the shares
  Heat heat;
  bool by_count;  // what is kept: top_k logits, or a mass
  bool held;      // the chip has the bucket's logits
  int opened;     // the bucket that is looked at
  int there;      // its logits
  double needed;  // of the mass

  __device__ __forceinline__ explicit Drawing(Block& block)
      : b(block),
        wanted(block.launch.request),
        count(block.plan.blocks * block.plan.ranks),
        shares(reinterpret_cast<Share*>(block.scratch + MEETING)),
        room(block.scratch + MEETING + facts::SHARE_FLOATS * count),
        heat(wanted.temperature),
        by_count(false),
        held(false),
        opened(-1),
        there(0),
        needed(0) {
    static_assert(sizeof(Share) == 4 * facts::SHARE_FLOATS, "SHARE_FLOATS in layout.py is another");
  }

  __device__ __forceinline__ void put(int number, const Pack<SUMMARY>& said) const {
    const double mass = double(said.at[2]) + double(said.at[3]);
    const u64 whole = mass > 0 ? u64(mass) : 0;
    Share& share = shares[number];
    share.best = said.at[0];
    share.kept[0] = u32(whole), share.kept[1] = u32(whole >> 32);
  }
  __device__ __forceinline__ bool far() const { return b.plan.ranks > 1; }
  __device__ TWIN_APART const float* shelf(int share) const {
    return shelf_of(b, share / b.plan.blocks, share % b.plan.blocks);
  }
  __device__ __forceinline__ const float* logits(int share) const {
    return shelf(share) + FIRST;
  }
  __device__ __forceinline__ const float* levels(int share) const {
    return logits(share) + shelf_rows(b.plan);
  }
  static __device__ TWIN_APART u64 mass_of(const Share& share) {
    return whole_of(share.kept[0], share.kept[1]);
  }
  __device__ __forceinline__ bool enough(const Tally& seen) const {
    return by_count ? seen.count >= wanted.top_k : seen.mass >= needed;
  }

  // All weights, scaled.
  __device__ TWIN_APART double weigh(float best) {
    const Span own = neighbours(b, count);
    const int top = heat.bucket(best);
    double mine = 0, total;
    TWIN_ONCE
    for (int i = own.lo; i < own.hi; ++i) {
      Share& share = shares[i];
      share.down = top - heat.bucket(share.best);
      share.scale = exp64((double(share.best) - double(best)) * heat.by);
      mine += share.scale * double(mass_of(share));
    }
    sum_before(b, mine, total);
    return total;
  }

  // What a share has in buckets 0..at of all: the words of a level, and whether they count.
  __device__ TWIN_APART Pack<4> level(int share, int at, bool& any) const {
    const int own = at == BUCKETS - 1 ? at : at - shares[share].down;
    any = own >= 0;
    return load_pack<4, 16>(levels(share) + LEVEL * (any ? own : 0), far());
  }

  // The first bucket up to which there is enough, and what lies above it.
  __device__ TWIN_APART int crossing(Tally& above) {
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

  // Looks at a bucket: where each share has it, and what it keeps above it.
  __device__ TWIN_APART void open(int bucket) {
    if (bucket == opened) return;
    opened = bucket, held = false;
    const Span own = neighbours(b, count);
    int mine = 0;
    TWIN_ONCE
    for (int i = own.lo; i < own.hi; ++i) {
      Share& share = shares[i];
      bool some, any;
      const Pack<4> over = level(i, bucket ? bucket - 1 : 0, some), with = level(i, bucket, any);
      some = some && bucket > 0;
      share.start = some ? bits_as<int>(over.at[0]) : 0;
      share.kept[0] = some ? bits_as<u32>(over.at[1]) : 0;
      share.kept[1] = some ? bits_as<u32>(over.at[2]) : 0;
      share.equal = 0;
      share.before = any ? bits_as<int>(with.at[0]) - share.start : 0;
      mine += share.before;
    }
    int at = sum_before(b, mine, there);
    TWIN_ONCE
    for (int i = own.lo; i < own.hi; ++i) {
      const int size = shares[i].before;
      shares[i].before = at;
      at += size;
    }
    b.core.barrier();
  }

  // look(share, logit) of the opened bucket's logits, each by one thread, the same each time. Its
  // share is the last one that begins no later. Those that the chip holds are loaded once.
  template <class One>
  __device__ __forceinline__ void each(One look) {
    constexpr int AT_ONCE = 4;
    const int stride = b.core.threads();
    float* const chip = room + facts::PROBED_FLOATS;         // [HELD]
    u16* const owner = reinterpret_cast<u16*>(chip + HELD);  // [HELD]
    TWIN_ONCE
    for (int k = b.core.thread(); k < there; k += stride * AT_ONCE) {
      int at[AT_ONCE], share[AT_ONCE] = {};
      float logit[AT_ONCE];
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) at[j] = k + j * stride < there ? k + j * stride : k;
      if (held) {
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) share[j] = owner[at[j]], logit[j] = chip[at[j]];
      } else {
        TWIN_ONCE
        for (int size = count; size > 1; size -= size / 2) {
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j) {
            const int middle = share[j] + size / 2;
            share[j] = shares[middle].before <= at[j] ? middle : share[j];
          }
        }
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
          const Share& one = shares[share[j]];
          logit[j] = load_shared(
              levels(share[j]) + LEVEL * BUCKETS + one.start + at[j] - one.before, far());
        }
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j)
          if (there <= HELD) owner[at[j]] = u16(share[j]), chip[at[j]] = logit[j];
      }
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j)
        if (k + j * stride < there) look(shares[share[j]], logit[j]);
    }
    held = there <= HELD;
  }

  // Where the crossing lies among a bucket's logits, or what shares keep of them.
  __device__ TWIN_APART void search(bool shared_out, int bucket, const Tally& over,
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
  __device__ TWIN_APART void narrow(const Tally& above, int left, const u32* part,
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
  __device__ TWIN_APART void compare(const Tally& above, int left, const Listed* list,
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
  __device__ TWIN_APART void find(const Tally& above, u64 before, u64 weight, int number,
                                  int here, int left, u32 key, Found* found) const {
    const Tally without = {above.mass + double(before), above.count + number},
                with = {above.mass + double(before + weight), above.count + number + here};
    if (here && !enough(without) && (enough(with) || number + here == left))
      *found = {double(before), double(weight), number, here, key};
  }

  // Of the logits as high as the lowest one kept, the first of the vocabulary are.
  __device__ TWIN_APART void share_ties(const Kept& kept) {
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
  __device__ TWIN_APART double kept_mass(float lowest) const {
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
  __device__ TWIN_APART int choose(double u, u64& into) {
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
  __device__ TWIN_APART int pick(int number, u64 into, bool cut, const Kept& kept) {
    const Share& share = shares[number];
    const float* const from = logits(number);
    const Span own = neighbours(b, shelf_rows(b.plan) / 4);
    const int taken = cut ? share.taken : 0;
    const bool some = taken > 0 && taken < int(share.equal);
    int ties_before = 0, all_ties, token = -1, loaded = -1;
    u64 reached = 0, all;
    const int first = bits_as<int>(load_shared(shelf(number), far()));
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

  // Shares have their best logits and their mass; `best` is the best of them.
  __device__ __forceinline__ int token(const Candidate& best, u64 position) {
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
};

}  // namespace twin
