// The host: a block is one OS thread, one warp of one lane. Vector extensions of GCC and clang stand for every
// instruction set; __AVX512F__ and __AVX__ choose the width, F16C the half conversion, anything else compiles to plain loops.
#pragma once

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define TWIN_TABLE static const
#define TWIN_LARGE_TABLE TWIN_TABLE

#define TWIN_UNROLL
#define TWIN_KEEP(x)
#define TWIN_HOLDS(what) ((what) ? (void)0 : twin::broken(#what, __FILE__, __LINE__))  // a law of the layout, at most once a batch of rows
#define TWIN_ONCE
#define TWIN_APART __attribute__((noinline))  // a build takes 3 s instead of 6 to 11

#include "plan.h"
#include "source.h"

#if defined(__SANITIZE_THREAD__)
#define TWIN_VECTOR_EXCHANGE 0  // the sanitizer understands atomics, not lane-wise atomic vector loads
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
constexpr int VECTOR = 16;
#elif defined(__AVX__)
constexpr int VECTOR = 8;
#else
constexpr int VECTOR = 4;
#endif
typedef float vfloat __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef int vint __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef u32 vu32 __attribute__((vector_size(4 * VECTOR), aligned(4), may_alias));
typedef u16 vu16 __attribute__((vector_size(2 * VECTOR), aligned(2), may_alias));
typedef short vshort __attribute__((vector_size(2 * VECTOR), aligned(2), may_alias));

constexpr int LINE = 64;

template <class To, class From>
__forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// ---- stored types ------------------------------------------------------------------------------------------

constexpr int type_bytes(Type type) { return type == Type::FP32 ? 4 : 2; }

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
  if (magnitude < 0x38800000u) {                              // subnormal: let the FPU round at 2**-24
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
  } else {
#if defined(__AVX512F__)
    typedef short whole __attribute__((vector_size(32)));
    typedef float wide __attribute__((vector_size(64)));
    return bits_as<vfloat>(__builtin_ia32_vcvtph2ps512_mask(bits_as<whole>(*reinterpret_cast<const vshort*>(at)), wide{}, 0xFFFF, 4));
#elif defined(__F16C__)
    typedef short whole __attribute__((vector_size(16)));
    return bits_as<vfloat>(__builtin_ia32_vcvtph2ps256(bits_as<whole>(*reinterpret_cast<const vshort*>(at))));
#else
    vfloat out = {};
    for (int i = 0; i < VECTOR; ++i) out[i] = load_element<T>(at + 2 * i);
    return out;
#endif
  }
}

__forceinline__ float sum_lanes(vfloat v) {
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)  // halves folded in registers; without, through memory
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return v[0] + v[1];
#else
  float lane[VECTOR];
  __builtin_memcpy(lane, &v, sizeof v);
  for (int half = VECTOR / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
#endif
}

__forceinline__ float infinity() { return __builtin_inff(); }

// exp(x) to 2 ulp without a branch, so that loops of it vectorise; results below the smallest normal number are 0.
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

__forceinline__ float square_root(float x) { return __builtin_sqrtf(x); }
__forceinline__ float inverse_root(float x) { return 1.0f / square_root(x); }

// ---- exchange memory ---------------------------------------------------------------------------------------

__forceinline__ float load_shared(const float* at) {
  return bits_as<float>(__atomic_load_n(reinterpret_cast<const u32*>(at), __ATOMIC_ACQUIRE));
}

__forceinline__ void store_shared(float* at, float value) {
  __atomic_store_n(reinterpret_cast<u32*>(at), bits_as<u32>(value), __ATOMIC_RELEASE);
}

