// How cached keys and values are stored, by their type alone.
#pragma once

namespace twin {

// The type in which tensor cores multiply cached numbers: FP16 holds all of 8 bits.
constexpr Type MULTIPLIED = KV == Type::FP8 ? Type::FP16 : KV;
// Are these divided by scales?
constexpr bool CACHE_SCALED = KV == Type::FP8;

// How the 16-byte units of a row of ROW bytes are swizzled where tensor cores look at it: those of
// eight rows that a warp loads together lie in other banks.
template <int ROW>
__device__ __forceinline__ u32 row_swizzle(u32 row) {
  return ROW % 128 ? row >> 1 & 3 : row & 7;
}

}  // namespace twin
