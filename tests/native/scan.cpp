// A scan of cached keys and values as four warps of an NVIDIA block make it
// (native/platform/cuda_scan.cuh), every thread one of the operating system's. Tensor-core
// instructions are computed by their definition. Compiled with HEADDIM, STORED (FP16, BF16 or FP8)
// and WIDE_SCAN, 1 for sets of up to eight heads. Says how far the result lies from softmax attention
// in double precision, for every number of positions, and what it read that no position holds.
#include <pthread.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

enum class Type : int { FP32, BF16, FP16, FP8 };
constexpr Type WEIGHT = Type::STORED, KV = WEIGHT;
constexpr int HEAD_DIM = HEADDIM;
enum class Gate { SILU, GELU, RELU2 };
struct Family {  // as most have it
  static constexpr Gate GATE = Gate::SILU;
  static constexpr float SCORE_CAP = 0.0f, LOGIT_CAP = 0.0f, EMBEDDING = 1.0f;
};
struct Additions {
  static constexpr float GAIN = 1.0f, LIMIT = 0.0f, OFFSET = 0.0f;
};
constexpr int type_bytes(Type type) { return type == Type::FP8 ? 1 : 2; }

template <class To, class From>
To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace twin

#include "../../native/platform/cached_rows.h"
#include "../../native/platform/e4m3.h"

namespace twin {
u16 stored(float value) {
  if (MULTIPLIED == Type::FP16) return bits_as<u16>(_Float16(value));
  const u32 bits = bits_as<u32>(value);
  return u16((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);  // to nearest, ties to even
}
float number(u16 bits) {
  return MULTIPLIED == Type::FP16 ? float(bits_as<_Float16>(bits)) : bits_as<float>(u32(bits) << 16);
}
template <Type>
void unpack(u32 word, float& first, float& second) {
  first = number(u16(word)), second = number(u16(word >> 16));
}
template <Type>
u32 packed(float first, float second) {
  return u32(stored(first)) | u32(stored(second)) << 16;
}
// As it is cached, and what that stands for.
u16 cached(float value) { return KV == Type::FP8 ? u16(e4m3_bits(value)) : stored(value); }
float cached_number(u16 bits) { return KV == Type::FP8 ? e4m3_value(bits) : number(bits); }
u32 bytes_of(u32 a, u32 b, u32 chosen) {
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 at = chosen >> 4 * i & 7;
    out |= ((at < 4 ? a : b) >> at % 4 * 8 & 255u) << 8 * i;
  }
  return out;
}
template <bool UPPER>
u32 halves_of_e4m3(u32 four) {
  const u32 two = UPPER ? four >> 16 : four;
  return packed<Type::FP16>(e4m3_value(two & 255u), e4m3_value(two >> 8 & 255u));
}
float infinity() { return INFINITY; }
float exp32(float x) { return expf(x); }

// ---- a warp: 32 threads that meet for each collective instruction, through memory that all see

thread_local struct {
  int x;
} threadIdx = {0};
pthread_barrier_t meeting;
u32 threads[32][8];
u8* shared;  // addresses are offsets from it
u32 queries_at;  // behind it lie queries
std::atomic<bool> crowded{false};  // did rows of queries that are loaded together meet in a bank?

int me() { return threadIdx.x % 32; }
template <class Made>
auto together(Made made) {  // everybody has written its own row of `threads`
  pthread_barrier_wait(&meeting);
  auto result = made();
  pthread_barrier_wait(&meeting);
  return result;
}
void __syncwarp() { pthread_barrier_wait(&meeting); }
float __shfl_xor_sync(u32, float value, int mask) {
  threads[me()][0] = bits_as<u32>(value);
  return together([&] { return bits_as<float>(threads[me() ^ mask][0]); });
}
size_t __cvta_generic_to_shared(const void* at) {
  return size_t(static_cast<const u8*>(at) - shared);
}
u16 element(u32 row, int column) {
  u16 bits;
  memcpy(&bits, shared + row + 2 * column, 2);
  return bits;
}
template <class At>
// thread l of 8 i .. 8 i + 7 has the address of row l % 8 of matrix i
void matrices(u32 (&to)[4], u32 from, At at) {
  threads[me()][0] = from;
  together([&] {
    for (int i = 0; i < 4; ++i) to[i] = u32(at(i, 0)) | u32(at(i, 1)) << 16;
    for (int row = me() / 8 * 8; row < me() && from >= queries_at; ++row) {
      const u32 other = threads[row][0];
      if (other != from && other / 16 % 8 == from / 16 % 8) crowded = true;
    }
    return 0;
  });
}
void load_matrices(u32 (&to)[4], u32 from) {
  matrices(to, from,
           [](int i, int e) { return element(threads[8 * i + me() / 4][0], me() % 4 * 2 + e); });
}
void load_transposed(u32 (&to)[4], u32 from) {
  matrices(to, from,
           [](int i, int e) { return element(threads[8 * i + me() % 4 * 2 + e][0], me() / 4); });
}
u32 transposed(u32 fragment) {
  threads[me()][0] = fragment;
  return together([] {
    const auto at = [](int row, int column) {
      return threads[row * 4 + column / 2][0] >> column % 2 * 16 & 0xFFFFu;
    };
    return at(me() % 4 * 2, me() / 4) | at(me() % 4 * 2 + 1, me() / 4) << 16;
  });
}
template <Type>
void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(threads[me()], mine, sizeof mine);
  together([&] {
    for (int i = 0; i < 4; ++i) {
      const int row = me() / 4 + (i > 1 ? 8 : 0), column = me() % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const u32 x = threads[row % 8 * 4 + k % 8 / 2][(row > 7) + 2 * (k > 7)],
                  y = threads[column * 4 + k % 8 / 2][4 + (k > 7)];
        d[i] += number(u16(x >> k % 2 * 16)) * number(u16(y >> k % 2 * 16));
      }
    }
    return 0;
  });
}

}  // namespace twin

