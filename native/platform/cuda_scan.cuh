// Attention of one token over tiles of cached keys and values, on the tensor cores. tests/native/scan.cpp runs it lane by lane on a CPU.
#pragma once

namespace twin {

// Four 8 x 8 matrices of 16-bit values, each row at the address of one lane: the fragment of a 16 x 16 matrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ u32 transposed(u32 fragment) {
  u32 to;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(fragment));
  return to;
}
template <Type T>
__device__ __forceinline__ u32 packed(float first, float second) {
  u32 word;
  if constexpr (T == Type::BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}

// Two numbers, or what 16 bits lose of them.
__device__ __forceinline__ u32 packed(float first, float second, bool lost) {
  const u32 word = packed<KV>(first, second);
  float high, higher;
  unpack<KV>(word, high, higher);
  return lost ? packed<KV>(first - high, second - higher) : word;
}

// Part of an item on the chip: its keys, its values, and the newest of each where it is one of them.
struct CacheTile {
  const u8 *keys, *values, *fresh;
  int count;  // positions
  int here;   // the newest, or one that the tile does not have
  int first;  // its first position of the item
};

// Running softmax of a group's query heads over the positions of one warp. A product compares 16 positions with the queries of 4
// heads, which are columns twice: rounded to 16 bits, and what that loses; so do probabilities, so that sums are of 16 bits' precision in
// keys and values alone. A lane keeps scores of positions lane / 4 and 8 more, and of heads 2 * (lane % 2) and one more of each set.
struct TileScan {
  static constexpr int WARPS = 4, POSITIONS = 16;  // of a block; of a product
  static constexpr int STEPS = (HEAD_DIM + 15) / 16, HEADS = 4, SETS = (GROUP + HEADS - 1) / HEADS;
  static constexpr int BYTES = HEAD_DIM * type_bytes(KV);  // of a key

  u32 query[SETS][STEPS][2];
  float output[SETS][STEPS][4];
  float most[SETS][2], total[SETS][2];

  __device__ __forceinline__ static int lane() { return int(threadIdx.x % 32); }
  __device__ __forceinline__ static float apart(float v, int lanes) { return __shfl_xor_sync(0xFFFFFFFFu, v, lanes); }

  // `queries` lie on the chip, [GROUP][HEAD_DIM].
  __device__ __forceinline__ explicit TileScan(const float* queries) {
    const int head = lane() / 4 % HEADS, column = lane() % 4 * 2;
    const bool lost = lane() / 4 >= HEADS;
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
#pragma unroll
      for (int i = 0; i < 2 * STEPS; ++i) {
        const float* at = queries + (s * HEADS + head) * HEAD_DIM + i * 8 + column;
        const bool some = s * HEADS + head < GROUP;
        query[s][i / 2][i % 2] = packed(some ? at[0] : 0.0f, some ? at[1] : 0.0f, lost);
      }
#pragma unroll
      for (int m = 0; m < STEPS; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) output[s][m][i] = 0.0f;
      most[s][0] = most[s][1] = -1e30f;
      total[s][0] = total[s][1] = 0.0f;
    }
  }

  // Where a row begins, and how its 16-byte units are twisted: a lane's own.
  struct Row {
    u32 at, twist;

    __device__ __forceinline__ Row(const CacheTile& tile, const u8* rows, const u8* fresh, int row) {
      const int held = row < tile.count ? row : 0;  // numbers, also where nothing is held
      const bool near = held == tile.here;
      at = u32(__cvta_generic_to_shared(near ? fresh : rows + held * BYTES));
      twist = near ? 0u : u32(tile.first + held) & 7u;
    }
    __device__ __forceinline__ u32 unit(int number) const { return at + ((u32(number) ^ twist) << 4); }
  };

  // The tile's positions whose turn it is, `unit` products of the item having been made before.
  __device__ __forceinline__ void look(const CacheTile& tile, int unit, int warp) {
    if (warp >= WARPS) return;
#pragma unroll 1
    for (int at = ((warp - unit) & (WARPS - 1)) * POSITIONS; at < tile.count; at += WARPS * POSITIONS) product(tile, at);
  }

  __device__ __forceinline__ void product(const CacheTile& tile, int at) {
    float score[SETS][2][4] = {};
    const Row key(tile, tile.keys, tile.fresh, at + lane() % 16);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      u32 keys[4];
      load_matrices(keys, key.unit(2 * step + lane() / 16));
#pragma unroll
      for (int s = 0; s < SETS; ++s)
        multiply_add<KV>(score[s][step % 2], keys[0], keys[1], keys[2], keys[3], query[s][step][0], query[s][step][1]);
    }
    const bool held = at + lane() / 4 < tile.count, later = at + lane() / 4 + 8 < tile.count;
    u32 weight[SETS][2];
#pragma unroll
    for (int s = 0; s < SETS; ++s) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = score[s][0][i] + score[s][1][i];
        p[i] += apart(p[i], 2);
        if (!(i < 2 ? held : later)) p[i] = -infinity();
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = p[h] > p[2 + h] ? p[h] : p[2 + h];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
          const float other = apart(top, lanes);
          top = other > top ? other : top;
        }
        top = top > most[s][h] ? top : most[s][h];
        const float shrink = exp32(most[s][h] - top);
        most[s][h] = top;
        p[h] = exp32(p[h] - top), p[2 + h] = exp32(p[2 + h] - top);
        total[s][h] = total[s][h] * shrink + (p[h] + p[2 + h]);
#pragma unroll
        for (int m = 0; m < STEPS; ++m) output[s][m][h] *= shrink, output[s][m][2 + h] *= shrink;
      }
      weight[s][0] = transposed(packed(p[0], p[1], lane() % 4 >= 2));
      weight[s][1] = transposed(packed(p[2], p[3], lane() % 4 >= 2));
    }
    const Row value(tile, tile.values, tile.fresh + BYTES, at + lane() / 16 * 8 + lane() % 8);
#pragma unroll
    for (int m = 0; m < STEPS; ++m) {
      u32 values[4];
      load_transposed(values, value.unit(2 * m + lane() / 8 % 2));
#pragma unroll
      for (int s = 0; s < SETS; ++s) multiply_add<KV>(output[s][m], values[0], values[1], values[2], values[3], weight[s][0], weight[s][1]);
    }
  }

  // Into [GROUP][HEAD_DIM + 2] on the chip: outputs, maximum, sum.
  __device__ __forceinline__ void put(float* rows) {
#pragma unroll
    for (int s = 0; s < SETS; ++s)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = s * HEADS + lane() % 2 * 2 + h;
        float* row = rows + head * (HEAD_DIM + 2) + lane() / 4;
        const bool mine = lane() % 4 < 2 && head < GROUP;
#pragma unroll
        for (int i = 0; i < 2 * STEPS; ++i) {
          const float part = output[s][i / 2][i % 2 * 2 + h], sum = part + apart(part, 2);
          if (mine) row[i * 8] = sum;
        }
        float sum = total[s][h];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) sum += apart(sum, lanes);
        if (mine && lane() < 4) row[HEAD_DIM] = most[s][h], row[HEAD_DIM + 1] = sum;
      }
  }
};

}  // namespace twin
