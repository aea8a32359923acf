// Buckets of logits, and integers that a block's threads add up: their sums do not depend on
// who adds first.
#pragma once

#include "handoff.cuh"

namespace twin {

constexpr int BUCKETS = facts::SAMPLE_BUCKETS, LEVEL = facts::LEVEL_FLOATS;
constexpr int MEETING = facts::MEETING_FLOATS;  // of the scratch: a value of each warp

using i64 = long long;

__device__ __forceinline__ u64 whole_of(u32 low, u32 high) { return u64(low) | u64(high) << 32; }

// Adds to a number of two words that the block's threads share.
__device__ TWIN_LARGE void add_whole(Block& b, u32* at, u64 more) {
  const u32 low = u32(more), old = b.core.count(at, low),
            high = u32(more >> 32) + u32(u32(old + low) < old);
  if (high) b.core.count(at + 1, high);
}

// The sum of what the threads before this one have, and of what all have. Ends with a barrier.
template <class T>
__device__ TWIN_LARGE T sum_before(Block& b, T mine, T& total) {
  T* const met = reinterpret_cast<T*>(b.scratch);
  T before = 0, sum = mine;
  TWIN_ONCE
  for (int mask = 1; mask < b.core.warp_threads(); mask *= 2) {
    const T other = b.core.shuffle_xor(sum, mask);
    if (b.core.warp_thread() & mask) before += other;
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
__device__ TWIN_LARGE Span neighbours(const Block& b, int count) {
  const int size = (count + b.core.threads() - 1) / b.core.threads(),
            lo = b.core.thread() * size < count ? b.core.thread() * size : count;
  return {lo, lo + size < count ? lo + size : count};
}

// What a thread's buckets hold.
struct Content {
  u64 weight;
  int count;
};
__device__ TWIN_LARGE Content tally_of(const u32* bucket, Span own) {
  Content all = {0, 0};
  TWIN_ONCE
  for (int k = own.lo; k < own.hi; ++k) {
    all.count += int(bucket[LEVEL * k]);
    all.weight += whole_of(bucket[LEVEL * k + 1], bucket[LEVEL * k + 2]);
  }
  return all;
}

}  // namespace twin
