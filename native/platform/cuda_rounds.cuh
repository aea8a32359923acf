// Products of a few tokens with the tiles of the ring.
#pragma once

namespace twin {

// Sixteen bytes, of shared memory and of what other blocks wrote.
__device__ __forceinline__ void load_units(u32 (&to)[4], u32 at) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at));
}
__device__ __forceinline__ void load_units(u32 (&to)[4], const u8* at) {
  const float4 v = load_quad(reinterpret_cast<const float*>(at));
  to[0] = bits_as<u32>(v.x), to[1] = bits_as<u32>(v.y), to[2] = bits_as<u32>(v.z),
  to[3] = bits_as<u32>(v.w);
}

// A stage's product, by all consumers. A warp takes every CONSUMER_WARPSth tile: eight of its rows
// at a time are the rows of a product, the tokens its columns. Which columns of the matrix meet in
// one step of a product is free, so a thread has eight neighbours of a row in one load: thread l
// those of row l / 4, and of the token of that number, from column 8 * (l % 4) on.
struct FewProducts {
  static constexpr int COLUMNS = facts::FEW_COLUMNS;  // of a warp's loads
  static constexpr int AT_ONCE = 4;   // such loads under way together, each with sums of its own
  static constexpr int SUMS = Few::SUMS_BYTES / int(sizeof(float)) / MOST_FEW;

  u32 inputs, pitch;  // in shared memory: [tokens][pitch]; pitch 0: they are loaded where they lie
  const u8* x;
  int cols, tokens;

  __device__ __forceinline__ FewProducts(u32 chip, const u8* x, int cols, int tokens)
      : inputs(chip), pitch(u32(few_pitch(cols))), x(x), cols(cols), tokens(tokens) {
    if (tokens * pitch > u32(Few::INPUT_BYTES)) pitch = 0;
  }

  // at(token, column): where activations lie.
  template <class At>
  __device__ __forceinline__ void bring(int me, At at) const {
    if (pitch == 0) return;
    const int units = cols / 8;
#pragma unroll 4
    for (int i = me; i < tokens * units; i += CONSUMERS)
      copy_activations(inputs + u32(i / units) * pitch + u32(i % units * 16),
                       x + at(i / units, i % units * 8), true);
    copies_sent();
    copies_arrived<0>();
  }

  // to[0], to[1]: the sums of row l / 4 of eight rows from `from` on, and of tokens 2 * (l % 4) and
  // one more, over `width` columns of the matrix from `column` on.
  template <class At>
  __device__ __forceinline__ void eight_rows(int lane, u32 from, int rows, int column, int width,
                                             At at, float (&to)[2]) const {
    const int row = lane / 4 < rows ? lane / 4 : rows - 1, part = lane % 4 * 8, token = lane / 4;
    const bool here = token < tokens;
    const u32 a_at = from + u32(row * width + part) * 2,
              b_at = inputs + u32(here ? token : 0) * pitch + u32(column + part) * 2;
    float sum[AT_ONCE][4] = {};
#pragma unroll 1
    for (int c = 0; c < width; c += AT_ONCE * COLUMNS) {
      u32 a[AT_ONCE][4], b[AT_ONCE][4];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int to_column = c + j * COLUMNS < width ? c + j * COLUMNS : c;
        if (pitch == 0) {
          load_units(b[j], x + at(here ? token : 0, column + to_column + part));
        } else {
          load_units(b[j], b_at + u32(to_column) * 2);
        }
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        load_units(a[j], a_at + u32(c + j * COLUMNS < width ? c + j * COLUMNS : c) * 2);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        if (c + j * COLUMNS >= width) continue;
        multiply_add(sum[j], a[j][0], 0u, a[j][1], 0u, b[j][0], b[j][1]);
        multiply_add(sum[j], a[j][2], 0u, a[j][3], 0u, b[j][2], b[j][3]);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = (sum[0][i] + sum[1][i]) + (sum[2][i] + sum[3][i]);
  }

  // Rows lo..hi-1 of the stage's matrix; emit(token, first row of an element, its sum, that of its
  // last row). `sums`: [2][slices][rows][MOST_FEW].
  template <int UNIT, class Core, class At, class Emit>
  __device__ __forceinline__ bool run(Core& core, const Stage& stage, Span own, float* sums, At at,
                                      Emit emit) const {
    const int wide = stage.tile_cols, high = stage.tile_rows, slices = (cols + wide - 1) / wide,
              lane = core.warp_thread();
    const int most = SUMS / slices / high * high;  // rows of a batch: the plan has some
#pragma unroll 1
    for (int lo = own.lo, half = 0; lo < own.hi; lo += most, half ^= 1) {
      const int rows = own.hi - lo < most ? own.hi - lo : most,
                tiles = (rows + high - 1) / high * slices;
      float* const mine = sums + half * SUMS * MOST_FEW;
#pragma unroll 1
      for (int n = core.warp(); n < tiles; n += CONSUMER_WARPS) {
        const int first = n / slices * high, slice = n % slices, column = slice * wide,
                  here = rows - first < high ? rows - first : high,
                  width = cols - column < wide ? cols - column : wide;
        const u32 tile = core.ring.tile + u32(n), from = core.ring.acquire(tile);
#pragma unroll 1
        for (int r = 0; r < here; r += 8) {
          float found[2];
          eight_rows(lane, from + u32(r * width * 2), here - r, column, width, at, found);
          if (lane / 4 < here - r)
            *reinterpret_cast<float2*>(mine + (slice * most + first + r + lane / 4) * MOST_FEW +
                                       lane % 4 * 2) = float2{found[0], found[1]};
        }
        core.ring.release(tile, CONSUMER_WARPS);
      }
      core.ring.tile += u32(tiles);
      core.barrier();
      const int elements = rows / UNIT;
#pragma unroll 1
      for (int i = core.thread(); i < elements * tokens; i += CONSUMERS) {
        const int element = i % elements, token = i / elements;
        float total[UNIT] = {};
#pragma unroll 1
        for (int slice = 0; slice < slices; ++slice)
#pragma unroll
          for (int u = 0; u < UNIT; ++u)
            total[u] += mine[(slice * most + element * UNIT + u) * MOST_FEW + token];
        emit(token, lo / UNIT + element, total[0], total[UNIT - 1]);
      }
    }
    return true;
  }
};

}  // namespace twin
