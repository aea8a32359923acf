// The arithmetic that a model's family chooses (Family and Additions in the generated header).
#pragma once

namespace twin {

// GELU with tanh(u) for the error function is x (1 + tanh(u)) / 2, which is x / (1 + exp(-2 u)):
// this is -2 u. SiLU is x / (1 + exp(-x)).
__device__ __forceinline__ float gate_exponent(float x) {
  if constexpr (Family::GATE == Gate::GELU)
    return -1.5957691216057308f * (x + 0.044715f * x * x * x);
  return -Additions::GAIN * x;
}

// What a gate opens to, and what a row makes that no gate meets. A NaN passes.
__device__ __forceinline__ float activated(float x) {
  if constexpr (Family::GATE == Gate::RELU2) return x <= 0.0f ? 0.0f : x * x;
  return x / (1.0f + exp32(gate_exponent(x)));
}

// What a gate lets pass of its up row. A NaN passes.
__device__ __forceinline__ float through_gate(float gate, float up) {
  constexpr float LIMIT = Additions::LIMIT;
  if constexpr (LIMIT > 0.0f) {
    gate = gate > LIMIT ? LIMIT : gate;
    up = up > LIMIT ? LIMIT : up < -LIMIT ? -LIMIT : up;
  }
  const float open = activated(gate);
  return open * (Additions::OFFSET != 0.0f ? up + Additions::OFFSET : up);
}

// cap * tanh(x / cap). Of a small x it keeps what FP32 has below the cap's last bit: 4e-6 for 50.
__device__ __forceinline__ float softly(float x, float cap) {
  return cap - 2.0f * cap / (1.0f + exp32(2.0f / cap * x));
}

__device__ __forceinline__ float capped_score(float score) {
  if constexpr (Family::SCORE_CAP > 0.0f) return softly(score, Family::SCORE_CAP);
  return score;
}

__device__ __forceinline__ float capped_logit(float logit) {
  if constexpr (Family::LOGIT_CAP > 0.0f) return softly(logit, Family::LOGIT_CAP);
  return logit;
}

__device__ __forceinline__ float embedded(float element) {
  if constexpr (Family::EMBEDDING != 1.0f) return element * Family::EMBEDDING;
  return element;
}

}  // namespace twin
