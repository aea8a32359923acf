// Attention of a chunk's tokens over the cache on the tensor cores, with a running softmax.
#pragma once

#include "cuda_eight_bits.cuh"
#include "family.h"

namespace twin {

__device__ __forceinline__ float power_of_two(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}
__device__ __forceinline__ float reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// A block takes ROWS query rows of one KV head: all query heads of neighbouring tokens. Each warp
// has 16 of them, and looks at tiles of positions that come into shared memory once for all warps.
// A thread keeps rows thread / 4 and 8 more of its warp's.
struct PassScan {
  // Outputs of wider heads leave no registers for their queries, which are looked up in shared
  // memory.
  static constexpr bool KEPT = HEAD_DIM <= facts::KEPT_HEAD;
  // positions that come together
  static constexpr int TILE = STREAMED_ROUNDS ? Few::POSITIONS
                              : KEPT          ? facts::PASS_SCAN_POSITIONS
                                              : facts::PASS_WIDE_POSITIONS;
  // one in use, the others under way
  static constexpr int TILES = STREAMED_ROUNDS ? Few::SCAN_TILES : facts::PASS_SCAN_TILES;
  static constexpr int ROWS = 16 * CONSUMER_WARPS, TOKENS = GROUP ? ROWS / GROUP : 1;
  // of a key, or a value
  static constexpr int BYTES = HEAD_DIM * type_bytes(KV), UNITS = BYTES / 16;
  static constexpr int PITCH = BYTES + 16;   // an odd number of units: eight rows meet in no bank
  static constexpr int QUERY_BYTES = HEAD_DIM * type_bytes(MULTIPLIED), QUERY_PITCH = QUERY_BYTES + 16;
  static constexpr bool EIGHT_BITS = KV == Type::FP8;
  static constexpr int PART = TILE * PITCH;  // a tile's keys; its values follow
  static constexpr int STEPS = (HEAD_DIM + 15) / 16, SETS = TILE / 16;
  static constexpr int QUERIES = TILES * 2 * PART;  // where the rows' queries lie
  static constexpr int bytes = QUERIES + (KEPT ? 0 : ROWS * QUERY_PITCH);
  static constexpr float LOG2_E = 1.44269504f;  // scores are powers of two
  static_assert(!Plan::tensor_pass || bytes <= Plan::prompt_bytes, "the plan counts the same");
  static_assert(!STREAMED_ROUNDS || bytes <= Few::BYTES, "the ring leaves as much");

  int thread;
  u32 query_at;  // where the warp's queries lie in shared memory
  u32 query[KEPT ? STEPS : 1][4];
  float output[2 * STEPS][4];
  float most[2], total[2];  // of scores in powers of two

