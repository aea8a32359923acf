// Weights of few bits times a block's activations, in the registers of its consumer warps. A piece
// is what a thread has of a tile at once: ROWS_AT_ONCE loads of 16 bytes, whatever the format.
#pragma once

namespace twin {

// ---- a stage's input as whole numbers -----------------------------------------------------------

// x as numbers of 16 bits times a scale: high and low signed bytes, four neighbours to a word. The
// scale is the thread's own, by the largest element of each of its chunks, so no thread asks
// others.
template <class Vector>
struct Whole {
  static constexpr int WORDS = Vector::VECTOR / 4;
  static constexpr float MOST = 32512.0f;  // 127 * 256: the high byte stays within its sign
  static constexpr float LEAST = 1e-30f;   // of less, MOST / x would overflow: taken for zero

  u32 high[Vector::PORTIONS][WORDS], low[Vector::PORTIONS][WORDS];
  float scale[Vector::PORTIONS];

  __device__ __forceinline__ void set(const Vector& x) {
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      float most = 0, strange = 0;  // NaN where an element is no number
#pragma unroll
      for (int i = 0; i < Vector::VECTOR; ++i) {
        most = fmaxf(most, fabsf(x.at[c][i]));
        strange += x.at[c][i] * 0.0f;
      }
      const float by = most > LEAST ? MOST / most : 0.0f;
      scale[c] = (most > LEAST ? most * (1.0f / MOST) : 0.0f) + strange;
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        u32 v[4], up[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          v[i] = u32(nearest(x.at[c][4 * w + i] * by));
          up[i] = v[i] + 128u;  // the low byte is signed: what it lacks, the high one has
        }
        low[c][w] = bytes_of(bytes_of(v[0], v[1], 0x0040), bytes_of(v[2], v[3], 0x0040), 0x5410);
        high[c][w] =
            bytes_of(bytes_of(up[0], up[1], 0x0051), bytes_of(up[2], up[3], 0x0051), 0x5410);
      }
    }
  }
};

// ---- a piece ------------------------------------------------------------------------------------

template <Code C>
struct Coding {  // how a piece of a vector's columns is divided into rows
  static constexpr Code CODE = C;
  // multiplied as whole numbers
  static constexpr bool SCALED = C != Code::PLAIN, WHOLE = C == Code::INT8;
  static constexpr int LOADS = CODED_PACK * code_bits(C) / (8 * UNIT_BYTES);  // of a row
  static constexpr int ROWS = LOADS ? ROWS_AT_ONCE / LOADS : ROWS_AT_ONCE;
  static_assert(!CODED || ROWS * LOADS == ROWS_AT_ONCE, "whole loads, whole rows");
};

struct CodedPiece {
  u32 word[ROWS_AT_ONCE][UNIT_BYTES / 4];  // by loads: those of a row follow each other
  float scale[ROWS_AT_ONCE];

  // Of thread `me`, from row `first` on of a tile of `rows` rows of `apart` bytes at address
  // `from`. Beyond its rows: what the slot has there.
  template <class Coding, class Vector>
  __device__ __forceinline__ void load(int me, int c, u32 from, u32 apart, int first, int rows) {
    constexpr int LOADS = Coding::LOADS;
    const u32 plane = apart / LOADS;  // the second loads of all threads follow the first ones
    const u32 mine =
        Vector::valid(me, c) ? u32(Vector::local(me) / Vector::VECTOR * UNIT_BYTES) : 0u;
    const u32 at = from + u32(first) * apart + mine;
#pragma unroll
    for (int i = 0; i < ROWS_AT_ONCE; ++i)
      load_four(at + u32(i / LOADS) * apart + u32(i % LOADS) * plane, word[i]);
    if constexpr (Coding::SCALED) {
      constexpr int WIDE = code_block(Coding::CODE);  // 0: a row has one scale
      const int block = WIDE && Vector::valid(me, c) ? Vector::local(me) / (WIDE ? WIDE : 1) : 0;
      const u32 behind = from + u32(rows) * apart + 4u * u32(block * scaled_rows(rows) + first);
#pragma unroll
      for (int r = 0; r < Coding::ROWS; r += 4) {
        u32 bits[4];
        load_four(behind + 4u * u32(r), bits);
#pragma unroll
        for (int i = 0; i < 4; ++i) scale[r + i] = bits_as<float>(bits[i]);
      }
    }
  }

  // sum[r] += this thread's part of row r.
  template <class Coding, class Vector>
  __device__ __forceinline__ void multiply(int c, const Vector& x, const Whole<Vector>& whole,
                                           float (&sum)[Coding::ROWS]) const {
    constexpr int WORDS = Coding::LOADS * UNIT_BYTES / 4;
#pragma unroll
    for (int r = 0; r < Coding::ROWS; ++r) {
      if constexpr (Coding::CODE == Code::INT8) {
        int high = 0, low = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          high = dot4(word_of<WORDS>(r, w), whole.high[c][w], high);
          low = dot4(word_of<WORDS>(r, w), whole.low[c][w], low);
        }
        sum[r] += float(high * 256 + low) * (scale[r] * whole.scale[c]);
      } else if constexpr (Coding::SCALED) {
        float part = 0;
#pragma unroll
        for (int i = 0; i < Vector::VECTOR; i += 4) {
          float w[4];
          four_e4m3(word_of<WORDS>(r, i / 4), w);
#pragma unroll
          for (int j = 0; j < 4; ++j) part += w[j] * x.at[c][i + j];
        }
        sum[r] += part * scale[r];
      } else if constexpr (WEIGHT == Type::FP32) {
#pragma unroll
        for (int i = 0; i < Vector::VECTOR; ++i)
          sum[r] += bits_as<float>(word_of<WORDS>(r, i)) * x.at[c][i];
      } else {
#pragma unroll
        for (int i = 0; i < Vector::VECTOR; i += 2) {
          float low, high;
          unpack<WEIGHT>(word_of<WORDS>(r, i / 2), low, high);
          sum[r] += low * x.at[c][i];
          sum[r] += high * x.at[c][i + 1];
        }
      }
    }
  }

  template <int WORDS>  // of a row
  __device__ __forceinline__ u32 word_of(int row, int number) const {
    const int at = row * WORDS + number;
    return word[at / 4][at % 4];
  }
};

// Calls use(Coding<code>{}) with that of the stage, one of those that the plan's matrices have.
template <class Stage, class Use>
__device__ __forceinline__ void with_coding(const Stage& stage, Use use) {
  if constexpr (uses(Code::INT8))
    if (code_of(stage) == Code::INT8) return use(Coding<Code::INT8>{});
  if constexpr (uses(Code::FP8))
    if (code_of(stage) == Code::FP8) return use(Coding<Code::FP8>{});
  if constexpr (uses(Code::FP8_BLOCKS))
    if (code_of(stage) == Code::FP8_BLOCKS) return use(Coding<Code::FP8_BLOCKS>{});
  use(Coding<Code::PLAIN>{});
}

// What a stage's batches have in common: the weights that were taken ahead, in the order in which
// they are multiplied, and the input as whole numbers, made once it is there.
template <class Vector>
struct Begun {
  static constexpr int PORTIONS = Vector::AHEAD_PORTIONS, GROUPS = Vector::AHEAD_GROUPS;

  CodedPiece taken[GROUPS ? GROUPS : 1][PORTIONS ? PORTIONS : 1];
  int held;
  Whole<Vector> whole;
  bool made;
};

}  // namespace twin
