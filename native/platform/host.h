// The host: a block is one OS thread, one warp of one thread. Here are the machine's words; who
// uses them: host_core.h and the other host_*.h. Vector extensions of GCC and clang stand for every
// instruction set; __AVX512F__ and __AVX__ choose the width, F16C the half conversion, anything
// else compiles to plain loops.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define TWIN_TABLE static const
#define TWIN_LARGE_TABLE TWIN_TABLE

#define TWIN_UNROLL
#define TWIN_KEEP(x)
// a law of the layout, at most once a batch of rows
#define TWIN_HOLDS(what) ((what) ? (void)0 : twin::broken(#what, __FILE__, __LINE__))
#define TWIN_ONCE
#define TWIN_LARGE __attribute__((noinline))  // a build takes 3 s instead of 6 to 11

#include "tables.h"
#include "plan.h"
#include "source.h"

#if defined(__SANITIZE_THREAD__)
// the sanitizer understands atomics, not element-wise atomic vector loads
#define TWIN_VECTOR_EXCHANGE 0
#else
#define TWIN_VECTOR_EXCHANGE 1
#endif

namespace twin {

// Going on would overwrite what belongs to somebody else: a wrong token without a sign.
[[noreturn]] inline void broken(const char* law, const char* file, int line) {
  fprintf(stderr, "%s:%d: the layout breaks the kernel's law (%s); report this\n", file, line, law);
  abort();
}

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
constexpr int VECTOR = VECTOR_BYTES / 4;
typedef float vfloat __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef int vint __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef u32 vu32 __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef u16 vu16 __attribute__((vector_size(2 * VECTOR), aligned(2), may_alias));
typedef signed char vbytes __attribute__((vector_size(VECTOR), aligned(1), may_alias));
typedef short vshort __attribute__((vector_size(2 * VECTOR), aligned(2), may_alias));

constexpr int LINE = 64;

template <class To, class From>
__forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace twin

#include "e4m3.h"

namespace twin {

// ---- stored types -------------------------------------------------------------------------------

constexpr int type_bytes(Type type) {
  return type == Type::FP32 ? 4 : type == Type::FP8 ? 1 : 2;
}

inline float half_value(u16 h) {
  const u32 sign = u32(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  if (exponent == 31) return bits_as<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    const float small = float(mantissa) * 0x1p-24f;
    return sign ? -small : small;
  }
  return bits_as<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline u16 half_bits(float value) {  // round to nearest even
  const u32 bits = bits_as<u32>(value), magnitude = bits & 0x7FFFFFFFu;
  const u16 sign = u16((bits >> 16) & 0x8000u);
  if (magnitude > 0x7F800000u) return u16(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return u16(sign | 0x7C00u);  // rounds past the largest half
  // subnormal: let the FPU round at 2**-24
  if (magnitude < 0x38800000u) {
    const float shifted = bits_as<float>(magnitude) + 0.5f;
    return u16(sign | (bits_as<u32>(shifted) - 0x3F000000u));
  }
  return u16(sign | ((magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13));
}

inline u16 bfloat_bits(float value) {
  const u32 bits = bits_as<u32>(value);
  if (value != value) return u16((bits >> 16) | 0x40u);
  return u16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

template <Type T>
__forceinline__ float load_element(const u8* at) {
  if constexpr (T == Type::FP32) {
    float value;
    __builtin_memcpy(&value, at, 4);
    return value;
  } else if constexpr (T == Type::FP8) {
    return e4m3_value(*at);
  } else {
    u16 bits;
    __builtin_memcpy(&bits, at, 2);
    return T == Type::BF16 ? bits_as<float>(u32(bits) << 16) : half_value(bits);
  }
}

template <Type T>
__forceinline__ void store_element(u8* at, float value) {
  if constexpr (T == Type::FP32) {
    __builtin_memcpy(at, &value, 4);
  } else if constexpr (T == Type::FP8) {
    *at = u8(e4m3_bits(value));
  } else {
    const u16 bits = T == Type::BF16 ? bfloat_bits(value) : half_bits(value);
    __builtin_memcpy(at, &bits, 2);
  }
}

template <Type T>
__forceinline__ vfloat load_vector(const u8* at) {
  if constexpr (T == Type::FP32) {
    return *reinterpret_cast<const vfloat*>(at);
  } else if constexpr (T == Type::BF16) {
    return bits_as<vfloat>(__builtin_convertvector(*reinterpret_cast<const vu16*>(at), vu32) << 16);
  } else if constexpr (T == Type::FP8) {  // e4m3_value
    const vint wide = __builtin_convertvector(*reinterpret_cast<const vbytes*>(at), vint);
    const vfloat value =
        bits_as<vfloat>((wide & int(0x80000000u)) | (wide & 127) << 20) * 0x1p120f;
    return bits_as<vfloat>(bits_as<vint>(value) | (((wide & 127) == 127) & 0x7FC00000));
  } else {
#if defined(__AVX512F__)
    typedef short whole __attribute__((vector_size(32)));
    typedef float wide __attribute__((vector_size(64)));
    return bits_as<vfloat>(__builtin_ia32_vcvtph2ps512_mask(
        bits_as<whole>(*reinterpret_cast<const vshort*>(at)), wide{}, 0xFFFF, 4));
#elif defined(__F16C__)
    typedef short whole __attribute__((vector_size(16)));
    return bits_as<vfloat>(
        __builtin_ia32_vcvtph2ps256(bits_as<whole>(*reinterpret_cast<const vshort*>(at))));
#else
    vfloat out = {};
    for (int i = 0; i < VECTOR; ++i) out[i] = load_element<T>(at + 2 * i);
    return out;
#endif
  }
}

__forceinline__ float sum_elements(vfloat v) {
// halves folded in registers; without, through memory
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
#else
  float element[VECTOR];
  __builtin_memcpy(element, &v, sizeof v);
  for (int half = VECTOR / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) element[i] += element[i + half];
  return element[0];
#endif
}

__forceinline__ float infinity() { return __builtin_inff(); }

// exp(x) to 2 ulp without a branch, so that loops of it vectorise; results below the smallest
// normal number are 0.
__forceinline__ float exp32(float x) {
  const float clamped = x > 88.72f ? 88.72f : (x < -87.33f ? -87.33f : x);
  const float n = __builtin_floorf(clamped * 1.44269504f + 0.5f);
  float r = clamped - n * 0.693359375f;
  r += n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const float y = (p * r * r + r + 1.0f) * bits_as<float>(u32(int(n) + 127) << 23);
  return x != x ? x : (x < -87.33f ? 0.0f : (x > 88.72f ? infinity() : y));
}

// log(x) of a normal number to 2 ulp: of what lies between the roots of 1/2 and 2, a polynomial.
__forceinline__ float log32(float x) {
  const u32 bits = bits_as<u32>(x) - 0x3F3504F3u;  // of the root of 1/2
  const float e = float(int(bits) >> 23);
  const float m = bits_as<float>((bits & 0x7FFFFFu) + 0x3F3504F3u) - 1.0f, z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return m + (p * m * z - 2.12194440e-4f * e - 0.5f * z) + 0.693359375f * e;
}

__forceinline__ float square_root(float x) { return __builtin_sqrtf(x); }
__forceinline__ float inverse_root(float x) { return 1.0f / square_root(x); }

// ---- exchange memory ----------------------------------------------------------------------------

__forceinline__ float load_shared(const float* at, bool = false) {
  return bits_as<float>(__atomic_load_n(reinterpret_cast<const u32*>(at), __ATOMIC_ACQUIRE));
}

__forceinline__ void store_shared(float* at, float value) {
  __atomic_store_n(reinterpret_cast<u32*>(at), bits_as<u32>(value), __ATOMIC_RELEASE);
}

__forceinline__ void arrive(u32* counter) { __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
__forceinline__ u32 arrivals(const u32* counter) {
  return __atomic_load_n(counter, __ATOMIC_ACQUIRE);
}
template <class T>
__forceinline__ T load_host(const T* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
template <class T>
__forceinline__ void store_host(T* at, T value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
__forceinline__ void host_fence() { __atomic_thread_fence(__ATOMIC_ACQ_REL); }
__forceinline__ bool claim(int* at, int expected, int wanted) {
  return __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
}

#if TWIN_VECTOR_EXCHANGE
__forceinline__ void publish_fence() { __atomic_thread_fence(__ATOMIC_RELEASE); }
__forceinline__ void acquire_fence() { __atomic_thread_fence(__ATOMIC_ACQUIRE); }
#else  // every exchanged word is an acquire or a release by itself
__forceinline__ void publish_fence() {}
__forceinline__ void acquire_fence() {}
#endif

inline u64 now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return u64(time.tv_sec) * 1000000000u + u64(time.tv_nsec);
}

inline void pause_core() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");
#endif
}

}  // namespace twin

#include "host_waiting.h"
#include "coded.h"
#include "coded_values.h"
#include "one_scope.h"
#include "entries.h"
#include "head_shapes.h"
#include "memory_vector.h"
#include "memory_prompt.h"
#include "host_products.h"
#include "host_blocks.h"
#include "host_core.h"

// The stages, whose registers a GPU's compiler must see whole, may be functions here: a build takes
// 3 s instead of 23.
#undef __forceinline__
#define __forceinline__ inline
