// A chunk's activations and products. Of 16-bit weights on the tensor cores: 16 tokens are the rows of an instruction, 8 weight
// rows its columns. Warps divide a matrix by columns: each brings its share of activations and weights onto the chip, steps
// ahead and across rows, into slots of its own. Loads into registers do not do: the assembler waits for all that are under way
// at once. The ring rests during the passes; its memory holds the slots, or what attention needs.
#pragma once

namespace twin {

constexpr int CHUNK_TOKENS = 16;    // of a tensor-core instruction
constexpr int CHUNK_TILE_ROWS = 8;  // of a tensor-core instruction
constexpr int PIECE_COLUMNS = 8;    // 16 bytes of 16-bit activations
constexpr int STEP_PIECES = 4;      // of a row: four lanes copy 64 bytes together
constexpr int CHUNK_SLOTS = 4;      // steps of a warp on the chip: one in use, the others under way
constexpr int MOST_SUMS = 64;       // registers of a lane

// Of a plan with passes; one token a pass is never read in them.
constexpr int PASS_TOKENS = Plan::prompt_chunk > 1 ? Plan::prompt_chunk : CHUNK_TOKENS;
constexpr int TOKEN_SETS = PASS_TOKENS / CHUNK_TOKENS;
constexpr int CHUNK_GROUPS = TOKEN_SETS < 2 ? 8 : MOST_SUMS / (4 * TOKEN_SETS);  // of 8 rows, that use a step's activations together
constexpr int PIECE_BYTES = 2 * PIECE_COLUMNS * PASS_TOKENS;
constexpr int STEP_COLUMNS = STEP_PIECES * PIECE_COLUMNS;
constexpr int STEP_ACTIVATIONS = STEP_PIECES * PIECE_BYTES;     // bytes
constexpr int GROUP_BYTES = 2 * STEP_COLUMNS * CHUNK_TILE_ROWS;  // of a step's weights
constexpr int STEP_BYTES = STEP_ACTIVATIONS + CHUNK_GROUPS * GROUP_BYTES;
constexpr int SUM_GROUPS = 8 / TOKEN_SETS;  // whose sums are added over the warps together
constexpr int SUM_ROWS = SUM_GROUPS * CHUNK_TILE_ROWS, SUM_QUADS = SUM_ROWS / 4;
constexpr int WARP_SUMS = PASS_TOKENS * SUM_ROWS;
// What twin/kernel/prompt.py counts a block's memory with.
static_assert(CHUNK_TOKENS == facts::PASS_TOKENS, "TOKENS in twin/kernel/prompt.py is another");
static_assert(CHUNK_TILE_ROWS == facts::PASS_TILE_ROWS,
              "TILE_ROWS in twin/kernel/prompt.py is another");
static_assert(PIECE_COLUMNS == facts::PASS_PIECE_COLUMNS,
              "PIECE_COLUMNS in twin/kernel/prompt.py is another");
static_assert(STEP_COLUMNS == facts::PASS_STEP_COLUMNS,
              "STEP_COLUMNS in twin/kernel/prompt.py is another");
static_assert(CHUNK_SLOTS == facts::PASS_SLOTS, "SLOTS in twin/kernel/prompt.py is another");
static_assert(MOST_SUMS == facts::PASS_GROUPS_OF_32 * 8,
              "GROUPS in twin/kernel/prompt.py uses other registers");
static_assert(CHUNK_GROUPS == (PASS_TOKENS == 16   ? facts::PASS_GROUPS_OF_16
                               : PASS_TOKENS == 32 ? facts::PASS_GROUPS_OF_32
                                                   : facts::PASS_GROUPS_OF_64),
              "GROUPS in twin/kernel/prompt.py is another");
static_assert(WARP_SUMS == facts::PASS_SUM_FLOATS,
              "SUM_FLOATS in twin/kernel/prompt.py is another");
static_assert(PASS_TOKENS % CHUNK_TOKENS == 0 && CHUNK_GROUPS % SUM_GROUPS == 0, "whole instructions, whole sums");

// Shared memory of a block during passes, in bytes from its start.
struct ChunkShared {
  static constexpr int slots = 0;                                            // [warps][CHUNK_SLOTS][STEP_BYTES]
  static constexpr int sums = CONSUMER_WARPS * CHUNK_SLOTS * STEP_BYTES;       // [warps][tokens][SUM_ROWS] FP32
  static constexpr int products = sums + 4 * WARP_SUMS * CONSUMER_WARPS;       // bytes
  static constexpr int bytes = Plan::prompt_bytes;                             // or what attention needs
  static_assert(WEIGHT == Type::FP32 || Plan::prompt_chunk == 1 || products <= bytes, "the plan counts the same");
};

// A block's rows of a stage's matrix as they lie in its stream: row groups of the tile's height, in each its column slices.
struct Rows16 {
  const u8* from;
  int rows;    // of the block
  int cols;
  int tile_cols;
  int height;  // of a row group
};

// Where a warp stands in its share of the columns; 32 columns a step, which end with a slice.
struct ChunkColumns {
  int before;  // columns of the slices before this one
  int width;   // of the slice
  int at;      // in the slice