  __device__ __forceinline__ static float shuffle(float v, int threads) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, threads);
  }
  __device__ __forceinline__ static float power(float x) { return power_of_two(x); }
  __device__ __forceinline__ static float larger(float a, float b) { return a > b ? a : b; }

  // row(i): where the query of the thread's row thread / 4 + 8 * i lies, 16-bit numbers. Those that
  // are not kept are on their way to `chip`, behind the tiles, with the first tile.
  template <class Row>
  __device__ __forceinline__ PassScan(int thread, u32 chip, int warp, Row row)
      : thread(thread), query_at(chip + u32(QUERIES + warp * 16 * QUERY_PITCH)) {
    if constexpr (KEPT) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u8* at = row(i % 2) + i / 2 * 16 + thread % 4 * 4;
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          query[step][i] =
              bits_as<u32>(load_shared(reinterpret_cast<const float*>(at + step * 32)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u8* const from = row(i);
#pragma unroll
        for (int unit = thread % 4; unit < QUERY_BYTES / 16; unit += 4)
          copy_activations(query_at + u32((thread / 4 + 8 * i) * QUERY_PITCH + unit * 16),
                           from + unit * 16, true);
      }
    }
    clear();
  }
  // Of queries in shared memory, [rows][QUERY_PITCH].
  __device__ __forceinline__ PassScan(int thread, u32 queries)
      : thread(thread), query_at(queries) {
    if constexpr (KEPT) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step)
        load_matrices(query[step], query_at + u32(thread % 16 * QUERY_PITCH + thread / 16 * 16 +
                                                  step * 32));
    }
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < 2 * STEPS; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) output[m][i] = 0.0f;
    most[0] = most[1] = LOWEST;
    total[0] = total[1] = 0.0f;
  }

  // A logit without a value joins the softmax of the thread's row i, one of four threads' sum.
  __device__ __forceinline__ void join(int i, float logit) {
    most[i] = LOG2_E * logit;
    total[i] = thread % 4 == 0 ? 1.0f : 0.0f;
  }

  // Scores of a tile that lies at `keys`: position 8 * j + 2 * (thread % 4) + i % 2 of row thread /
  // 4 + i / 2 * 8.
  __device__ __forceinline__ void compare(u32 keys, float (&score)[2 * SETS][4]) const {
    const u32 from = keys + u32((thread / 16 * 8 + thread % 8) * PITCH + thread / 8 % 2 * 16);
    u32 both[EIGHT_BITS ? SETS : 1][4];  // numbers of 8 bits of two steps
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 found[4];
      if constexpr (!KEPT)
        load_matrices(found,
                      query_at + u32(thread % 16 * QUERY_PITCH + thread / 16 * 16 + step * 32));
      const u32* const q = KEPT ? query[KEPT ? step : 0] : found;
#pragma unroll
      for (int set = 0; set < SETS; ++set) {
        u32 key[4];
        if constexpr (EIGHT_BITS) {
          if (step % 2 == 0) load_matrices(both[set], from + u32(set * 16 * PITCH + step * 16));
          eight_bits::columns(both[set][step % 2], key[0], key[1]);
          eight_bits::columns(both[set][2 + step % 2], key[2], key[3]);
        } else {
          load_matrices(key, from + u32(set * 16 * PITCH + step * 32));
        }
        multiply_add<MULTIPLIED>(score[2 * set], q[0], q[1], q[2], q[3], key[0], key[1]);
        multiply_add<MULTIPLIED>(score[2 * set + 1], q[0], q[1], q[2], q[3], key[2], key[3]);
      }
    }
  }
  __device__ __forceinline__ void add_values(u32 values, const float (&weight)[2 * SETS][4]) {
    const u32 from = values + u32(thread % 16 * PITCH + thread / 16 * 16);
#pragma unroll
    for (int set = 0; set < SETS; ++set) {
      u32 w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[i] =
            packed<MULTIPLIED>(weight[2 * set + i / 2][i % 2 * 2], weight[2 * set + i / 2][i % 2 * 2 + 1]);
      u32 both[4];  // numbers of 8 bits of two steps
#pragma unroll
      for (int m = 0; m < STEPS; ++m) {
        u32 value[4];
        if constexpr (EIGHT_BITS) {  // columns 2 * i of 16, and 2 * i + 1
          if (m % 2 == 0) load_transposed(both, from + u32(set * 16 * PITCH + m * 16));
          eight_bits::rows(both[m % 2 * 2], value[0], value[2]);
          eight_bits::rows(both[m % 2 * 2 + 1], value[1], value[3]);
        } else {
          load_transposed(value, from + u32(set * 16 * PITCH + m * 32));
        }
        multiply_add<MULTIPLIED>(output[2 * m], w[0], w[1], w[2], w[3], value[0], value[1]);
        multiply_add<MULTIPLIED>(output[2 * m + 1], w[0], w[1], w[2], w[3], value[2], value[3]);
      }
    }
  }
  // A tile at `at`, whose first position is `first`; a row sees positions from[i]..to[i]-1. `scale`
  // makes scores powers of two.
  __device__ __forceinline__ void look(u32 at, int first, const int (&from)[2], const int (&to)[2],
                                       bool all, float scale) {
    float score[2 * SETS][4] = {};
    compare(at, score);
    if constexpr (Family::SCORE_CAP > 0.0f) {  // capped_score of powers of two
      constexpr float CAP = Family::SCORE_CAP * LOG2_E;
      const float by = scale * (2.0f / Family::SCORE_CAP);
#pragma unroll
      for (int j = 0; j < 2 * SETS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          score[j][i] = CAP - 2.0f * CAP * reciprocal(1.0f + power_of_two(score[j][i] * by));
      scale = 1.0f;
    }
    if (!all) {
#pragma unroll
      for (int j = 0; j < 2 * SETS; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int position = first + 8 * j + thread % 4 * 2 + i % 2;
          if (position < from[i / 2] || position >= to[i / 2]) score[j][i] = -infinity();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = score[0][2 * h];
#pragma unroll
      for (int j = 0; j < 2 * SETS; ++j)
        top = larger(top, larger(score[j][2 * h], score[j][2 * h + 1]));
      top = larger(top, shuffle(top, 1));
      top = larger(top, shuffle(top, 2));
      top = larger(most[h], top * scale);
      const float shrink = power_of_two(most[h] - top);
      most[h] = top, total[h] *= shrink;
#pragma unroll
      for (int m = 0; m < 2 * STEPS; ++m)
        output[m][2 * h] *= shrink, output[m][2 * h + 1] *= shrink;
#pragma unroll
      for (int j = 0; j < 2 * SETS; ++j)
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          score[j][i] = power_of_two(score[j][i] * scale - top);
          total[h] += score[j][i];
        }
    }
    add_values(at + PART, score);
  }
  // The sum of weights of the thread's row i.
  __device__ __forceinline__ float sum_of(int i) const {
    const float sum = total[i] + shuffle(total[i], 1);
    return sum + shuffle(sum, 2);
  }
  // put(i, column, two neighbours) of row thread / 4 + 8 * i. SOME: a row may have seen nothing.
  template <bool SOME = false, class Put>
  __device__ __forceinline__ void close(Put put) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_of(h);
      const float by = SOME && sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
      for (int m = 0; m < 2 * STEPS; ++m) {
        if constexpr (EIGHT_BITS)  // neighbours stand in two products' outputs
          put(h, m / 2 * 16 + thread % 4 * 4 + m % 2 * 2, output[m / 2 * 2][2 * h + m % 2] * by,
              output[m / 2 * 2 + 1][2 * h + m % 2] * by);
        else
          put(h, 8 * m + thread % 4 * 2, output[m][2 * h] * by, output[m][2 * h + 1] * by);
      }
    }
  }

  // The same of outputs times open(their gates), which lie at gates(i): as many loads are under way
  // together as outputs leave registers for.
  template <class Gates, class Open, class Put>
  __device__ __forceinline__ void close_gated(Gates gates, Open open, Put put) const {
    constexpr int AT_ONCE = 8;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = total[h] + shuffle(total[h], 1);
      sum += shuffle(sum, 2);
      const float by = 1.0f / sum;
      const float* const from = gates(h) + thread % 4 * 2;
#pragma unroll
      for (int first = 0; first < 2 * STEPS; first += AT_ONCE) {
        float2 gate[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
          if (first + j < 2 * STEPS) gate[j] = load_pair(from + 8 * (first + j));
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
          if (first + j < 2 * STEPS)
            put(h, 8 * (first + j) + thread % 4 * 2, output[first + j][2 * h] * by * open(gate[j].x),
                output[first + j][2 * h + 1] * by * open(gate[j].y));
      }
    }
  }

  // Positions first..first+TILE-1 on their way to `to`; where(position, byte) is in the cache, keys
  // first. Zeros from `end` on.
  template <class Where>
  __device__ __forceinline__ static void ask(u32 to, int first, int end, int thread, Where where) {
#pragma unroll
    for (int i = thread; i < TILE * 2 * UNITS; i += CONSUMERS) {
      const int position = i / (2 * UNITS), unit = i % (2 * UNITS), value = unit / UNITS;
      const bool there = first + position < end;
      copy_activations(to + u32(value * PART + position * PITCH + unit % UNITS * 16),
                       where(there ? first + position : first, unit * 16), there);
    }
  }
};

}  // namespace twin
