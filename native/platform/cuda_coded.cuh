// Low-bit weights times a block's activations, in the registers of its consumer warps. A
// piece is what a thread has of a tile at once: some loads of 16 bytes, whatever the format. A load
// of four bits is two rows of as many columns as one of eight bits has.
#pragma once

namespace twin {

// ---- a stage's input as integers ----------------------------------------------------------------

constexpr float MOST_WHOLE = 32512.0f;  // 127 * 256: the high byte stays within its sign
constexpr float LEAST_WHOLE = 1e-30f;   // of less, MOST / x would overflow: taken for zero

__device__ __forceinline__ void split_bytes(const u32 (&v)[4], u32& high, u32& low) {
  u32 up[4];  // the low byte is signed: what it lacks, the high one has
#pragma unroll
  for (int i = 0; i < 4; ++i) up[i] = v[i] + 128u;
  low = bytes_of(bytes_of(v[0], v[1], 0x0040), bytes_of(v[2], v[3], 0x0040), 0x5410);
  high = bytes_of(bytes_of(up[0], up[1], 0x0051), bytes_of(up[2], up[3], 0x0051), 0x5410);
}

// x as numbers of 16 bits times a scale: high and low signed bytes, four to a word. The scale is
// the thread's own, by the largest element of each of its chunks, so no thread asks others.
template <class Vector>
struct Whole {
  static constexpr int WORDS = Vector::VECTOR / 4;
  u32 high[Vector::PORTIONS][WORDS], low[Vector::PORTIONS][WORDS];
  float scale[Vector::PORTIONS];
  int sum[Vector::PORTIONS];  // of the numbers

  // Eight bits: neighbours to a word.
  template <Element ELEMENT>
  __device__ __forceinline__ void set(const Vector& x) {
    if constexpr (ELEMENT == Element::INT4) {
      set_paired(x);
    } else {
#pragma unroll
      for (int c = 0; c < Vector::PORTIONS; ++c) {
        float most = 0, strange = 0;  // NaN where an element is no number
#pragma unroll
        for (int i = 0; i < Vector::VECTOR; ++i) {
          most = fmaxf(most, fabsf(x.at[c][i]));
          strange += x.at[c][i] * 0.0f;
        }
        const float by = scaled(c, most, strange, 1.0f);
        sum[c] = 0;
#pragma unroll
        for (int w = 0; w < WORDS; ++w) {
          u32 v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) v[i] = u32(nearest(x.at[c][4 * w + i] * by));
          sum[c] += int(v[0] + v[1] + v[2] + v[3]);
          bytes(c, w, v);
        }
      }
    }
  }

  // INT4: a byte of weights is low + 16 high, so low * a + high * b = byte * b / 16 + low *
  // (a - b / 16): the byte needs no shift. The first half of the words is that of the latter
  // factors, the second that of b, both in the same units: sums of 16 low * .. + byte * .. .
  __device__ __forceinline__ void set_paired(const Vector& x) {
    constexpr int HALF = WORDS / 2;
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      float most = 0, strange = 0;
#pragma unroll
      for (int i = 0; i < Vector::VECTOR; i += 2) {
        const float a = x.at[c][i], b = x.at[c][i + 1];
        most = fmaxf(most, fmaxf(fabsf(a - b * 0.0625f), fabsf(b)));
        strange += a * 0.0f + b * 0.0f;
      }
      const float by = scaled(c, most, strange, 0.0625f);
      sum[c] = 0;
#pragma unroll
      for (int w = 0; w < HALF; ++w) {
        u32 v[4], u[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float a = x.at[c][8 * w + 2 * i], b = x.at[c][8 * w + 2 * i + 1];
          v[i] = u32(nearest((a - b * 0.0625f) * by)), u[i] = u32(nearest(b * by));
        }
        sum[c] += 16 * int(v[0] + v[1] + v[2] + v[3]) + 17 * int(u[0] + u[1] + u[2] + u[3]);
        bytes(c, w, v), bytes(c, HALF + w, u);
      }
    }
  }

  __device__ __forceinline__ float scaled(int c, float most, float strange, float unit) {
    scale[c] = (most > LEAST_WHOLE ? most * (1.0f / MOST_WHOLE) : 0.0f) * unit + strange;
    return most > LEAST_WHOLE ? MOST_WHOLE / most : 0.0f;
  }
  __device__ __forceinline__ void bytes(int c, int w, const u32 (&v)[4]) {
    split_bytes(v, high[c][w], low[c][w]);
  }
};

}  // namespace twin

#include "cuda_fragments.cuh"

