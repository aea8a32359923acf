// A chunk's activations and products. Of 16-bit weights on the tensor cores, by products of warp
// groups (wgmma): 64 tokens are the rows of a product, 32 to 128 weight rows its columns. A chunk
// of several tiles of tokens is shared by as many neighbouring blocks, or a few more: each takes
// the rows of all of them for a tile, so that activations and weights come through the second-level
// cache in equal parts. The ring rests during the passes; its memory holds the steps of a product,
// or what attention needs.
#pragma once


namespace twin {

constexpr int GROUP_TOKENS = 64;  // of a warp group's product
constexpr int WARP_GROUPS = CONSUMER_WARPS / 4;
constexpr int PIECE_COLUMNS = 8;  // 16 bytes of 16-bit activations
constexpr int STEP_COLUMNS = facts::PASS_STEP_COLUMNS;
constexpr int STEP_BYTES = 2 * STEP_COLUMNS;  // of a row: what a descriptor swizzles
static_assert(STEP_BYTES == 128, "swizzled_rows: rows of 128 bytes");
constexpr int MOST_STEPS = facts::PASS_MOST_STEPS;  // in shared memory
constexpr int ALIGNED = 1024;                       // of eight swizzled rows
constexpr int SECTOR_ROWS = 8;                      // whose sums fill one, in FP32

// Of a plan with passes; one token a pass is never read in them. Passes that verify drafts have a
// few tokens.
constexpr int PASS_TOKENS =
    Plan::prompt_chunk > 1 && (!FEW_TOKENS || Plan::prompt_chunk < GROUP_TOKENS)
        ? Plan::prompt_chunk
        : GROUP_TOKENS;
// of a block at a time
constexpr int TILE_TOKENS =
    PASS_TOKENS < facts::PASS_TILE_TOKENS ? PASS_TOKENS : facts::PASS_TILE_TOKENS;
constexpr int TILES = PASS_TOKENS / TILE_TOKENS,
              HALVES = TILE_TOKENS > GROUP_TOKENS ? TILE_TOKENS / GROUP_TOKENS : 1;
constexpr int MEMBERS = TILES > HALVES ? TILES : HALVES;  // blocks that share their rows, at most
static_assert(TILE_TOKENS <= WARP_GROUPS * GROUP_TOKENS,
              "a warp group takes GROUP_TOKENS of a tile");
static_assert(PASS_TOKENS % TILE_TOKENS == 0 && (TILE_TOKENS & (TILE_TOKENS - 1)) == 0,
              "whole tiles; twin/kernel/prompt.py");

// Shared memory of a block during passes, in bytes from its start: steps of products, or what
// attention needs; SharedRows.
struct ChunkShared {
  static constexpr int bytes = Plan::prompt_bytes;
  // experts: entries sorted by expert, and where each one's begin; routed_bytes in
  // twin/kernel/prompt.py
  static constexpr int routed =
      Experts::ANY
          ? (2 * (PASS_TOKENS * Entries::EACH + Entries::EXPERTS + 1) + 15) / 16 * 16
          : 0;
  static constexpr int order = bytes - routed;
  static constexpr int rows = order - facts::PASS_ROWS_BYTES;
  static constexpr int begins = ALIGNED + facts::PASS_ROOM_BYTES;  // Feeder::begin
  static constexpr int used =
      begins + int(sizeof(u32)) * 256 / (CONSUMERS / (STEP_BYTES / 16)) * CONSUMERS;
  static_assert(WEIGHT == Type::FP32 || Plan::prompt_chunk == 1 || used <= rows,
                "the plan counts the same");
};

// The rows of the blocks that share a chunk, as they lie in their streams: row groups of the tile's
// height, in each its column slices. In shared memory, since sums take the registers.
struct SharedRows {
  const u8* from;      // the first block's stream
  u32 next[MEMBERS];   // where the next stage begins in each block's, 16-byte units from there
  int first, members;  // blocks
  u32 start[MEMBERS];  // where the stage begins in each block's, 16-byte units from there
  int end[MEMBERS];    // behind each block's last row
  int lo;              // first row
  int skew;            // places before it that no row has: `arrange`
  int cols;
  int tile_cols;
  int height;   // of a row group
  const u8* x;  // the chunk's activations
  int tokens;   // of the chunk
  int of;       // that a block takes at a time
  int wide;     // rows that it takes together
  // Experts: the entries that are multiplied, null where all tokens are; whether each has an input
  // of its own; rows of an expert whose column slices lie one behind the other, 0: decoded rows;
  // its biases, if any. The blocks that share other stages' rows.
  const u16* entries;
  bool own_input;
  int expert_rows;
  const float* biases;
  int sharing_first, sharing_members;

  // The row of the chunk's activations that a token's, or an entry's, are.
  __device__ __forceinline__ int input_of(int token) const {
    const int entry = entries[token];
    return own_input ? entry : entry / Entries::EACH;
  }

  // Places of rows, in the order in which they are multiplied, and the row at one.
  __device__ __forceinline__ int count() const { return end[MEMBERS - 1] - lo + skew; }
  __device__ __forceinline__ int row_at(int place) const { return lo - skew + place; }
  __device__ __forceinline__ int steps() const { return (cols + STEP_COLUMNS - 1) / STEP_COLUMNS; }
  // Where row `row` of all lies, columns from `column` on, 16-byte units from the first block's
  // stream.
  __device__ __forceinline__ u32 unit(int row, int column) const {
    if constexpr (Experts::ANY && !CODED)
      if (expert_rows) {
        const int before = column / tile_cols * tile_cols,
                  width = cols - before < tile_cols ? cols - before : tile_cols;
        return (u32(before) * u32(expert_rows) + u32(row) * u32(width) + u32(column - before)) /
               PIECE_COLUMNS;
      }
    int member = 0;
    while (member + 1 < MEMBERS && row >= end[member]) ++member;
    const int begin = member ? end[member - 1] : lo, of = (row - begin) % height,
              group = row - begin - of;
    const int high = end[member] - begin - group < height ? end[member] - begin - group : height;
    const int before = column / tile_cols * tile_cols,
              width = cols - before < tile_cols ? cols - before : tile_cols;
    return start[member] + (u32(group) * u32(cols) + u32(before) * u32(high) +
                            u32(of) * u32(width) + u32(column - before)) /
                               PIECE_COLUMNS;
  }
};
static_assert(sizeof(SharedRows) <= facts::PASS_ROWS_BYTES,
              "ROWS_BYTES in twin/kernel/prompt.py is too small");

// How a block keeps steps of so many rows in shared memory, with up to 64 tokens or 128.
template <int WIDE>
struct Steps {
  // between two barriers: copies of a few rows take less time than a barrier and a product
  static constexpr int AT_ONCE = WIDE <= 64 ? 2 : 1;
  __host__ __device__ static constexpr int bytes(bool small) {
    return (WIDE + (small ? 1 : 2) * GROUP_TOKENS) * STEP_BYTES;
  }
  __host__ __device__ static constexpr int fitting(bool small) {
    return facts::PASS_ROOM_BYTES / bytes(small) / AT_ONCE * AT_ONCE;
  }
  __host__ __device__ static constexpr int count(bool small) {
    return fitting(small) < MOST_STEPS ? fitting(small) : MOST_STEPS;
  }
  // Under way: others are in use, as many may be by the other warp group.
  __host__ __device__ static constexpr int ahead(bool small) { return count(small) - 2 * AT_ONCE; }
  static_assert(ahead(false) >= AT_ONCE && ahead(true) >= AT_ONCE && MOST_STEPS % AT_ONCE == 0,
                "what is awaited is under way");
};

// A thread's share of the copies of one step after the other: a 16-byte unit of each PITCHth row,
// of weights and of activations.
template <int WIDE>
struct Feeder {
  static constexpr int PITCH = CONSUMERS / (STEP_BYTES / 16), ROWS = WIDE / PITCH,
                       TOKENS = (TILE_TOKENS + PITCH - 1) / PITCH;
  static constexpr u32 NONE = ~0u;
  using Of = Steps<WIDE>;

