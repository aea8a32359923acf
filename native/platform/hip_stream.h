// Weights on their way from memory into registers: each wave has a few strips under way, from
// before a stage's inputs are there until its last row. Included by hip.h.
#pragma once

namespace twin {

typedef u32 quad_words __attribute__((ext_vector_type(4)));
typedef _Float16 half_pair __attribute__((ext_vector_type(2)));

constexpr int STEP = 16 / type_bytes(WEIGHT);  // weights of a load

typedef float quad_floats __attribute__((ext_vector_type(4)));

// STEP neighbours, a multiple of 16 bytes from where local memory begins.
struct Elements {
  float at[STEP];

  __device__ explicit Elements(const float* from) {
#pragma unroll
    for (int i = 0; i < STEP; i += 4) {
      const quad_floats four = *reinterpret_cast<const quad_floats*>(from + i);
      at[i] = four[0], at[i + 1] = four[1], at[i + 2] = four[2], at[i + 3] = four[3];
    }
  }
};

// A thread's 16 bytes of columns of a stage's input, to be multiplied with the same columns of
// several rows.
template <Type T>
struct Columns {
  const Elements from;

  __device__ explicit Columns(const float* at) : from(at) {}
  __device__ float dot(quad_words words, float sum) const {
    for (int i = 0; i < 4; ++i) {
      const u32 word = words[i];
      if constexpr (T == Type::FP32) {
        sum += bits_as<float>(word) * from.at[i];
      } else {  // BF16: gfx942 has no dot product of it with an FP32 sum
        float a, b;
        unpack<T>(word, a, b);
        sum += a * from.at[2 * i];
        sum += b * from.at[2 * i + 1];
      }
    }
    return sum;
  }
};

// FP16 weights: two products and their sum in FP32 take one instruction. The input is there twice,
// rounded to FP16 and what rounding lost, so sums are those of FP32 inputs. An element beyond
// 65,504 becomes infinite, so that a run ends with an error.
template <>
struct Columns<Type::FP16> {
  half_pair rounded[4], lost[4];

  __device__ explicit Columns(const float* at) {
    const Elements from(at);
    for (int i = 0; i < 4; ++i) {
      const float a = from.at[2 * i], b = from.at[2 * i + 1];
      rounded[i] = half_pair{_Float16(a), _Float16(b)};
      lost[i] = half_pair{_Float16(a - float(rounded[i][0])), _Float16(b - float(rounded[i][1]))};
    }
  }
  __device__ float dot(quad_words words, float sum) const {
    for (int i = 0; i < 4; ++i) {
      const u32 word = words[i];
      const half_pair weights = bits_as<half_pair>(word);
      sum = __builtin_amdgcn_fdot2(weights, rounded[i], sum, false);
      sum = __builtin_amdgcn_fdot2(weights, lost[i], sum, false);
    }
    return sum;
  }
};

// The same in all lanes, which the compiler then knows: such values, and what is computed of them,
// take no register of a lane.
__device__ __forceinline__ int same(int value) { return __builtin_amdgcn_readfirstlane(value); }
__device__ __forceinline__ const u8* same(const u8* at) {
  const u64 bits = u64(at);
  return (const u8*)(u64(u32(same(int(u32(bits))))) | u64(u32(same(int(u32(bits >> 32))))) << 32);
}

// The compiler moves no instruction past it.
__device__ __forceinline__ void in_this_order() { __builtin_amdgcn_sched_barrier(0); }

// A strip is what a wave loads and multiplies at once: 16 bytes a lane of each of a few rows.
constexpr int STRIP_ROWS = 4, STRIP_COLS = WAVE * STEP;
// Strips of a wave that are under way: 128 KiB of a block's eight waves, 64 registers a lane.
constexpr int STRIPS = 2;

struct Strip {
  static constexpr int NONE = 0x7FFFFFFF;

  int row;   // its first, of the block's own rows; NONE: it is empty
  int rows;  // at most STRIP_ROWS
  int col;   // its first, of the stage's input
  int cols;  // from there to the tile's end: the strip ends a row where they are not more than its own
  int part;  // column slice

