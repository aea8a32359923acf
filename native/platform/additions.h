// What a model's layers have besides those of Llama and of plain experts: sinks, biases, clamped
// gates. A header that is generated for such a model brings its own constants
// (twin/kernel/experts.py); with these the kernel has no code for them.
#pragma once

namespace twin {

#ifndef TWIN_ADDITIONS
struct Additions {
  static constexpr bool SINKS = false;        // each head's softmax has a logit without a value
  static constexpr bool OUTPUT_BIAS = false;  // of attention
  static constexpr bool EXPERT_BIAS = false;
  static constexpr float GAIN = 1.0f;    // of a gate within its sigmoid
  static constexpr float OFFSET = 0.0f;  // is added to what passes the gate
  static constexpr float LIMIT = 0.0f;   // clamps gates and what passes them; 0: not
};
#endif

}  // namespace twin
