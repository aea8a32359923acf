// Time steps of recurrent states, in steps and in prompt passes.
#pragma once

namespace twin {

// log(1 + exp(x)); what exp(x) loses next to one is below 1e-4 of a time step.
__device__ __forceinline__ float time_step(float x) {
  constexpr float FAR = 20.0f;
  if (x > FAR) return x;
  const float small = exp32(x);
  return small < 1e-4f ? small : log32(1.0f + small);
}

// A head's time step, which some models clamp.
__device__ __forceinline__ float clamped_step(float x) {
  float step = time_step(x);
  if constexpr (Delta::LEAST_STEP > 0.0f) step = step < Delta::LEAST_STEP ? Delta::LEAST_STEP : step;
  if constexpr (Delta::MOST_STEP > 0.0f) step = step > Delta::MOST_STEP ? Delta::MOST_STEP : step;
  return step;
}

}  // namespace twin
