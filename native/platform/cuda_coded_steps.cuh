// Products of experts whose weights have eight bits, in a prompt pass: codes come into shared memory
// as they are stored, and each step of columns is decoded there for the tensor cores. A thread
// decodes what it has copied itself. Rows that were decoded in the device's memory first took three
// times as long: they passed the second-level cache twice in 16 bits.
#pragma once

namespace twin {

struct CodedSteps {
  static constexpr int WIDE = facts::CODED_STEP_ROWS;  // rows that a block takes together, at most
  static constexpr int PITCH = CONSUMERS / 4,  // rows between those of a thread: four share a row
                       LINES = WIDE / PITCH;   // of a thread
  static constexpr int RAW = WIDE * STEP_COLUMNS, SCALES = LINES * CONSUMERS * int(sizeof(float));
  // steps between two barriers; pairs of decoded ones: one is read by products, one is written
  static constexpr int AT_ONCE = 2, DECODED_BYTES = AT_ONCE * WIDE * STEP_BYTES;
  static constexpr int TOKEN_PITCH = CONSUMERS / (STEP_BYTES / 16);  // of a thread's activations
  static constexpr u32 NONE = ~0u;

  // Tokens' activations, then codes, then scales; rows of both begin at a multiple of 1,024 bytes.
  __host__ __device__ static constexpr int slot_bytes(bool small) {
    return (small ? 1 : 2) * GROUP_TOKENS * STEP_BYTES + RAW + SCALES;
  }
  __host__ __device__ static constexpr int slots(bool small) {
    return (facts::PASS_ROOM_BYTES + facts::PASS_BEGINS_BYTES - 2 * DECODED_BYTES) /
           slot_bytes(small);
  }
  // Under way: others are in use.
  __host__ __device__ static constexpr int ahead(bool small) { return slots(small) - AT_ONCE; }
};
static_assert(CodedSteps::slot_bytes(true) % ALIGNED == 0 &&
                  CodedSteps::slot_bytes(false) % ALIGNED == 0 &&
                  CodedSteps::ahead(false) > CodedSteps::AT_ONCE,
              "slots begin where products find swizzled rows");

// A thread's copies and decoding of a batch of an expert's rows, for TOKENS entries at most.
template <class Decoder, class Block, class Stage, class RowBatch>
struct CodedFeeder : CodedSteps {
  static constexpr u32 BLOCK = u32(Decoder::BLOCK);
  // copies are of words: of two scales in 16 bits, of which a row's is the same in all blocks
  static constexpr bool HALVES = Decoder::SCALE == Scale::FP16;
  static constexpr u32 SCALE_BYTES = u32(scale_bytes(Decoder::SCALE)), WORD = ~u32(HALVES ? 3 : 0);
  static_assert(HALVES || Decoder::SCALE == Scale::FP32, "scales of these types alone");

  const Block& b;
  const Stage& stage;
  const RowBatch& batch;
  const SharedRows& rows;
  const u8* weights;  // the expert's
  int me, step;       // the thread; the next step that it asks for
  int until;          // steps until its column is in another slice
  // of each of its rows: its first code of the slice, less the step's, and where its scales lie, both
  // in bytes from the expert's weights; between a block's scales and the next one's
  u32 code[LINES], scale[LINES] = {}, pitch[LINES];
  int begin;  // the slice's first column
  u64 policy;

  __device__ __forceinline__ CodedFeeder(const Block& b, const Stage& stage, const RowBatch& batch,
                                         const SharedRows& rows, const u8* weights, int me)
      : b(b), stage(stage), batch(batch), rows(rows), weights(weights), me(me), step(0), until(0),
        policy(read_once()) {}

  __device__ __forceinline__ int unit() const { return me % 4; }  // sixteen columns of a step
  __device__ __forceinline__ int line() const { return me / 4; }
  __device__ __forceinline__ int column() const { return step * STEP_COLUMNS + unit() * 16; }