__forceinline__ void arrive(u32* counter) { __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
__forceinline__ u32 arrivals(const u32* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
template <class T>
__forceinline__ T load_host(const T* at) {
  return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}
template <class T>
__forceinline__ void store_host(T* at, T value) {
  __atomic_store_n(at, value, __ATOMIC_RELEASE);
}
__forceinline__ bool claim(int* at, int expected, int wanted) {
  return __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
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

// ---- waiting -----------------------------------------------------------------------------------------------

// Where blocks that share a core wait for each other. sched_yield would not do: recent Linux schedulers charge every
// yield a whole slice, and a block that had polled for a while was seen not to run again for tens of seconds.
struct Parking {
  alignas(LINE) int epoch;     // publications so far, of all blocks
  alignas(LINE) int sleepers;
};

constexpr u32 PATIENT_SPINS = 20000;    // pauses, before a block with a core of its own begins to sleep
constexpr u32 POLITE_YIELDS = 64;       // that a block tries before it parks: waking a core that went idle costs 20-50 us
constexpr u64 POLITE_NS = 50000;        // but no more once one of them took long: the core is busy, and sleeping is fairer
constexpr long NAP_NS = 20000;          // then: another process wants the core, and will have it
constexpr long PARKED_NS = 1000000;     // a parked block looks at the abort word at least this often

inline void nap(long ns) {
  const timespec time = {0, ns};
  nanosleep(&time, nullptr);
}

inline void park(Parking& parking, int seen) {
#if defined(__linux__)
  const timespec time = {0, PARKED_NS};
  __atomic_fetch_add(&parking.sleepers, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &parking.epoch, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
  __atomic_fetch_sub(&parking.sleepers, 1, __ATOMIC_SEQ_CST);
#else
  if (__atomic_load_n(&parking.epoch, __ATOMIC_SEQ_CST) == seen) sched_yield();
#endif
}

inline void unpark(Parking& parking) {
  __atomic_fetch_add(&parking.epoch, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&parking.sleepers, __ATOMIC_SEQ_CST)) syscall(SYS_futex, &parking.epoch, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, nullptr, nullptr, 0);
#endif
}

// A build of the tests' in which blocks stop for a while at random: between two stages, behind their reads, behind what they published.
#if defined(TWIN_NAPS)
inline void nap_at_random() {
  static u32 started = 0;
  static thread_local u32 state = 0x9E3779B9u * (1u + __atomic_fetch_add(&started, 1u, __ATOMIC_RELAXED));
  state = state * 1664525u + 1013904223u;
  if (state >> 29 == 0) nap(long(state >> 12 & 0x1FFFFu));
}
#else
inline void nap_at_random() {}
#endif

// ---- one block ---------------------------------------------------------------------------------------------
}  // namespace twin

#include "memory_vector.h"
#include "memory_prompt.h"

namespace twin {

// The stream lies packed in memory; acquiring a tile is free, and the window ahead of it is prefetched while it is used.
struct Ring {
  const u8* stream;
  u64 cursor;
  u64 ahead;

  bool mine() const { return true; }
  const u8* acquire() const { return stream + cursor; }
  void release() {}
  void next(int bytes) { cursor += u64(bytes); }
  void rewind() { cursor = 0; }
};

// Even and odd elements of 2 * VECTOR neighbours.
__forceinline__ void deinterleave(const float* x, vfloat& even, vfloat& odd) {
#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 12)
  const vfloat low = *reinterpret_cast<const vfloat*>(x), high = *reinterpret_cast<const vfloat*>(x + VECTOR);
  even = __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  odd = __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#else
  for (int i = 0; i < VECTOR; ++i) even[i] = x[2 * i], odd[i] = x[2 * i + 1];
#endif
}

// R rows of a tile times x. A word of two BF16 values is split by a shift and a mask, which costs less than widening
// each: 32 columns at a time, even and odd ones apart.
template <int R>
__forceinline__ void dot_rows(const u8* w, int cols, const float* x, float* sums, u64 ahead) {
  constexpr int SIZE = type_bytes(WEIGHT), STEP = WEIGHT == Type::BF16 ? 2 * VECTOR : VECTOR;
  const long stride = long(cols) * SIZE;
  vfloat sum[R] = {};
  const u8* coming = w + ahead;
  int c = 0;
  for (; c + STEP <= cols; c += STEP) {
    const u8* at = w + long(c) * SIZE;
    if constexpr (WEIGHT == Type::BF16) {
      vfloat even, odd;
      deinterleave(x + c, even, odd);
      for (int r = 0; r < R; ++r) {
        const vu32 words = *reinterpret_cast<const vu32*>(at + r * stride);
        sum[r] += bits_as<vfloat>(words << 16) * even;
        sum[r] += bits_as<vfloat>(words & 0xFFFF0000u) * odd;
      }
    } else {
      const vfloat xs = *reinterpret_cast<const vfloat*>(x + c);
      for (int r = 0; r < R; ++r) sum[r] += load_vector<WEIGHT>(at + r * stride) * xs;
    }
    for (int line = 0; line < R * STEP * SIZE; line += LINE) __builtin_prefetch(coming + line, 0, 3);
    coming += R * STEP * SIZE;
  }
  for (int r = 0; r < R; ++r) {
    float total = sum_lanes(sum[r]);
    for (int i = c; i < cols; ++i) total += load_element<WEIGHT>(w + r * stride + long(i) * SIZE) * x[i];
    sums[r] = total;
  }
}

// A lane's part of a cached key or value: here all of it, unpacked when it is used.
struct Piece {
  const u8* row;
  template <class Core>
  void load(const Core&, const u8* from) {
    row = from;
  }
  template <class Core>
  void load_near(const Core& core, const u8* from) {
    load(core, from);
  }
  void clear() { row = nullptr; }
  void unpack(float* out) const {
    constexpr int SIZE = type_bytes(KV);
    int d = 0;
    for (; d + VECTOR <= HEAD_DIM && row; d += VECTOR) *reinterpret_cast<vfloat*>(out + d) = load_vector<KV>(row + d * SIZE);
    for (; d < HEAD_DIM; ++d) out[d] = row ? load_element<KV>(row + d * SIZE) : 0.0f;
  }
};

struct Core {
  using Hidden = MemoryVector;
  using Residual = MemoryResidual;
  using Heads = MemoryVector;
  using Ffn = MemoryVector;
  using Piece = twin::Piece;

  Ring ring;
  Parking* parking;  // more blocks than cores: some may sleep; null when each has a core
  bool alone;        // no other block shares this one's core
  int seen = 0;      // publications before the last poll
  u64 began = 0;     // of the present wait

  static constexpr int POSITIONS = 16;      // cached positions scored before the running maximum moves
  static constexpr int HEADS = GROUP;       // query heads that share one read of a key in a prompt pass
  static constexpr int SCAN_HEADS = GROUP;  // and in a step
  static constexpr int SPLITS = 4;         // of a head, looked at together
  static constexpr int POSITION_LANES = 1;  // lanes that share a cached position
  static constexpr bool KEEPER = false;     // no helper makes the resets
  static constexpr bool CACHE_IN_RING = false;  // cached keys and values are read where they lie
  static constexpr int CACHE_TILE = 1;
  static constexpr bool TENSOR_SCAN = false;
  struct TileScan {
    static constexpr int WARPS = 1, POSITIONS = 1;
  };

  static constexpr int thread() { return 0; }
  static constexpr int threads() { return 1; }
  static constexpr int warp() { return 0; }
  static constexpr int warps() { return 1; }
  static constexpr int lane() { return 0; }
  static constexpr int lanes() { return 1; }
  void barrier() {}
  bool any(bool mine) { return mine; }
  void warp_sync() {}
  float warp_sum(float v) { return v; }
  float unit_sum(float v) { return v; }
  float lane_apart(float v, int) { return v; }
  bool agree(bool good) { return good; }
  bool gave_up() { return false; }
  void forget() { nap_at_random(); }
  void begin() { nap_at_random(); }
  void cleared() {}
  bool told_to_leave(const int* abort) { return load_host(abort); }
  template <class Vector>
  Nothing take_ahead(const Stage&, Span, bool) {
    return {};
  }
  void dot_tiles(const Stage& stage, const MemoryVector& x, int lo, int hi, float* sums, int batch, Nothing) {
    dot_memory_tiles(*this, stage, x, lo, hi, sums, batch);
  }
  template <class T>
  T sum(T v) {
    return v;
  }
  template <class Wins>
  Candidate best(Candidate mine, Wins) {
    return mine;
  }

  float dot(const float* a, const float* b, int n) {
    vfloat sum[4] = {};
    int i = 0;
    for (; i + 4 * VECTOR <= n; i += 4 * VECTOR)
      for (int j = 0; j < 4; ++j)
        sum[j] += *reinterpret_cast<const vfloat*>(a + i + j * VECTOR) * *reinterpret_cast<const vfloat*>(b + i + j * VECTOR);
    float total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; ++i) total += a[i] * b[i];
    return total;
  }

  void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    int r = 0;
    const long stride = long(cols) * type_bytes(WEIGHT);
    for (; r + 8 <= rows; r += 8) dot_rows<8>(w + r * stride, cols, x, sums + r, ring.ahead);
    for (; r + 2 <= rows; r += 2) dot_rows<2>(w + r * stride, cols, x, sums + r, ring.ahead);
    for (; r < rows; ++r) dot_rows<1>(w + r * stride, cols, x, sums + r, ring.ahead);
  }

  static float piece_dot(const float* a, const float* b) {
    vfloat sum = {};
    int d = 0;
    for (; d + VECTOR <= HEAD_DIM; d += VECTOR) sum += *reinterpret_cast<const vfloat*>(a + d) * *reinterpret_cast<const vfloat*>(b + d);
    float total = sum_lanes(sum);
    for (; d < HEAD_DIM; ++d) total += a[d] * b[d];
    return total;
  }

  // Between two polls. A block that shares its core lets the others run, then sleeps until somebody published after
  // its last poll.
  static void appended() {}
  static void scanned() {}
  void relax(u32 spins) {
    if (alone) {
      spins > PATIENT_SPINS ? nap(NAP_NS) : pause_core();
      return;
    }
    if (spins <= 1) began = now_ns();
    if (spins <= POLITE_YIELDS && now_ns() - began < POLITE_NS) {
      sched_yield();
      return;
    }
    const int now = __atomic_load_n(&parking->epoch, __ATOMIC_SEQ_CST);
    if (now == seen) park(*parking, seen);
    seen = now;
  }

  // The stage's publications are out: wake who waits for them.
  void published() {
    if (parking) unpark(*parking);
    nap_at_random();
  }

  // out[i - lo] = (or += scale *) the sum of the parts at i. False when a wait was given up; stall(part, element)
  // is called between two polls.
  template <class Stall>
  bool gather(const Source& source, int lo, int hi, float* out, Stall stall, int = 0) {
    int i = lo;
#if TWIN_VECTOR_EXCHANGE
    constexpr int UNROLL = 4, STEP = UNROLL * VECTOR;
    for (; i + STEP <= hi; i += STEP) {
      vfloat sum[UNROLL] = {};
      for (int p = 0; p < source.parts; ++p) {
        const float* from = source.at(p) + i;
        vfloat got[UNROLL];
        for (;;) {
          vint missing = {};
          for (int j = 0; j < UNROLL; ++j) {
            const vint bits = *reinterpret_cast<const volatile vint*>(from + j * VECTOR);
            missing |= bits == vint{} + int(SENTINEL);
            got[j] = bits_as<vfloat>(bits);
          }
          if (!source.polled || !any(missing)) break;
          if (!stall(source.part(p), i)) return false;
        }
        for (int j = 0; j < UNROLL; ++j) sum[j] = p ? sum[j] + got[j] : got[j];
      }
      for (int j = 0; j < UNROLL; ++j) {
        vfloat* at = reinterpret_cast<vfloat*>(out + (i - lo) + j * VECTOR);
        *at = sum[j];
      }
    }
#endif
    for (; i < hi; ++i) {
      float sum = 0;
      for (int p = 0; p < source.parts; ++p) {
        float got = load_shared(source.at(p) + i);
        while (source.polled && bits_as<u32>(got) == SENTINEL) {
          if (!stall(source.part(p), i)) return false;
          got = load_shared(source.at(p) + i);
        }
        sum = p ? sum + got : got;
      }
      out[i - lo] = sum;
    }
    acquire_fence();
    return true;
  }

  // Exchange memory: `count` words become `bits`.
  static void fill(float* at, int count, u32 bits) {
    int i = 0;
#if TWIN_VECTOR_EXCHANGE
    for (; i + VECTOR <= count; i += VECTOR) *reinterpret_cast<volatile vint*>(at + i) = vint{} + int(bits);
#endif
    for (; i < count; ++i) store_shared(at + i, bits_as<float>(bits));
  }

  static bool any(vint mask) {
    u64 words[sizeof(vint) / 8], all = 0;
    __builtin_memcpy(words, &mask, sizeof mask);
    for (u64 word : words) all |= word;
    return all != 0;
  }
};

}  // namespace twin

// The stages, whose registers a GPU's compiler must see whole, may be functions here: a build takes 3 s instead of 23.
#undef __forceinline__
#define __forceinline__ inline
