// For sources of passes and of the ring that are compiled without the passes that verify drafts: the
// names of cuda_few.cuh and cuda_rounds.cuh, of which nothing is used.
#pragma once

namespace twin {

constexpr bool FEW_TOKENS = false, STREAMED_ROUNDS = false;

struct Few {
  static constexpr int SLOTS = 1, BEGIN = 0, INPUT_BYTES = 0;
};

struct FewProducts {
  FewProducts(u32, const u8*, int, int) {}
  template <class At>
  void bring(int, At) const {}
  template <int UNIT, class Core, class Stage, class Rows, class At, class Emit>
  bool run(Core&, const Stage&, Rows, float*, At, Emit) const {
    return true;
  }
};

}  // namespace twin
