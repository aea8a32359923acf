// What an NVIDIA block makes of a tile of low-bit weights (native/platform/cuda_coded.cuh), thread
// by thread; FP4 warp by warp, whose threads are the operating system's. Compiled with
// PACK_ELEMENTS, CODED_AS, COLUMNS, TEAM_WARPS and TEAM_SLICES, ON_CHIP for an input in the
// block's memory (cuda_quantised.cuh), and ANY_EXPERTS, next to which it is
// gathered by fours; reads the input [COLUMNS] and a tile
// of each slice from stdin, the number of rows from the command line, and writes their sums.
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
#define TWIN_KEEP(x)
constexpr int UNIT_BYTES = facts::UNIT_BYTES, ROWS_AT_ONCE = facts::ROWS_AT_ONCE, CONSUMERS = 256;

struct Experts {
  static constexpr bool ANY = ANY_EXPERTS;
};
constexpr bool CODED = true;
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
struct Warp {
  pthread_barrier_t meeting;
  u32 threads[32][6];
};
thread_local u32 lane = 0;
thread_local Warp* warp = nullptr;

u32 thread_of_warp() { return lane; }
template <class Made>
auto together(Made made) {  // everybody has written its own row of `threads`
  pthread_barrier_wait(&warp->meeting);
  auto result = made();
  pthread_barrier_wait(&warp->meeting);
  return result;
}
template <class T>
T of_thread(T value, u32 from) {
  warp->threads[lane][0] = bits_as<u32>(value);
  return together([&] { return bits_as<T>(warp->threads[from % 32][0]); });
}
float of_neighbour(float value) { return of_thread(value, lane ^ 1u); }
int signed_byte(u32 word, int i) { return (signed char)(word >> 8 * i); }
// PTX ISA, "Matrix Fragments for mma.m16n8k32"
void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp->threads[lane], mine, sizeof mine);
  const auto& threads = warp->threads;
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
u32 upper_half(u32 word, u32 none) {  // FP16 numbers that are none would not stay as they are
  if (word & 0x88888888u || none) fprintf(stderr, "a word with signs\n"), exit(1);
  return word >> 16 | (word & 0xFFFF0000u);
}
float load_float(u32 at) {
  u32 bits;
  load_one(at, &bits);
  return bits_as<float>(bits);
}
void store_four(u32 at, const u32 (&from)[4]) {
  if (at % 16) fprintf(stderr, "a store of 16 bytes at %u\n", at), exit(1);
  memcpy(chip + at, from, 16);
}
void store_float(u32 at, float value) { memcpy(chip + at, &value, 4); }
void two_e4m3(u32 pair, float (&out)[2]);

struct Plan {
  static constexpr int ranks = 1, whole = 0, whole_units = (COLUMNS / PACK_ELEMENTS + 3) / 4 * 4,
                       scratch_floats = whole_units * (PACK_ELEMENTS / 2 + 1) + 4;
};
int nearest(float x) { return std::isfinite(x) ? int(lrintf(x)) : 0; }
float about_reciprocal(float x) { return 1.0f / x; }
int __ffs(int x) { return __builtin_ffs(x); }
constexpr u32 SENTINEL = facts::SENTINEL;
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

#include "source.h"

namespace twin {
template <int N, int ALIGNED, bool TOGETHER>
struct Side;  // of what is exchanged, which no test here gathers
}  // namespace twin

#include "coded.h"
#include "cuda_coded.cuh"

namespace twin {
template <class Layout, class Home>
struct Activation;
template <Code CODE>
struct Quantised {};
}  // namespace twin

#include "cuda_quantised.cuh"

