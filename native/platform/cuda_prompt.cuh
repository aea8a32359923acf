// A chunk's activations and products on the tensor cores: tokens are the 16 rows of an instruction, 8 weight rows its
// columns, read straight from the ring. During the passes the ring has fewer slots; the rest of its memory holds the first
// columns of the stage's activations, or what attention needs. Barriers of its own keep the decode ring untouched.
#pragma once

namespace twin {

constexpr int CHUNK_TOKENS = 16;
constexpr int CHUNK_TILE_ROWS = 8;
constexpr int CHUNK_SUMS = CHUNK_TOKENS * CHUNK_TILE_ROWS;  // of one warp
constexpr int PIECE_COLUMNS = 8;                            // 16 bytes of 16-bit activations
constexpr int PIECE_BYTES = 2 * PIECE_COLUMNS * CHUNK_TOKENS;

// Shared memory of a block during passes, in bytes from its start; slots want 128-byte alignment.
struct ChunkShared {
  static constexpr int slots = 0;
  static constexpr int activations = Plan::prompt_slots * Plan::slot_bytes;
  static constexpr int sums = activations + Plan::prompt_activation_bytes;
  static constexpr int bytes = sums + 2 * 4 * CHUNK_SUMS * CONSUMER_WARPS;
};

// Mbarriers of the passes: they lie outside of what bulk copies of the decode ring overwrite.
struct ChunkBarriers {
  static constexpr int SLOTS = Plan::prompt_slots > 0 ? Plan::prompt_slots : 1;
  u64 full[SLOTS];
  u64 empty[SLOTS];
  u64 done;  // all passes are over: the decode ring may have the memory

  __device__ void init() {
    for (int i = 0; i < SLOTS; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, CONSUMER_WARPS);
    }
    barrier_init(&done, CONSUMERS);
  }
};

__device__ __forceinline__ u32 chunk_slot(u32 tile) { return tile % u32(ChunkBarriers::SLOTS); }
__device__ __forceinline__ u32 chunk_parity(u32 tile) { return tile / u32(ChunkBarriers::SLOTS) & 1u; }

// The loader's side of the passes.
struct ChunkLoader {
  u8* slots;
  ChunkBarriers& barriers;
  const volatile int* stop;  // the consumers have left
  u32 tile;

  __device__ bool wait(u64* barrier, u32 parity) const {
    while (!barrier_passed(barrier, parity))
      if (*stop) return false;
    return true;
  }
  __device__ bool fill(const u8* from, int bytes) {
    const u32 slot = chunk_slot(tile);
    if (tile >= u32(ChunkBarriers::SLOTS) && !wait(barriers.empty + slot, chunk_parity(tile) ^ 1u)) return false;
    bulk_copy(slots + slot * u32(Plan::slot_bytes), from, bytes, barriers.full + slot);
    ++tile;
    return !*stop;
  }
  // False: the run has ended. Nothing may arrive after the block has left.
  __device__ bool finish() {
    if (wait(&barriers.done, 0)) return true;
    const u32 last = tile < u32(ChunkBarriers::SLOTS) ? tile : u32(ChunkBarriers::SLOTS);
    for (u32 back = 1; back <= last; ++back) barrier_wait(barriers.full + chunk_slot(tile - back), chunk_parity(tile - back));
    return false;
  }
};

// d += a * b for 16 tokens, 8 weight rows and 16 columns.
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (WEIGHT == Type::BF16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

__device__ __forceinline__ uint4 load_piece_shared(u32 at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}

// Past the first-level cache: other multiprocessors wrote it.
__device__ __forceinline__ uint4 load_piece_global(const u8* at) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at) : "memory");
  return v;
}

struct Chunk {
  static constexpr int RUN = 8;
  static constexpr int CACHED = Plan::prompt_activation_bytes / PIECE_BYTES;  // pieces of the activations on the chip

  u8* shared;
  ChunkBarriers& barriers;
  u32 tile;  // of all passes so far
  int half;  // of the sums

  template <class Block>
  __device__ explicit Chunk(Block& b) : shared(b.core.ring.slots), barriers(b.core.chunk_barriers), tile(0), half(0) {}

  template <class Block>
  __device__ float* memory(Block&) const {
    return reinterpret_cast<float*>(shared + ChunkShared::activations);
  }

