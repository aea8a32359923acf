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
constexpr int CHUNK_HELD = 2;  // groups of 8 rows whose sums are added over the warps together

// Shared memory of a block during passes, in bytes from its start; slots want 128-byte alignment.
struct ChunkShared {
  static constexpr int slots = 0;
  static constexpr int activations = Plan::prompt_slots * Plan::slot_bytes;
  static constexpr int sums = activations + Plan::prompt_activation_bytes;
  static constexpr int bytes = sums + 2 * CHUNK_HELD * 4 * CHUNK_SUMS * CONSUMER_WARPS;
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
  u64* left;  // the consumers are done
  u32 tile;

  __device__ bool wait(u64* barrier, u32 parity) const {
    while (!barrier_passed(barrier, parity))
      if (barrier_seen(left, 0)) return false;
    return true;
  }
  __device__ bool fill(const u8* from, int bytes) {
    const u32 slot = chunk_slot(tile);
    if (tile >= u32(ChunkBarriers::SLOTS) && !wait(barriers.empty + slot, chunk_parity(tile) ^ 1u)) return false;
    bulk_copy(slots + slot * u32(Plan::slot_bytes), from, bytes, barriers.full + slot);
    ++tile;
    return !barrier_seen(left, 0);
  }
  // False: the run has ended. Nothing may arrive after the block has left.
  __device__ bool finish() {
    if (wait(&barriers.done, 0)) return true;
    const u32 last = tile < u32(ChunkBarriers::SLOTS) ? tile : u32(ChunkBarriers::SLOTS);
    for (u32 back = 1; back <= last; ++back) barrier_wait(barriers.full + chunk_slot(tile - back), chunk_parity(tile - back));
    return false;
  }
};

