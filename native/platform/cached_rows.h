// How cached keys and values are stored, by their type alone.
#pragma once

namespace twin {

// The type in which tensor cores multiply cached numbers: FP16 holds all of 8 bits.
constexpr Type MULTIPLIED = KV == Type::FP8 ? Type::FP16 : KV;
// Are these divided by scales?
constexpr bool CACHE_SCALED = KV == Type::FP8;

// How the 16-byte units of a row of ROW bytes are swizzled where tensor cores look at it: those of
// eight rows that a warp loads together lie in other banks.
template <int ROW, class Number>
__device__ __forceinline__ Number row_swizzle(Number row) {
  return ROW % 128 ? row >> 1 & 3 : row & 7;
}

// Where column d of a key of 8 bits stands among those that tensor cores multiply: neighbours 4 * i
// and 4 * i + 1 are columns 2 * i and 2 * i + 1 of 16, the next two 8 columns behind them.
__device__ __forceinline__ int product_column(int d) {
  return (d & ~15) | (d & 2) << 2 | (d & 12) >> 1 | (d & 1);
}

}  // namespace twin
