// Attention of one token over tiles of cached keys and values, on the tensor cores.
// tests/native/scan.cpp runs it thread by thread on a CPU.
#pragma once

#include "family.h"

namespace twin {

// Two numbers, or what 16 bits lose of them.
__device__ __forceinline__ u32 packed(float first, float second, bool lost) {
  const u32 word = packed<KV>(first, second);
  float high, higher;
  unpack<KV>(word, high, higher);
  return lost ? packed<KV>(first - high, second - higher) : word;
}

// Part of an item on the chip: its keys, its values, and the newest of each where it is one of
// them.
struct CacheTile {
  const u8 *keys, *values, *fresh;
  int count;  // positions
  int here;   // the newest, or one that the tile does not have
  int first;  // its first position of the item
};

// Running softmax of some query heads over the positions of one warp. A product compares 16
// positions with 8 columns. Queries are there twice, rounded to 16 bits and what that loses; so are
// probabilities, so that results have the precision of the cached values. Up to 4 heads are columns
// twice. Of up to 8 (WIDE) a second product adds what rounding loses: each key and value is still
// loaded once, and a thread keeps as many scores and outputs. These are of positions thread / 4 and
// 8 more, and of heads 2 * (thread % 4), of four 2 * (thread % 2), and one more.
template <bool WIDE>
struct TileScan {
  static constexpr int WARPS = facts::TENSOR_WARPS;          // that share an item's positions
  static constexpr int POSITIONS = facts::TENSOR_POSITIONS;  // of a product
  static constexpr int STEPS = (HEAD_DIM + 15) / 16, HEADS = (WIDE ? 2 : 1) * facts::TENSOR_HEADS;
  static constexpr int PARTS = WIDE ? 2 : 1;  // products: of rounded queries and of what is lost
  // On the chip at once, of a set. Those of 16 heads of 128 elements by four warps would be 33 KiB,
  // two slots of a ring, so warps meet before.
  static constexpr int PARTIALS = WIDE ? facts::WIDE_PARTIALS : WARPS;
  static constexpr bool MEET = PARTIALS < WARPS;
  static_assert((WARPS & (WARPS - 1)) == 0, "twin/kernel/scan.py: warps take turns by a mask");
  static_assert(WARPS % PARTIALS == 0, "twin/kernel/scan.py: as many warps meet each time");
  static_assert(POSITIONS == 16 && facts::TENSOR_HEADS == 4,
                "twin/plan/splits.py: an m16n8k16 product has 16 positions and 4 heads twice");
  static constexpr int BYTES = HEAD_DIM * type_bytes(KV);  // of a key

  // Queries of wider heads are looked up on the chip for each product: in registers they spilled.
  static constexpr bool KEPT = HEAD_DIM <= facts::KEPT_HEAD;

  int thread;        // of the warp
  const u32* asked;  // this thread's elements of its query; null: it has none
  u32 query[KEPT ? STEPS * PARTS : 1][2];
  float output[STEPS][4];
  float most[2], total[2];

  __device__ __forceinline__ static float apart(float v, int threads) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, threads);
  }

  // Element d of a query, into [2][HEAD_DIM] of 16 bits: rounded, and what that loses.
  __device__ __forceinline__ static void store_query(float* head, int d, float value) {
    u16* const to = reinterpret_cast<u16*>(head) + d;
    to[0] = u16(packed(value, value, false));
    to[HEAD_DIM] = u16(packed(value, value, true));
  }

  // `queries` lie on the chip, as they were stored.
  __device__ __forceinline__ TileScan(const float* queries, int heads, int thread)
      : thread(thread) {
    const int head = thread / 4 % HEADS, lost = thread / 4 / HEADS;
    asked = head < heads ? reinterpret_cast<const u32*>(queries + head * HEAD_DIM) +
                               lost * (HEAD_DIM / 2) + thread % 4
                         : nullptr;
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < 2 * STEPS * PARTS; ++i) query[i / 2][i % 2] = element(i);
    }