// d += a * b for 16 tokens, 8 weight rows and 16 columns. Not volatile: the loads of later columns may go first.
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (WEIGHT == Type::BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// From a slot of the ring.
__device__ __forceinline__ uint4 load_tile_piece(const u8* at) { return *reinterpret_cast<const uint4*>(at); }

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
  int me;    // the thread

  // Addresses that are computed here are not kept in registers for the steps that follow.
  template <class Block>
  __device__ explicit Chunk(Block& b) : barriers(b.core.chunk_barriers), tile(0), half(0), me(b.core.thread()) {
    int start = 0;
    keep_here(start);
    shared = b.core.ring.slots + start;
    keep_here(me);
  }

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
    for (int i = me * 16; i < bytes; i += CONSUMERS * 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + u32(i)), "l"(x + i) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    core.barrier();
  }

  // ---- products ----

  // A lane's part of the activations of 8 columns from `column` on: of a token of the first 8, and of one of the others.
  template <bool NEAR>
  __device__ __forceinline__ void load_activations(const u8* x, int column, uint4& low, uint4& high) const {
    const int piece = column / PIECE_COLUMNS, offset = piece * PIECE_BYTES + (me % 32 / 4 ^ (piece % 4 * 2)) * 16;
    if (NEAR || piece < CACHED) {
      const uint4* at = reinterpret_cast<const uint4*>(shared + ChunkShared::activations + offset);
      low = at[0], high = at[8];
    } else {
      low = load_piece_global(x + offset), high = load_piece_global(x + offset + 128);
    }
  }

  // sum += all tokens times 8 rows of the tile at `from` whose first column is `column`: this warp's chunks of 64 columns, of
  // which two are under way together. `ready` waits for the tile: activations are asked for before. NEAR: all are on the chip.
  //
  // Rows begin at the same bank, and a load's phase takes four lanes each of two rows: 64 bytes a row. So lanes of odd rows
  // take the two halves of a chunk's 128 bytes in the other order, and no two lanes meet in a bank.
  template <bool NEAR, class Ready>
  __device__ __forceinline__ void add_tile(const u8* x, const u8* from, int rows, int cols, int column, float (&sum)[4], Ready ready) const {
    constexpr int STEP = 4 * PIECE_COLUMNS, STEPS = 4, APART = 2 * STEP * CONSUMER_WARPS;
    const int lane = me % 32, row = lane / 4, quarter = lane % 4 * PIECE_COLUMNS, odd = row % 2;
    const u8* const weights = from + (row < rows ? row : 0) * cols * 2;
    bool waited = false;
    for (int start = me / 32 * 2 * STEP; start < cols || !waited; start += 2 * APART) {
      uint4 low[STEPS] = {}, high[STEPS] = {}, w[STEPS] = {};  // tokens 0-7 and 8-15; a row
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const int at = start + k / 2 * APART + k % 2 * STEP + quarter;
        if (at < cols) load_activations<NEAR>(x, column + at, low[k], high[k]);
      }
      if (!waited) ready();
      waited = true;
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        const int at = start + k / 2 * APART + (k % 2 ^ odd) * STEP + quarter;
        if (at < cols) w[k] = load_tile_piece(weights + at * 2);
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < STEPS; ++k) {
        if (start + k / 2 * APART >= cols) break;  // the same in all lanes, which multiply together
        const uint4 mine = odd ? w[k ^ 1] : w[k];
        multiply_add(sum, low[k].x, high[k].x, low[k].y, high[k].y, mine.x, mine.y);
        multiply_add(sum, low[k].z, high[k].z, low[k].w, high[k].w, mine.z, mine.w);
      }
    }
  }

  // The same in FP32, two tokens at a time; sums [tokens][8] of this warp, in shared memory.
  __device__ __forceinline__ void add_tile_fp32(const float* x, const float* from, int rows, int cols, int column, int columns, int tokens,
                                                bool first, float* sums) const {
    constexpr int TOKENS = 2, STEP = 4;
    const int lane = me % 32, warp = me / 32;
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
  // tile's columns. The sums of CHUNK_HELD groups of 8 rows are added over the warps after one barrier; the next groups use
  // the other half of the memory.
  template <class Block, class Emit>
  __device__ __forceinline__ void multiply(Block& b, const Stage& stage, const float* x, int tokens, Emit emit) {
    constexpr bool WIDE = WEIGHT == Type::FP32;
    constexpr int GROUP_SUMS = CONSUMER_WARPS * CHUNK_SUMS;
    const int lane = me % 32, warp = me / 32, size = type_bytes(WEIGHT);
    const Span own = b.plan.owned_at(stage.owned + b.block);
    const u8* packed = reinterpret_cast<const u8*>(x);
    if constexpr (!WIDE) fetch(b.core, packed, stage.cols);
    const u32 slices = u32((stage.cols + stage.tile_cols - 1) / stage.tile_cols);
    int held = 0, first = own.lo, second = own.lo;  // groups, and where they begin
    for (int row = own.lo; row < own.hi; row += stage.tile_rows, tile += slices) {
      const int rows = own.hi - row < stage.tile_rows ? own.hi - row : stage.tile_rows;
      for (int below = 0; below < rows; below += CHUNK_TILE_ROWS) {
        const int here = rows - below < CHUNK_TILE_ROWS ? rows - below : CHUNK_TILE_ROWS, end = row + below + here;
        float* const sums = reinterpret_cast<float*>(shared + ChunkShared::sums) + half * CHUNK_HELD * GROUP_SUMS;
        float* const mine = sums + held * GROUP_SUMS + warp * CHUNK_SUMS;
        float sum[4] = {};
        for (u32 slice = 0; slice < slices; ++slice) {
          const int column = int(slice) * stage.tile_cols, cols = stage.cols - column < stage.tile_cols ? stage.cols - column : stage.tile_cols;
          const u32 slot = chunk_slot(tile + slice);
          const u8* from = shared + slot * u32(Plan::slot_bytes) + below * cols * size;
          auto ready = [&] { barrier_wait(barriers.full + slot, chunk_parity(tile + slice)); };
          if constexpr (WIDE) {
            ready();
            add_tile_fp32(x, reinterpret_cast<const float*>(from), here, cols, column, stage.cols, tokens, slice == 0, mine);
          } else if (column + cols <= CACHED * PIECE_COLUMNS) {
            add_tile<true>(packed, from, here, cols, column, sum, ready);
          } else {
            add_tile<false>(packed, from, here, cols, column, sum, ready);
          }
          __syncwarp();
          if (below + CHUNK_TILE_ROWS >= rows && lane == 0) barrier_arrive(barriers.empty + slot);
        }
        if constexpr (!WIDE) {  // of token lane / 4 and 8 + lane / 4, rows 2 * (lane % 4) and the next
          float2* to = reinterpret_cast<float2*>(mine) + lane;
          to[0] = float2{sum[0], sum[1]}, to[CHUNK_SUMS / 4] = float2{sum[2], sum[3]};
        }
        if (++held == 1) second = end;
        if (held < CHUNK_HELD && end < own.hi) continue;
        b.core.barrier();
        add_warps(stage.unit, sums, first, second, end, tokens, emit);
        half ^= 1, held = 0, first = end;
      }
    }
  }

  // Rows first..second-1 from the sums of the first group, second..end-1 from those of the second.
  template <class Emit>
  __device__ __forceinline__ void add_warps(int unit, const float* sums, int first, int second, int end, int tokens, Emit emit) const {
    static_assert(CHUNK_HELD == 2, "two groups");
    const int shift = unit - 1;  // a unit is one row or two
#pragma unroll 1
    for (int i = me; i < CHUNK_HELD * CHUNK_SUMS; i += CONSUMERS) {
      const int group = i / CHUNK_SUMS, token = i % CHUNK_SUMS / CHUNK_TILE_ROWS, element = i % CHUNK_TILE_ROWS;
      const int row = group ? second : first, elements = ((group ? end : second) - row) >> shift;
      if (token >= tokens || element >= elements) continue;
      const float* at = sums + group * CONSUMER_WARPS * CHUNK_SUMS + token * CHUNK_TILE_ROWS + (element << shift);
      float low = 0, high = 0;
#pragma unroll
      for (int w = 0; w < CONSUMER_WARPS; ++w) low += at[w * CHUNK_SUMS], high += at[w * CHUNK_SUMS + shift];
      emit(token, (row >> shift) + element, low, high);
    }
  }
};

}  // namespace twin
