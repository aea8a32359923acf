// The host's inner products of stored rows: where a decode step on a CPU spends its time.
#pragma once

namespace twin {

// Even and odd elements of 2 * VECTOR neighbours.
__forceinline__ void deinterleave(const float* x, vfloat& even, vfloat& odd) {
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)
  const vfloat low = *reinterpret_cast<const vfloat*>(x),
               high = *reinterpret_cast<const vfloat*>(x + VECTOR);
  even =
      __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd =
      __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  for (int i = 0; i < VECTOR; ++i) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
#endif
}

// R rows of a tile times x. A word of two BF16 values is split by a shift and a mask, which costs
// less than widening each: 32 columns at a time, even and odd ones separately.
template <int R>
__forceinline__ void dot_rows(const u8* w, int cols, const float* x, float* sums, u64 ahead) {
  constexpr int SIZE = type_bytes(WEIGHT), STEP = WEIGHT == Type::BF16 ? 2 * VECTOR : VECTOR;
  const long stride = long(cols) * SIZE;
  vfloat sum[R] = {};
  const u8* coming = w + ahead;
  int c = 0;
  for (; c + STEP <= cols; c += STEP) {
    const u8* slice = w + long(c) * SIZE;
    if constexpr (WEIGHT == Type::BF16) {
      vfloat even, odd;
      deinterleave(x + c, even, odd);
      for (int r = 0; r < R; ++r) {
        const vu32 words = *reinterpret_cast<const vu32*>(slice + r * stride);
        sum[r] += bits_as<vfloat>(words << 16) * even;
        sum[r] += bits_as<vfloat>(words & 0xFFFF0000u) * odd;
      }
    } else {
      const vfloat xs = *reinterpret_cast<const vfloat*>(x + c);
      for (int r = 0; r < R; ++r) sum[r] += load_vector<WEIGHT>(slice + r * stride) * xs;
    }
    for (int line = 0; line < R * STEP * SIZE; line += LINE)
      __builtin_prefetch(coming + line, 0, 3);
    coming += R * STEP * SIZE;
  }
  for (int r = 0; r < R; ++r) {
    float total = sum_elements(sum[r]);
    for (int i = c; i < cols; ++i)
      total += load_element<WEIGHT>(w + r * stride + long(i) * SIZE) * x[i];
    sums[r] = total;
  }
}

// Numbers of VECTOR neighbours' codes from column `c` of a row on, as FP32.
template <Element ELEMENT>
__forceinline__ vfloat coded_vector(const u8* row, int c) {
  if constexpr (ELEMENT == Element::INT4 || ELEMENT == Element::E2M1) {
    vint wide;  // two codes a byte, the first in the lower half
    for (int i = 0; i < VECTOR; i += 2) {
      const int two = row[(c + i) / 2];
      wide[i] = two & 15, wide[i + 1] = two >> 4;
    }
    if constexpr (ELEMENT == Element::INT4) return __builtin_convertvector(wide, vfloat);
    return bits_as<vfloat>(((wide & 8) << 28) | (wide & 7) << 22) * 0x1p126f;
  } else {
    const vint wide = __builtin_convertvector(*reinterpret_cast<const vbytes*>(row + c), vint);
    if constexpr (ELEMENT == Element::INT8) return __builtin_convertvector(wide, vfloat);
    // E4M3: sign, and exponent and mantissa, in FP32's places
    return bits_as<vfloat>((wide & int(0x80000000u)) | (wide & 127) << 20) * 0x1p120f;
  }
}

// R rows of codes, `pitch` bytes from each other, less their zeros, times x; `cols` is a multiple
// of 16.
template <Element ELEMENT, int R>
__forceinline__ void dot_code_rows(const u8* w, long pitch, int cols, const float* x,
                                   const float* zero, float* sums, u64 ahead) {
  constexpr bool ZEROS = ELEMENT == Element::INT4;
  vfloat sum[R] = {};
  for (int c = 0; c < cols; c += VECTOR) {
    const vfloat xs = *reinterpret_cast<const vfloat*>(x + c);
    for (int r = 0; r < R; ++r) {
      const vfloat value = coded_vector<ELEMENT>(w + r * pitch, c);
      sum[r] += (ZEROS ? value - zero[r] : value) * xs;
    }
    if (c % LINE == 0)
      for (int r = 0; r < R; ++r) __builtin_prefetch(w + r * pitch + c + ahead, 0, 3);
  }
  for (int r = 0; r < R; ++r) sums[r] = sum_elements(sum[r]);
}

constexpr int CODED_ROWS = 4;  // at once

template <Element ELEMENT>
__forceinline__ void dot_code(const u8* w, long pitch, int rows, int cols, const float* x,
                              const float* zero, float* sums, u64 ahead) {
  if (rows == CODED_ROWS)
    return dot_code_rows<ELEMENT, CODED_ROWS>(w, pitch, cols, x, zero, sums, ahead);
  for (int r = 0; r < rows; ++r)
    dot_code_rows<ELEMENT, 1>(w + r * pitch, pitch, cols, x, zero + r, sums + r, ahead);
}

// Up to CODED_ROWS rows, before their scales.
__forceinline__ void dot_codes(Element element, const u8* w, long pitch, int rows, int cols,
                               const float* x, const float* zero, float* sums, u64 ahead) {
  switch (element) {
    case Element::INT8:
      return dot_code<Element::INT8>(w, pitch, rows, cols, x, zero, sums, ahead);
    case Element::E4M3:
      return dot_code<Element::E4M3>(w, pitch, rows, cols, x, zero, sums, ahead);
    case Element::INT4:
      return dot_code<Element::INT4>(w, pitch, rows, cols, x, zero, sums, ahead);
    case Element::E2M1:
      return dot_code<Element::E2M1>(w, pitch, rows, cols, x, zero, sums, ahead);
  }
}

}  // namespace twin
