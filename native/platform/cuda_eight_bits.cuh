// Cached numbers of 8 bits on tensor cores, which multiply them in FP16.
#pragma once

namespace twin {

// A warp's load of 8 x 8 words of 16 bits gives a thread two of these words, four numbers: those of
// two steps' columns, which a product's other side then has in the same order (`product_column`), or
// of two rows.
namespace eight_bits {

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
