// Gated DeltaNet, and gates of attention's outputs. A header that is generated for such a model
// brings its own constants (twin/kernel/recurrent.py); with these the kernel has no code for them.
#pragma once

namespace twin {

#ifndef TWIN_DELTA
struct Delta {
  static constexpr bool ANY = false;
  static constexpr int KEY_DIM = 4, VALUE_DIM = 4;  // of a head
  static constexpr int CONV = 2;                    // positions that the convolution sees
  static constexpr int KEY_HEADS = 1, VALUE_HEADS = 1;  // of a rank
  static constexpr int COLUMNS = 4;  // of a head's state that an item has
};
#endif

#ifndef TWIN_OUTGOING
struct Outgoing {
  static constexpr bool GATED = false;  // each output of attention times the sigmoid of a number
};
#endif

}  // namespace twin
