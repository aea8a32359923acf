// What low-bit codes and the scales behind them mean, one by one, for platforms that
// decode them to FP32. Behind coded.h and load_element.
#pragma once

namespace twin {

// The number that a code stands for, before its zero point and its scale.
__device__ inline float coded_value(Element element, u32 bits) {
  switch (element) {
    case Element::INT8: return float(int(static_cast<signed char>(bits)));
    case Element::INT4: return float(bits);
    case Element::E2M1:  // sign, and exponent and mantissa, in FP32's places
      return bits_as<float>((bits & 8u) << 28 | (bits & 7u) << 22) * 0x1p126f;
    default: return e4m3_value(bits);
  }
}

// The code of column `c` of a row.
__device__ inline u32 code_at(Element element, const u8* row, int c) {
  if (element == Element::INT8 || element == Element::E4M3) return row[c];
  return u32(row[c / 2]) >> 4 * (c % 2) & 15u;
}

// What lies behind the codes of a tile of so many rows, whose rows have so many blocks.
struct Scales {
  Code code;
  const u8* behind;
  int high, blocks;  // rows as scales count them

  __device__ float of(int row, int block) const {
    const Scale kind = code_scale(code);
    const u8* from = behind + (code_outer(code) ? 4l * high : 0);
    const u8* at = from + (long(block) * high + row) * scale_bytes(kind);
    const float outer = code_outer(code) ? load_element<Type::FP32>(behind + 4l * row) : 1.0f;
    switch (kind) {
      case Scale::FP32: return load_element<Type::FP32>(at);
      case Scale::BF16: return load_element<Type::BF16>(at);
      case Scale::FP16: return load_element<Type::FP16>(at);
      case Scale::E8M0: return bits_as<float>(*at ? u32(*at) << 23 : 1u << 22);
      default: return e4m3_value(*at) * outer;
    }
  }
  __device__ float zero(int row, int block) const {
    if (!code_zeros(code)) return float(code_zero(code));
    return float(behind[long(blocks) * high * scale_bytes(code_scale(code)) +
                        long(block) * high + row]);
  }
};

}  // namespace twin