  __device__ __forceinline__ void open(const Rows16& matrix, int step) {
    const int steps = (matrix.tile_cols + STEP_COLUMNS - 1) / STEP_COLUMNS;  // of a slice
    before = step / steps * matrix.tile_cols;
    at = step % steps * STEP_COLUMNS;
    width = matrix.cols - before < matrix.tile_cols ? matrix.cols - before : matrix.tile_cols;
  }
  __device__ __forceinline__ void next(const Rows16& matrix) {
    const bool more = at + STEP_COLUMNS < width;
    before = more ? before : before + matrix.tile_cols;
    at = more ? at + STEP_COLUMNS : 0;
    width = matrix.cols - before < matrix.tile_cols ? matrix.cols - before : matrix.tile_cols;
  }
};

struct Chunk {
  static constexpr int RUN = 8;
  u8* shared;
  u64* passed;       // all passes are over: the decode ring may have the memory
  const u8* stream;  // the next stage's weights
  int me;            // the thread

  // Addresses that are computed here are not kept in registers for the steps that follow.
  template <class Block>
  __device__ explicit Chunk(Block& b) : passed(&b.core.signals.passed), stream(nullptr), me(b.core.thread()) {
    int start = 0;
    keep_here(start);
    shared = reinterpret_cast<u8*>(b.input) - b.plan.ring_slots * b.plan.slot_bytes + start;  // from the ring on
    keep_here(me);
  }

  template <class Block>
  __device__ float* memory(Block&) const {
    return reinterpret_cast<float*>(shared + ChunkShared::slots);
  }

  // A pass begins.
  template <class Block>
  __device__ void open(Block& b) {
    stream = b.memory.stream + u64(b.plan.streams_at(b.block).page) * PAGE_BYTES;
  }

  // The memory goes back to the decode ring: what was written here comes before what bulk copies will write.
  template <class Block>
  __device__ void finish(Block&) {
    leave_to_copies();
    leave_cache_to_copies();
    barrier_arrive(shared_address(passed));
  }

  // The next stage's weights on their way to the second-level cache, while the block does something else.
  template <class Block>
  __device__ void prefetch(Block& b, const Stage& stage) const {
    constexpr u32 MOST = 128 << 10;  // 16 MiB of all blocks
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const u32 bytes = u32(own.hi - own.lo) * u32(stage.cols) * type_bytes(WEIGHT);
    if (me == 0 && bytes > 0) prefetch_weights(stream, bytes < MOST ? bytes : MOST);
  }

  // ---- activations ----

