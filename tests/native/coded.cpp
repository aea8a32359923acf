// What an NVIDIA block makes of a tile of few-bit weights (native/platform/cuda_coded.cuh), thread
// by thread. Compiled with PACK_ELEMENTS, CODED_AS and COLUMNS; reads the input [COLUMNS] and a
// tile from stdin, the number of its rows from the command line, and writes its rows' sums.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __host__
#define __device__
#define __forceinline__ inline

#include "facts.h"

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
enum class Type { FP16, BF16, FP32 };
constexpr Type WEIGHT = Type::BF16;
constexpr int type_bytes(Type) { return 2; }
constexpr int UNIT_BYTES = facts::UNIT_BYTES, ROWS_AT_ONCE = facts::ROWS_AT_ONCE;

#define TWIN_CODED
constexpr u32 CODES = ~0u;
constexpr int CODED_PACK = PACK_ELEMENTS;

// ---- the machine --------------------------------------------------------------------------------

u8 chip[1 << 17];

void load_four(u32 at, u32* to) {
  if (at % 16) fprintf(stderr, "a load of 16 bytes at %u\n", at), exit(1);
  memcpy(to, chip + at, 16);
}
template <class To, class From>
To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
int dot4(u32 a, u32 b, int sum) {
  for (int i = 0; i < 4; ++i)
    sum += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
  return sum;
}
void load_two(u32 at, u32* to) {
  if (at % 8) fprintf(stderr, "a load of 8 bytes at %u\n", at), exit(1);
  memcpy(to, chip + at, 8);
}
void load_one(u32 at, u32* to) {
  if (at % 4) fprintf(stderr, "a load of 4 bytes at %u\n", at), exit(1);
  memcpy(to, chip + at, 4);
}
int dot4_unsigned(u32 a, u32 b, int sum) {
  for (int i = 0; i < 4; ++i) sum += int(a >> 8 * i & 255u) * int((signed char)(b >> 8 * i));
  return sum;
}
u32 bytes_of(u32 a, u32 b, u32 chosen) {
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 digit = chosen >> 4 * i & 7u, byte = (digit < 4 ? a : b) >> 8 * (digit % 4) & 255u;
    out |= (chosen >> 4 * i & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
u32 thread_of_warp() { return 0; }
int nearest(float x) { return int(lrintf(x)); }
template <Type T>
void unpack(u32 word, float& low, float& high) {
  if (T == Type::FP16) {
    const auto value = [](u32 half) {
      const float magnitude = bits_as<float>((half & 0x7FFFu) << 13) * 0x1p112f;
      return half & 0x8000u ? -magnitude : magnitude;
    };
    low = value(word & 0xFFFFu), high = value(word >> 16);
  } else {
    low = bits_as<float>(word << 16), high = bits_as<float>(word & 0xFFFF0000u);
  }
}
void four_e4m3(u32 word, float (&out)[4]);
float fmaxf(float a, float b) { return std::fmax(a, b); }
float fabsf(float a) { return std::fabs(a); }
}  // namespace twin

#include "coded.h"
#include "cuda_coded.cuh"

namespace twin {
void four_e4m3(u32 word, float (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = e4m3_value(word >> 8 * i & 255u);
}
struct Vector {
  static constexpr int VECTOR = CODED_PACK, PORTIONS = 1, AHEAD_GROUPS = 0;
  float at[PORTIONS][VECTOR];
  static bool valid(int, int) { return true; }
  static int local(int me) { return me * VECTOR; }
};
}  // namespace twin

namespace twin {
constexpr Code CODE = Code(CODED_AS);
float x[COLUMNS];

template <int LOADS_AT_ONCE>
std::vector<float> sums_of(int rows) {
  using As = Coding<CODE, LOADS_AT_ONCE>;
  std::vector<float> sums(rows + ROWS_AT_ONCE, 0.0f);
  for (int me = 0; me < COLUMNS / CODED_PACK; ++me) {
    Vector mine;
    memcpy(mine.at[0], x + me * CODED_PACK, sizeof mine.at[0]);
    Whole<Vector> whole;
    whole.set<As::ELEMENT>(mine);
    for (int first = 0; first < rows; first += As::ROWS) {
      CodedPiece<As::AT_ONCE> piece;
      piece.template load<As, Vector>(me, 0, 0, u32(COLUMNS * code_bits(CODE) / 8), first, rows);
      float sum[As::ROWS] = {};
      piece.template multiply<As>(0, mine, whole, sum);
      for (int r = 0; r < As::ROWS; ++r) sums[first + r] += sum[r];
    }
  }
  return sums;
}
}  // namespace twin

int main(int, char** words) {
  using namespace twin;
  const int rows = atoi(words[1]), loads = atoi(words[2]);
  if (fread(x, 4, COLUMNS, stdin) != COLUMNS || fread(chip, 1, sizeof chip, stdin) == 0) return 1;
  std::vector<float> sums = sums_of<ROWS_AT_ONCE>(rows);
  if (loads == 4) sums = sums_of<4>(rows);
  if constexpr (Coding<CODE>::PAIR == 2)
    if (loads == 2) sums = sums_of<2>(rows);
  fwrite(sums.data(), 4, rows, stdout);
}
