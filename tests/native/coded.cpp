// What an NVIDIA block makes of a tile of few-bit weights (native/platform/cuda_coded.cuh), thread
// by thread; FP4 warp by warp, whose threads are the operating system's. Compiled with
// PACK_ELEMENTS, CODED_AS, COLUMNS and TEAM_WARPS; reads the input [COLUMNS] and a tile from stdin,
// the number of its rows from the command line, and writes its rows' sums.
#include <pthread.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
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

// A warp: threads that meet for each instruction of all of them, through memory that all see. What
// has no such instruction runs as one thread.
thread_local u32 lane = 0;
pthread_barrier_t meeting;
u32 threads[32][6];

u32 thread_of_warp() { return lane; }
template <class Made>
auto together(Made made) {  // everybody has written its own row of `threads`
  pthread_barrier_wait(&meeting);
  auto result = made();
  pthread_barrier_wait(&meeting);
  return result;
}
template <class T>
T of_thread(T value, u32 from) {
  threads[lane][0] = bits_as<u32>(value);
  return together([&] { return bits_as<T>(threads[from % 32][0]); });
}
float thread_beside(float value) { return of_thread(value, lane ^ 1u); }
int signed_byte(u32 word, int i) { return (signed char)(word >> 8 * i); }
// PTX ISA, "Matrix Fragments for mma.m16n8k32"
void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(threads[lane], mine, sizeof mine);
  together([&] {
    for (int i = 0; i < 4; ++i) {
      const int row = int(lane) / 4 + (i > 1 ? 8 : 0), column = int(lane) % 4 * 2 + i % 2;
      for (int k = 0; k < 32; ++k) {
        const u32 x = threads[row % 8 * 4 + k % 16 / 4][(row > 7) + 2 * (k > 15)],
                  y = threads[column * 4 + k % 16 / 4][4 + (k > 15)];
        d[i] += signed_byte(x, k % 4) * signed_byte(y, k % 4);
      }
    }
    return 0;
  });
}
void load_half(u32 at, u32* to) {
  if (at % 2) fprintf(stderr, "a load of 2 bytes at %u\n", at), exit(1);
  to[0] = chip[at] | u32(chip[at + 1]) << 8;
}
void two_e4m3(u32 pair, float (&out)[2]);
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
void two_e4m3(u32 pair, float (&out)[2]) {
  for (int i = 0; i < 2; ++i) out[i] = e4m3_value(pair >> 8 * i & 255u);
}
struct Vector {
  static constexpr int VECTOR = CODED_PACK, PORTIONS = 1, AHEAD_GROUPS = 0, WIDTH = COLUMNS,
                       TEAM = TEAM_WARPS, EACH = (WIDTH / VECTOR + TEAM - 1) / TEAM,
                       LANES = (EACH + 7) / 8 * 8;
  static_assert(LANES <= 32, "a team covers a tile");
  float at[PORTIONS][VECTOR];
  static bool valid(int, int) { return true; }
  static int local(int me) { return me * VECTOR; }
};
// whose threads lie as those of a team
struct Dealt : Vector {
  static int local(int me) { return (me / 32 * LANES + me % 32) * VECTOR; }
  static bool valid(int me, int) { return me % 32 < LANES && local(me) < COLUMNS; }
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
    Input<Vector> input;
    input.whole.set<As::ELEMENT>(mine);
    for (int first = 0; first < rows; first += As::ROWS) {
      CodedPiece<As::AT_ONCE> piece;
      piece.template load<As, Vector>(me, 0, 0, u32(COLUMNS * code_bits(CODE) / 8), first, rows);
      float sum[As::SUMS] = {};
      piece.template multiply<As>(0, mine, input, sum);
      for (int r = 0; r < As::ROWS; ++r) sums[first + r] += sum[r];
    }
  }
  return sums;
}

// The same of a team's warps, one after the other; a warp stores its own sums.
template <class As>
std::vector<float> team_sums(int rows) {
  std::vector<float> sums(rows, 0.0f);
  pthread_barrier_init(&meeting, nullptr, 32);
  for (int warp = 0; warp < TEAM_WARPS; ++warp) {
    std::vector<float> part(rows);
    std::vector<std::thread> all;
    for (u32 number = 0; number < 32; ++number)
      all.emplace_back([&, number] {
        lane = number;
        const int me = 32 * warp + int(number);
        Dealt mine = {};
        if (Dealt::valid(me, 0)) memcpy(mine.at[0], x + Dealt::local(me), sizeof mine.at[0]);
        Input<Dealt> input;
        input.fragments.set(mine);
        for (int first = 0; first < rows; first += As::ROWS) {
          CodedPiece<> piece;
          piece.template load<As, Dealt>(me, 0, 0, u32(COLUMNS * code_bits(CODE) / 8), first, rows);
          float sum[As::SUMS] = {};
          piece.template multiply<As>(0, mine, input, sum);
          FragmentPiece::store<Dealt>(sum, rows - first, part.data() + first);
        }
      });
    for (std::thread& one : all) one.join();
    for (int r = 0; r < rows; ++r) sums[r] += part[r];
  }
  return sums;
}
}  // namespace twin

int main(int, char** words) {
  using namespace twin;
  const int rows = atoi(words[1]), loads = atoi(words[2]);
  if (fread(x, 4, COLUMNS, stdin) != COLUMNS || fread(chip, 1, sizeof chip, stdin) == 0) return 1;
  std::vector<float> sums;
  if constexpr (Coding<CODE>::TENSOR) {
    sums = team_sums<Coding<CODE>>(rows);
  } else {
    sums = loads == 4 ? sums_of<4>(rows) : sums_of<ROWS_AT_ONCE>(rows);
    if constexpr (Coding<CODE>::PAIR == 2)
      if (loads == 2) sums = sums_of<2>(rows);
  }
  fwrite(sums.data(), 4, rows, stdout);
}