  // The thread's column has come to another slice.
  __device__ __forceinline__ void find() {
    const int slice = column() / stage.tile_cols, before = slice * stage.tile_cols,
              left = rows.cols - before, width = left < stage.tile_cols ? left : stage.tile_cols;
    const bool inside = column() < rows.cols;
    until = inside ? (before + width - column() + STEP_COLUMNS - 1) / STEP_COLUMNS : 1 << 30;
    begin = before;
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      const int row = rows.row_at(line() + i * PITCH);
      code[i] = NONE;
      if (row < batch.lo || row >= batch.hi || !inside) continue;
      group_of(b, stage, batch, row, [&](int first, int count, auto lies) {
        const u32 tile = lies(slice) * UNIT_BYTES;
        code[i] = tile + u32((row - first) * width + column() - before) -
                  u32(step) * STEP_COLUMNS;
        scale[i] = tile + u32(count * width) + u32(row - first) * SCALE_BYTES;
        pitch[i] = u32(scaled_rows(count)) * SCALE_BYTES;
      });
    }
  }
  __device__ __forceinline__ void ask(u32 slot, bool small) {
    if (until == 0) find();
    const u32 raw = slot + u32((small ? 1 : 2) * GROUP_TOKENS * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      const bool there = code[i] != NONE;
      copy_weights(raw + u32((i * CONSUMERS + me) * 16),
                   weights + (there ? code[i] + u32(step) * STEP_COLUMNS : 0u), there,
                   policy);
      const u32 number = BLOCK ? u32(column() - begin) / (BLOCK ? BLOCK : 1u) : 0u;
      copy_word(raw + u32(RAW + (i * CONSUMERS + me) * int(sizeof(float))),
                weights + (there ? scale[i] + number * pitch[i] & WORD : 0u), there);
    }
    ++step, --until;
  }
  // The thread's codes of a step as the weight type has them, where products find them.
  __device__ __forceinline__ void decode(u32 slot, bool small, u32 to) const {
    const u32 raw = slot + u32((small ? 1 : 2) * GROUP_TOKENS * STEP_BYTES);
#pragma unroll
    for (int i = 0; i < LINES; ++i) {
      Decoder some;
      load_four(raw + u32((i * CONSUMERS + me) * 16), some.word);
      some.scale[0] = load_float(raw + u32(RAW + (i * CONSUMERS + me) * int(sizeof(float))));
      if constexpr (HALVES) {
        float even, odd;
        unpack<Type::FP16>(bits_as<u32>(some.scale[0]), even, odd);
        some.scale[0] = scale[i] / SCALE_BYTES % 2 ? odd : even;
      }
      some.zero[0] = 0.0f;
      u32 made[Decoder::WORDS];
      some.decode(0, made);
      const int row = line() + i * PITCH;
      const u32 at = to + u32(row * STEP_BYTES);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 four[4] = {made[4 * half], made[4 * half + 1], made[4 * half + 2],
                             made[4 * half + 3]};
        store_four(at + u32((2 * unit() + half ^ row % 8) * 16), four);
      }
    }
  }
};

// A thread's copies of the activations of a tile of entries.
template <int TILE>
struct EntryFeeder {
  static constexpr int TOKENS = TILE / CodedSteps::TOKEN_PITCH;

  u32 from[TOKENS];  // bytes of a step, from the chunk's activations
  bool there[TOKENS];
  int me;

  __device__ __forceinline__ EntryFeeder(const SharedRows& rows, int first, int me) : me(me) {
    const int pieces = STEP_BYTES / 16, unit = me % pieces;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = me / pieces + i * CodedSteps::TOKEN_PITCH;
      there[i] = first + token < rows.tokens;
      const int input = there[i] ? rows.input_of(first + token) : 0;
      from[i] = u32(input / TILE_TOKENS) * u32(rows.steps()) * u32(TILE_TOKENS * STEP_BYTES) +
                u32(input % TILE_TOKENS * STEP_BYTES) + u32((unit ^ token % 8 ^ input % 8) << 4);
    }
  }
  __device__ __forceinline__ void ask(const SharedRows& rows, u32 slot, int step) const {
    const int pieces = STEP_BYTES / 16, unit = me % pieces;
    const bool held = rows.cols > step * STEP_COLUMNS + (unit ^ me / pieces % 8) * PIECE_COLUMNS;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i)
      if (there[i])
        copy_activations(slot + u32((me / pieces + i * CodedSteps::TOKEN_PITCH) * STEP_BYTES +
                                    unit * 16),
                         rows.x + from[i] + u64(step) * (TILE_TOKENS * STEP_BYTES), held);
  }
};

}  // namespace twin