  const SharedRows& rows;
  const u8* from;  // the first block's stream
  u64 policy;
  const u8* x;     // the thread's first unit of the next step's activations
  int me;          // the thread
  int tile, row;   // the next step's, of tokens and weights
  int step, left;  // its number in these; more of them
  int all;         // more of all
  int until;       // steps until the thread's column is in another slice
  int full;        // steps of a row in which the thread's activations are there
  int here;        // tokens of the tile
  u32 slot;        // where it goes
  // [ROWS][CONSUMERS] where the thread's rows of its slice begin, 16-byte units; NONE: no such row.
  // In shared memory, since sums take the registers.
  u32* begin;

  __device__ __forceinline__ Feeder(u8* chip, u32 slots, int me, int block)
      : rows(*reinterpret_cast<const SharedRows*>(chip + ChunkShared::rows)),
        from(rows.from),
        policy(read_later() ? read_again() : read_once()),
        x(nullptr),
        me(me),
        slot(slots),
        begin(reinterpret_cast<u32*>(chip + ChunkShared::begins) + me) {
    const int begin = block - rows.first, of = rows.of * rows.members;
    const int tiles =
        rows.tokens > begin * rows.of ? (rows.tokens - begin * rows.of + of - 1) / of : 0;
    all = tiles * ((rows.count() + WIDE - 1) / WIDE) * steps();
    const int column = (unit() ^ first() % 8) * PIECE_COLUMNS;
    full = rows.cols > column ? (rows.cols - column + STEP_COLUMNS - 1) / STEP_COLUMNS : 0;
    open(begin, 0);
  }
  // Are weights read once more, by a neighbour or for other tokens? A block's place for decoded
  // rows is written again: what left the cache would go to memory in vain.
  __device__ __forceinline__ bool read_later() const {
    if (Experts::ANY && rows.entries && (CODED || rows.tokens > rows.of)) return true;
    return rows.members > 1;
  }
  __device__ __forceinline__ int unit() const { return me % (STEP_BYTES / 16); }
  __device__ __forceinline__ int first() const { return me / (STEP_BYTES / 16); }
  __device__ __forceinline__ bool small() const { return rows.of <= GROUP_TOKENS; }
  // Steps of a row, with those that fill up the last ones between two barriers.
  __device__ __forceinline__ int steps() const {
    return (rows.steps() + Of::AT_ONCE - 1) / Of::AT_ONCE * Of::AT_ONCE;
  }

  __device__ __forceinline__ void open(int tile_, int row_) {
    tile = tile_, row = row_, step = 0, left = steps();
    const int before = tile * rows.of;
    here = rows.tokens - before < rows.of ? rows.tokens - before : rows.of;
    x = rows.x + u64(before / TILE_TOKENS) * u64(rows.steps()) * (TILE_TOKENS * STEP_BYTES) +
        (before % TILE_TOKENS + first()) * STEP_BYTES + unit() * 16;
    if constexpr (Experts::ANY)
      if (rows.entries) x = rows.x;  // each row is found by itself
    find();
  }
  __device__ __forceinline__ bool more() const { return all > 0; }
  // The thread's column has come to another slice.
  __device__ __forceinline__ void find() {
    const int column = step * STEP_COLUMNS + unit() * PIECE_COLUMNS,
              before = column / rows.tile_cols * rows.tile_cols;
    const int end = rows.cols - before < rows.tile_cols ? rows.cols : before + rows.tile_cols;
    until = column < rows.cols ? (end - column + STEP_COLUMNS - 1) / STEP_COLUMNS : 1 << 30;
#pragma unroll 1
    for (int i = 0; i < ROWS; ++i) {
      const int at = row + first() + i * PITCH;
      const bool there = column < rows.cols && at >= rows.skew && at < rows.count();
      begin[i * CONSUMERS] =
          there ? rows.unit(rows.row_at(at), column) - u32(step) * (STEP_BYTES / 16) : NONE;
    }
  }
  __device__ __forceinline__ void ask_weights() const {
    const u32 to = slot + u32(first() * STEP_BYTES + ((unit() ^ first() % 8) << 4)),
              along = u32(step) * (STEP_BYTES / 16);
#pragma unroll 4
    for (int i = 0; i < ROWS; ++i) {
      const u32 row = begin[i * CONSUMERS];
      copy_weights(to + u32(i * PITCH * STEP_BYTES),
                   from + u64(row != NONE ? row + along : 0u) * 16, row != NONE, policy);
    }
  }
  __device__ __forceinline__ void ask_activations() const {
    const bool held = step < full;
    const u32 to = slot + u32((WIDE + first()) * STEP_BYTES + unit() * 16);
    if constexpr (Experts::ANY)
      if (rows.entries) {
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
          if (first() + i * PITCH >= here) continue;
          const int from = rows.input_of(tile * rows.of + first() + i * PITCH);
          copy_activations(to + u32(i * PITCH * STEP_BYTES),
                           x + u64(from / TILE_TOKENS) * u64(rows.steps()) *
                                   (TILE_TOKENS * STEP_BYTES) +
                               from % TILE_TOKENS * STEP_BYTES +
                               ((unit() ^ first() % 8 ^ from % 8) << 4),
                           held);
        }
        return;
      }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
      if (first() + i * PITCH < here)
        copy_activations(to + u32(i * PITCH * STEP_BYTES), x + i * PITCH * STEP_BYTES, held);
  }
  __device__ __forceinline__ void next(u32 slots, bool small) {
    slot += u32(Of::bytes(small));
    if (slot == slots + u32(Of::count(small) * Of::bytes(small))) slot = slots;
    --all;
    x += TILE_TOKENS * STEP_BYTES;
    ++step;
    if (--left == 0) {
      if (all == 0) return;
      const bool last = row + WIDE >= rows.count();
      open(last ? tile + rows.members : tile, last ? 0 : row + WIDE);
    } else if (--until == 0) {
      find();
    }
  }
};

}  // namespace twin

#include "cuda_coded_steps.cuh"

namespace twin {

// A block's rows of a stage's FP32 matrix.
struct Rows32 {
  const u8* from;
  int rows;
  int cols;
  int tile_cols;
};

struct Chunk {
  static constexpr int PACK = 8;
  static constexpr int PART = TILE_TOKENS;  // of an expert's entries that all tokens have
  static constexpr bool TENSOR_PASS = Plan::tensor_pass;  // attention looks at the cache by Scan
  static constexpr bool TENSOR_STATES = PassStates::FITS;
  using States = PassStates;
  template <class Core>
  using Solving = twin::Solving<Core>;
  template <class Core>
  using Carrying = twin::Carrying<Core>;
  using Scan = PassScan;
  u8* shared;
  // the next stage's weights, of a plan that decodes them or has them in FP32
  const u8* stream;
  int me;  // the thread