namespace twin {

// ---- a piece ------------------------------------------------------------------------------------

// How a piece of a vector's columns, of AT_ONCE loads, is divided into rows.
template <Code C, int AT_ONCE_ = ROWS_AT_ONCE>
struct Coding {
  static constexpr Code CODE = C;
  static constexpr int AT_ONCE = AT_ONCE_;
  static constexpr Element ELEMENT = code_element(C);
  static constexpr bool SCALED = C != Code::PLAIN;
  // multiplied as integers: by tensor cores, or a thread for itself
  static constexpr bool TENSOR = SCALED && ELEMENT == Element::E2M1,
                        WHOLE = SCALED && (ELEMENT == Element::INT8 || ELEMENT == Element::INT4);
  static constexpr int LOADED = 8 * UNIT_BYTES / code_bits(C);  // weights of a load
  static constexpr int LOADS = CODED_PACK > LOADED ? CODED_PACK / LOADED : 1;  // of a row
  static constexpr int PAIR = CODED_PACK && CODED_PACK < LOADED ? 2 : 1;       // rows of a load
  static constexpr int ROWS = AT_ONCE / LOADS * PAIR;
  static_assert(!CODED || LOADED * LOADS == CODED_PACK * PAIR, "whole loads, whole rows");
  static_assert(!SCALED || ROWS % 4 == 0, "scales of four rows are loaded at once");
};

template <int AT_ONCE = ROWS_AT_ONCE>
struct CodedPiece {
  static constexpr int PAIRED_ROWS = 2 * AT_ONCE;  // of four bits

  u32 word[AT_ONCE][UNIT_BYTES / 4];  // by loads: those of a row follow each other
  float scale[PAIRED_ROWS];                // of rows
  u32 inner[PAIRED_ROWS / 2];              // scales of blocks as they are stored
  u32 zero[PAIRED_ROWS / 4];               // zero points, a byte each

  // Of thread `me`, from row `first` on of a tile of `rows` rows of `pitch` bytes at address
  // `from`. Beyond its rows: what the slot has there.
  template <class Coding, class Vector>
  __device__ __forceinline__ void load(int me, int c, u32 from, u32 pitch, int first, int rows) {
    constexpr int LOADS = Coding::LOADS;
    const u32 plane = pitch / LOADS;  // the second loads of all threads follow the first ones
    const u32 mine =
        Vector::valid(me, c) ? u32(Vector::local(me) / Vector::VECTOR * UNIT_BYTES) : 0u;
    const u32 at = from + u32(first) * pitch + mine;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      load_four(at + u32(i / LOADS * Coding::PAIR) * pitch + u32(i % LOADS) * plane, word[i]);
    if constexpr (Coding::SCALED) {
      constexpr int WIDE = code_block(Coding::CODE);  // 0: a row has one scale
      const int block = WIDE && Vector::valid(me, c) ? Vector::local(me) / (WIDE ? WIDE : 1) : 0;
      const u32 behind = from + u32(whole_rows(Coding::CODE, rows)) * pitch;
      if constexpr (code_scale(Coding::CODE) == Scale::FP32) {
        load_floats<Coding::ROWS>(behind + 4u * u32(block * scaled_rows(rows) + first));
      } else {
        const u32 blocks = WIDE ? (pitch * 8 / code_bits(Coding::CODE) + WIDE - 1) / WIDE : 1;
        load_scales<Coding::CODE, Coding::ROWS>(behind, u32(scaled_rows(rows)), u32(first),
                                                u32(block), blocks);
      }
    }
  }

  template <int ROWS>
  __device__ __forceinline__ void load_floats(u32 at) {
#pragma unroll
    for (int r = 0; r < ROWS; r += 4) {
      u32 bits[4];
      load_four(at + 4u * u32(r), bits);
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[r + i] = bits_as<float>(bits[i]);
    }
  }

  // Of COUNT rows from `first` on, `high` as scales count them.
  template <Code CODE, int COUNT>
  __device__ __forceinline__ void load_scales(u32 behind, u32 high, u32 first, u32 block,
                                              u32 blocks) {
    const u32 at = block * high + first;
    constexpr int EACH = scale_bytes(code_scale(CODE));
    load_of_rows<EACH, COUNT>(behind + u32(EACH) * at, inner);
    if constexpr (code_zeros(CODE)) load_of_rows<1, COUNT>(behind + 2u * blocks * high + at, zero);
  }
  // EACH bytes of every row, in the widest loads that are aligned: columns of scales begin at
  // multiples of SCALED_ROWS rows.
  template <int EACH, int COUNT>
  __device__ __forceinline__ static void load_of_rows(u32 from, u32* to) {
    constexpr int ROWS = COUNT < facts::SCALED_ROWS ? COUNT : facts::SCALED_ROWS,
                  WORDS = EACH * ROWS / 4;
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "loads of 4, 8 or 16 bytes");
#pragma unroll
    for (int i = 0; i < COUNT / ROWS; ++i) {
      const u32 at = from + u32(4 * WORDS * i);
      if constexpr (WORDS == 1) load_one(at, to + WORDS * i);
      if constexpr (WORDS == 2) load_two(at, to + WORDS * i);
      if constexpr (WORDS == 4) load_four(at, to + WORDS * i);
    }
  }

