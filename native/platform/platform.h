// The one place that chooses a platform. The interface is documented in README.md beside this file.
#pragma once

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr u32 SENTINEL = 0xFFFFFFFFu;       // an exchanged word that is not yet written; a NaN no arithmetic here produces
constexpr u32 PUBLISHED_NAN = 0x7FC00000u;  // what a NaN is published as
constexpr int COUNTER_STRIDE = 32;          // words: a counter has a 128-byte line of its own
constexpr int PAGE_BYTES = 4096;            // streams of blocks start on a page
constexpr int UNIT_BYTES = 16;              // of StageStart

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
