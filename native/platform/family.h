// What a model's family does otherwise than Llama: its constants, and the arithmetic that rests on
// them alone. A header that is generated for such a family brings its own constants
// (twin/kernel/header.py); with these the kernel is the machine code that it was without them.
#pragma once

namespace twin {

#ifndef TWIN_FAMILY
struct Family {
  // gates pass through GELU, by its approximation with tanh, instead of SiLU
  static constexpr bool GELU = false;
  static constexpr bool NORMS_BEFORE = true;  // what a module reads is normed
  // what a module adds to the residual is normed: Stage::post_norm
  static constexpr bool NORMS_AFTER = false;
  // all heads of q are normed as one vector, and those of k
  static constexpr bool QK_NORMED_TOGETHER = false;
  static constexpr bool ROPE_BY_LAYER = false;  // Stage::rope
  static constexpr float EMBEDDING = 1.0f;      // factor of a token's embedding
  // factor of query times key; 0: 1 / sqrt(HEAD_DIM)
  static constexpr float SCORE = 0.0f;
  static constexpr float SCORE_CAP = 0.0f;  // cap * tanh(score / cap); 0: none
  static constexpr float LOGIT_CAP = 0.0f;
};
#endif

// GELU with tanh(u) for the error function is x (1 + tanh(u)) / 2, which is x / (1 + exp(-2 u)):
// this is -2 u. SiLU has -x in its place.
__device__ __forceinline__ float gelu_exponent(float x) {
  return -1.5957691216057308f * (x + 0.044715f * x * x * x);
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