#include "../../native/platform/facts.h"
#include "../../native/platform/source.h"
#include "../../native/platform/cuda_scan.cuh"

namespace {

using namespace twin;
struct Heads {
  static constexpr int HEAD_DIM = HEADDIM;
};
using Scan = TileScan<Heads, WIDE_SCAN>;
constexpr int SIZE = type_bytes(KV), ROW = SIZE * HEAD_DIM;
constexpr int WIDTH = HEAD_DIM + 2;

// Positions from..to-1 of an item, the last of them the newest or not, in tiles of `tile`. The
// largest error, relative to the largest value. Sets of heads follow each other, and warps from the
// last to the first, as they meet.
double error(int from, int to, bool newest, int tile, int heads) {
  std::mt19937 chance(unsigned(to * 7 + from));
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> key(to), value(to);
  for (int p = from; p < to; ++p)
    for (int d = 0; d < HEAD_DIM; ++d)
      key[p].push_back(cached_number(cached(normal(chance)))),
          value[p].push_back(cached_number(cached(normal(chance))));
  std::vector<float> queries(heads * HEAD_DIM);
  for (float& one : queries) one = 0.3f * normal(chance);

  const int cached = newest ? to - 1 : to, tiles = (to - from + tile - 1) / tile;
  // NaNs, where nothing is held; behind the newest the queries, [heads][2] rows
  std::vector<u8> memory((size_t(tiles * 2 * tile + 2) * SIZE + 4 * heads + 4) * HEAD_DIM, 0xFF);
  shared = memory.data();
  u8* const fresh = shared + size_t(tiles) * 2 * tile * ROW;
  float* const stored_queries = reinterpret_cast<float*>(fresh + 2 * ROW);
  queries_at = u32(fresh - shared) + 2 * ROW;
  for (size_t i = 0; i < queries.size(); ++i) {
    const int head = int(i) / HEAD_DIM;
    Scan::store_query(stored_queries + head * HEAD_DIM, head, int(i % HEAD_DIM), queries[i]);
  }
  for (int p = from; p < to; ++p)
    for (int d = 0; d < HEAD_DIM; ++d) {
      const int swizzled = SIZE * d ^ int(row_swizzle<ROW>(u32(p))) << 4, row = (p - from) % tile;
      u8* const at = p < cached
                         ? shared + size_t((p - from) / tile * 2 * tile + row) * ROW + swizzled
                         : fresh + SIZE * d;
      const u16 k = twin::cached(key[p][d]), v = twin::cached(value[p][d]);
      memcpy(at, &k, SIZE);
      memcpy(at + (p < cached ? tile : 1) * ROW, &v, SIZE);
    }

  std::vector<float> results(Scan::PARTIALS * heads * WIDTH, NAN);
  const Scan::Found found(results.data(), Scan::PARTIALS * heads);
  for (int turn = 0; turn < Scan::WARPS * ((heads + Scan::HEADS - 1) / Scan::HEADS); ++turn) {
    const int warp = Scan::WARPS - 1 - turn % Scan::WARPS, head = turn / Scan::WARPS * Scan::HEADS,
              set = std::min(Scan::HEADS, heads - head);
    std::vector<std::thread> running;
    for (int thread = 0; thread < 32; ++thread)
      running.emplace_back([&, thread] {
        threadIdx.x = thread;
        Scan scan(stored_queries + head * HEAD_DIM, head, set, thread);
        const int products = (tile + Scan::POSITIONS - 1) / Scan::POSITIONS;
        for (int first = from; first < to; first += tile) {
          const bool streamed = first < cached;
          const u8* const rows =
              streamed ? shared + size_t((first - from) / tile) * 2 * tile * ROW : nullptr;
          scan.look({rows, rows + tile * ROW, fresh, std::min(tile, to - first),
                     streamed ? (newest ? to - 1 : -1) - first : 0, first},
                    (first - from) / tile * products, warp);
        }
        const Scan::Found rows = found.from(warp % Scan::PARTIALS * heads + head);
        if (Scan::MEET) scan.close();
        if (warp + Scan::PARTIALS < Scan::WARPS) scan.meet(rows, set);
        scan.put(rows, set);
      });
    for (std::thread& one : running) one.join();
  }

  double worst = 0, largest = 0;
  for (int h = 0; h < heads; ++h) {
    double top = -1e30, total = 0;
    std::vector<double> score(to), sum(HEAD_DIM);
    for (int p = from; p < to; ++p) {
      for (int d = 0; d < HEAD_DIM; ++d) score[p] += double(queries[h * HEAD_DIM + d]) * key[p][d];
      top = std::max(top, score[p]);
    }
    for (int p = from; p < to; ++p) {
      total += std::exp(score[p] - top);
      for (int d = 0; d < HEAD_DIM; ++d) sum[d] += std::exp(score[p] - top) * value[p][d];
    }
    double most = -1e30, all = 0;
    const auto row = [&](int warp) { return found.from(warp * heads + h / Scan::HEADS * Scan::HEADS); };
    const int in_set = h % Scan::HEADS;
    const auto end = [&](int warp, int i) { return double(row(warp).ends[2 * in_set + i]); };
    for (int w = 0; w < Scan::PARTIALS; ++w) most = std::max(most, end(w, 0));
    for (int w = 0; w < Scan::PARTIALS; ++w) all += end(w, 1) * std::exp(end(w, 0) - most);
    for (int d = 0; d < HEAD_DIM; ++d) {
      double made = 0;
      for (int w = 0; w < Scan::PARTIALS; ++w)
        made += row(w).outputs[Scan::Found::place(in_set, d)] * std::exp(end(w, 0) - most);
      const double off = std::fabs(made / all - sum[d] / total);
      worst = off > worst || std::isnan(off) ? off : worst;
      largest = std::max(largest, std::fabs(sum[d] / total));
    }
  }
  return worst / largest;
}

}  // namespace