  // The memory goes back to the decode ring: what was written here comes before what bulk copies will write.
  template <class Block>
  __device__ void finish(Block&) {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    barrier_arrive(&barriers.done);
  }

  // ---- activations ----

  // 16-bit: pieces of 8 columns, in each the 16 bytes of 16 tokens. Tokens are shuffled within a piece, so that the lanes
  // of one load phase (2 tokens of 4 pieces) touch all banks. A number too large for a half becomes the largest one.
  __device__ static int offset(int token, int column) {
    const int piece = column / PIECE_COLUMNS;
    return piece * PIECE_BYTES + token / 8 * 128 + ((token % 8) ^ (piece % 4 * 2)) * 16 + column % PIECE_COLUMNS * 2;
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

  // The first pieces onto the chip. Ends with a block barrier.
  template <class Core>
  __device__ __forceinline__ void fetch(Core& core, const u8* x, int columns) const {
    const int pieces = columns / PIECE_COLUMNS, bytes = (pieces < CACHED ? pieces : CACHED) * PIECE_BYTES;
    const u32 to = shared_address(shared + ChunkShared::activations);
    for (int i = core.thread() * 16; i < bytes; i += CONSUMERS * 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + u32(i)), "l"(x + i) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    core.barrier();
  }

  // ---- products ----

  // sum += all tokens times 8 rows of the tile at `from` whose first column is `column`: this warp's 32-column chunks.
  // `ready` waits for the tile: activations that are not on the chip are asked for before.
  template <class Ready>
  __device__ __forceinline__ void add_tile(const u8* x, u32 from, int rows, int cols, int column, float (&sum)[4], Ready ready) const {
    constexpr int AT_ONCE = 2, STEP = 4 * PIECE_COLUMNS;
    const int lane = int(threadIdx.x % 32), row = lane / 4, quarter = lane % 4;
    const u32 weights = from + u32((row < rows ? row : 0) * cols + quarter * PIECE_COLUMNS) * 2u;
    const u32 cached = shared_address(shared + ChunkShared::activations);
    bool waited = false;
    for (int c = int(threadIdx.x / 32) * STEP; c < cols || !waited; c += AT_ONCE * STEP * CONSUMER_WARPS) {
      uint4 low[AT_ONCE] = {}, high[AT_ONCE] = {};  // tokens 0-7 and 8-15
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int at = c + k * STEP * CONSUMER_WARPS + quarter * PIECE_COLUMNS;
        if (at >= cols) continue;
        const int piece = (column + at) / PIECE_COLUMNS, offset = piece * PIECE_BYTES + (row ^ (piece % 4 * 2)) * 16;
        if (piece < CACHED) {
          low[k] = load_piece_shared(cached + u32(offset)), high[k] = load_piece_shared(cached + u32(offset) + 128u);
        } else {
          low[k] = load_piece_global(x + offset), high[k] = load_piece_global(x + offset + 128);
        }
      }
      if (!waited) ready();
      waited = true;
      __syncwarp();
#pragma unroll
      for (int k = 0; k < AT_ONCE; ++k) {
        const int start = c + k * STEP * CONSUMER_WARPS;  // the same in all lanes, which multiply together
        if (start >= cols) break;
        uint4 w = {};
        if (start + quarter * PIECE_COLUMNS < cols) w = load_piece_shared(weights + u32(start) * 2u);
        multiply_add(sum, low[k].x, high[k].x, low[k].y, high[k].y, w.x, w.y);
        multiply_add(sum, low[k].z, high[k].z, low[k].w, high[k].w, w.z, w.w);
      }
    }
  }