  // sum[r] += this thread's part of row r.
  template <class Coding, class Vector>
  __device__ __forceinline__ void multiply(int c, const Vector& x, const Whole<Vector>& whole,
                                           float (&sum)[Coding::ROWS]) const {
    constexpr int WORDS = Coding::LOADS * UNIT_BYTES / 4;
    if constexpr (Coding::PAIR == 2) {
      multiply_paired<Coding::CODE>(c, whole, sum);
    } else {
#pragma unroll
      for (int r = 0; r < Coding::ROWS; ++r) {
        if constexpr (Coding::SCALED && Coding::ELEMENT == Element::INT8) {
          int high = 0, low = 0;
#pragma unroll
          for (int w = 0; w < WORDS; ++w) {
            high = dot4(word_of<WORDS>(r, w), whole.high[c][w], high);
            low = dot4(word_of<WORDS>(r, w), whole.low[c][w], low);
          }
          sum[r] += float(high * 256 + low) * (scale_of<Coding::CODE>(r) * whole.scale[c]);
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
  }

  // Four bits: 16 weights of a row, all of one block.
  template <Code CODE, class Vector>
  __device__ __forceinline__ void multiply_paired(int c, const Whole<Vector>& whole,
                                                  float (&sum)[PAIRED_ROWS]) const {
#pragma unroll
    for (int r = 0; r < PAIRED_ROWS; r += 4) {
      float by[4];
      four_scales<CODE>(r, by);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32(&words)[4] = word[(r + i) / 2];
        const u32 two[2] = {words[(r + i) % 2 * 2], words[(r + i) % 2 * 2 + 1]};
        const int total =
            int4_total(c, two, whole,
                       code_zeros(CODE) ? int(zero[r / 4] >> 8 * i & 255u) : code_zero(CODE));
        sum[r + i] += float(total) * (by[i] * whole.scale[c]);
      }
    }
  }

  // Of one row of eight bits.
  template <Code CODE>
  __device__ __forceinline__ float scale_of(int r) const {
    if constexpr (code_scale(CODE) == Scale::FP32) return scale[r];
    float two[2];
    unpack<Type::FP16>(inner[r / 2], two[0], two[1]);
    return two[r % 2];
  }
  // Of rows r to r + 3.
  template <Code CODE>
  __device__ __forceinline__ void four_scales(int r, float (&by)[4]) const {
    constexpr Type TYPE = code_scale(CODE) == Scale::FP16 ? Type::FP16 : Type::BF16;
#pragma unroll
    for (int i = 0; i < 4; i += 2) unpack<TYPE>(inner[(r + i) / 2], by[i], by[i + 1]);
  }

  // 256 * (16 * lower . high + bytes . high) + 16 * lower . low + bytes . low, in one chain of
  // sums, from which a zero point for each weight is taken off.
  template <class Vector>
  __device__ __forceinline__ static int int4_total(int c, const u32 (&bytes)[2],
                                                   const Whole<Vector>& whole, int zero) {
    const auto& high = whole.high[c];
    const auto& low = whole.low[c];
    const u32 lower[2] = {bytes[0] & 0x0F0F0F0Fu, bytes[1] & 0x0F0F0F0Fu};
    int total = dot4_unsigned(lower[1], high[1], dot4_unsigned(lower[0], high[0], 0));
    total = dot4_unsigned(bytes[1], high[3], dot4_unsigned(bytes[0], high[2], total * 16));
    total = dot4_unsigned(lower[1], low[1], dot4_unsigned(lower[0], low[0], total * 16));
    total = total * 16 - zero * whole.sum[c];
    return dot4_unsigned(bytes[1], low[3], dot4_unsigned(bytes[0], low[2], total));
  }

  template <int WORDS>  // of a row
  __device__ __forceinline__ u32 word_of(int row, int number) const {
    const int at = row * WORDS + number;
    return word[at / 4][at % 4];
  }
};

// Calls use(Coding<code>{}) with that of the stage, one of those that AMONG has a bit for. Where it
// has a single one, nothing is requested: a vector's elements may then leave their registers once
// they are integers.
template <u32 AMONG, int NUMBER = facts::CODE_KINDS, class Stage, class Use>
__device__ __forceinline__ void with_coding(const Stage& stage, Use use) {
  constexpr u32 OTHERS = AMONG & ((1u << NUMBER) - 1u);
  if constexpr ((AMONG >> NUMBER & 1u) == 0) {
    with_coding<AMONG, NUMBER - 1>(stage, use);
  } else if constexpr (OTHERS == 0) {
    use(Coding<Code(NUMBER)>{});
  } else {
    if (code_of(stage) == Code(NUMBER)) return use(Coding<Code(NUMBER)>{});
    with_coding<OTHERS, NUMBER - 1>(stage, use);
  }
}

// What a stage's batches have in common: the weights that were prefetched, in the order in which
// they are multiplied, and the input as integers, made once it is there.
template <class Vector>
struct Begun {
  static constexpr int PORTIONS = Vector::AHEAD_PORTIONS, GROUPS = Vector::AHEAD_GROUPS;

  CodedPiece<> taken[GROUPS ? GROUPS : 1][PORTIONS ? PORTIONS : 1];
  int held;
  Whole<Vector> whole;
};

}  // namespace twin
