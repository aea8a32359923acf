// A chunk's activations and products on platforms whose blocks multiply vectors that lie in memory.
#pragma once

namespace twin {

struct Chunk {
  static constexpr int PACK = 8;  // neighbours that are stored at once
  static constexpr int PART = 1 << 16;  // of an expert's entries that all tokens have
  static constexpr bool TENSOR_PASS = false, TENSOR_STATES = false;

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
  __device__ static void store_pair(float* x, int columns, int token, int column, float value,
                                    float next) {
    store(x, columns, token, column, value), store(x, columns, token, column + 1, next);
  }
  __device__ static void store_two(float* at, float value, float next) {
    store_shared(at, value), store_shared(at + 1, next);
  }
  __device__ static void store_pack(float* x, int columns, int token, int column,
                                    const Pack<PACK>& pack) {
    for (int i = 0; i < PACK; ++i) store(x, columns, token, column + i, pack.at[i]);
  }

  // Cached keys and values into shared memory, and from there.
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

  // ---- experts ----------------------------------------------------------------------------------

  // The block's rows of a router to where all blocks find them, one after the other.
  template <class Block, class Stage>
  __device__ void put_rows(Block& b, const Stage& stage, u8* to) {
    constexpr int SIZE = type_bytes(WEIGHT);
    const Span own = b.plan.owned_of(stage.owned, b.block);
    for (int row = own.lo; row < own.hi; row += stage.tile_rows) {
      const int rows = own.hi - row < stage.tile_rows ? own.hi - row : stage.tile_rows;
      for (int col = 0; col < stage.cols; col += stage.tile_cols) {
        const int cols = stage.cols - col < stage.tile_cols ? stage.cols - col : stage.tile_cols;
        if (b.core.ring.mine()) {
          const u8* from = b.core.ring.acquire();
          for (int i = b.core.warp_thread(); i < rows * cols * SIZE / 4; i += b.core.warp_threads())
            reinterpret_cast<u32*>(to + (long(row - own.lo + 4 * i / SIZE / cols) * stage.cols +
                                         col + 4 * i / SIZE % cols) * SIZE)[0] =
                reinterpret_cast<const u32*>(from)[i];
          b.core.ring.release();
        }
        b.core.ring.next(tile_bytes(stage, rows, cols));
      }
    }
  }

  // Logits of the tokens whose rows lie at `x`, [tokens][LOGITS]; row(expert): the router's weights.
  template <class Block, class Row>
  __device__ static void score(Block& b, const float* x, int tokens, float* logits, Row row) {
    for (int expert = b.core.warp(); expert < Entries::LOGITS; expert += b.core.warps())
      for (int token = 0; token < tokens; ++token)
        b.core.dot_tile(row(expert), 1, b.plan.hidden, x + long(token) * b.plan.hidden,
                        logits + token * Entries::LOGITS + expert);
  }

  // Where each expert's entries begin among all, sorted; the entries follow.
  template <class Block>
  __device__ static int* begins(const Block& b) {
    return reinterpret_cast<int*>(b.scratch + b.plan.prompt_order);
  }
  template <class Block>
  __device__ int entries_of(Block& b, int expert) const {
    return begins(b)[expert + 1] - begins(b)[expert];
  }

  // Entries by expert. `choices`: [tokens][CHOICE], each token's experts first.
  template <class Block>
  __device__ void sort(Block& b, const float* choices, int tokens) {
    constexpr int EACH = Entries::EACH;
    b.core.barrier();
    if (b.core.thread() == 0) {
      int* const begin = begins(b);
      int* const order = begin + Entries::EXPERTS + 1;
      int next = 0;
      for (int expert = 0; expert < Entries::EXPERTS; ++expert) {
        begin[expert] = next;
        for (int entry = 0; entry < tokens * EACH; ++entry) {
          const float* at = choices + entry / EACH * Entries::CHOICE + entry % EACH;
          if (bits_as<int>(load_shared(at)) == expert) order[next++] = entry;
        }
      }
      begin[Entries::EXPERTS] = next;
    }
    b.core.barrier();
  }

