// What a model's family does otherwise than Llama: its constants, and the arithmetic that rests on them alone. A header that is generated
// for such a family brings its own constants (twin/kernel/header.py); with these the kernel is the machine code that it was without them.
#pragma once

namespace twin {

#ifndef TWIN_FAMILY
struct Family {
  static constexpr bool GELU = false;                // gates pass through GELU, by its approximation with tanh, instead of SiLU
  static constexpr bool NORMS_BEFORE = true;         // what a module reads is normed
  static constexpr bool NORMS_AFTER = false;         // what a module adds to the residual stream is normed: Stage::post_norm
  static constexpr bool QK_NORMED_TOGETHER = false;  // all heads of q are normed as one vector, and those of k
  static constexpr bool ROPE_BY_LAYER = false;       // Stage::rope
  static constexpr float EMBEDDING = 1.0f;           // factor of a token's embedding
  static constexpr float SCORE = 0.0f;               // factor of query times key; 0: 1 / sqrt(HEAD_DIM)
  static constexpr float SCORE_CAP = 0.0f;           // cap * tanh(score / cap); 0: none
  static constexpr float LOGIT_CAP = 0.0f;
};
#endif

// A gate's activation. x / (1 + exp(-2 u)) is x (1 + tanh(u)) / 2.
__device__ __forceinline__ float activated(float gate) {
  if constexpr (Family::GELU) {
    const float bent = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + exp32(-2.0f * bent));
  } else {
    return gate / (1.0f + exp32(-gate));
  }
}

// cap * tanh(x / cap). Of a small x it keeps what FP32 has below the cap's last bit: 4e-6 for 50.
__device__ __forceinline__ float softly(float x, float cap) { return cap - 2.0f * cap / (1.0f + exp32(2.0f / cap * x)); }

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
