// A chunk's activations and products. Of 16-bit weights on the tensor cores, by products of warp groups (wgmma): 64 tokens are the
// rows of a product, 32 to 128 weight rows its columns. A chunk of several tiles of tokens is shared by as many neighbouring
// blocks: each takes the rows of all of them for a tile, so that activations and weights come through the second-level cache in
// equal parts. The ring rests during the passes; its memory holds the steps of a product, or what attention needs.
#pragma once

namespace twin {

constexpr int GROUP_TOKENS = 64;    // of a warp group's product
constexpr int WARP_GROUPS = CONSUMER_WARPS / 4;
constexpr int PIECE_COLUMNS = 8;    // 16 bytes of 16-bit activations
constexpr int STEP_COLUMNS = facts::PASS_STEP_COLUMNS;
constexpr int STEP_BYTES = 2 * STEP_COLUMNS;  // of a row: what a descriptor twists
static_assert(STEP_BYTES == 128, "twisted_rows: rows of 128 bytes");
constexpr int MOST_STEPS = facts::PASS_MOST_STEPS;  // on the chip
constexpr int ALIGNED = 1024;       // of eight twisted rows

// Of a plan with passes; one token a pass is never read in them.
constexpr int PASS_TOKENS = Plan::prompt_chunk > 1 ? Plan::prompt_chunk : GROUP_TOKENS;
constexpr int TILE_TOKENS = PASS_TOKENS < facts::PASS_TILE_TOKENS ? PASS_TOKENS : facts::PASS_TILE_TOKENS;  // of a block at a time
constexpr int MEMBERS = (PASS_TOKENS + TILE_TOKENS - 1) / TILE_TOKENS;  // blocks that share their rows
static_assert(TILE_TOKENS <= WARP_GROUPS * GROUP_TOKENS, "a warp group takes GROUP_TOKENS of a tile");
static_assert(PASS_TOKENS % TILE_TOKENS == 0 && (TILE_TOKENS & (TILE_TOKENS - 1)) == 0, "whole tiles; twin/kernel/prompt.py");

// Shared memory of a block during passes, in bytes from its start.
struct ChunkShared {
  static constexpr int bytes = Plan::prompt_bytes;
  static constexpr int rows = bytes - facts::PASS_ROWS_BYTES;  // SharedRows
  static constexpr int places = ALIGNED + facts::PASS_ROOM_BYTES;  // [Feeder::ROWS][CONSUMERS] of a thread's rows, behind the steps
  static constexpr int used = places + 2 * 128 / (CONSUMERS / (STEP_BYTES / 16)) * CONSUMERS * int(sizeof(uint2));
  static_assert(WEIGHT == Type::FP32 || Plan::prompt_chunk == 1 || used <= rows, "the plan counts the same");
};

// The rows of the blocks that share a chunk, as they lie in their streams: row groups of the tile's height, in each its column slices.
// On the chip, since sums take the registers.
struct SharedRows {
  const u8* from;       // the first block's stream
  u32 next[MEMBERS];    // where the next stage begins in each block's, 16-byte units from there
  int first, members;   // blocks
  u32 start[MEMBERS];   // where the stage begins in each block's, 16-byte units from there
  int end[MEMBERS];     // behind each block's last row
  int lo;               // first row
  int cols;
  int tile_cols;
  int height;           // of a row group

  __device__ __forceinline__ int count() const { return end[MEMBERS - 1] - lo; }
};

static_assert(sizeof(SharedRows) <= facts::PASS_ROWS_BYTES, "ROWS_BYTES in twin/kernel/prompt.py is too small");

// A thread's share of the copies of one step after the other: a 16-byte unit of each 32nd row, of weights and of activations.
struct Feeder {
  static constexpr int APART = CONSUMERS / (STEP_BYTES / 16);  // rows between those of a thread
  static constexpr int ROWS = 2 * 128 / APART;                 // of it, at most
  static constexpr int TOKENS = (TILE_TOKENS + APART - 1) / APART;

