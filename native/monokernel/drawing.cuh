// What the block that draws knows of all blocks' logits, and how it looks at those of one bucket.
#pragma once

#include "logits_buffer.cuh"

namespace twin {

constexpr int LISTED = facts::SAMPLE_LISTED;  // logits that are compared one by one
constexpr int HELD = facts::SAMPLE_HELD;      // of a bucket, in shared memory
constexpr int PROBES = 16, ADDERS = 16;       // buckets requested at once; threads of each

static_assert(PROBES * PROBES == BUCKETS, "a bucket is found in two rounds");
static_assert(facts::FOUND_FLOATS + LEVEL * BUCKETS <= facts::PROBED_FLOATS,
              "what a crossing is found with may take the room of what it finds next");
static_assert(LISTED * 16 == LEVEL * BUCKETS * 4, "a list takes the room of the buckets");

struct Share {   // one block of one rank, in the order of the vocabulary
  double scale;  // of its weights next to those of the best logit of all
  u32 kept[2];   // the mass of what is kept
  float best;    // its best logit
  int down;      // that one's bucket, from the best one of all
  int start;     // of the bucket that is looked at: its first logit
  int before;    // and how many logits other shares have before it
  u32 equal;     // of its logits: as high as the lowest one kept
  int taken;     // of those
};

struct Tally {
  double mass;  // next to the best logit's weight
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
    static_assert(sizeof(Share) == 4 * facts::SHARE_FLOATS, "SHARE_FLOATS in memory.py is another");
  }

  __device__ __forceinline__ void put(int number, const Pack<SUMMARY>& said) const {
    const double mass = double(said.at[2]) + double(said.at[3]);
    const u64 whole = mass > 0 ? u64(mass) : 0;
    Share& share = shares[number];
    share.best = said.at[0];
    share.kept[0] = u32(whole), share.kept[1] = u32(whole >> 32);
  }
  __device__ __forceinline__ bool far() const { return b.plan.ranks > 1; }
  __device__ TWIN_LARGE const float* buffer(int share) const {
    return buffer_of(b, share / b.plan.blocks, share % b.plan.blocks);
  }
  __device__ __forceinline__ const float* logits(int share) const {
    return buffer(share) + FIRST;
  }
  __device__ __forceinline__ const float* levels(int share) const {
    return logits(share) + b.plan.block_logits;
  }
  static __device__ TWIN_LARGE u64 mass_of(const Share& share) {
    return whole_of(share.kept[0], share.kept[1]);
  }
  __device__ __forceinline__ bool enough(const Tally& seen) const {
    return by_count ? seen.count >= wanted.top_k : seen.mass >= needed;
  }

  // All weights, scaled.
  __device__ TWIN_LARGE double weigh(float best) {
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
  __device__ TWIN_LARGE Pack<4> level(int share, int at, bool& any) const {
    const int own = at == BUCKETS - 1 ? at : at - shares[share].down;
    any = own >= 0;
    return load_pack<4, 16>(levels(share) + LEVEL * (any ? own : 0), far());
  }

  // Looks at a bucket: where each share has it, and what it keeps above it.
  __device__ TWIN_LARGE void open(int bucket) {
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

  // crossing.cuh
  __device__ TWIN_LARGE int crossing(Tally& above);
  __device__ TWIN_LARGE void search(bool shared_out, int bucket, const Tally& over,
                                    Kept& kept);
  __device__ TWIN_LARGE void narrow(const Tally& above, int left, const u32* part,
                                    Found* found);
  __device__ TWIN_LARGE void compare(const Tally& above, int left, const Listed* list,
                                     Found* found);
  __device__ TWIN_LARGE void find(const Tally& above, u64 before, u64 weight, int number,
                                  int here, int left, u32 key, Found* found) const;

  // pick.cuh
  __device__ TWIN_LARGE void share_ties(const Kept& kept);
  __device__ TWIN_LARGE double kept_mass(float lowest) const;
  __device__ TWIN_LARGE int choose(double u, u64& into);
  __device__ TWIN_LARGE int pick(int number, u64 into, bool cut, const Kept& kept);

  // sampling.cuh
  __device__ __forceinline__ int token(const Candidate& best, u64 position);
};

}  // namespace twin