  __device__ bool ends() const { return rows > 0 && cols <= STRIP_COLS; }
  __device__ void keep_same() {
    row = same(row), rows = same(rows), col = same(col), cols = same(cols), part = same(part);
  }
};

// The strips of one wave in a stage's rows, in the order in which they lie in the stream. Waves
// take STRIP_ROWS rows of a tile in turn. Strips of a batch of rows come in rounds of STRIPS, the
// last ones empty: so each batch begins with the registers of the first.
struct Walk {
  const u8* first;    // where the block's rows begin
  const u8* nowhere;  // what an empty strip loads
  int rows, batch;  // of the block; between two barriers
  int end;          // of the batch
  int row, sub;     // rows of a tile, one below the other; rows inside
  int col, part;    // a tile of these; its number
  int inner;        // columns inside

  // The wave's first strip lies `turn` shares, rows of a tile, behind the stage's begin.
  __device__ Walk(const Stage& stage, const u8* from, const u8* else_from, int own, int turn)
      : first(from), nowhere(else_from), rows(own), batch(stage.batch), end(0), row(0), sub(0), col(0), part(0),
        inner(0) {
    on(stage, turn);
  }

  __device__ void keep_same() {
    first = same(first), nowhere = same(nowhere), rows = same(rows), batch = same(batch), end = same(end), row = same(row);
    sub = same(sub), col = same(col), part = same(part), inner = same(inner);
  }
  __device__ static int high(const Stage& stage) {  // rows of a tile, in whole shares
    return (stage.tile_rows + STRIP_ROWS - 1) / STRIP_ROWS * STRIP_ROWS;
  }
  // So many shares on, and further where there are no rows.
  __device__ void on(const Stage& stage, int shares) {
    do {
      sub += shares * STRIP_ROWS;
      while (sub >= high(stage)) {
        sub -= high(stage);
        col += stage.tile_cols, ++part;
        if (col >= stage.cols) col = part = 0, row += stage.tile_rows;
      }
      shares = WAVES;
    } while (row < rows && row + sub >= rows);
  }

  // The next one; where it lies, and the bytes between its rows. `opens`: a round begins with it.
  __device__ Strip take(const Stage& stage, bool opens, const u8*& from, int& apart) {
    if (opens)
      while (row >= end && end < rows) end += batch;
    from = nowhere, apart = 0;
    if (row >= end || row >= rows) return {Strip::NONE, 0, 0, 0, 0};
    const int here = rows - row < stage.tile_rows ? rows - row : stage.tile_rows,
              wide = stage.cols - col < stage.tile_cols ? stage.cols - col : stage.tile_cols,
              left = here - sub;
    const Strip strip = {row + sub, left < STRIP_ROWS ? left : STRIP_ROWS, col + inner,
                         wide - inner, part};
    apart = wide * type_bytes(WEIGHT);
    from = first + u32(row * stage.cols + here * col + sub * wide + inner) * type_bytes(WEIGHT);
    inner += STRIP_COLS;
    if (inner >= wide) {
      inner = 0;
      on(stage, WAVES);
    }
    return strip;
  }
};

// A wave's strips that are under way or there.
struct Strips {
  Walk walk;
  int own;  // the block's first row
  Strip strip[STRIPS];
  quad_words words[STRIPS][STRIP_ROWS];

  __device__ Strips(const Stage& stage, const u8* first, const u8* nowhere, Span rows, int turn)
      : walk(stage, first, nowhere, rows.hi - rows.lo, turn), own(rows.lo) {}

  // Behind waits, from which lanes return one by one, the compiler does not know it any more.
  __device__ void keep_same() {
    walk.keep_same(), own = same(own);
#pragma unroll
    for (int k = 0; k < STRIPS; ++k) strip[k].keep_same();
  }

  // Always so many loads: with a condition around some, the compiler would wait for all that are
  // under way, and keep registers for words that are not there. Rows and lanes without weights load
  // 16 bytes that are somebody's.
  __device__ void load(const Stage& stage, int at, int lane) {
    const u8* from;
    int apart;
    strip[at] = walk.take(stage, at == 0, from, apart);
    const bool holds = lane * STEP < strip[at].cols;
#pragma unroll
    for (int r = 0; r < STRIP_ROWS; ++r) {
      const u32 there = holds && r < strip[at].rows ? u32(r * apart + lane * 16) : 0u;
      words[at][r] =
          __builtin_nontemporal_load(global(reinterpret_cast<const quad_words*>(from + there)));
    }
  }
};

}  // namespace twin
