// What a block reads of one value, and what platforms and stages share. Included by each platform
// once `__device__` means something.
#pragma once

#ifndef TWIN_LARGE
#define TWIN_LARGE __forceinline__  // of large functions that are called at several places
#endif

// What lies in the device's memory, not in shared memory: AMD's compiler asks.
#ifndef TWIN_GLOBAL
#define TWIN_GLOBAL(at) (at)
#endif
// A number that all threads of a warp have alike: AMD's compiler then keeps it, and what is looked
// up by it, in scalar registers.
#ifndef TWIN_SAME
#define TWIN_SAME(number) (number)
#endif

namespace twin {

// the maximum of nothing: finite, so that no difference of two maxima is undefined
constexpr float LOWEST = -1e30f;

// Parts whose elements are summed, in rank order: `parts` neighbours from `first` on, without the
// part `hole`.
struct Source {
  const float* base;  // part 0, element 0
  int stride;         // floats from part to part
  int parts;
  int first;
  int hole;     // left out; the last part or beyond leaves none out
  bool polled;  // wait for each element; otherwise something else proved that they are there
  bool lost;    // the wait for a counter was given up
  bool pushed;  // parts may come from other GPUs
  int swap;     // of two parts: 1 where the second comes first. Their sum has the same bits.

  __device__ int part(int p) const { return (first + p + (first + p >= hole)) ^ swap; }
  __device__ const float* at(int p) const { return base + long(part(p)) * stride; }
};

template <int N>
struct Pack {  // neighbouring exchanged elements
  float at[N];
};

}  // namespace twin