  // Addresses that are computed here are not kept in registers for the steps that follow.
  template <class Block>
  __device__ explicit Chunk(Block& b) : stream(nullptr), me(b.core.thread()) {
    int begin = 0;
    keep_here(begin);
    // from the ring on, or behind it where it does not rest
    shared = reinterpret_cast<u8*>(b.input) - b.plan.ring_slots * b.plan.slot_bytes + begin;
    if constexpr (STREAMED_ROUNDS) shared += Few::BEGIN;
    keep_here(me);
  }

  template <class Block>
  __device__ float* memory(Block&) const {
    return reinterpret_cast<float*>(shared);
  }

  __device__ u32 tiles() const { return shared_address(shared); }  // of the cache, for Scan

  __device__ SharedRows& rows() const {
    return *reinterpret_cast<SharedRows*>(shared + ChunkShared::rows);
  }

  // Tokens that a block takes at a time. A few more than a warp group's are left to two blocks, so
  // that more weights are under way.
  __device__ static int together(int tokens) {
    return tokens <= TILE_TOKENS && TILE_TOKENS > GROUP_TOKENS ? GROUP_TOKENS : TILE_TOKENS;
  }

  // Ranks how long a group of `members` blocks takes: shares of rows of all of them, times the
  // tiles that one of them takes; of equal ones more tiles are longer. MEMBERS + 1 keeps the second
  // from outweighing the first.
  __device__ static int duration(int tiles, int members) {
    const int turns = (tiles + members - 1) / members;
    return turns * members * (MEMBERS + 1) + turns;
  }
  // Blocks that share their rows: as many as a chunk has tiles, or a few more, some of them idle,
  // where the last blocks, fewer than the others, would hold up all; `members_of` in
  // twin/kernel/prompt.py.
  __device__ static int sharing(int tiles, int blocks) {
    int best = tiles, least = 0;
    for (int members = tiles; members <= MEMBERS; ++members) {
      const int rest = blocks % members, last = rest ? duration(tiles, rest) : 0,
                all = blocks < members ? 0 : duration(tiles, members),
                most = last > all ? last : all;
      if (members == tiles || most < least) best = members, least = most;
    }
    return best;
  }

  // Where the streams of the blocks that share a stage's rows begin: `from` is where experts are
  // while these are multiplied.
  template <class Block>
  __device__ const u8* shared_stream(const Block& b) const {
    if constexpr (!Experts::ANY) return rows().from;
    return b.memory.stream + u64(b.plan.streams_at(rows().sharing_first).page) * PAGE_BYTES;
  }

  // A pass of so many tokens begins.
  template <class Block>
  __device__ void open(Block& b, int tokens) {
    stream = b.memory.stream + u64(b.plan.streams_at(b.block).page) * PAGE_BYTES;
    if (WEIGHT == Type::FP32 || STREAMED_ROUNDS || me != 0) return;
    const int tiles = (tokens + together(tokens) - 1) / together(tokens),
              members = sharing(tiles, b.plan.blocks), first = b.block / members * members,
              page = b.plan.streams_at(first).page;
    SharedRows& all = rows();
    all.first = first;
    all.members = members < b.plan.blocks - first ? members : b.plan.blocks - first;
    if constexpr (Experts::ANY)
      all.sharing_first = all.first, all.sharing_members = all.members;
    if constexpr (CODED) return;
    all.from = b.memory.stream + u64(page) * PAGE_BYTES;
    for (int m = 0; m < all.members; ++m)
      all.next[m] = u32(b.plan.streams_at(first + m).page - page) * (PAGE_BYTES / 16);
  }

  // The next stage's weights on their way to the second-level cache, while the block does something
  // else.
  template <class Block>
  __device__ void prefetch(Block& b, const Stage& stage) const {
    constexpr u32 MOST = 128 << 10;  // 16 MiB of all blocks
    if constexpr (STREAMED_ROUNDS) return;
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const u32 bytes = u32(own.hi - own.lo) * u32(stage.cols) * type_bytes(WEIGHT);
    if (me != 0 || bytes == 0) return;
    if constexpr (CODED) {
      const u32 coded = coded_rows_bytes(stage, own.hi - own.lo);
      return prefetch_weights(stream, coded < MOST ? coded : MOST);
    }
    const u8* from = stream;
    if (WEIGHT != Type::FP32) {
      const int first = Experts::ANY ? rows().sharing_first : rows().first;
      from = shared_stream(b) + u64(rows().next[b.block - first]) * 16;
    }
    prefetch_weights(from, bytes < MOST ? bytes : MOST);
  }

  // ---- low-bit weights --------------------------------------------------------------------------

  // Where a block has a stage's rows once they are decoded, [rows][cols] of the weight type. Stages
  // that follow each other without a meeting between them have different places: a neighbour may
  // still read the rows of the stage before.
  template <class Block>
  __device__ static u8* decoded(const Block& b, const Stage& stage, int block) {
    const StageKind kind = StageKind(stage.kind);
    const bool first = kind == StageKind::QKV || kind == StageKind::GATE_UP ||
                       kind == StageKind::DELTA_IN || kind == StageKind::CONV_IN ||
                       kind == StageKind::SHARED_UP;
    float* const from = b.memory.prompt + b.plan.prompt_decoded;
    return reinterpret_cast<u8*>(
        first ? from + long(block) * b.plan.prompt_normed_floats
               : from + long(b.plan.blocks) * b.plan.prompt_normed_floats +
                     long(block) * b.plan.prompt_summed_floats);
  }

  // The block's rows of a stage. All blocks meet before one of them multiplies.
  template <class Block>
  __device__ __forceinline__ void decode(Block& b, const Stage& stage) {
    if constexpr (CODED) {
      const Span own = b.plan.owned_of(stage.owned, b.block);
      decode_rows(stage, stream, own.hi - own.lo, decoded(b, stage, b.block), me, CONSUMERS);
      stream += coded_rows_bytes(stage, own.hi - own.lo);
    }
  }

  // ---- experts ----------------------------------------------------------------------------------

  // The block's rows of a router to where all blocks find them, one after the other.
  template <class Block, class Stage>
  __device__ __forceinline__ void put_rows(Block& b, const Stage& stage, u8* to) {
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const int count = own.hi - own.lo;
    if constexpr (CODED) {
      decode_rows(stage, stream, count, to, me, CONSUMERS);
      stream += coded_rows_bytes(stage, count);
    } else {
      SharedRows& all = rows();
      const u8* const from =
          shared_stream(b) + u64(all.next[b.block - all.sharing_first]) * UNIT_BYTES;
      const int units = stage.cols / PIECE_COLUMNS;
#pragma unroll 1
      for (int i = me; i < count * units; i += CONSUMERS) {
        const int row = i / units, column = i % units * PIECE_COLUMNS,
                  group = row / stage.tile_rows * stage.tile_rows,
                  before = column / stage.tile_cols * stage.tile_cols;
        const int high = count - group < stage.tile_rows ? count - group : stage.tile_rows,
                  width = stage.cols - before < stage.tile_cols ? stage.cols - before
                                                                : stage.tile_cols;
        const long at = long(group) * stage.cols + long(before) * high +
                        long(row - group) * width + column - before;
        *reinterpret_cast<float4*>(to + long(i) * UNIT_BYTES) =
            load_once(reinterpret_cast<const float*>(from + at * type_bytes(WEIGHT)));
      }
      b.core.barrier();  // all have seen where their rows begin
      if (me == 0)
        for (int m = 0; m < all.sharing_members; ++m) {
          const Span its = b.plan.owned_of(stage.owned, all.sharing_first + m);
          all.next[m] += u32(its.hi - its.lo) * u32(stage.cols / PIECE_COLUMNS);
        }
    }
  }

