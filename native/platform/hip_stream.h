// Weights on their way from memory into registers: each wave has a few strips under way, from
// before a stage's inputs are there until its last row. Included by hip.h.
#pragma once

namespace twin {

typedef u32 quad_words __attribute__((ext_vector_type(4)));
typedef _Float16 half_pair __attribute__((ext_vector_type(2)));

constexpr int STEP = 16 / type_bytes(WEIGHT);  // weights of a load

typedef u32 pair_words __attribute__((ext_vector_type(2)));
typedef float quad_floats __attribute__((ext_vector_type(4)));

// STEP neighbours, a multiple of 16 bytes from where local memory begins.
struct Elements {
  float at[STEP];

  __device__ Elements() {}
  __device__ explicit Elements(const float* from) {
#pragma unroll
    for (int i = 0; i < STEP; i += 4) {
      const quad_floats four = *reinterpret_cast<const quad_floats*>(from + i);
      at[i] = four[0], at[i + 1] = four[1], at[i + 2] = four[2], at[i + 3] = four[3];
    }
  }
};

__device__ __forceinline__ Elements elements(const MemoryVector& x, bool holds, int col,
                                             const float* nothing) {
  return Elements(holds ? x.at + col : nothing);
}

// A thread's 16 bytes of columns of a stage's input, to be multiplied with the same columns of
// several rows.
template <Type T>
struct Columns {
  const Elements from;

  __device__ explicit Columns(const Elements& seen) : from(seen) {}
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

  __device__ explicit Columns(const Elements& from) {
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
// Strips of a wave that are under way or there: 16 registers of a lane each, 32 KiB of a block.
constexpr int STRIPS = TWIN_STRIPS;

struct Strip {
  int batch;  // of all batches of rows that the block multiplies, one after the other
  int row;    // its first, of the batch
  int rows;   // at most STRIP_ROWS; none where it is empty
  int col;    // its first, of the stage's input
  int cols;   // from there to the tile's end
  int part;   // column slice

  __device__ bool ends() const { return rows > 0 && cols <= STRIP_COLS; }
};

// Where the next strip of a wave is: the wave's strips of all stages, in the order in which they
// lie in the stream, step after step. Waves take STRIP_ROWS rows of a tile in turn. The strips of a
// batch come in rounds of STRIPS, the last ones empty, so that each batch begins with the registers
// of the first.
struct Walk {
  const u8* stream;   // of the block
  const u8* nowhere;  // 16 bytes that are somebody's: what an empty strip loads
  int wave, block;
  int step, head_from;  // the first step whose LM head counts
  int stage, at;        // the next stage to be looked at; where this one's rows begin, in bytes
  int batch, end;       // how many have been begun; the first row behind this one
  int rows, cols, high, wide, most;  // of the block; of the matrix; of a tile; of a batch
  int row, sub, col, part, inner;    // rows of a tile, rows inside; a tile of these, columns inside

  // Nothing has been looked at.
  __device__ Walk(const u8* from, const u8* somewhere, int own_block, int own_wave, int first_head)
      : stream(from), nowhere(somewhere), wave(own_wave), block(own_block), step(0),
        head_from(first_head), stage(0), at(0), batch(-1), end(0), rows(0), cols(0), high(1),
        wide(1), most(1), row(0), sub(0), col(0), part(0), inner(0) {}

  __device__ int share() const {  // rows of a tile, in whole shares
    return (high + STRIP_ROWS - 1) / STRIP_ROWS * STRIP_ROWS;
  }
  // So many shares on, and further where there are no rows.
  __device__ void on(int shares) {
    do {
      sub += shares * STRIP_ROWS;
      while (sub >= share()) {
        sub -= share();
        col += wide, ++part;
        if (col >= cols) col = part = 0, row += high;
      }
      shares = WAVES;
    } while (row < rows && row + sub >= rows);
  }
  // Does the next stage have rows of this block in the stream? The wave's first strip of it.
  __device__ bool enter(const Plan& plan) {
    at += rows * cols * type_bytes(WEIGHT);
    rows = 0;
    if (stage >= plan.stage_count) stage = at = 0, ++step;
    const Stage& next = plan.stages_at(stage);
    ++stage;
    if (next.owned < 0 || in_experts(next)) return false;
    if (next.kind == int(StageKind::LM_HEAD) && step < head_from) return false;
    const Span own = plan.owned_of(next.owned, block);
    rows = own.hi - own.lo;
    cols = next.cols, high = next.tile_rows, wide = next.tile_cols, most = next.batch;
    row = sub = col = part = inner = end = 0;
    on(wave);
    return rows > 0;
  }
  __device__ static bool in_experts(const Stage& stage) {  // their tiles lie elsewhere
    return stage.expert_rows > 0;
  }
  // To the next batch in which the wave has strips. False: it has none in a whole step.
  __device__ bool open(const Plan& plan) {
    for (int looked = 0; row >= end || row >= rows;) {
      if (end < rows) {
        end += most, ++batch;
      } else if (looked++ > plan.stage_count) {
        return false;
      } else if (enter(plan)) {
        end = most, ++batch;
      }
    }
    return true;
  }

  // The next one; where it lies, and the bytes between its rows. `opens`: a round begins with it.
  __device__ Strip take(const Plan& plan, bool opens, const u8*& from, int& pitch) {
    from = nowhere, pitch = 0;
    if ((opens && !open(plan)) || row >= end || row >= rows) return {-1, 0, 0, 0, 0, 0};
    const int here = rows - row < high ? rows - row : high,
              width = cols - col < wide ? cols - col : wide, left = here - sub;
    const Strip strip = {batch, row + sub - (end - most), left < STRIP_ROWS ? left : STRIP_ROWS,
                         col + inner, width - inner, part};
    pitch = width * type_bytes(WEIGHT);
    from = stream + u32(at) + u32(row * cols + here * col + sub * width + inner) * type_bytes(WEIGHT);
    inner += STRIP_COLS;
    if (inner >= width) {
      inner = 0;
      on(WAVES);
    }
    return strip;
  }
};

// What a wave knows of its strips, in local memory between stages: in registers it would be kept in
// every lane.
struct Known {
  Walk walk;
  Strip strip[STRIPS];
  int batch;  // of the next product

  // Behind waits, from which lanes return one by one, the compiler knows nothing any more to be the
  // same in all of them.
  __device__ void keep_same() {
    u32* const words = reinterpret_cast<u32*>(this);
#pragma unroll
    for (u32 i = 0; i < sizeof(Known) / 4; ++i) words[i] = u32(same(int(words[i])));
  }
};

// A wave's strips that are under way or there. They are loaded from the kernel's start on, across
// stages and steps: the next stage's are under way while this one's last are multiplied, and while
// it waits.
struct Strips {
  quad_words words[STRIPS][STRIP_ROWS];

  // Always so many loads: with a condition around some, the compiler would wait for all that are
  // under way. Rows and lanes without weights load 16 bytes that are somebody's.
  __device__ void load(const Plan& plan, Known& known, int at, int lane) {
    const u8* from;
    int pitch;
    const Strip strip = known.walk.take(plan, at == 0, from, pitch);
    const bool holds = lane * STEP < strip.cols;
#pragma unroll
    for (int r = 0; r < STRIP_ROWS; ++r) {
      const u32 there = holds && r < strip.rows ? u32(r * pitch + lane * 16) : 0u;
      words[at][r] =
          __builtin_nontemporal_load(global(reinterpret_cast<const quad_words*>(from + there)));
    }
    known.strip[at] = strip;
  }
};

}  // namespace twin
