// What the routers of a model's layers do. A header that is generated for a model with experts
// brings its own constants (twin/kernel/experts.py); with these the kernel has no code for experts.
#pragma once

namespace twin {

#ifndef TWIN_EXPERTS
struct Experts {
  static constexpr bool ANY = false;
  // of a layer; of a token; columns of one's down projection
  static constexpr int COUNT = 1, TOP_K = 1, WIDTH = 1;
  // scores are sigmoids of the logits, else their softmax
  static constexpr bool SIGMOID = false;
  static constexpr bool NORMALISED = true;  // the chosen weights sum to one,
  static constexpr float SCALING = 1.0f;    // times this
};
#endif

// What stands beside routed experts.
#ifndef TWIN_BESIDE
struct Beside {
  static constexpr bool SHARED = false;  // experts that every token visits,
  static constexpr bool GATED = false;   // times the sigmoid of a logit behind the router's
  static constexpr bool DENSE = false;   // layers without experts
};
#endif

#ifndef TWIN_ROUTED_SHAPES
struct RoutedUp {};  // what a device's loaders know of experts of few-bit weights
struct RoutedDown {};
#endif

}  // namespace twin