  // The same in FP32, two tokens at a time; sums [tokens][8] of this warp, in shared memory.
  __device__ __forceinline__ void add_tile_fp32(const float* x, const float* from, int rows, int cols, int column, int columns, int tokens,
                                                bool first, float* sums) const {
    constexpr int TOKENS = 2, STEP = 4;
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    for (int token = 0; token < tokens; token += TOKENS) {
      float sum[TOKENS][CHUNK_TILE_ROWS] = {};
      for (int c = (warp * 32 + lane) * STEP; c < cols; c += CONSUMERS * STEP) {
        float4 xs[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const int row = token + t < tokens ? token + t : token;
          xs[t] = load_quad(x + long(row) * columns + column + c);
        }
#pragma unroll
        for (int r = 0; r < CHUNK_TILE_ROWS; ++r) {
          const float4 w = *reinterpret_cast<const float4*>(from + (r < rows ? r : 0) * cols + c);
#pragma unroll
          for (int t = 0; t < TOKENS; ++t) sum[t][r] += xs[t].x * w.x + xs[t].y * w.y + xs[t].z * w.z + xs[t].w * w.w;
        }
      }
#pragma unroll
      for (int t = 0; t < TOKENS; ++t)
#pragma unroll
        for (int r = 0; r < CHUNK_TILE_ROWS; ++r) {
          float total = sum[t][r];
#pragma unroll
          for (int apart = 16; apart; apart /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, apart);
          float* at = sums + (token + t) * CHUNK_TILE_ROWS + r;
          if (lane == r) *at = first ? total : *at + total;
        }
    }
  }

  // emit(token, element, sum of its first row, sum of its last row) for each element of the block. All warps share each
  // tile's columns; 8 rows of all tokens are summed over the warps between two barriers, in turns of two halves.
  template <class Block, class Emit>
  __device__ __forceinline__ void multiply(Block& b, const Stage& stage, const float* x, int tokens, Emit emit) {
    constexpr bool WIDE = WEIGHT == Type::FP32;
    const int lane = b.core.lane(), warp = b.core.warp(), unit = stage.unit, size = type_bytes(WEIGHT);
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const u8* packed = reinterpret_cast<const u8*>(x);
    if constexpr (!WIDE) fetch(b.core, packed, stage.cols);
    const u32 slices = u32((stage.cols + stage.tile_cols - 1) / stage.tile_cols);
    for (int row = own.lo; row < own.hi; row += stage.tile_rows, tile += slices) {
      const int rows = own.hi - row < stage.tile_rows ? own.hi - row : stage.tile_rows;
      for (int below = 0; below < rows; below += CHUNK_TILE_ROWS) {
        const int here = rows - below < CHUNK_TILE_ROWS ? rows - below : CHUNK_TILE_ROWS;
        float* const sums = reinterpret_cast<float*>(shared + ChunkShared::sums) + half * CONSUMER_WARPS * CHUNK_SUMS;
        float sum[4] = {};
        half ^= 1;
        for (u32 slice = 0; slice < slices; ++slice) {
          const int column = int(slice) * stage.tile_cols, cols = stage.cols - column < stage.tile_cols ? stage.cols - column : stage.tile_cols;
          const u32 slot = chunk_slot(tile + slice);
          const u8* from = shared + slot * u32(Plan::slot_bytes) + below * cols * size;
          auto ready = [&] { barrier_wait(barriers.full + slot, chunk_parity(tile + slice)); };
          if constexpr (WIDE) {
            ready();
            add_tile_fp32(x, reinterpret_cast<const float*>(from), here, cols, column, stage.cols, tokens, slice == 0, sums + warp * CHUNK_SUMS);
          } else {
            add_tile(packed, shared_address(from), here, cols, column, sum, ready);
          }
          __syncwarp();
          if (below + CHUNK_TILE_ROWS >= rows && lane == 0) barrier_arrive(barriers.empty + slot);
        }
        if constexpr (!WIDE) {  // of token lane / 4 and 8 + lane / 4, rows 2 * (lane % 4) and the next
          float2* to = reinterpret_cast<float2*>(sums + warp * CHUNK_SUMS) + lane;
          to[0] = float2{sum[0], sum[1]}, to[CHUNK_SUMS / 4] = float2{sum[2], sum[3]};
        }
        b.core.barrier();
        const int elements = here / unit;
        for (int i = b.core.thread(); i < tokens * elements; i += CONSUMERS) {
          const int token = i / elements, element = i % elements;
          const float* at = sums + token * CHUNK_TILE_ROWS + element * unit;
          float low = 0, high = 0;
#pragma unroll
          for (int w = 0; w < CONSUMER_WARPS; ++w) low += at[w * CHUNK_SUMS], high += at[w * CHUNK_SUMS + unit - 1];
          emit(token, (row + below) / unit + element, low, high);
        }
      }
    }
  }
};

}  // namespace twin