// With an argument, only until a case is wrong.
int main(int words, char**) {
  pthread_barrier_init(&meeting, nullptr, 32);
  double worst = 0;
  const int cases[][5] = {// from, to, newest, tile, heads of one or several sets
                          {0, 1, 1, 16, 4},  {0, 16, 0, 16, 4}, {0, 17, 1, 16, 3},
                          {0, 17, 1, 32, 1}, {5, 40, 1, 32, 4}, {3, 100, 0, 64, 2},
                          {0, 90, 1, 16, 4}, {0, 100, 1, 24, 4}, {5, 77, 0, 24, 3},
                          {3, 70, 1, 32, 9}, {0, 100, 1, 24, 12}, {5, 140, 0, 32, 16}};
  for (const auto& one : cases) {
    const double off = error(one[0], one[1], one[2], one[3], one[4]);
    if (!(off < 1e-4)) {
      fprintf(stderr, "positions %d to %d, newest %d, tiles of %d, %d heads: off by %g\n", one[0],
              one[1], one[2], one[3], one[4], off);
      if (words > 1) return 1;
    }
    worst = off > worst || std::isnan(off) ? off : worst;
  }
  if (crowded) fprintf(stderr, "rows of queries meet in a bank\n");
  printf("%g\n", worst);
  return worst < 1e-4 && !crowded ? 0 : 1;
}
