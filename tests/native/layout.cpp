// Of every column of a vector, who has it: TeamLayout in cuda_layout.cuh, both ways round. Compiled
// with ALL_COLUMNS, TILE_COLUMNS, TEAM_WARPS and EACH_COLUMNS; prints the columns that its two ways disagree on, or that no thread
// has.
#include <cstdio>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace twin {
using u32 = unsigned int;
enum class Code { PLAIN };
enum class Type { BF16 };
enum class StageKind { DELTA };
struct Stage {};
struct Plan {
  static constexpr u32 kinds = 0;
};
struct OtherShape {
  static constexpr int HEAD_DIM = 128;
};
constexpr Type WEIGHT = Type::BF16;
constexpr bool CODED = true;
constexpr int CONSUMER_WARPS = 8, HEAD_DIM = 128;
constexpr int type_bytes(Type) { return 2; }
constexpr int code_bits(Code) { return 16; }
}  // namespace twin

#include "cuda_layout.cuh"

int main() {
  using Layout = twin::TeamLayout<ALL_COLUMNS, TILE_COLUMNS, 16, TEAM_WARPS, 0, 0, EACH_COLUMNS>;
  std::vector<int> seen(ALL_COLUMNS);
  for (int me = 0; me < 32 * twin::CONSUMER_WARPS; ++me)
    for (int c = 0; c < Layout::PORTIONS; ++c) {
      if (!Layout::valid(me, c) || Layout::beyond(me, c)) continue;
      for (int i = 0; i < Layout::VECTOR; ++i) {
        const int column = Layout::column(me, c) + i;
        const Layout::Held held = Layout::held(twin::u32(column));
        ++seen[column];
        if (int(held.thread) != me || int(held.portion) != c || int(held.element) != i)
          printf("%d: thread %d, not %d\n", column, me, int(held.thread));
      }
    }
  for (int column = 0; column < ALL_COLUMNS; ++column)
    if (seen[column] != 1) printf("%d: %d threads\n", column, seen[column]);
}
