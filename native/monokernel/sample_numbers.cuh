// The sampler's numbers: the order of logits, its random number, weights next to the best logit.
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

constexpr float SHARPNESS = 16.0f;    // buckets of one temperature
constexpr float OUTERMOST = 0x1p23f;  // beyond it floats would skip buckets

// A request's temperature, as logits are divided by it.
struct Heat {
  double by;  // rounded to FP32, a product with it is the quotient
  float per;  // buckets of one

  __device__ __forceinline__ explicit Heat(float temperature) : by(1.0 / double(temperature)) {
    const float wide = float(double(SHARPNESS) * by);
    per = wide < 1e30f ? wide : 1e30f;
  }

  // The bucket of a logit, higher ones last. The same borders in every block, whatever it has.
  __device__ TWIN_LARGE int bucket(float logit) const {
    float at = logit * per;
    at = at > -OUTERMOST ? at : -OUTERMOST;
    at = at < OUTERMOST ? at : OUTERMOST;
    const int whole = int(at);
    return whole - (float(whole) > at);
  }

  // A logit's weight next to that of the best one, 2**39. So few bits that the weights of 2**24
  // tokens fit 64; so many that a weight has those of FP32 down to 2**-15.
  __device__ TWIN_LARGE u64 weight(float logit, float best) const {
    const float weight = exp32(float(double(logit - best) * by));
    return weight > 0.0f ? u64(weight * 0x1p39f) : 0;
  }
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

}  // namespace twin
