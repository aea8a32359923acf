// How a stage's weights are stored: in the plan's weight type, or as low-bit codes with
// the scales of their blocks behind a tile's codes (twin/kernel/packing.py). The generated header
// says which of them a plan has: CODES has a bit for each.
#pragma once

#include "e4m3.h"

namespace twin {

enum class Code : int {
  PLAIN = 0,
  INT8 = facts::CODE_INT8,
  INT8_GROUPS = facts::CODE_INT8_GROUPS,  // of 32 columns, as GGUF's Q8_0
  FP8 = facts::CODE_FP8,
  FP8_BLOCKS = facts::CODE_FP8_BLOCKS,
  INT4 = facts::CODE_INT4,  // the first of INT4_CODES
  MXFP4 = facts::CODE_MXFP4,
  NVFP4 = facts::CODE_NVFP4,
  // GGUF's blocks, which the host alone multiplies (host_blocks.h), in the order of their file
  Q4_0 = facts::CODE_GGUF,
  Q4_1,
  Q5_0,
  Q5_1,
  Q8_0,
  MIXED_32,
  Q4_K,
  Q5_K,
  Q6_K,
  MIXED_256
};
// Of INT4 by group width, as 32 << i / 4; i & 2: with zero points; i & 1: scales in FP16, not BF16.
constexpr int INT4_CODES = facts::INT4_CODES;

enum class Element { INT8, E4M3, INT4, E2M1 };  // what a code stands for, before its scale
enum class Scale { FP32, BF16, FP16, E8M0, E4M3 };  // how a block's scale is stored

__host__ __device__ constexpr bool uses(Code code) { return CODED && (CODES >> int(code) & 1u); }
__host__ __device__ constexpr bool is_int4(Code code) {
  return int(code) >= int(Code::INT4) && int(code) < int(Code::INT4) + INT4_CODES;
}
__host__ __device__ constexpr bool in_blocks(Code code) { return int(code) >= int(Code::Q4_0); }
__host__ __device__ constexpr int int4_kind(Code code) { return int(code) - int(Code::INT4); }
__host__ __device__ constexpr Element code_element(Code code) {
  if (is_int4(code)) return Element::INT4;
  if (code == Code::MXFP4 || code == Code::NVFP4) return Element::E2M1;
  return code == Code::INT8 || code == Code::INT8_GROUPS ? Element::INT8 : Element::E4M3;
}
__host__ __device__ constexpr int code_bits(Code code) {
  if (code == Code::PLAIN) return 8 * type_bytes(WEIGHT);
  return is_int4(code) || code_element(code) == Element::E2M1 ? 4 : 8;
}
// Rows of a tile with those that fill its last loads, of two rows in four bits.
__host__ __device__ constexpr int whole_rows(Code code, int rows) {
  if (in_blocks(code)) return (rows + facts::BLOCK_ROWS - 1) / facts::BLOCK_ROWS * facts::BLOCK_ROWS;
  return code_bits(code) < 8 ? (rows + 1) / 2 * 2 : rows;
}
// Columns of a row that share a scale; 0: all.
__host__ __device__ constexpr int code_block(Code code) {
  if (is_int4(code)) return 32 << int4_kind(code) / 4;
  if (code == Code::MXFP4 || code == Code::INT8_GROUPS) return 32;
  return code == Code::FP8_BLOCKS ? 128 : code == Code::NVFP4 ? 16 : 0;
}
__host__ __device__ constexpr Scale code_scale(Code code) {
  if (is_int4(code)) return int4_kind(code) & 1 ? Scale::FP16 : Scale::BF16;
  if (code == Code::INT8_GROUPS) return Scale::FP16;
  return code == Code::MXFP4 ? Scale::E8M0 : code == Code::NVFP4 ? Scale::E4M3 : Scale::FP32;
}
__host__ __device__ constexpr int scale_bytes(Scale scale) {
  return scale == Scale::FP32 ? 4 : scale == Scale::BF16 || scale == Scale::FP16 ? 2 : 1;
}
// Has a block a zero point; a row a scale besides those of its blocks?
__host__ __device__ constexpr bool code_zeros(Code code) {
  return is_int4(code) && int4_kind(code) & 2;
}
__host__ __device__ constexpr bool code_outer(Code code) { return code == Code::NVFP4; }
// The code that stands for zero where blocks have no zero points.
__host__ __device__ constexpr int code_zero(Code code) {
  return is_int4(code) && !code_zeros(code) ? 8 : 0;
}
static_assert(int(Code::MIXED_256) == facts::CODE_KINDS, "codes in Python's order");

// Rows of a tile as their scales count them.
__host__ __device__ constexpr int scaled_rows(int rows) {
  return (rows + facts::SCALED_ROWS - 1) / facts::SCALED_ROWS * facts::SCALED_ROWS;
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
    const int codes =
        whole_rows(code_of(stage), rows) * (whole ? stage.row_bytes : stage.last_bytes);
    const int high = in_blocks(code_of(stage)) ? whole_rows(code_of(stage), rows) : scaled_rows(rows);
    const int bytes = codes + high * (whole ? stage.row_scales : stage.last_scales);
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