  u8* chip;          // the block's memory
  const u8* x;       // the chunk's activations
  int me, tokens;    // the thread; tokens of the chunk
  int tile, tiles;   // of tokens: the next step's, and from one of this block to its next
  int wide;          // weight rows of a step
  int row;           // the next step's first, from rows.lo
  int at, before;    // columns: of the thread's unit in its slice, of the slices before
  int step;          // columns before it, in steps
  u32 slots, bytes;  // where the steps lie, and one's bytes
  int count, slot;   // of slots; of the next step
  u64 policy;

  __device__ __forceinline__ const SharedRows& shared_rows() const { return *reinterpret_cast<const SharedRows*>(chip + ChunkShared::rows); }
  // Of the thread's row i: its group in slice 0, 16-byte units; rows of the group, 0 where there is none, and 256 times the row in it.
  // On the chip, since the sums take the registers.
  __device__ __forceinline__ uint2& place(int i) const { return reinterpret_cast<uint2*>(chip + ChunkShared::places)[i * CONSUMERS + me]; }
  __device__ __forceinline__ int steps() const { return (shared_rows().cols + STEP_COLUMNS - 1) / STEP_COLUMNS; }
  __device__ __forceinline__ int unit() const { return me % (STEP_BYTES / 16); }
  __device__ __forceinline__ int first() const { return me / (STEP_BYTES / 16); }
  __device__ __forceinline__ u32 twisted(int row) const { return u32(row * STEP_BYTES + ((unit() ^ row % 8) << 4)); }
  __device__ __forceinline__ u32 weights(int which) const { return slots + u32(which) * bytes; }
  __device__ __forceinline__ u32 activations(int which) const { return weights(which) + u32(wide * STEP_BYTES); }

  // The first step of a batch of rows.
  __device__ __forceinline__ void open() {
    const SharedRows& rows = shared_rows();
    step = 0, before = 0, at = unit() * PIECE_COLUMNS;
    settle();
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) {
      const int mine = rows.lo + row + first() + i * APART;
      int member = 0;
      while (member + 1 < MEMBERS && mine >= rows.end[member]) ++member;
      const u32 start = rows.start[member];
      const int lo = member ? rows.end[member - 1] : rows.lo, hi = rows.end[member];
      const int of = (mine - lo) % rows.height, group = mine - lo - of, high = hi - lo - group < rows.height ? hi - lo - group : rows.height;
      const bool there = i * APART + first() < wide && mine < hi;
      place(i) = uint2{start + u32(group) * u32(rows.cols / PIECE_COLUMNS), there ? u32(high | of << 8) : 0u};
    }
  }
  // Into the slice that holds the thread's column.
  __device__ __forceinline__ void settle() {
    const SharedRows& rows = shared_rows();
    while (at >= rows.tile_cols) at -= rows.tile_cols, before += rows.tile_cols;
  }
  __device__ __forceinline__ void ask_weights() const {
    const SharedRows& rows = shared_rows();
    const bool held = before + at < rows.cols;
    const int width = rows.cols - before < rows.tile_cols ? rows.cols - before : rows.tile_cols;
    const u32 to = weights(slot);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (i * APART >= wide) break;
      const uint2 in = place(i);
      const u32 high = in.y & 255u, of = in.y >> 8;
      const bool there = held && high > 0;
      const u32 from = in.x + (u32(before) * high + of * u32(width) + u32(at)) / PIECE_COLUMNS;
      copy_weights(to + twisted(first() + i * APART), rows.from + u64(there ? from : 0u) * 16, there, policy);
    }
  }
  __device__ __forceinline__ void ask_activations() const {
    const int here = tokens - tile * TILE_TOKENS < TILE_TOKENS ? tokens - tile * TILE_TOKENS : TILE_TOKENS;
    const bool held = step * STEP_COLUMNS + ((unit() ^ first() % 8) * PIECE_COLUMNS) < shared_rows().cols;
    const u8* from = x + (u64(tile) * u64(steps()) + u64(step)) * (TILE_TOKENS * STEP_BYTES);
    const u32 to = activations(slot);
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = first() + i * APART, byte = token * STEP_BYTES + unit() * 16;
      if (token < here) copy_activations(to + u32(byte), from + byte, held);
    }
  }
  __device__ __forceinline__ bool more() const { return tile * TILE_TOKENS < tokens; }
  __device__ __forceinline__ void next() {
    slot = slot + 1 < count ? slot + 1 : 0;
    ++step, at += STEP_COLUMNS;
    if (step < steps()) return settle();
    row += wide;
    if (row >= shared_rows().count()) row = 0, tile += tiles;
    open();
  }
};

