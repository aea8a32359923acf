// What a prompt pass multiplies experts for: entries, numbered token * EACH + place of the choice.
// Included by each platform.
#pragma once

namespace twin {

struct Entries {
  static constexpr int EACH = Experts::VISITED;  // of a token
  // that are visited: shared ones are numbered behind those that are chosen
  static constexpr int EXPERTS = Experts::COUNT + Experts::VISITED - Experts::TOP_K;
  static constexpr int LOGITS = Experts::COUNT + int(NonRouted::GATED);  // of a router
  // floats that a pass keeps of a token: experts and weights, [EACH] each, and what the output of
  // shared ones is multiplied by
  static constexpr int CHOICE = 2 * EACH + 1;
};

}  // namespace twin