  template <class Block, class Stage, class RowBatch>
  __device__ void prefetch_batch(Block&, const Stage&, const RowBatch&, const u8*) const {}
  template <bool DOWN, class Block, class Stage, class RowBatch>
  __device__ void decode_batch(Block&, const Stage&, const RowBatch&, const u8*) const {}

  // emit(entry, element, sum of its first row, sum of its last row) for some entries of an expert and
  // each element of a batch of its rows. An entry's input is its token's, or that of a DOWN
  // projection its own. Sums begin with the rows' biases, where there are some.
  template <int UNIT, bool DOWN, class Block, class Stage, class EntryPart, class RowBatch,
            class Emit>
  __device__ void multiply_entries(Block& b, const Stage& stage, const float* x, int expert,
                                   const EntryPart& part, const RowBatch& batch, const u8* weights, const float* biases,
                                   Emit emit) {
    const int* const begin = begins(b);
    const int* const order = begin + Entries::EXPERTS + 1;
    const int cols = stage.expert_cols, first = begin[expert] + part.first,
              end = first + part.count;
    float* const mine = b.scratch + b.core.warp() * 2 * stage.tile_rows;
    float* const tile = mine + stage.tile_rows;
    each_group(b, stage, batch, [&](int row, int rows, auto place) {
      for (int at = first + b.core.warp(); at < end; at += b.core.warps()) {
        const int entry = order[at];
        const float* from = x + long(DOWN ? entry : entry / Entries::EACH) * cols;
        for (int r = b.core.warp_thread(); r < rows; r += b.core.warp_threads())
          mine[r] = biases ? biases[row + r] : 0.0f;
        b.core.warp_sync();
        for (int col = 0, slice = 0; col < cols; col += stage.tile_cols, ++slice) {
          const int wide = cols - col < stage.tile_cols ? cols - col : stage.tile_cols;
          if constexpr (CODED) {
            b.core.dot_coded(code_of(stage), weights + u64(place(slice)) * UNIT_BYTES, rows, wide,
                             from + col, tile);
          } else {
            const long first = long(stage.expert_rows) * col + long(row) * wide;
            b.core.dot_tile(weights + first * type_bytes(WEIGHT), rows, wide, from + col, tile);
          }
          b.core.warp_sync();
          for (int r = b.core.warp_thread(); r < rows; r += b.core.warp_threads())
            mine[r] += tile[r];
          b.core.warp_sync();
        }
        for (int i = b.core.warp_thread(); i < rows / UNIT; i += b.core.warp_threads())
          emit(entry, row / UNIT + i, mine[i * UNIT], mine[i * UNIT + UNIT - 1]);
        b.core.warp_sync();
      }
    });
  }

  // ---- products ---------------------------------------------------------------------------------

  // emit(token, element, sum of its first row, sum of its last row) for each element of the block.
  // Each warp adds its tiles' sums of a row group in its own part of the scratch,
  // [warps][tokens][tile_rows].
  template <int UNIT, class Block, class Ready, class Emit>
  __device__ bool multiply(Block& b, const Stage& stage, const float* x, int tokens, Ready ready,
                           Emit emit) {
    if (!ready()) return false;
    b.core.quantise_chunk(stage, x, tokens);
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const int pitch = tokens * stage.tile_rows;
    float* const mine = b.scratch + b.core.warp() * pitch;
    // one token's sums of a tile
    float* const tile = b.scratch + b.core.warps() * pitch + b.core.warp() * stage.tile_rows;
    for (int row = own.lo; row < own.hi; row += stage.tile_rows) {
      const int rows = own.hi - row < stage.tile_rows ? own.hi - row : stage.tile_rows;
      for (int i = b.core.warp_thread(); i < pitch; i += b.core.warp_threads()) mine[i] = 0.0f;
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
          sums[0] += b.scratch[w * pitch + first];
          sums[1] += b.scratch[w * pitch + first + unit - 1];
        }
        emit(token, row / unit + i % elements, sums[0], sums[1]);
      }
      b.core.barrier();
    }
    b.core.chunk_done();
    return true;
  }
};

// Rows of a head that drafts, one behind the other, times x: a warp's.
template <class Block>
__device__ void dot_draft_rows(Block& b, const u8* rows, int count, int cols, const float* x,
                               float* sums) {
  b.core.dot_tile(rows, count, cols, x, sums);
}

}  // namespace twin
