// How a stage's weights are stored: in the plan's weight type, or as codes of few bits with the
// scales of their blocks behind a tile's codes (twin/kernel/coded.py). Without a header that is
// generated for such a plan, the kernel has no code for the rest.
#pragma once

namespace twin {

enum class Code : int {
  PLAIN = 0,
  INT8 = facts::CODE_INT8,
  FP8 = facts::CODE_FP8,
  FP8_BLOCKS = facts::CODE_FP8_BLOCKS
};

#ifdef TWIN_CODED
constexpr bool CODED = true;
#else
constexpr bool CODED = false;
constexpr u32 CODES = 1u;  // a bit for each code of the plan's matrices
constexpr int CODED_PACK = 0;    // elements of a row that a GPU's thread holds at once
#endif

__host__ __device__ constexpr bool uses(Code code) { return CODED && (CODES >> int(code) & 1u); }
__host__ __device__ constexpr int code_bits(Code code) {
  return code == Code::PLAIN ? 8 * type_bytes(WEIGHT) : 8;
}
// Columns of a row that share a scale; 0: all.
__host__ __device__ constexpr int code_block(Code code) {
  return code == Code::FP8_BLOCKS ? 128 : 0;
}
// Rows of a tile as their scales count them.
__host__ __device__ constexpr int scaled_rows(int rows) {
  return (rows + facts::SCALED_ROWS - 1) / facts::SCALED_ROWS * facts::SCALED_ROWS;
}

// The number that a code of eight bits stands for, before its scale.
__device__ inline float coded_value(Code code, u8 bits) {
  if (code == Code::INT8) return float(int(static_cast<signed char>(bits)));
  const u32 magnitude = bits & 127u;  // E4M3: its exponent is less by 120 than that of FP32
  const float value = bits_as<float>(magnitude << 20) * 0x1p120f;
  return (bits & 128u ? -1.0f : 1.0f) * (magnitude == 127u ? bits_as<float>(0x7FC00000u) : value);
}

// Of a table that has these fields only in such a plan.
template <class Stage>
__device__ __forceinline__ Code code_of(const Stage& stage) {
  if constexpr (CODED) return Code(stage.code);
  return Code::PLAIN;
}

// Bytes of a tile of so many rows, `whole`: of all of a tile's columns, or of the last slice's.
template <class Stage>
__device__ __forceinline__ int coded_bytes(const Stage& stage, int rows, bool whole) {
  if constexpr (CODED) {
    const int codes = rows * (whole ? stage.row_bytes : stage.last_bytes);
    const int bytes = codes + scaled_rows(rows) * (whole ? stage.row_scales : stage.last_scales);
    return (bytes + UNIT_BYTES - 1) / UNIT_BYTES * UNIT_BYTES;
  }
  return 0;
}

// Bytes of a tile.
template <class Stage>
__device__ __forceinline__ int tile_bytes(const Stage& stage, int rows, int cols) {
  if constexpr (CODED) return coded_bytes(stage, rows, cols == stage.tile_cols);
  return rows * cols * type_bytes(WEIGHT);
}

}  // namespace twin