#pragma unroll
    for (int m = 0; m < STEPS; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) output[m][i] = 0.0f;
    most[0] = most[1] = LOWEST;
    total[0] = total[1] = 0.0f;
  }

  // Of step number / 2 / PARTS, that of a product's first columns or its last ones.
  __device__ __forceinline__ u32 element(int number) const {
    const int at = number / (2 * PARTS) * 2 + number % 2, lost = number / 2 % PARTS;
    return asked ? asked[4 * at + lost * (HEAD_DIM / 2)] : 0u;
  }

  // Where a row begins, and how its 16-byte units are twisted: a thread's own.
  struct Row {
    u32 at, twist;

    __device__ __forceinline__ Row(const CacheTile& tile, const u8* rows, const u8* fresh,
                                   int row) {
      const int held = row < tile.count ? row : 0;  // numbers, also where nothing is held
      const bool near = held == tile.here;
      at = u32(__cvta_generic_to_shared(near ? fresh : rows + held * BYTES));
      twist = near ? 0u : u32(tile.first + held) & 7u;
    }
    __device__ __forceinline__ u32 unit(int number) const {
      return at + ((u32(number) ^ twist) << 4);
    }
  };

  // The tile's positions whose turn it is, `made` products of the item having been made before, by
  // the warp `me` of WARPS.
  __device__ __forceinline__ void look(const CacheTile& tile, int made, int me) {
    if (me >= WARPS) return;
#pragma unroll 1
    for (int at = ((me - made) & (WARPS - 1)) * POSITIONS; at < tile.count; at += WARPS * POSITIONS)
      product(tile, at);
  }

  __device__ __forceinline__ void product(const CacheTile& tile, int at) {
    float score[2 * PARTS][4] = {};  // chains of products that do not await each other
    const Row key(tile, tile.keys, tile.fresh, at + thread % 16);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 keys[4];
      load_matrices(keys, key.unit(2 * step + thread / 16));
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const int at = step * PARTS + part;
        const u32 first = KEPT ? query[KEPT ? at : 0][0] : element(2 * at),
                  second = KEPT ? query[KEPT ? at : 0][1] : element(2 * at + 1);
        multiply_add<KV>(score[at % (2 * PARTS)], keys[0], keys[1], keys[2], keys[3], first,
                         second);
      }
    }
    const bool held = at + thread / 4 < tile.count, later = at + thread / 4 + 8 < tile.count;
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = score[0][i] + score[1][i];
      p[i] = capped_score(p[i] + (WIDE ? score[2 % (2 * PARTS)][i] + score[3 % (2 * PARTS)][i]
                                       : apart(p[i], 2)));
      if (!(i < 2 ? held : later)) p[i] = -infinity();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = p[h] > p[2 + h] ? p[h] : p[2 + h];
#pragma unroll
      for (int threads = 4; threads < 32; threads *= 2) {
        const float other = apart(top, threads);
        top = other > top ? other : top;
      }
      top = top > most[h] ? top : most[h];
      const float shrink = exp32(most[h] - top);
      most[h] = top;
      p[h] = exp32(p[h] - top), p[2 + h] = exp32(p[2 + h] - top);
      total[h] = total[h] * shrink + (p[h] + p[2 + h]);
#pragma unroll
      for (int m = 0; m < STEPS; ++m) output[m][h] *= shrink, output[m][2 + h] *= shrink;
    }
    u32 weight[PARTS], later_weight[PARTS];
#pragma unroll
    for (int part = 0; part < PARTS; ++part) {
      const bool lost = WIDE ? part > 0 : thread % 4 >= 2;
      weight[part] = transposed(packed(p[0], p[1], lost));
      later_weight[part] = transposed(packed(p[2], p[3], lost));
    }
    const Row value(tile, tile.values, tile.fresh + BYTES, at + thread / 16 * 8 + thread % 8);
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
      u32 values[4];
      load_transposed(values, value.unit(2 * m + thread / 8 % 2));
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        multiply_add<KV>(output[m], values[0], values[1], values[2], values[3], weight[part],
                         later_weight[part]);
    }
  }

  // The first of a thread's two heads, of which each warp puts the same elements.
  __device__ __forceinline__ int first_head() const { return thread % (HEADS / 2) * 2; }

  // Sums over the threads of a warp, before it meets others: each has those of all its positions.
  __device__ __forceinline__ static float over_positions(float sum) {
#pragma unroll
    for (int threads = 4; threads < 32; threads *= 2) sum += apart(sum, threads);
    return sum;
  }
  __device__ __forceinline__ void close() {
    total[0] = over_positions(total[0]);
    total[1] = over_positions(total[1]);
  }

  // What another warp's same thread has put into `rows`, to its own; both have been closed.
  __device__ __forceinline__ void meet(const float* rows, int heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = first_head() + h;
      if (head >= heads) continue;
      const float* const row = rows + head * (HEAD_DIM + 2);
      const float other = row[HEAD_DIM], top = other > most[h] ? other : most[h],
                  mine = exp32(most[h] - top), theirs = exp32(other - top);
      most[h] = top;
      total[h] = total[h] * mine + row[HEAD_DIM + 1] * theirs;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        float& part = output[i / 2][i % 2 * 2 + h];
        part = part * mine + row[thread / 4 + i * 8] * theirs;
      }
    }
    __syncwarp();  // all have looked at the maximum and the sum that a few of them put next
  }

  // Into [heads][HEAD_DIM + 2] on the chip: outputs, maximum, sum.
  __device__ __forceinline__ void put(float* rows, int heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = first_head() + h;
      float* row = rows + head * (HEAD_DIM + 2) + thread / 4;
      const bool mine = thread % 4 < HEADS / 2 && head < heads;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const float part = output[i / 2][i % 2 * 2 + h], sum = WIDE ? part : part + apart(part, 2);
        if (mine) row[i * 8] = sum;
      }
      const float sum = MEET ? total[h] : over_positions(total[h]);
      if (mine && thread < 4) row[HEAD_DIM] = most[h], row[HEAD_DIM + 1] = sum;
    }
  }
};

}  // namespace twin