// A block's rows of a stage's FP32 matrix.
struct Rows32 {
  const u8* from;
  int rows;
  int cols;
  int tile_cols;
};

struct Chunk {
  static constexpr int RUN = 8;
  static constexpr bool TENSOR_PASS = Plan::tensor_pass;  // attention looks at the cache by Scan
  using Scan = PassScan;
  u8* shared;
  u64* passed;       // all passes are over: the decode ring may have the memory
  const u8* stream;  // FP32: the next stage's weights
  int me;            // the thread

  // Addresses that are computed here are not kept in registers for the steps that follow.
  template <class Block>
  __device__ explicit Chunk(Block& b) : passed(&b.core.signals.passed), stream(nullptr), me(b.core.thread()) {
    int begin = 0;
    keep_here(begin);
    shared = reinterpret_cast<u8*>(b.input) - b.plan.ring_slots * b.plan.slot_bytes + begin;  // from the ring on
    keep_here(me);
  }

  template <class Block>
  __device__ float* memory(Block&) const {
    return reinterpret_cast<float*>(shared);
  }

  __device__ u32 tiles() const { return shared_address(shared); }  // of the cache, for Scan

  __device__ SharedRows& rows() const { return *reinterpret_cast<SharedRows*>(shared + ChunkShared::rows); }

  // A pass of so many tokens begins.
  template <class Block>
  __device__ void open(Block& b, int tokens) {
    stream = b.memory.stream + u64(b.plan.streams_at(b.block).page) * PAGE_BYTES;
    if (WEIGHT == Type::FP32 || me != 0) return;
    const int tiles = (tokens + TILE_TOKENS - 1) / TILE_TOKENS, first = b.block / tiles * tiles, page = b.plan.streams_at(first).page;
    SharedRows& all = rows();
    all.first = first, all.members = tiles < b.plan.blocks - first ? tiles : b.plan.blocks - first;
    all.from = b.memory.stream + u64(page) * PAGE_BYTES;
    for (int m = 0; m < all.members; ++m) all.next[m] = u32(b.plan.streams_at(first + m).page - page) * (PAGE_BYTES / 16);
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
    if (me != 0 || bytes == 0) return;
    const u8* from = stream;
    if (WEIGHT != Type::FP32) from = rows().from + u64(rows().next[b.block - rows().first]) * 16;
    prefetch_weights(from, bytes < MOST ? bytes : MOST);
  }

  // ---- activations ----

  // 16-bit: tiles of tokens, in each steps of columns, in each rows of 128 bytes, twisted as a descriptor reads them. A number too
  // large for a half becomes the largest one.
  __device__ static long offset(int columns, int token, int column) {
    const int steps = (columns + STEP_COLUMNS - 1) / STEP_COLUMNS, row = token % TILE_TOKENS;
    const int unit = column / PIECE_COLUMNS % (STEP_BYTES / 16) ^ row % 8;
    return (long(token / TILE_TOKENS) * steps + column / STEP_COLUMNS) * (TILE_TOKENS * STEP_BYTES) + row * STEP_BYTES + unit * 16 +
           column % PIECE_COLUMNS * 2;
  }
  __device__ static u16 rounded(float value) {
    if constexpr (WEIGHT == Type::BF16) return bfloat_bits(value);
    return half_bits(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
  }
  __device__ static void store(float* x, int columns, int token, int column, float value) {
    if constexpr (WEIGHT == Type::FP32) {
      x[long(token) * columns + column] = value;
    } else {
      *reinterpret_cast<u16*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) = rounded(value);
    }
  }
  // Neighbours, the first in an even column.
  __device__ static void store_pair(float* x, int columns, int token, int column, float value, float next) {
    if constexpr (WEIGHT == Type::FP32) {
      store(x, columns, token, column, value), store(x, columns, token, column + 1, next);
    } else {
      *reinterpret_cast<u32*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) = u32(rounded(value)) | u32(rounded(next)) << 16;
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
      *reinterpret_cast<uint4*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) = uint4{words[0], words[1], words[2], words[3]};
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

