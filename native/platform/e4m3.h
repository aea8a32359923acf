// E4M3 without infinities, as weights and caches of eight bits have it, by whole numbers: for
// platforms without instructions for it. Behind bits_as.
#pragma once

namespace twin {

__device__ inline float e4m3_value(u32 bits) {
  const u32 magnitude = bits & 127u;  // its exponent is less by 120 than that of FP32
  const float value = bits_as<float>(magnitude << 20) * 0x1p120f;
  return (bits & 128u ? -1.0f : 1.0f) * (magnitude == 127u ? bits_as<float>(0x7FC00000u) : value);
}

// To the nearest, ties to even; beyond 448, and infinities, to 448.
__device__ inline u32 e4m3_bits(float value) {
  const u32 bits = bits_as<u32>(value), magnitude = bits & 0x7FFFFFFFu, sign = bits >> 24 & 128u;
  if (magnitude > 0x7F800000u) return sign | 127u;   // no number
  if (magnitude >= 0x43E80000u) return sign | 126u;  // 464 and more round past the largest
  // below 2**-6: FP32 rounds at 2**-9
  if (magnitude < 0x3C800000u)
    return sign | (bits_as<u32>(bits_as<float>(magnitude) + 0x1p14f) - 0x46800000u);
  return sign | ((magnitude - 0x3C000000u + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20);
}

}  // namespace twin
