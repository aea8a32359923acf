// Attention of one token over tiles of cached keys and values, on the tensor cores.
// tests/native/scan.cpp runs it thread by thread on a CPU.
#pragma once

#include "cuda_eight_bits.cuh"
#include "family.h"

namespace twin {

// Two numbers, or what 16 bits lose of them.
__device__ __forceinline__ u32 packed(float first, float second, bool lost) {
  const u32 word = packed<MULTIPLIED>(first, second);
  float high, higher;
  unpack<MULTIPLIED>(word, high, higher);
  return lost ? packed<MULTIPLIED>(first - high, second - higher) : word;
}

// Part of an item in shared memory: its keys, its values, and the newest of each where it is one of
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
template <class S, bool WIDE>
struct TileScan {
  static constexpr int HEAD_DIM = S::HEAD_DIM;
  static constexpr bool EIGHT_BITS = KV == Type::FP8;
  // that share an item's positions
  static constexpr int WARPS = EIGHT_BITS && !WIDE ? facts::TENSOR_WARPS_OF_8_BITS : facts::TENSOR_WARPS;
  static constexpr int POSITIONS = facts::TENSOR_POSITIONS;  // of a product
  static constexpr int STEPS = (HEAD_DIM + 15) / 16, HEADS = (WIDE ? 2 : 1) * facts::TENSOR_HEADS;
  static constexpr int PARTS = WIDE ? 2 : 1;  // products: of rounded queries and of what is lost
  // In shared memory at once, of a set. Those of 16 heads of 128 elements by four warps would be
  // 33 KiB, two slots of a ring, so warps meet before.
  static constexpr int PARTIALS = WIDE ? facts::WIDE_PARTIALS : WARPS;
  static constexpr bool MEET = PARTIALS < WARPS;
  static_assert((WARPS & (WARPS - 1)) == 0, "twin/schedule/scan.py: warps take turns by a mask");
  static_assert(WARPS % PARTIALS == 0, "twin/schedule/scan.py: as many warps meet each time");
  static_assert(POSITIONS == 16 && facts::TENSOR_HEADS == 4,
                "twin/schedule/splits.py: an m16n8k16 product has 16 positions and 4 heads twice");
  static constexpr int BYTES = HEAD_DIM * type_bytes(KV);  // of a key
  static constexpr int QUERY_BYTES = HEAD_DIM * type_bytes(MULTIPLIED);

  // Queries of wider heads are looked up in shared memory for each product: in registers they
  // spilled.
  static constexpr bool KEPT = HEAD_DIM <= facts::KEPT_HEAD;

  static constexpr int CHAINS = 4;  // of products that do not await each other

  int thread;  // of the warp
  u32 query_at, unit;  // in shared memory: the query row of which a thread has the address, and where in it
  u32 query[KEPT ? STEPS * PARTS : 1][2];
  float output[STEPS][4];
  float most[2], total[2];

