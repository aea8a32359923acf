// Cached numbers of 8 bits on tensor cores, which multiply them in FP16.
#pragma once

namespace twin {

// A warp's load of 8 x 8 words of 16 bits gives a
// thread two of these words, four numbers: those of two steps' columns, which a product's other
// side then has in the same order (`column_of`), or of two rows (`row_of`).
namespace eight_bits {

// Where column d of a key stands among those that products take: neighbours 4 * i and 4 * i + 1 are
// columns 2 * i and 2 * i + 1 of 16, the next two 8 columns behind them.
__device__ __forceinline__ int column_of(int d) {
  return (d & ~15) | (d & 2) << 2 | (d & 12) >> 1 | (d & 1);
}
// Of four neighbours of a key: those of a product's first half of columns, and of its second.
__device__ __forceinline__ void columns(u32 four, u32& first, u32& second) {
  first = halves_of_e4m3<false>(four), second = halves_of_e4m3<true>(four);
}
// Of two neighbours of each of two values, transposed: rows 2 * i, and 2 * i + 1.
__device__ __forceinline__ void rows(u32 four, u32& first, u32& second) {
  const u32 turned = bytes_of(four, 0, 0x3120);
  first = halves_of_e4m3<false>(turned), second = halves_of_e4m3<true>(turned);
}

}  // namespace eight_bits

}  // namespace twin
