// Products of a warp group on the tensor cores (wgmma), for prompt passes. tests/native/chunk.cpp
// stands in for it on a CPU.
#pragma once

namespace twin {

// ---- products of a warp group: 64 rows of A, N rows of B, 16 columns ----------------------------

// Where a product finds rows of 128 bytes whose 16-byte units are swizzled by the row
// (`unit ^ row % 8`), eight rows in 1,024 bytes that begin at a multiple of as much: a matrix
// descriptor with the 128-byte swizzle (PTX ISA, "Matrix Descriptor Format").
__device__ __forceinline__ u64 swizzled_rows(u32 at) {
  constexpr u64 EIGHT_ROWS = 1024, SWIZZLE_128 = 1;
  return u64(at >> 4 & 0x3FFFu) | (u64(1) << 16) | (EIGHT_ROWS >> 4) << 32 | SWIZZLE_128 << 62;
}
constexpr u64 NEXT_PRODUCT = 2;  // 16 columns further on, in a descriptor

// What the group's threads have stored or copied comes before what products will read, registers
// included.
__device__ __forceinline__ void products_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void products_sent() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// All but the last LEFT groups of products are made.
template <int LEFT>
__device__ __forceinline__ void products_made() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
// No instruction that uses these sums moves across.
template <int N>
__device__ __forceinline__ void hold_sums(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

#define TWIN_8(d, at)                                                              \
  "+f"(d[at]), "+f"(d[at + 1]), "+f"(d[at + 2]), "+f"(d[at + 3]), "+f"(d[at + 4]), \
      "+f"(d[at + 5]), "+f"(d[at + 6]), "+f"(d[at + 7])

#define TWIN_PRODUCT_32(type)                                                     \
  asm volatile(                                                                   \
      "{ .reg .pred add; setp.eq.u32 add, 1, 1; "                                 \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                 \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, " \
      "%16, %17, add, 1, 1, 0, 0; }"                                              \
      : TWIN_8(d, 0), TWIN_8(d, 8)                                                \
      : "l"(a), "l"(b))

#define TWIN_PRODUCT_64(type)                                                             \
  asm volatile(                                                                           \
      "{ .reg .pred add; setp.eq.u32 add, 1, 1; "                                         \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type                         \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, " \
      "%32, %33, add, 1, 1, 0, 0; }"                                                      \
      : TWIN_8(d, 0), TWIN_8(d, 8), TWIN_8(d, 16), TWIN_8(d, 24)                          \
      : "l"(a), "l"(b))

#define TWIN_PRODUCT_96(type)                                                                  \
  asm volatile(                                                                                \
      "{ .reg .pred add; setp.eq.u32 add, 1, 1; "                                              \
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." type "." type                              \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "               \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "       \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}, "      \
      "%48, %49, add, 1, 1, 0, 0; }"                                                           \
      : TWIN_8(d, 0), TWIN_8(d, 8), TWIN_8(d, 16), TWIN_8(d, 24), TWIN_8(d, 32), TWIN_8(d, 40) \
      : "l"(a), "l"(b))

#define TWIN_PRODUCT_128(type)                                                                  \
  asm volatile(                                                                                 \
      "{ .reg .pred add; setp.eq.u32 add, 1, 1; "                                               \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type                              \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "        \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "        \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "       \
      "%64, %65, add, 1, 1, 0, 0; }"                                                            \
      : TWIN_8(d, 0), TWIN_8(d, 8), TWIN_8(d, 16), TWIN_8(d, 24), TWIN_8(d, 32), TWIN_8(d, 40), \
        TWIN_8(d, 48), TWIN_8(d, 56)                                                            \
      : "l"(a), "l"(b))

// d += A * B^T, from shared memory: D's rows 16 * (warp % 4) + thread / 4 and 8 more, in each pair
// of columns 8 * i + 2 * (thread % 4).
template <Type T, int N>
__device__ __forceinline__ void multiply_group(float (&d)[N / 2], u64 a, u64 b) {
  static_assert(N == 32 || N == 64 || N == 96 || N == 128, "instructions that stand above");
  if constexpr (N == 32 && T == Type::BF16) TWIN_PRODUCT_32("bf16");
  if constexpr (N == 32 && T != Type::BF16) TWIN_PRODUCT_32("f16");
  if constexpr (N == 64 && T == Type::BF16) TWIN_PRODUCT_64("bf16");
  if constexpr (N == 64 && T != Type::BF16) TWIN_PRODUCT_64("f16");
  if constexpr (N == 96 && T == Type::BF16) TWIN_PRODUCT_96("bf16");
  if constexpr (N == 96 && T != Type::BF16) TWIN_PRODUCT_96("f16");
  if constexpr (N == 128 && T == Type::BF16) TWIN_PRODUCT_128("bf16");
  if constexpr (N == 128 && T != Type::BF16) TWIN_PRODUCT_128("f16");
}

#undef TWIN_8
#undef TWIN_PRODUCT_32
#undef TWIN_PRODUCT_64
#undef TWIN_PRODUCT_96
#undef TWIN_PRODUCT_128

}  // namespace twin
