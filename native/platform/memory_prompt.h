// A chunk's activations and products on platforms whose blocks multiply vectors that lie in memory.
#pragma once

namespace twin {

struct Chunk {
  static constexpr int PACK = 8;  // neighbours that are stored at once
  static constexpr bool TENSOR_PASS = false;

  template <class Block>
  __device__ explicit Chunk(Block&) {}
  template <class Block>
  __device__ static float* memory(Block& b) {
    return b.scratch;
  }
  template <class Block>
  __device__ void open(Block&, int) {}
  template <class Block>
  __device__ void prefetch(Block&, const Stage&) const {}
  template <class Block>
  __device__ void decode(Block&, const Stage&) const {}  // products do it

  // Activations are FP32 [tokens][columns].
  __device__ static void store(float* x, int columns, int token, int column, float value) {
    x[long(token) * columns + column] = value;
  }
  __device__ static void store_pack(float* x, int columns, int token, int column,
                                    const Pack<PACK>& pack) {
    for (int i = 0; i < PACK; ++i) store(x, columns, token, column + i, pack.at[i]);
  }

  // Cached keys and values onto the chip, and from there.
  static constexpr int COPY_BYTES = 4;
  __device__ static void copy(u8* to, const u8* from) {
    *reinterpret_cast<u32*>(to) = *reinterpret_cast<const u32*>(from);
  }
  __device__ static void sent() {}
  template <int LEFT>
  __device__ static void arrived() {}
  template <class Core, class Piece>
  __device__ static void load(Core& core, Piece& piece, const u8* row) {
    piece.load_near(core, row);
  }

  // emit(token, element, sum of its first row, sum of its last row) for each element of the block.
  // Each warp adds its tiles' sums of a row group in its own part of the scratch,
  // [warps][tokens][tile_rows].
  template <int UNIT, class Block, class Ready, class Emit>
  __device__ bool multiply(Block& b, const Stage& stage, const float* x, int tokens, Ready ready,
                           Emit emit) {
    if (!ready()) return false;
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const int apart = tokens * stage.tile_rows;
    float* const mine = b.scratch + b.core.warp() * apart;
    // one token's sums of a tile
    float* const tile = b.scratch + b.core.warps() * apart + b.core.warp() * stage.tile_rows;
    for (int row = own.lo; row < own.hi; row += stage.tile_rows) {
      const int rows = own.hi - row < stage.tile_rows ? own.hi - row : stage.tile_rows;
      for (int i = b.core.warp_thread(); i < apart; i += b.core.warp_threads()) mine[i] = 0.0f;
      b.core.warp_sync();
      for (int col = 0; col < stage.cols; col += stage.tile_cols) {
        const int cols = stage.cols - col < stage.tile_cols ? stage.cols - col : stage.tile_cols;
        if (b.core.ring.mine()) {
          const u8* weights = b.core.ring.acquire();
          for (int token = 0; token < tokens; ++token) {
            const float* from = x + long(token) * stage.cols + col;
            if constexpr (CODED) b.core.dot_coded(code_of(stage), weights, rows, cols, from, tile);
            else b.core.dot_tile(weights, rows, cols, from, tile);
            b.core.warp_sync();
            for (int r = b.core.warp_thread(); r < rows; r += b.core.warp_threads())
              mine[token * stage.tile_rows + r] += tile[r];
            b.core.warp_sync();
          }
          b.core.ring.release();
        }
        b.core.ring.next(tile_bytes(stage, rows, cols));
      }
      b.core.barrier();
      constexpr int unit = UNIT;
      const int elements = rows / unit;
      for (int i = b.core.thread(); i < tokens * elements; i += b.core.threads()) {
        const int token = i / elements, first = token * stage.tile_rows + i % elements * unit;
        float sums[2] = {};
        for (int w = 0; w < b.core.warps(); ++w) {
          sums[0] += b.scratch[w * apart + first];
          sums[1] += b.scratch[w * apart + first + unit - 1];
        }
        emit(token, row / unit + i % elements, sums[0], sums[1]);
      }
      b.core.barrier();
    }
    return true;
  }
};

}  // namespace twin