  // 16-bit: pieces of 8 columns, in each the 16 bytes of all tokens. A number too large for a half becomes the largest one.
  __device__ static int offset(int token, int column) {
    return column / PIECE_COLUMNS * PIECE_BYTES + token * 2 * PIECE_COLUMNS + column % PIECE_COLUMNS * 2;
  }
  __device__ static u16 rounded(float value) {
    if constexpr (WEIGHT == Type::BF16) return bfloat_bits(value);
    return half_bits(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
  }
  __device__ static void store(float* x, int columns, int token, int column, float value) {
    if constexpr (WEIGHT == Type::FP32) {
      x[long(token) * columns + column] = value;
    } else {
      *reinterpret_cast<u16*>(reinterpret_cast<u8*>(x) + offset(token, column)) = rounded(value);
    }
  }
  __device__ static void store_run(float* x, int columns, int token, int column, const Run<RUN>& run) {
    if constexpr (WEIGHT == Type::FP32) {
#pragma unroll
      for (int i = 0; i < RUN; ++i) store(x, columns, token, column + i, run.at[i]);
    } else {
      u32 words[RUN / 2];
#pragma unroll
      for (int i = 0; i < RUN / 2; ++i) words[i] = u32(rounded(run.at[2 * i])) | u32(rounded(run.at[2 * i + 1])) << 16;
      *reinterpret_cast<uint4*>(reinterpret_cast<u8*>(x) + offset(token, column)) = uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // ---- cached keys and values ----

  static constexpr int COPY_BYTES = HEAD_DIM * type_bytes(KV) % 16 == 0 ? 16 : 4;
  __device__ static __forceinline__ void copy(u8* to, const u8* from) {
    if constexpr (COPY_BYTES == 16) {
      copy_activations(shared_address(to), from, true);
    } else {
      *reinterpret_cast<float*>(to) = load_shared(reinterpret_cast<const float*>(from));
    }
  }
  __device__ static __forceinline__ void sent() { copies_sent(); }
  // All that was sent, but for the last LEFT times.
  template <int LEFT>
  __device__ static __forceinline__ void arrived() {
    copies_arrived<LEFT>();
  }

  // A lane's part of a position on the chip, in wide loads.
  template <class Core, class Piece>
  __device__ static __forceinline__ void load(const Core& core, Piece& piece, const u8* row) {
    const u8* at = row + core.lane() % Piece::LANES * Piece::BYTES;
    if constexpr (!Piece::WIDE) {
      piece.load_near(core, row);
    } else if constexpr (Piece::BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at + 4 * i);
        piece.word[i] = v.x, piece.word[i + 1] = v.y, piece.word[i + 2] = v.z, piece.word[i + 3] = v.w;
      }
    } else if constexpr (Piece::BYTES % 8 == 0) {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; i += 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(at + 4 * i);
        piece.word[i] = v.x, piece.word[i + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; ++i) piece.word[i] = *reinterpret_cast<const u32*>(at + 4 * i);
    }
  }

  // ---- products ----

  // A step's weights of the row groups from `row` of the block on, on their way to `to`; zeros beyond the matrix.
  __device__ __forceinline__ void ask_weights(const Rows16& matrix, const ChunkColumns& columns, int row, u32 to, u64 once) const {
    const int lane = me % 32, column = columns.at + lane % 4 * PIECE_COLUMNS;
#pragma unroll
    for (int g = 0; g < CHUNK_GROUPS; ++g) {
      const int first = row + g * matrix.height, rows = matrix.rows - first < matrix.height ? matrix.rows - first : matrix.height;
      const u32 at = u32(first) * u32(matrix.cols) + u32(columns.before * rows + (lane / 4 < rows ? lane / 4 : 0) * columns.width + column);
      const bool there = rows > 0 && column < columns.width;
      copy_weights(to + u32(g * GROUP_BYTES + lane * 16), matrix.from + u64(there ? at : 0u) * 2, there, once);
    }
  }

  // A step's activations. Tokens are shuffled within a piece, so that the lanes of one load phase (2 tokens of 4 pieces) touch all
  // banks. Columns beyond the slice are zeros.
  __device__ __forceinline__ void ask_activations(const u8* x, const ChunkColumns& columns, u32 to) const {
    const int lane = me % 32, first = (columns.before + columns.at) / PIECE_COLUMNS, pieces = (columns.width - columns.at) / PIECE_COLUMNS;
#pragma unroll
    for (int i = 0; i < STEP_PIECES * PASS_TOKENS; i += 32) {
      const int piece = (i + lane) / PASS_TOKENS, token = (i + lane) % PASS_TOKENS;
      const bool there = piece < pieces;
      const u8* from = x + (there ? (first + piece) * PIECE_BYTES + token * 16 : 0);
      copy_activations(to + u32(piece * PIECE_BYTES + (token ^ piece * 2) * 16), from, there);
    }
  }

  // sum += all tokens times the weights of a step that lies at `slot`. Row groups that are not there are zeros: a branch would make
  // each wait for the one before.
  __device__ __forceinline__ void multiply_step(const u8* slot, float (&sum)[CHUNK_GROUPS][TOKEN_SETS][4]) const {
    const int lane = me % 32;
    const uint4* const at = reinterpret_cast<const uint4*>(slot + lane % 4 * PIECE_BYTES + (lane / 4 ^ lane % 4 * 2) * 16);
    const uint4* const weights = reinterpret_cast<const uint4*>(slot + STEP_ACTIVATIONS + lane * 16);
    uint4 low[TOKEN_SETS], high[TOKEN_SETS], w[CHUNK_GROUPS];
#pragma unroll
    for (int t = 0; t < TOKEN_SETS; ++t) low[t] = at[16 * t], high[t] = at[16 * t + 8];
#pragma unroll
    for (int g = 0; g < CHUNK_GROUPS; ++g) w[g] = weights[g * (GROUP_BYTES / 16)];
#pragma unroll
    for (int t = 0; t < TOKEN_SETS; ++t)
#pragma unroll
      for (int g = 0; g < CHUNK_GROUPS; ++g) multiply_add(sum[g][t], low[t].x, high[t].x, low[t].y, high[t].y, w[g].x, w[g].y);
#pragma unroll
    for (int t = 0; t < TOKEN_SETS; ++t)
#pragma unroll
      for (int g = 0; g < CHUNK_GROUPS; ++g) multiply_add(sum[g][t], low[t].z, high[t].z, low[t].w, high[t].w, w[g].z, w[g].w);
  }

  // emit(token, element, sum of its first row, sum of its last row) for each element of the block. `ready` waits for the
  // activations, once the first weights are under way; false ends it.
  template <class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply(Block& b, const Stage& stage, const float* x, int tokens, Ready ready, Emit emit) {
    keep_here(me);  // nor are they from stage to stage
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const bool sliced = stage.cols > stage.tile_cols;
    const Rows16 matrix = {stream, own.hi - own.lo, stage.cols, stage.tile_cols, sliced ? stage.tile_rows : CHUNK_TILE_ROWS};
    stream += u64(u32(matrix.rows) * u32(matrix.cols)) * type_bytes(WEIGHT);
    if constexpr (WEIGHT == Type::FP32) {
      if (!ready()) return false;
      multiply_fp32(matrix, own.lo / stage.unit, stage.unit, sliced ? stage.tile_rows : matrix.rows, x, tokens, emit);
      return true;
    } else {
      return multiply_16(b, matrix, own.lo / stage.unit, stage.unit, reinterpret_cast<const u8*>(x), tokens, ready, emit);
    }
  }

  template <class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply_16(Block& b, const Rows16& matrix, int element, int unit, const u8* x, int tokens, Ready ready,
                                              Emit emit) {
    const int warp = me / 32, batch = CHUNK_GROUPS * matrix.height;
    const int slice = (matrix.tile_cols + STEP_COLUMNS - 1) / STEP_COLUMNS, last = matrix.cols % matrix.tile_cols;
    const int all = matrix.cols / matrix.tile_cols * slice + (last + STEP_COLUMNS - 1) / STEP_COLUMNS;
    const int share = (all + CONSUMER_WARPS - 1) / CONSUMER_WARPS, left = all - warp * share;
    const int steps = left < 0 ? 0 : left < share ? left : share;  // of this warp
    const u64 once = read_once();

    u8* const slots = shared + ChunkShared::slots + warp * (CHUNK_SLOTS * STEP_BYTES);
    const u32 to = shared_address(slots);
    ChunkColumns start;
    start.open(matrix, warp * share);

    // The first steps' weights are asked for before their activations are there.
    ChunkColumns next = start;
    int next_row = 0, next_step = 0;
    auto advance = [&] {
      next.next(matrix);
      if (++next_step < steps) return;
      next = start, next_step = 0, next_row += batch;
    };
    const int all_steps = steps * ((matrix.rows + batch - 1) / batch);
#pragma unroll 1
    for (int i = 0; i < CHUNK_SLOTS - 1 && i < all_steps; ++i) {
      ask_weights(matrix, next, next_row, to + u32(i * STEP_BYTES) + STEP_ACTIVATIONS, once);
      advance();
    }
    if (!ready()) return false;
    next = start, next_row = next_step = 0;
#pragma unroll 1
    for (int i = 0; i < CHUNK_SLOTS - 1; ++i) {
      if (i < all_steps) ask_activations(x, next, to + u32(i * STEP_BYTES)), advance();
      copies_sent();
    }

    u32 done = 0;  // steps, of all batches
    for (int row = 0; row < matrix.rows; row += batch) {
      float sum[CHUNK_GROUPS][TOKEN_SETS][4] = {};
      const int left = (matrix.rows - row + matrix.height - 1) / matrix.height, groups = left < CHUNK_GROUPS ? left : CHUNK_GROUPS;
#pragma unroll 1
      for (int step = 0; step < steps; ++step, ++done) {
        copies_arrived<CHUNK_SLOTS - 2>();
        __syncwarp();  // all lanes' copies are there, and all have used the slot before
        if (done + CHUNK_SLOTS - 1 < u32(all_steps)) {
          const u32 slot = to + (done + CHUNK_SLOTS - 1) % CHUNK_SLOTS * STEP_BYTES;
          ask_weights(matrix, next, next_row, slot + STEP_ACTIVATIONS, once);
          ask_activations(x, next, slot);
          advance();
        }
        copies_sent();
        multiply_step(slots + done % CHUNK_SLOTS * STEP_BYTES, sum);
      }
#pragma unroll
      for (int g = 0; g < CHUNK_GROUPS; g += SUM_GROUPS)
        if (g < groups) add_warps(b, matrix, row + g * matrix.height, element, unit, tokens, sum, g, emit);
    }
    return true;
  }

  // The warps' sums of SUM_GROUPS row groups from `row` on, added in their order; `from` is the first of them in `sum`.
  template <class Block, class Emit>
  __device__ __forceinline__ void add_warps(Block& b, const Rows16& matrix, int row, int element, int unit, int tokens,
                                            const float (&sum)[CHUNK_GROUPS][TOKEN_SETS][4], int from, Emit emit) const {
    const int lane = me % 32;
    float* const sums = reinterpret_cast<float*>(shared + ChunkShared::sums);
    if (row > 0) b.core.barrier();  // those before have been added
    // Of token lane / 4 and 8 more, rows 2 * (lane % 4) and the next. Quads of rows are shuffled: no two lanes meet in a bank.
    float* const mine = sums + me / 32 * WARP_SUMS + lane / 4 * SUM_ROWS + lane % 2 * 2;
#pragma unroll
    for (int g = 0; g < SUM_GROUPS; ++g)
#pragma unroll
      for (int t = 0; t < TOKEN_SETS; ++t) {
        float* const to = mine + t * CHUNK_TOKENS * SUM_ROWS + shuffled(2 * g + lane % 4 / 2, lane / 4) * 4;
        *reinterpret_cast<float2*>(to) = float2{sum[from + g][t][0], sum[from + g][t][1]};
        *reinterpret_cast<float2*>(to + 8 * SUM_ROWS) = float2{sum[from + g][t][2], sum[from + g][t][3]};
      }
    b.core.barrier();
#pragma unroll 1
    for (int i = me; i < tokens * SUM_QUADS; i += CONSUMERS) {
      const int token = i / SUM_QUADS, quad = i % SUM_QUADS;
      const float* at = sums + token * SUM_ROWS + shuffled(quad, token) * 4;
      float4 total = *reinterpret_cast<const float4*>(at);
#pragma unroll
      for (int w = 1; w < CONSUMER_WARPS; ++w) {
        const float4 more = *reinterpret_cast<const float4*>(at + w * WARP_SUMS);
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      const int below = quad % 2 * 4, first = row + quad / 2 * matrix.height + below;  // row of total.x, of the block
      const int here = matrix.height - below < matrix.rows - first ? matrix.height - below : matrix.rows - first;
      if (unit == 1) {
        if (here > 0) emit(token, element + first, total.x, total.x);
        if (here > 1) emit(token, element + first + 1, total.y, total.y);
        if (here > 2) emit(token, element + first + 2, total.z, total.z);
        if (here > 3) emit(token, element + first + 3, total.w, total.w);
      } else {
        if (here > 1) emit(token, element + first / 2, total.x, total.y);
        if (here > 3) emit(token, element + first / 2 + 1, total.z, total.w);
      }
    }
  }
  __device__ static __forceinline__ int shuffled(int quad, int token) {
    return SUM_QUADS >= 8 ? quad ^ token % 4 * 2 : SUM_QUADS == 4 ? quad ^ token / 2 % 2 * 2 : quad;
  }

  // FP32: a warp takes four rows of a row group at a time, and two tokens; its lanes share the columns.
  template <class Emit>
  __device__ __forceinline__ void multiply_fp32(const Rows16& matrix, int element, int unit, int height, const float* x, int tokens,
                                                Emit emit) const {
    constexpr int TOKENS = 2, ROWS = 4, STEP = 4;
    const int lane = me % 32;
    for (int row = me / 32 * ROWS; row < matrix.rows; row += CONSUMER_WARPS * ROWS) {
      for (int token = 0; token < tokens; token += TOKENS) {
        float sum[TOKENS][ROWS] = {};
#pragma unroll 1
        for (int before = 0; before < matrix.cols; before += matrix.tile_cols) {
          const int width = matrix.cols - before < matrix.tile_cols ? matrix.cols - before : matrix.tile_cols;
#pragma unroll 1
          for (int c = lane * STEP; c < width; c += 32 * STEP) {
            float4 xs[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t) xs[t] = load_quad(x + long(token + t < tokens ? token + t : token) * matrix.cols + before + c);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
              const int at = row + r < matrix.rows ? row + r : row, group = at - at % height;
              const int rows = matrix.rows - group < height ? matrix.rows - group : height;
              const u64 from = u64(group) * u64(matrix.cols) + u64(before * rows + at % height * width + c);
              const float4 w = load_once(reinterpret_cast<const float*>(matrix.from) + from);
#pragma unroll
              for (int t = 0; t < TOKENS; ++t) sum[t][r] += xs[t].x * w.x + xs[t].y * w.y + xs[t].z * w.z + xs[t].w * w.w;
            }
          }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int apart = 16; apart; apart /= 2) sum[t][r] += __shfl_xor_sync(0xFFFFFFFFu, sum[t][r], apart);
          if (lane != 0 || token + t >= tokens) continue;
#pragma unroll
          for (int r = 0; r < ROWS; ++r) {
            if (row + r >= matrix.rows || (unit > 1 && r % 2)) continue;
            const float last = unit > 1 ? sum[t][(r + 1) % ROWS] : sum[t][r];
            emit(token + t, element + (row + r) / unit, sum[t][r], last);
          }
        }
      }
    }
  }
};

}  // namespace twin
