// What each block makes of its logits: it divides them into buckets and says in four words how much
// it has.
#pragma once

#include "buckets.cuh"
#include "sample_numbers.cuh"

namespace twin {

// A block's logits buffer in the memory of its rank. Its readers find it filled once they see the
// block's summary, so its words need no sentinel and no reset. Steps take two buffers in turn: one
// is filled again when all readers of the other have said so (docs/kernel.md).
//   [FIRST] its first token
//   [rows] logits, in the order of the vocabulary
//   [BUCKETS][count, mass (2 words)] of all up to each bucket
//   [rows] logits, by bucket
constexpr int FIRST = facts::LOGITS_FIRST;  // of its words: a logit
constexpr int SUMMARY = facts::SUMMARY_FLOATS;  // best logit, its token; mass, in two floats

__device__ TWIN_LARGE float* buffer_of(const Block& b, int rank, int block) {
  const int size = b.plan.logits_buffer_floats;
  return b.launch.ranks[rank].logits_buffers + long((b.at.step & 1) * b.plan.blocks + block) * size;
}
// Where the head's logits lie in the scratch meanwhile: behind its sums, and behind the buckets.
__device__ __forceinline__ float* head_logits(const Block& b) {
  const int sums = 2 * b.plan.half_floats, buckets = MEETING + LEVEL * BUCKETS;
  return b.scratch + (sums > buckets ? sums : buckets);
}

__device__ __forceinline__ int all_tokens(const Plan& plan) {
  return plan.shard_vocab * plan.ranks;
}
__device__ TWIN_LARGE bool cuts(const Block& b) {
  const Request& wanted = b.launch.request;
  return (wanted.top_k > 0 && wanted.top_k < all_tokens(b.plan)) || wanted.top_p < 1.0 ||
         wanted.margin < double(infinity());
}

// The block's logits as the sampler wants them, into its buffer; what it publishes of them, in each
// thread. Only thread 0 may publish it, and at once: the last barrier has ordered the buffer.
__device__ TWIN_LARGE Pack<SUMMARY> summarize(Block& b, const float* logit, int rows,
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
  const int room = b.plan.block_logits, top = heat.bucket(best.logit);
  TWIN_HOLDS(rows <= room);
  float *const buffer = buffer_of(b, b.rank, b.block), *const logits = buffer + FIRST,
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
  if (b.core.thread() == 0) store_shared(buffer, bits_as<float>(first));
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
  b.core.confirm(buffer, FIRST + room + (cut ? LEVEL * BUCKETS + room : 0));
  b.core.barrier();
  said.at[2] = float(mass);
  said.at[3] = float(i64(mass) - i64(said.at[2]));
  return said;
}

}  // namespace twin