  __device__ __forceinline__ static float shuffle(float v, int threads) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, threads);
  }

  // How the units, 16 bytes, of a query's row are swizzled, as those of cached rows are: eight rows
  // that a warp loads together begin in other banks. Without that, each load took eight turns.
  __device__ __forceinline__ static int swizzle(int head, int lost) { return (head + 4 * lost) & 7; }

  // Element d of a query, its KV head's `number`th, into [2][HEAD_DIM] of 16 bits: rounded, and
  // what that loses.
  __device__ __forceinline__ static void store_query(float* head, int number, int d, float value) {
    u16* const to = reinterpret_cast<u16*>(head);
    if constexpr (EIGHT_BITS) d = product_column(d);
    to[d ^ swizzle(number, 0) << 3] = u16(packed(value, value, false));
    to[HEAD_DIM + (d ^ swizzle(number, 1) << 3)] = u16(packed(value, value, true));
  }

  // `queries` lie in shared memory, as they were stored, from their KV head's `first`th on. Columns
  // beyond `heads` are the last one's again, for nothing.
  __device__ __forceinline__ TileScan(const float* queries, int first, int heads, int thread)
      : thread(thread) {
    const int column = thread % 8, lost = column / HEADS,
              head = column % HEADS < heads ? column % HEADS : heads - 1;
    query_at = u32(__cvta_generic_to_shared(queries + head * HEAD_DIM)) + u32(lost * QUERY_BYTES);
    unit = u32(thread / 8 ^ swizzle(first + head, lost));
    if constexpr (KEPT) {
#pragma unroll
      for (int pair = 0; pair < STEPS / 2; ++pair)
#pragma unroll
        for (int part = 0; part < PARTS; ++part)
          load_queries(pair, part, query + 2 * pair * PARTS);
    }
#pragma unroll
    for (int m = 0; m < STEPS; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) output[m][i] = 0.0f;
    most[0] = most[1] = LOWEST;
    total[0] = total[1] = 0.0f;
  }

  // Of steps 2 * pair and 2 * pair + 1, into [2][PARTS]: of rounded queries, or of what is lost.
  __device__ __forceinline__ void load_queries(int pair, int part, u32 (*to)[2]) const {
    static_assert(STEPS % 2 == 0, "queries of two steps are loaded together");
    u32 both[4];
    load_matrices(both, query_at + u32(part * QUERY_BYTES) + ((unit ^ 4u * u32(pair ^ part)) << 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i / 2 * PARTS + part][i % 2] = both[i];
  }

  // Where a row begins, and how its 16-byte units are swizzled: a thread's own.
  struct Row {
    u32 at, swizzle;

    __device__ __forceinline__ Row(const CacheTile& tile, const u8* rows, const u8* fresh,
                                   int row) {
      const int held = row < tile.count ? row : 0;  // numbers, also where nothing is held
      const bool near = held == tile.here;
      at = u32(__cvta_generic_to_shared(near ? fresh : rows + held * BYTES));
      swizzle = near ? 0u : row_swizzle<BYTES>(u32(tile.first + held));
    }
    __device__ __forceinline__ u32 unit(int number) const {
      return at + ((u32(number) ^ swizzle) << 4);
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
    float score[CHAINS][4] = {};
    const Row key(tile, tile.keys, tile.fresh, at + thread % 16);
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      u32 asking[2 * PARTS][2];
#pragma unroll
      for (int part = 0; part < PARTS && !KEPT; ++part) load_queries(step / 2, part, asking);
      u32 both[4];  // numbers of 8 bits of both steps
      if constexpr (EIGHT_BITS) load_matrices(both, key.unit(step + thread / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 keys[4];
        if constexpr (EIGHT_BITS) {
          eight_bits::columns(both[2 * i], keys[0], keys[2]);
          eight_bits::columns(both[2 * i + 1], keys[1], keys[3]);
        } else {
          load_matrices(keys, key.unit(2 * (step + i) + thread / 16));
        }
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
          const int at = (step + i) * PARTS + part;
          const u32(&asks)[2] = KEPT ? query[KEPT ? at : 0] : asking[i * PARTS + part];
          multiply_add<MULTIPLIED>(score[at % CHAINS], keys[0], keys[1], keys[2], keys[3], asks[0],
                                   asks[1]);
        }
      }
    }
    const bool held = at + thread / 4 < tile.count, later = at + thread / 4 + 8 < tile.count;
    float p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      p[i] = (score[0][i] + score[1][i]) + (score[2][i] + score[3][i]);
      p[i] = capped_score(WIDE ? p[i] : p[i] + shuffle(p[i], 2));
      if (!(i < 2 ? held : later)) p[i] = -infinity();
    }
    float top[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h] = p[h] > p[2 + h] ? p[h] : p[2 + h];
#pragma unroll
    for (int threads = 4; threads < 32; threads *= 2)
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // both under way
        const float other = shuffle(top[h], threads);
        top[h] = other > top[h] ? other : top[h];
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float highest = top[h] > most[h] ? top[h] : most[h],
                  shrink = exp32(most[h] - highest);
      most[h] = highest;
      p[h] = exp32(p[h] - highest), p[2 + h] = exp32(p[2 + h] - highest);
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
    u32 both[4];  // numbers of 8 bits of two steps
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
      u32 values[4];
      if constexpr (EIGHT_BITS) {
        if (m % 2 == 0) load_transposed(both, value.unit(m + thread / 8 % 2));
        eight_bits::rows(both[m % 2], values[0], values[1]);
        eight_bits::rows(both[2 + m % 2], values[2], values[3]);
      } else {
        load_transposed(values, value.unit(2 * m + thread / 8 % 2));
      }
#pragma unroll
      for (int part = 0; part < PARTS; ++part)
        multiply_add<MULTIPLIED>(output[m], values[0], values[1], values[2], values[3],
                                 weight[part], later_weight[part]);
    }
  }

  // The first of a thread's two heads, of which each warp puts the same elements.
  __device__ __forceinline__ int first_head() const { return thread % (HEADS / 2) * 2; }

  // Sums over the threads of a warp, before it meets others: each has those of all its positions.
  __device__ __forceinline__ static float over_positions(float sum) {
#pragma unroll
    for (int threads = 4; threads < 32; threads *= 2) sum += shuffle(sum, threads);
    return sum;
  }
  __device__ __forceinline__ void close() {
    total[0] = over_positions(total[0]);
    total[1] = over_positions(total[1]);
  }

  // Where partial results lie in shared memory: [rows][HEAD_DIM] outputs, behind them [rows][2]
  // maxima and sums; a row is a head of a warp.
  struct Found {
    float* outputs;
    float* ends;

    __device__ __forceinline__ Found(float* at, int rows)
        : outputs(at), ends(at + rows * HEAD_DIM) {}
    __device__ __forceinline__ Found(float* outputs, float* ends) : outputs(outputs), ends(ends) {}
    __device__ __forceinline__ Found from(int row) const {
      return {outputs + row * HEAD_DIM, ends + 2 * row};
    }
    // Element d of a set's head. Threads of a warp that put the same elements of four heads do so
    // into four groups of banks; when rows had a pitch of two banks, each store took four turns.
    __device__ __forceinline__ static int place(int head, int d) {
      return head * HEAD_DIM + (d ^ ((WIDE ? head / 2 : head) & 3) << 3);
    }
  };
  // Where a thread's elements of a head lie, thread / 4 + 8 * i or, of 8 bits, thread / 4 * 2 + i % 2
  // + 16 * (i / 2): of four neighbours each has an address, to which those of further fours add
  // constants.
  struct Places {
    float* first[4];

    __device__ __forceinline__ Places(const Found& rows, int head, int thread) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        first[i] = rows.outputs + Found::place(head, EIGHT_BITS ? thread / 4 * 2 + i % 2 + i / 2 * 16
                                                                : thread / 4 + 8 * i);
    }
    __device__ __forceinline__ float& at(int i) const { return first[i % 4][i / 4 * 32]; }
  };

  // What another warp's same thread has put into `rows`, to its own; both have been closed.
  __device__ __forceinline__ void meet(const Found& rows, int heads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int head = first_head() + h;
      if (head >= heads) continue;
      const float other = rows.ends[2 * head], top = other > most[h] ? other : most[h],
                  mine = exp32(most[h] - top), theirs = exp32(other - top);
      const Places places(rows, head, thread);
      most[h] = top;
      total[h] = total[h] * mine + rows.ends[2 * head + 1] * theirs;
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        float& part = output[i / 2][i % 2 * 2 + h];
        part = part * mine + places.at(i) * theirs;
      }
    }
    __syncwarp();  // all have looked at the maximum and the sum that a few of them put next
  }

  __device__ __forceinline__ void put(const Found& rows, int heads) {
    if constexpr (WIDE) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        put_head(rows, first_head() + h, heads, MEET ? total[h] : over_positions(total[h]), most[h],
                 [&](int i) { return output[i / 2][i % 2 * 2 + h]; });
    } else {  // of a head twice each of two threads sums one
      const bool second = thread & 2;
      put_head(rows, first_head() + second, heads, over_positions(second ? total[1] : total[0]),
               second ? most[1] : most[0], [&](int i) {
                 const float(&part)[4] = output[i / 2];
                 const int at = i % 2 * 2;
                 const float give = second ? part[at] : part[at + 1];
                 return (second ? part[at + 1] : part[at]) + shuffle(give, 2);
               });
    }
  }
  template <class Part>
  __device__ __forceinline__ void put_head(const Found& rows, int head, int heads, float sum,
                                           float top, Part part) {
    const bool mine = head < heads;
    const Places places(rows, head, thread);
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
      const float element = part(i);
      if (mine) places.at(i) = element;
    }
    if (mine && thread < 4) rows.ends[2 * head] = top, rows.ends[2 * head + 1] = sum;
  }
};

}  // namespace twin