  // Logits of the tokens whose rows lie in shared memory at `x`, [tokens][LOGITS]; row(expert): the
  // router's weights. A warp takes EXPERTS experts and all tokens at once.
  template <class Block, class Row>
  __device__ __forceinline__ static void score(Block& b, const float* x, int tokens, float* logits,
                                               Row row) {
    if (tokens > 2) score_tokens<CONSUMER_WARPS>(b, x, tokens, logits, row);
    else score_tokens<2>(b, x, tokens, logits, row);
  }
  template <int TOKENS, class Block, class Row>
  __device__ __forceinline__ static void score_tokens(Block& b, const float* x, int tokens,
                                                      float* logits, Row row) {
    // columns of a thread at a time; steps whose loads are under way together
    constexpr int EXPERTS = 4, COLUMNS = 4, STEP = 32 * COLUMNS, AT_ONCE = 4;
    const int hidden = b.plan.hidden, thread = b.core.warp_thread();
#pragma unroll 1
    for (int first = b.core.warp() * EXPERTS; first < Entries::LOGITS;
         first += CONSUMER_WARPS * EXPERTS) {
      const u8* from[EXPERTS];
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e)
        from[e] = row(first + e < Entries::LOGITS ? first + e : Entries::LOGITS - 1);
      float sum[EXPERTS][TOKENS] = {};
#pragma unroll 1
      for (int begin = thread * COLUMNS; begin < hidden; begin += AT_ONCE * STEP) {
        Pack<COLUMNS / 2> weight[AT_ONCE][EXPERTS];
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
          for (int e = 0; e < EXPERTS; ++e)
            if (begin + k * STEP < hidden)
              weight[k][e] = load_pack<COLUMNS / 2, 4 * (COLUMNS / 2)>(
                  reinterpret_cast<const float*>(from[e] + long(begin + k * STEP) * 2), true);
#pragma unroll
        for (int k = 0; k < AT_ONCE; ++k) {
          if (begin + k * STEP >= hidden) continue;
#pragma unroll
          for (int t = 0; t < TOKENS; ++t) {
            const float4 four = *reinterpret_cast<const float4*>(
                x + (t < tokens ? t : 0) * hidden + begin + k * STEP);
#pragma unroll
            for (int e = 0; e < EXPERTS; ++e) {
              float w[COLUMNS];
              unpack<WEIGHT>(bits_as<u32>(weight[k][e].at[0]), w[0], w[1]);
              unpack<WEIGHT>(bits_as<u32>(weight[k][e].at[1]), w[2], w[3]);
              sum[e][t] += four.x * w[0] + four.y * w[1] + four.z * w[2] + four.w * w[3];
            }
          }
        }
      }
#pragma unroll
      for (int e = 0; e < EXPERTS; ++e)
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
          const float all = b.core.warp_sum(sum[e][t]);
          if (thread == 0 && first + e < Entries::LOGITS && t < tokens)
            logits[t * Entries::LOGITS + first + e] = all;
        }
    }
  }

  // Entries, sorted by expert; where each expert's begin.
  __device__ u16* entries() const {
    return reinterpret_cast<u16*>(shared + ChunkShared::order);
  }
  __device__ u16* begins() const { return entries() + PASS_TOKENS * Entries::EACH;
  }
  template <class Block>
  __device__ __forceinline__ int entries_of(const Block&, int expert) const {
    return begins()[expert + 1] - begins()[expert];
  }

  // `choices`: [tokens][CHOICE], each token's experts first. SEGMENTS threads have entries of their
  // own, count them by expert, and write them behind those of the threads before.
  template <class Block>
  __device__ __forceinline__ void sort(Block& b, const float* choices, int tokens) const {
    constexpr int EACH = Entries::EACH, COUNT = Entries::EXPERTS,
                  SEGMENTS = COUNT <= 128 ? CONSUMERS : COUNT < 512 ? 128 : 64;
    constexpr int CHOSEN = (2 * PASS_TOKENS * EACH + 15) / 16 * 16;
    static_assert(Plan::prompt_chunk == 1 ||
                      CHOSEN + 2 * SEGMENTS * COUNT <= facts::PASS_ROOM_BYTES,
                  "experts and tokens fit the memory of products");
    static_assert(Plan::prompt_chunk == 1 || PASS_TOKENS * EACH < 1 << 16,
                  "an entry has 16 bits");
    u16* const chosen = reinterpret_cast<u16*>(shared);  // [entries]
    u16* const counts = chosen + CHOSEN / 2;             // [SEGMENTS][COUNT]
    const int all = tokens * EACH, share = (all + SEGMENTS - 1) / SEGMENTS,
              from = me * share < all ? me * share : all,
              to = from + share < all ? from + share : all;
    b.core.barrier();  // who used the memory before has left it
    constexpr int AT_ONCE = 8;  // whose loads are under way together
#pragma unroll 1
    for (int first = me; first < all; first += AT_ONCE * CONSUMERS) {
      float got[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int entry = first + i * CONSUMERS < all ? first + i * CONSUMERS : first;
        got[i] = load_shared(choices + entry / EACH * Entries::CHOICE + entry % EACH);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i)
        if (first + i * CONSUMERS < all) chosen[first + i * CONSUMERS] = u16(bits_as<int>(got[i]));
    }
#pragma unroll 1
    for (int i = me; i < SEGMENTS * COUNT; i += CONSUMERS) counts[i] = 0;
    b.core.barrier();
    if (me < SEGMENTS)
#pragma unroll 1
      for (int entry = from; entry < to; ++entry) ++counts[me * COUNT + chosen[entry]];
    b.core.barrier();
    // of each expert: what the threads before have
#pragma unroll 1
    for (int expert = me; expert < COUNT; expert += CONSUMERS) {
      int sum = 0;
#pragma unroll 8
      for (int s = 0; s < SEGMENTS; ++s) {
        const int count = counts[s * COUNT + expert];
        counts[s * COUNT + expert] = u16(sum);
        sum += count;
      }
      begins()[expert + 1] = u16(sum);
    }
    b.core.barrier();
    if (me == 0) {
      int sum = 0;
      begins()[0] = 0;
#pragma unroll 4
      for (int expert = 1; expert <= COUNT; ++expert)
        begins()[expert] = u16(sum += begins()[expert]);
    }
    b.core.barrier();
    if (me < SEGMENTS)
#pragma unroll 1
      for (int entry = from; entry < to; ++entry) {
        const int expert = chosen[entry];
        entries()[begins()[expert] + counts[me * COUNT + expert]++] = u16(entry);
      }
    b.core.barrier();
  }

  // Where a block decodes its rows of an expert, which no other block reads.
  template <class Block>
  __device__ static u8* decoded_batch(const Block& b) {
    return reinterpret_cast<u8*>(b.memory.prompt + b.plan.prompt_decoded +
                                 long(b.block) * b.plan.prompt_normed_floats);
  }

  // A batch's low-bit weights on their way to the second-level cache.
  template <class Block, class Stage, class RowBatch>
  __device__ __forceinline__ void prefetch_batch(Block& b, const Stage& stage,
                                                   const RowBatch& batch,
                                                   const u8* weights) const {
    if constexpr (CODED)
#pragma unroll 1
      for (int row = batch.lo + me; row < batch.hi; row += CONSUMERS)  // a thread took 5 us alone
        group_of(b, stage, batch, row, [&](int first, int rows, auto lies) {
          if (first == row)
            prefetch_weights(weights + u64(lies(0)) * UNIT_BYTES,
                             u32(stage.expert_group * rows / stage.tile_rows) * UNIT_BYTES);
        });
  }

  // A batch's low-bit weights as rows of the weight type, one after the other. Two warps take a
  // tile: loads of several tiles are under way together.
  template <bool DOWN, class Block, class Stage, class RowBatch>
  __device__ __forceinline__ void decode_batch(Block& b, const Stage& stage,
                                                 const RowBatch& batch, const u8* weights) const {
    constexpr int TEAM = 64, TEAMS = CONSUMERS / TEAM;
    if constexpr (CODED) {
      const int cols = stage.expert_cols;
      u8* const to = decoded_batch(b);
      with_decoder<EXPERT_CODES<DOWN>>(stage, [&](auto decoder) {
        if constexpr (decltype(decoder)::BITS == 8) return;  // products do it
        int number = 0;
        each_group(b, stage, batch, [&](int row, int rows, auto lies) {
#pragma unroll 1
          for (int col = 0, slice = 0; col < cols; col += stage.tile_cols, ++slice)
            if (number++ % TEAMS == me / TEAM)
              decltype(decoder)::tile(
                  weights + u64(lies(slice)) * UNIT_BYTES, rows,
                  cols - col < stage.tile_cols ? cols - col : stage.tile_cols,
                  to + (long(row - batch.lo) * cols + col) * type_bytes(WEIGHT), cols, me % TEAM,
                  TEAM);
        });
      });
    }
  }

  // emit(entry, element, sum of its first row, sum of its last row), or of two single rows as
  // `multiply` does, for some entries of an expert and each element of a batch of its rows. An
  // entry's input is its token's, or that of a DOWN projection its own. Sums begin with the rows'
  // biases, where there are some.
  template <int UNIT, bool DOWN, class Block, class Stage, class EntryPart, class RowBatch,
            class Emit>
  __device__ __forceinline__ void multiply_entries(Block& b, const Stage& stage, const float* x,
                                                   int expert, const EntryPart& part,
                                                   const RowBatch& batch,
                                                   const u8* weights, const float* biases,
                                                   Emit emit) {
    if constexpr (CODED && WEIGHT != Type::FP32) {
      with_decoder<EXPERT_CODES<DOWN>>(stage, [&](auto decoder) {
        using Of = decltype(decoder);
        if constexpr (Of::BITS == 8)
          multiply_codes<UNIT, DOWN, Of>(b, stage, x, expert, part, batch, weights, biases, emit);
        else
          multiply_rows<UNIT, DOWN>(b, stage, x, expert, part, batch, weights, biases, emit);
      });
    } else {
      multiply_rows<UNIT, DOWN>(b, stage, x, expert, part, batch, weights, biases, emit);
    }
  }
  // The same of rows in 16 bits.
  template <int UNIT, bool DOWN, class Block, class Stage, class EntryPart, class RowBatch,
            class Emit>
  __device__ __forceinline__ void multiply_rows(Block& b, const Stage& stage, const float* x,
                                                int expert, const EntryPart& part,
                                                const RowBatch& batch, const u8* weights,
                                                const float* biases, Emit emit) {
    if constexpr (WEIGHT != Type::FP32) {
      constexpr int MOST = CODED ? 64 : WIDEST;  // rows together; decoded ones are few
      keep_here(me);
      b.core.barrier();  // the rows are there, and who used the memory before has left it
      if (me == 0) {
        SharedRows& all = rows();
        all.first = b.block, all.members = 1, all.lo = batch.lo;
        for (int m = 0; m < MEMBERS; ++m) all.end[m] = batch.hi, all.start[m] = 0;
        all.from = CODED ? decoded_batch(b) : weights, all.cols = stage.expert_cols;
        all.tile_cols = CODED ? stage.expert_cols : stage.tile_cols, all.height = 8;
        all.expert_rows = CODED ? 0 : stage.expert_rows;
        all.x = reinterpret_cast<const u8*>(x), all.own_input = DOWN;
        all.entries = entries() + begins()[expert] + part.first, all.tokens = part.count;
        all.biases = biases;
        all.of = TILE_TOKENS > GROUP_TOKENS && all.tokens <= GROUP_TOKENS ? GROUP_TOKENS
                                                                          : TILE_TOKENS;
        arrange<UNIT, MOST>(all);
      }
      b.core.barrier();
      multiply_16<UNIT, MOST>(b, [] { return true; }, emit);
    }
  }

  // The same of codes of eight bits.
  template <int UNIT, bool DOWN, class Decoder, class Block, class Stage, class EntryPart,
            class RowBatch, class Emit>
  __device__ __forceinline__ void multiply_codes(Block& b, const Stage& stage, const float* x,
                                                 int expert, const EntryPart& part,
                                                 const RowBatch& batch, const u8* weights,
                                                 const float* biases, Emit emit) {
    keep_here(me);
    b.core.barrier();  // who used the memory before has left it
    if (me == 0) {
      SharedRows& all = rows();
      all.lo = batch.lo, all.cols = stage.expert_cols;
      for (int m = 0; m < MEMBERS; ++m) all.end[m] = batch.hi;
      all.x = reinterpret_cast<const u8*>(x), all.own_input = DOWN;
      all.entries = entries() + begins()[expert] + part.first, all.tokens = part.count;
      all.biases = biases;
      // as `arrange` does
      const int skew = all.lo % SECTOR_ROWS;
      all.skew = UNIT == 2 ? 0 : batch.hi - batch.lo + skew <= CodedSteps::WIDE ? skew : skew % 2;
    }
    b.core.barrier();
    if (rows().tokens <= GROUP_TOKENS)
      coded_products<UNIT, Decoder, true>(b, stage, batch, weights, emit);
    else
      coded_products<UNIT, Decoder, false>(b, stage, batch, weights, emit);
  }

  // SMALL: of up to 64 entries the warp groups share the rows, of more the entries.
  template <int UNIT, class Decoder, bool SMALL, class Block, class Stage, class RowBatch,
            class Emit>
  __device__ __forceinline__ void coded_products(Block& b, const Stage& stage,
                                                 const RowBatch& batch, const u8* weights,
                                                 Emit emit) const {
    using Of = CodedSteps;
    constexpr int TILE = SMALL ? GROUP_TOKENS : 2 * GROUP_TOKENS,
                  N = SMALL ? Of::WIDE / WARP_GROUPS : Of::WIDE, AHEAD = Of::ahead(SMALL),
                  AT_ONCE = Of::AT_ONCE;
    constexpr u32 SLOT = u32(Of::slot_bytes(SMALL));
    const SharedRows& all = rows();
    const int group = me / 128, steps = all.steps();
    const u32 begin = slots(), end = begin + u32(Of::slots(SMALL)) * SLOT;
    const auto behind = [&](u32 slot) { return slot + SLOT == end ? begin : slot + SLOT; };
#pragma unroll 1
    for (int first = 0; first < all.tokens; first += TILE) {
      CodedFeeder<Decoder, Block, Stage, RowBatch> feed(b, stage, batch, all, weights, me);
      const EntryFeeder<TILE> inputs(all, first, me);
      u32 filled = begin, used = begin, to = end;
      const auto ask = [&] {
        if (feed.step < steps) {
          inputs.ask(all, filled, feed.step);
          feed.ask(filled, SMALL);
          filled = behind(filled);
        }
        copies_sent();
      };
      if (first) b.core.barrier();  // the other warp group may still multiply
#pragma unroll 1
      for (int i = 0; i < AHEAD; ++i) ask();
      const int token = SMALL ? first : first + group * GROUP_TOKENS, row = SMALL ? group * N : 0;
      const bool mine = token < all.tokens;
      float sum[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sum[i] = 0.0f;
      if constexpr (Additions::EXPERT_BIAS)
        if (all.biases) add_biases(all, row, sum);
#pragma unroll 1
      for (int step = 0; step < steps; step += AT_ONCE) {
        const u32 second = behind(used);
        const bool two = step + 1 < steps;
        copies_arrived<AHEAD - AT_ONCE>();
        feed.decode(used, SMALL, to);
        if (two) feed.decode(second, SMALL, to + u32(Of::DECODED_BYTES / AT_ONCE));
        leave_to_copies();  // products read as bulk copies do
        products_made<0>();  // then nobody reads what is written next
        b.core.barrier();
        if (mine) {
          hold_sums(sum);
          products_begin();
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            if (i && !two) break;
            const u64 w = swizzled_rows(to + u32(i * Of::DECODED_BYTES / AT_ONCE +
                                                 row * STEP_BYTES)),
                      from = swizzled_rows((i ? second : used) +
                                           u32(SMALL ? 0 : group * GROUP_TOKENS * STEP_BYTES));
#pragma unroll
            for (int k = 0; k < STEP_COLUMNS / 16; ++k)
              multiply_group<WEIGHT, N>(sum, from + k * NEXT_PRODUCT, w + k * NEXT_PRODUCT);
          }
          products_sent();
          hold_sums(sum);
        }
        ask();
        ask();
        used = behind(second);
        to = to == end ? end + u32(Of::DECODED_BYTES) : end;
      }
      products_made<0>();
      hold_sums(sum);
      if (mine) emit_sums<UNIT>(all, token, row, sum, emit);
    }
  }

  // ---- activations ------------------------------------------------------------------------------

  // 16-bit: tiles of tokens, in each steps of columns, in each rows of 128 bytes, swizzled as a
  // descriptor reads them. A number too large for a half becomes the largest one.
  __device__ static long offset(int columns, int token, int column) {
    const int steps = (columns + STEP_COLUMNS - 1) / STEP_COLUMNS, row = token % TILE_TOKENS;
    const int unit = column / PIECE_COLUMNS % (STEP_BYTES / 16) ^ row % 8;
    return (long(token / TILE_TOKENS) * steps + column / STEP_COLUMNS) *
               (TILE_TOKENS * STEP_BYTES) +
           row * STEP_BYTES + unit * 16 + column % PIECE_COLUMNS * 2;
  }
  __device__ static u16 rounded(float value) {
    if constexpr (WEIGHT == Type::BF16) return bfloat_bits(value);
    return half_bits(value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value);
  }
  __device__ static void store(float* x, int columns, int token, int column, float value) {
    if constexpr (WEIGHT == Type::FP32) {
      x[long(token) * columns + column] = value;
    } else {
      *reinterpret_cast<u16*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) =
          rounded(value);
    }
  }
  // Neighbours, the first in an even column.
  __device__ static void store_pair(float* x, int columns, int token, int column, float value,
                                    float next) {
    if constexpr (WEIGHT == Type::FP32) {
      store(x, columns, token, column, value), store(x, columns, token, column + 1, next);
    } else {
      *reinterpret_cast<u32*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) =
          u32(rounded(value)) | u32(rounded(next)) << 16;
    }
  }
  __device__ static void store_pack(float* x, int columns, int token, int column,
                                    const Pack<PACK>& pack) {
    if constexpr (WEIGHT == Type::FP32) {
#pragma unroll
      for (int i = 0; i < PACK; ++i) store(x, columns, token, column + i, pack.at[i]);
    } else {
      u32 words[PACK / 2];
#pragma unroll
      for (int i = 0; i < PACK / 2; ++i)
        words[i] = u32(rounded(pack.at[2 * i])) | u32(rounded(pack.at[2 * i + 1])) << 16;
      *reinterpret_cast<uint4*>(reinterpret_cast<u8*>(x) + offset(columns, token, column)) =
          uint4{words[0], words[1], words[2], words[3]};
    }
  }

  // Neighbours in FP32, the first in an even column.
  __device__ static __forceinline__ void store_two(float* at, float value, float next) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(at), "f"(value), "f"(next)
                 : "memory");
  }

  // ---- cached keys and values -------------------------------------------------------------------

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

  // A thread's part of a position in shared memory, in wide loads.
  template <class Core, class Piece>
  __device__ static __forceinline__ void load(const Core& core, Piece& piece, const u8* row) {
    const u8* at = row + core.warp_thread() % Piece::THREADS * Piece::BYTES;
    if constexpr (!Piece::WIDE) {
      piece.load_near(core, row);
    } else if constexpr (Piece::BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; i += 4) {
        const uint4 v = *reinterpret_cast<const uint4*>(at + 4 * i);
        piece.word[i] = v.x, piece.word[i + 1] = v.y, piece.word[i + 2] = v.z,
        piece.word[i + 3] = v.w;
      }
    } else if constexpr (Piece::BYTES % 8 == 0) {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; i += 2) {
        const uint2 v = *reinterpret_cast<const uint2*>(at + 4 * i);
        piece.word[i] = v.x, piece.word[i + 1] = v.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Piece::WORDS; ++i)
        piece.word[i] = *reinterpret_cast<const u32*>(at + 4 * i);
    }
  }

  // ---- products ---------------------------------------------------------------------------------

  // emit(token, element, sum of its first row, sum of its last row) for each element of the tokens
  // and rows that are this block's; an element has UNIT rows. Of single rows also emit(token, even
  // element, its sum, the next one's, true). `ready` waits for the activations, once the first
  // weights are under way; false ends it.
  template <int UNIT, class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply(Block& b, const Stage& stage, const float* x, int tokens,
                                           Ready ready, Emit emit) {
    keep_here(me);  // nor are they from stage to stage
    if constexpr (STREAMED_ROUNDS) {
      const FewProducts few(shared_address(shared), reinterpret_cast<const u8*>(x), stage.cols,
                            tokens);
      const int cols = stage.cols;
      const auto at = [=](int token, int column) { return offset(cols, token, column); };
      if (!ready()) return false;
      b.core.barrier();  // who used the memory before has left it
      few.bring(me, at);
      b.core.barrier();
      return few.run<UNIT>(b.core, stage, b.plan.owned_of(stage.owned, b.block),
                           reinterpret_cast<float*>(shared + Few::INPUT_BYTES), at, emit);
    } else if constexpr (WEIGHT == Type::FP32) {
      const Span own = b.plan.owned_of(stage.owned, b.block);
      const bool sliced = !CODED && stage.cols > stage.tile_cols;
      const Rows32 matrix = {CODED ? decoded(b, stage, b.block) : stream, own.hi - own.lo,
                             stage.cols, CODED ? stage.cols : stage.tile_cols};
      if (!CODED) stream += u64(u32(matrix.rows) * u32(matrix.cols)) * type_bytes(WEIGHT);
      if (!ready()) return false;
      multiply_fp32(matrix, own.lo / UNIT, UNIT, sliced ? stage.tile_rows : matrix.rows, x, tokens,
                    emit);
      return true;
    } else if constexpr (CODED) {
      if (!ready()) return false;  // neighbours have decoded their rows
      b.core.barrier();  // who used the memory before has left it
      if (me == 0) share_decoded<UNIT>(b, stage, reinterpret_cast<const u8*>(x), tokens);
      b.core.barrier();
      return multiply_16<UNIT>(b, [] { return true; }, emit);
    } else {
      b.core.barrier();  // who used the memory before has left it
      if (me == 0) share_rows<UNIT>(b, stage, reinterpret_cast<const u8*>(x), tokens);
      b.core.barrier();
      return multiply_16<UNIT>(b, ready, emit);
    }
  }

  // The blocks that share a stage's rows, behind experts, which nobody shares.
  __device__ static void share_among(SharedRows& all) {
    if constexpr (Experts::ANY)
      all.first = all.sharing_first, all.members = all.sharing_members, all.entries = nullptr,
      all.expert_rows = 0, all.biases = nullptr;
  }

  // By one thread: the rows of a stage, where the next one's begin, and how the block takes them.
  template <int UNIT, class Block>
  __device__ void share_rows(const Block& b, const Stage& stage, const u8* x, int tokens) const {
    SharedRows& all = rows();
    share_among(all);
    all.from = shared_stream(b);
    all.cols = stage.cols, all.tile_cols = stage.tile_cols,
    all.height = stage.cols > stage.tile_cols ? stage.tile_rows : 8;
    for (int m = 0; m < MEMBERS; ++m) {
      const Span own =
          b.plan.owned_of(stage.owned, all.first + (m < all.members ? m : all.members - 1));
      if (m == 0) all.lo = own.lo;
      all.end[m] = own.hi, all.start[m] = all.next[m];
      if (m < all.members) all.next[m] += u32(own.hi - own.lo) * u32(stage.cols / PIECE_COLUMNS);
    }
    all.x = x, all.tokens = tokens, all.of = together(tokens);
    arrange<UNIT>(all);
  }

  // The same of rows that are decoded: whole rows follow each other.
  template <int UNIT, class Block>
  __device__ void share_decoded(const Block& b, const Stage& stage, const u8* x,
                                int tokens) const {
    SharedRows& all = rows();
    share_among(all);
    const u8* const from = decoded(b, stage, all.first);
    const u32 pitch = u32((decoded(b, stage, all.first + 1) - from) / UNIT_BYTES);
    all.from = from, all.cols = stage.cols, all.tile_cols = stage.cols, all.height = 8;
    for (int m = 0; m < MEMBERS; ++m) {
      const int member = m < all.members ? m : all.members - 1;
      const Span own = b.plan.owned_of(stage.owned, all.first + member);
      if (m == 0) all.lo = own.lo;
      all.end[m] = own.hi, all.start[m] = u32(member) * pitch;
    }
    all.x = x, all.tokens = tokens, all.of = together(tokens);
    arrange<UNIT>(all);
  }

  // Of short passes, where registers hold no more next to the rest of a pass.
  static constexpr int WIDEST = TILE_TOKENS > GROUP_TOKENS ? 256 : 128,
                       WIDER = WIDEST < 192 ? WIDEST : 192;

  // How many rows a block takes together: so that the fewest rows and tokens come into shared
  // memory, `least` of them.
  template <int MOST>
  __device__ static int width_of(int rows, int tokens, int& least) {
    constexpr int WIDTHS[] = {32, 64, 128, 192, 256};
    int best = 0;
#pragma unroll
    for (int width : WIDTHS) {
      if (width > MOST) continue;
      const int cost = (rows + width - 1) / width * (width + tokens);
      if (best == 0 || cost < least) best = width, least = cost;
    }
    return best;
  }
  // By one thread, when the rows are known: how the block takes them. A thread stores the sums of
  // two neighbouring rows together where the first is even; where it costs no more, four threads'
  // lie in one sector of memory.
  template <int UNIT, int MOST = WIDEST>
  __device__ static void arrange(SharedRows& all) {
    const int tokens = all.tokens < all.of ? all.tokens : all.of;
    int least = 0, aligned = 0;
    all.skew = 0;
    if (UNIT == 1 && all.count() > 0) all.skew = all.lo % 2;
    all.wide = width_of<MOST>(all.count(), tokens, least);
    if (UNIT == 2 || all.count() == 0) return;
    const int further = all.lo % SECTOR_ROWS - all.skew,
              wide = width_of<MOST>(all.count() + further, tokens, aligned);
    if (aligned <= least) all.skew += further, all.wide = wide;
  }

  // At most MOST rows together: 64, or WIDEST.
  template <int UNIT, int MOST = WIDEST, class Block, class Ready, class Emit>
  __device__ __forceinline__ bool multiply_16(Block& b, Ready ready, Emit emit) {
    static_assert(MOST == 64 || MOST == WIDEST, "of which there is code");
    const int wide = rows().wide;
    const bool any = rows().count() > 0;
    if constexpr (MOST == 64) {
      if (any) wide == 32 ? begin<32>(b) : begin<64>(b);
    } else {
      if (any) switch (wide) {
          case 32: begin<32>(b); break;
          case 64: begin<64>(b); break;
          case 128: begin<128>(b); break;
          case 192: begin<WIDER>(b); break;
          default: begin<WIDEST>(b);
        }
    }
    if (!ready()) return false;
    if constexpr (MOST == 64) {
      if (any) wide == 32 ? products<UNIT, 32, 1>(b, emit) : products<UNIT, 64, 1>(b, emit);
    } else {
      if (any) switch (wide) {
          case 32: products<UNIT, 32, 1>(b, emit); break;
          case 64: products<UNIT, 64, 1>(b, emit); break;
          case 128: products<UNIT, 128, 1>(b, emit); break;
          case 192: products<UNIT, WIDER / 2, 2>(b, emit); break;
          default: products<UNIT, WIDEST / 2, 2>(b, emit);
        }
    }
    return true;
  }
  __device__ __forceinline__ u32 slots() const {
    return (shared_address(shared) + ALIGNED - 1) / ALIGNED * ALIGNED;
  }

  // The first steps' weights.
  template <int WIDE, class Block>
  __device__ __forceinline__ void begin(const Block& b) const {
    const u32 at = slots();
    Feeder<WIDE> feed(shared, at, me, b.block);
    const bool small = feed.small();
    const int ahead = Steps<WIDE>::ahead(small);
#pragma unroll 1
    for (int i = 0; i < ahead && feed.more(); ++i) feed.ask_weights(), feed.next(at, small);
  }

  // WIDE * TIMES rows together.
  template <int UNIT, int WIDE, int TIMES, class Block, class Emit>
  __device__ __forceinline__ void products(Block& b, Emit emit) const {
    using Of = Steps<WIDE * TIMES>;
    constexpr int AT_ONCE = Of::AT_ONCE;
    const SharedRows& all = rows();
    const u32 at = slots();
    Feeder<WIDE * TIMES> feed(shared, at, me, b.block);
    const bool small = feed.small();
#pragma unroll 1
    for (int i = 0; i < Of::ahead(small); ++i) {
      if (feed.more()) feed.ask_activations(), feed.next(at, small);
      copies_sent();
    }
    const int group = me / 128;
    u32 slot = at;
#pragma unroll 1
    for (int tile = b.block - all.first; tile * all.of < all.tokens; tile += all.members) {
      const int begin = tile * all.of + group * GROUP_TOKENS;  // of this warp group's tokens
      const bool mine = begin < all.tokens && group * GROUP_TOKENS < all.of;
#pragma unroll 1
      for (int row = 0; row < all.count(); row += WIDE * TIMES) {
        float sum[TIMES][WIDE / 2];
#pragma unroll
        for (int t = 0; t < TIMES; ++t)
#pragma unroll
          for (int i = 0; i < WIDE / 2; ++i) sum[t][i] = 0.0f;
        if constexpr (Additions::EXPERT_BIAS)
          if (all.biases)
#pragma unroll
            for (int t = 0; t < TIMES; ++t) add_biases(all, row + t * WIDE, sum[t]);
#pragma unroll 1
        for (int steps = feed.steps(); steps > 0; steps -= AT_ONCE) {
          if (small) {
            copies_arrived<Of::ahead(true) - AT_ONCE>();
          } else {
            copies_arrived<Of::ahead(false) - AT_ONCE>();
          }
          leave_to_copies();  // products read as bulk copies do
          b.core.barrier();
          if (mine) {
#pragma unroll
            for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
            products_begin();
#pragma unroll
            // slots of steps between two barriers are neighbours
            for (int i = 0; i < AT_ONCE; ++i) {
              const u32 from = slot + u32(i * Of::bytes(small));
              const u64 w = swizzled_rows(from),
                        x = swizzled_rows(from +
                                         u32((WIDE * TIMES + group * GROUP_TOKENS) * STEP_BYTES));
#pragma unroll
              for (int k = 0; k < STEP_COLUMNS / 16; ++k)
#pragma unroll
                for (int t = 0; t < TIMES; ++t)
                  multiply_group<WEIGHT, WIDE>(
                      sum[t], x + k * NEXT_PRODUCT,
                      w + k * NEXT_PRODUCT + u64(t * WIDE * STEP_BYTES / 16));
            }
            products_sent();
#pragma unroll
            for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
            products_made<1>();
          }
#pragma unroll
          for (int i = 0; i < AT_ONCE; ++i) {
            if (feed.more()) feed.ask_weights(), feed.ask_activations(), feed.next(at, small);
            copies_sent();
          }
          slot += u32(AT_ONCE * Of::bytes(small));
          if (slot == at + u32(Of::count(small) * Of::bytes(small))) slot = at;
        }
        products_made<0>();
#pragma unroll
        for (int t = 0; t < TIMES; ++t) hold_sums(sum[t]);
        if (mine)
#pragma unroll
          for (int t = 0; t < TIMES; ++t) emit_sums<UNIT>(all, begin, row + t * WIDE, sum[t], emit);
      }
    }
  }

  // The biases of a product's rows, before there are sums: their loads are under way with copies.
  template <int N>
  __device__ __forceinline__ void add_biases(const SharedRows& rows, int row,
                                             float (&sum)[N]) const {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int at = row + 8 * i + me % 4 * 2 + j;
        const float bias =
            at >= rows.skew && at < rows.count() ? rows.biases[rows.row_at(at)] : 0.0f;
        sum[4 * i + j] = bias, sum[4 * i + 2 + j] = bias;
      }
  }

  // A thread's sums of a product: tokens 16 * (warp % 4) + thread / 4 and 8 more, pairs of
  // neighbouring rows.
  template <int UNIT, int N, class Emit>
  __device__ __forceinline__ void emit_sums(const SharedRows& rows, int begin, int row,
                                            const float (&sum)[N], Emit emit) const {
    const int thread = me % 32, count = rows.count();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = begin + me / 32 % 4 * 16 + thread / 4 + 8 * half;
      if (token >= rows.tokens) continue;
      int to = token;
      if constexpr (Experts::ANY)
        if (rows.entries) to = rows.entries[token];
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        const int at = row + 8 * i + thread % 4 * 2;
        const float low = sum[4 * i + 2 * half], high = sum[4 * i + 2 * half + 1];
        if constexpr (UNIT == 2) {
          if (at < count) emit(to, (rows.lo + at) / 2, low, high);
        } else {
          const bool first = at >= rows.skew && at < count,
                     second = at + 1 >= rows.skew && at + 1 < count;
          if (first && second) {
            emit(to, rows.row_at(at), low, high, true);
          } else if (first || second) {
            emit(to, rows.row_at(at) + second, first ? low : high, first ? low : high);
          }
        }
      }
    }
  }

  // FP32: a warp takes four rows of a row group at a time, and two tokens; its threads share the
  // columns.
  template <class Emit>
  __device__ __forceinline__ void multiply_fp32(const Rows32& matrix, int element, int unit,
                                                int height, const float* x, int tokens,
                                                Emit emit) const {
    constexpr int TOKENS = 2, ROWS = 4, STEP = 4;
    const int thread = me % 32;
    for (int row = me / 32 * ROWS; row < matrix.rows; row += CONSUMER_WARPS * ROWS) {
      for (int token = 0; token < tokens; token += TOKENS) {
        float sum[TOKENS][ROWS] = {};
#pragma unroll 1
        for (int before = 0; before < matrix.cols; before += matrix.tile_cols) {
          const int width =
              matrix.cols - before < matrix.tile_cols ? matrix.cols - before : matrix.tile_cols;
#pragma unroll 1
          for (int c = thread * STEP; c < width; c += 32 * STEP) {
            float4 xs[TOKENS];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
              xs[t] = load_quad(x + long(token + t < tokens ? token + t : token) * matrix.cols +
                                before + c);
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
              const int at = row + r < matrix.rows ? row + r : row, group = at - at % height;
              const int rows = matrix.rows - group < height ? matrix.rows - group : height;
              const u64 from =
                  u64(group) * u64(matrix.cols) + u64(before * rows + at % height * width + c);
              const float* const four = reinterpret_cast<const float*>(matrix.from) + from;
              const float4 w = CODED ? load_quad(four) : load_once(four);
#pragma unroll
              for (int t = 0; t < TOKENS; ++t)
                sum[t][r] += xs[t].x * w.x + xs[t].y * w.y + xs[t].z * w.z + xs[t].w * w.w;
            }
          }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
#pragma unroll
          for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int mask = 16; mask; mask /= 2)
              sum[t][r] += __shfl_xor_sync(0xFFFFFFFFu, sum[t][r], mask);
          if (thread != 0 || token + t >= tokens) continue;
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