  // emit(token, element, sum of its first row, sum of its last row) for each element of the tokens and rows that are this block's;
  // an element has UNIT rows. `ready` waits for the activations, once the first weights are under way; false ends it.
  template <int UNIT, class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply(Block& b, const Stage& stage, const float* x, int tokens, Ready ready, Emit emit) {
    keep_here(me);  // nor are they from stage to stage
    if constexpr (WEIGHT == Type::FP32) {
      const Span own = b.plan.owned_of(stage.owned, b.block);
      const bool sliced = stage.cols > stage.tile_cols;
      const Rows32 matrix = {stream, own.hi - own.lo, stage.cols, stage.tile_cols};
      stream += u64(u32(matrix.rows) * u32(matrix.cols)) * type_bytes(WEIGHT);
      if (!ready()) return false;
      multiply_fp32(matrix, own.lo / UNIT, UNIT, sliced ? stage.tile_rows : matrix.rows, x, tokens, emit);
      return true;
    } else {
      b.core.barrier();  // who used the memory before has left it
      if (me == 0) share_rows(b, stage, rows());
      b.core.barrier();
      return multiply_16<UNIT>(b, rows(), reinterpret_cast<const u8*>(x), tokens, ready, emit);
    }
  }

  // By one thread: the rows of a stage, and where the next one's begin.
  template <class Block>
  __device__ static void share_rows(const Block& b, const Stage& stage, SharedRows& rows) {
    rows.cols = stage.cols, rows.tile_cols = stage.tile_cols, rows.height = stage.cols > stage.tile_cols ? stage.tile_rows : 8;
    for (int m = 0; m < MEMBERS; ++m) {
      const Span own = b.plan.owned_of(stage.owned, rows.first + (m < rows.members ? m : rows.members - 1));
      if (m == 0) rows.lo = own.lo;
      rows.end[m] = own.hi, rows.start[m] = rows.next[m];
      if (m < rows.members) rows.next[m] += u32(own.hi - own.lo) * u32(stage.cols / PIECE_COLUMNS);
    }
  }

  // How many rows a block takes together: as few products as possible, each of them and each batch's end counted.
  __device__ static int width_of(int rows) {
    constexpr int WIDTHS[] = {32, 64, 128, 192, 256}, END = 32;
    int best = 0, least = 0;
#pragma unroll
    for (int width : WIDTHS) {
      const int cost = (rows + width - 1) / width * (width + END);
      if (best == 0 || cost < least) best = width, least = cost;
    }
    return best;
  }

