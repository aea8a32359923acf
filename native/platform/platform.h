// The one place that chooses a platform. The interface is documented in README.md next to this
// file.
#pragma once

#include "facts.h"

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 SENTINEL = facts::SENTINEL;           // a NaN no arithmetic here produces
constexpr u32 PUBLISHED_NAN = 0x7FC00000u;          // what a NaN is published as
constexpr int COUNTER_STRIDE = facts::LINE_FLOATS;  // words: a counter has a line of its own
constexpr int PAGE_BYTES = facts::PAGE_BYTES;       // streams of blocks start on a page
constexpr int UNIT_BYTES = facts::UNIT_BYTES;       // of StageStart

struct Candidate {
  float logit;
  int index;
};
}  // namespace twin

#if defined(TWIN_PLATFORM)  // a test brings its own
#include TWIN_PLATFORM
#elif defined(__CUDACC__)
#include "cuda.cuh"
#elif defined(__HIP__)
#include "hip.h"
#else
#include "host.h"
#endif