namespace twin {
void four_e4m3(u32 word, float (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = e4m3_value(word >> 8 * i & 255u);
}
void two_e4m3(u32 pair, float (&out)[2]) {
  for (int i = 0; i < 2; ++i) out[i] = e4m3_value(pair >> 8 * i & 255u);
}
struct Vector {
  static constexpr int VECTOR = CODED_PACK, PORTIONS = 1, AHEAD_GROUPS = 0, TEAM = TEAM_WARPS,
                       SLICES = TEAM_SLICES, WIDTH = (COLUMNS / SLICES + 31) / 32 * 32;
  float at[PORTIONS][VECTOR];
  static int local(int me) { return me % (32 * TEAM) * VECTOR; }
  static int column(int me, int) { return me / (32 * TEAM) * WIDTH + local(me); }
  static bool valid(int me, int c) {
    return local(me) < WIDTH && column(me, c) < COLUMNS;
  }
  static bool beyond(int, int) { return false; }
  static constexpr int ELEMENTS = COLUMNS;
  static constexpr bool EQUAL = COLUMNS % WIDTH == 0;
  struct Held {
    u32 thread, portion, element;
  };
  static Held held(u32 column) {
    return {column / WIDTH * 32 * TEAM + column % WIDTH / VECTOR, 0, column % VECTOR};
  }
  static constexpr bool alike(int) { return true; }
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

// The same of an input in shared memory.
std::vector<float> wide_sums(int rows) {
  using Wide = Activation<Vector, Quantised<CODE>>;
  using As = typename Wide::As;
  constexpr u32 WHOLE = sizeof chip / 2;
  std::vector<float> sums(rows + As::ROWS, 0.0f);
  for (int me = 0; me < COLUMNS / CODED_PACK; ++me) {
    Portion mine;
    memcpy(mine.at[0], x + me * CODED_PACK, sizeof mine.at[0]);
    Wide::put(mine.at[0], WHOLE, me, 0);
  }
  for (int me = 0; me < COLUMNS / CODED_PACK; ++me) {
    const typename Wide::Taken taken(WHOLE, me, 0);
    for (int first = 0; first < rows; first += As::ROWS) {
      CodedPiece<As::AT_ONCE> piece;
      piece.template load<As, Vector>(me, 0, 0, u32(COLUMNS * code_bits(CODE) / 8), first, rows);
      float sum[As::ROWS] = {};
      taken.multiply(piece, sum);
      for (int r = 0; r < As::ROWS; ++r) sums[first + r] += sum[r];
    }
  }
  return sums;
}

// The same of a block's teams, each of a column slice; a warp stores its own sums. Slices' tiles
// follow each other. `put(mine, me)`: a thread's elements, before all threads meet;
// `dot(mine, me, from, bytes of a row, to)`.
template <class Put, class Dot>
std::vector<float> team_sums(int rows, Put put, Dot dot) {
  constexpr int WARPS = TEAM_WARPS * Vector::SLICES;
  std::vector<float> parts[WARPS];
  static Warp warps[WARPS];
  pthread_barrier_t block;
  pthread_barrier_init(&block, nullptr, 32 * WARPS);
  std::vector<std::thread> all;
  u32 begins[Vector::SLICES + 1] = {};
  const auto cols_of = [](int slice) {
    const int left = COLUMNS - slice * Vector::WIDTH;
    return left < Vector::WIDTH ? left : Vector::WIDTH;
  };
  constexpr int BLOCK = code_block(CODE) ? code_block(CODE) : COLUMNS;
  for (int slice = 0; slice < Vector::SLICES; ++slice) {
    const int blocks = (cols_of(slice) + BLOCK - 1) / BLOCK,
              bytes = whole_rows(CODE, rows) * cols_of(slice) * code_bits(CODE) / 8 +
                      scaled_rows(rows) * (blocks * scale_bytes(code_scale(CODE)) + (code_outer(CODE) ? 4 : 0));
    begins[slice + 1] = begins[slice] + u32(bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
  }
  for (int number = 0; number < WARPS; ++number) {
    pthread_barrier_init(&warps[number].meeting, nullptr, 32);
    parts[number].resize(rows);
  }
  for (int me = 0; me < 32 * WARPS; ++me)
    all.emplace_back([&, me] {
      lane = u32(me % 32), warp = &warps[me / 32];
      Vector mine = {};
      if (Vector::valid(me, 0)) memcpy(mine.at[0], x + Vector::column(me, 0), sizeof mine.at[0]);
      put(mine, me);
      pthread_barrier_wait(&block);
      const int slice = me / 32 / TEAM_WARPS;
      dot(mine, me, begins[slice], u32(cols_of(slice) * code_bits(CODE) / 8), parts[me / 32].data());
    });
  for (std::thread& one : all) one.join();
  std::vector<float> sums(rows, 0.0f);
  for (const auto& part : parts)
    for (int r = 0; r < rows; ++r) sums[r] += part[r];
  return sums;
}

constexpr u32 INPUT = sizeof chip / 2;  // where it lies in the block's memory

// All columns by the threads that there are.
template <class Wide>
void put_fours(const Vector&, int me) {
  for (int column = Wide::FOUR * me; column - Wide::FOUR * me < COLUMNS;
       column += Wide::FOUR * 32 * TEAM_WARPS * Vector::SLICES) {
    float four[Wide::FOUR] = {};
    if (column < COLUMNS) memcpy(four, x + column, sizeof four);
    Wide::put_four(four, INPUT, column, column < COLUMNS);
  }
  Wide::clear_others(INPUT, me);
}

// Of FP4.
template <class As>
std::vector<float> fragments_sums(int rows) {
  using Its = Fragments<Vector>;
  using Wide = Activation<Vector, Quantised<As::CODE>>;
  return team_sums(
      rows,
      [](const Vector& mine, int me) {
        if (ON_CHIP) put_fours<Wide>(mine, me);
        else Its::set(mine, me, INPUT);
        Its::clear(me, INPUT);
      },
      [&](const Vector&, int me, u32 from, u32 pitch, float* to) {
        const Its::Lane place(me, INPUT);
        for (int first = 0; first < rows; first += As::ROWS) {
          float sum[2] = {};
          Its::template dot<As>(place, from, pitch, first, rows,
                                u32(me / 32 / TEAM_WARPS * Vector::WIDTH / CODED_PACK), sum);
          Its::store(place, sum, rows - first, to + first);
        }
      });
}

// Of FP8, of an input that other threads than those who multiply it have quantised.
template <class As>
std::vector<float> by_fours_sums(int rows) {
  using Wide = Activation<Vector, Quantised<As::CODE>>;
  return team_sums(
      rows, put_fours<Wide>,
      [&](const Vector&, int me, u32 from, u32 pitch, float* to) {
        const typename Wide::Taken taken(INPUT, me, 0);
        for (int first = 0; first < rows; first += As::ROWS) {
          CodedPiece<As::AT_ONCE> piece;
          piece.template load<As, Vector>(me, 0, from, pitch, first, rows);
          float sum[As::ROWS] = {};
          taken.multiply(piece, sum);
          for (int r = 0; r < As::ROWS && first + r < rows; ++r) {
            float total = 0;
            for (u32 thread = 0; thread < 32; ++thread) total += of_thread(sum[r], thread);
            if (lane == 0) to[first + r] = total;
          }
        }
      });
}
}  // namespace twin

int main(int, char** words) {
  using namespace twin;
  const int rows = atoi(words[1]), loads = atoi(words[2]);
  if (fread(x, 4, COLUMNS, stdin) != COLUMNS || fread(chip, 1, sizeof chip, stdin) == 0) return 1;
  if (ANY_EXPERTS) memset(chip + INPUT, 255, sizeof chip - INPUT);  // what other stages left there
  std::vector<float> sums;
  if constexpr (Coding<CODE>::TENSOR) {
    sums = fragments_sums<Coding<CODE>>(rows);
  } else if constexpr (ON_CHIP && ANY_EXPERTS) {
    sums = by_fours_sums<Coding<CODE>>(rows);
  } else if constexpr (ON_CHIP) {
    sums = wide_sums(rows);
  } else {
    sums = loads == 4 ? sums_of<4>(rows) : sums_of<ROWS_AT_ONCE>(rows);
    if constexpr (Coding<CODE>::PAIR == 2)
      if (loads == 2) sums = sums_of<2>(rows);
  }
  fwrite(sums.data(), 4, rows, stdout);
}