  template <int UNIT, class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply_16(Block& b, const SharedRows& rows, const u8* x, int tokens, Ready ready, Emit emit) {
    Feeder feed = {shared, x, me, tokens, b.block - rows.first, rows.members, width_of(rows.count()), 0, 0, 0, 0};
    feed.slots = (shared_address(shared) + ALIGNED - 1) / ALIGNED * ALIGNED;
    feed.bytes = u32(feed.wide + (tokens > GROUP_TOKENS && TILE_TOKENS > GROUP_TOKENS ? 2 : 1) * GROUP_TOKENS) * STEP_BYTES;
    feed.count = facts::PASS_ROOM_BYTES / int(feed.bytes) < MOST_STEPS ? facts::PASS_ROOM_BYTES / int(feed.bytes) : MOST_STEPS;
    feed.policy = rows.members > 1 ? read_again() : read_once();  // what neighbours read as well stays until they have
    feed.slot = 0;
    feed.open();
    const int ahead = feed.count - 2;  // steps under way: one is in use, one may be by the other warp group
    if (rows.count() > 0)
#pragma unroll 1
      for (int i = 0; i < ahead && feed.more(); ++i) feed.ask_weights(), feed.next();
    if (!ready()) return false;
    if (rows.count() <= 0) return true;
    feed.slot = feed.row = 0, feed.tile = b.block - rows.first;
    feed.open();
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) {
      if (feed.more()) feed.ask_activations(), feed.next();
      copies_sent();
    }
    switch (feed.wide) {
      case 32: return products<UNIT, 32, 1>(b, feed, ahead, emit), true;
      case 64: return products<UNIT, 64, 1>(b, feed, ahead, emit), true;
      case 128: return products<UNIT, 128, 1>(b, feed, ahead, emit), true;
      case 192: return products<UNIT, 96, 2>(b, feed, ahead, emit), true;
      default: return products<UNIT, 128, 2>(b, feed, ahead, emit), true;
    }
  }

  // WIDE * TIMES rows together, as the feeder brings them.
  template <int UNIT, int WIDE, int TIMES, class Block, class Emit>
  __device__ __forceinline__ void products(Block& b, Feeder& feed, int ahead, Emit emit) const {
    constexpr int GROUP_BYTES = GROUP_TOKENS * STEP_BYTES;
    const int group = me / 128, steps = feed.steps();
    int slot = 0;
#pragma unroll 1
    for (int tile = b.block - feed.shared_rows().first; tile * TILE_TOKENS < feed.tokens; tile += feed.tiles) {
      const int begin = tile * TILE_TOKENS + group * GROUP_TOKENS;  // of this warp group's tokens
      const bool mine = begin < feed.tokens && group * GROUP_TOKENS < TILE_TOKENS;
#pragma unroll 1
      for (int row = 0; row < feed.shared_rows().count(); row += WIDE * TIMES) {
        float sum[TIMES][WIDE / 2];
#pragma unroll
        for (int t = 0; t < TIMES; ++t)
#pragma unroll
          for (int i = 0; i < WIDE / 2; ++i) sum[t][i] = 0.0f;
#pragma unroll 1
        for (int step = 0; step < steps; ++step) {
          copies_arrived(ahead - 1);
          leave_to_copies();  // products read as bulk copies do
          b.core.barrier();
          if (mine) {
#pragma unroll
            for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
            products_begin();
            const u64 x = twisted_rows(feed.activations(slot) + u32(group * GROUP_BYTES)), w = twisted_rows(feed.weights(slot));
#pragma unroll
            for (int k = 0; k < STEP_COLUMNS / 16; ++k)
#pragma unroll
              for (int t = 0; t < TIMES; ++t)
                multiply_group<WEIGHT, WIDE>(sum[t], x + k * NEXT_PRODUCT, w + k * NEXT_PRODUCT + u64(t * WIDE * STEP_BYTES / 16));
            products_sent();
#pragma unroll
            for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
            products_made<1>();
          }
          if (feed.more()) feed.ask_weights(), feed.ask_activations(), feed.next();
          copies_sent();
          slot = slot + 1 < feed.count ? slot + 1 : 0;
        }
        products_made<0>();
#pragma unroll
        for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
        if (mine)
#pragma unroll
          for (int t = 0; t < TIMES; ++t) emit_sums<UNIT>(feed, begin, row + t * WIDE, sum[t], emit);
      }
    }
  }

  // A thread's sums of a product: tokens 16 * (warp % 4) + lane / 4 and 8 more, pairs of neighbouring rows.
  template <int UNIT, int N, class Emit>
  __device__ __forceinline__ void emit_sums(const Feeder& feed, int begin, int row, const float (&sum)[N], Emit emit) const {
    const int lane = me % 32, count = feed.shared_rows().count();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = begin + me / 32 % 4 * 16 + lane / 4 + 8 * half;
      if (token >= feed.tokens) continue;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int at = row + 8 * i + lane % 4 * 2;
        const float low = sum[4 * i + 2 * half], high = sum[4 * i + 2 * half + 1];
        if (UNIT == 2) {
          if (at < count) emit(token, (feed.shared_rows().lo + at) / 2, low, high);
        } else {
          if (at < count) emit(token, feed.shared_rows().lo + at, low, low);
          if (at + 1 < count) emit(token, feed.shared_rows().lo + at + 1, high, high);
        }
      }
    }
  }

  // FP32: a warp takes four rows of a row group at a time, and two tokens; its lanes share the columns.
  template <class Emit>
  __device__ __forceinline__ void multiply_fp32(const Rows32& matrix, int element, int unit, int height, const float* x, int tokens,
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
