// NVIDIA, compute capability 9.0: the machine's words (PTX). Who uses them: cuda_core.cuh and the
// other cuda_*.cuh.
// No toolkit header is included, so NVRTC alone can compile the kernel.
#pragma once

// a cache of its own: a look-up past the first-level cache waits behind the weights under way
#define TWIN_TABLE __constant__ static const
#define TWIN_LARGE_TABLE __device__ static const
#define TWIN_UNROLL _Pragma("unroll")    // of loops over registers
#define TWIN_KEEP(x) twin::keep_here(x)  // looked up here, not where it is used
#define TWIN_HOLDS(what)                 // the host's builds check it, and the proof before them
#define TWIN_ONCE _Pragma("unroll 1")    // of loops whose copies would need too many

#include "tables.h"
#include "plan.h"
#include "source.h"

namespace twin {

constexpr int CONSUMER_WARPS = Plan::consumer_warps;
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
// one of its threads needs 300 cycles a tile
constexpr int SCHEDULER_WARP = CONSUMER_WARPS, LOADER_WARP = CONSUMER_WARPS + 1, LOADERS = 2;
// side warps: a warp group of its own, so that registers can be moved to the others
constexpr int THREADS = CONSUMERS + 128;
// of each thread until the groups trade them; never more than the block was given
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr int SIDE_REGISTERS = 56,
              CONSUMER_REGISTERS =
                  (LAUNCH_REGISTERS * THREADS - 128 * SIDE_REGISTERS) / CONSUMERS / 8 * 8;
constexpr int SHARED_BYTES = 227 * 1024;  // most dynamic shared memory of a block
constexpr int CONSUMER_BARRIER = 1;       // barrier 0 is __syncthreads
// other GPUs write this one's exchange memory
constexpr bool PEERS = Plan::ranks > Plan::ranks_per_gpu;

__host__ __device__ constexpr int up16(int bytes) { return (bytes + 15) / 16 * 16; }

__device__ __forceinline__ void keep_here(int& x) { asm volatile("" : "+r"(x)); }
template <class T>
__device__ __forceinline__ void keep_here(T*& x) {
  asm volatile("" : "+l"(x));
}

template <class To, class From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

}  // namespace twin

#include "e4m3.h"

namespace twin {

// ---- stored types -------------------------------------------------------------------------------

__host__ __device__ constexpr int type_bytes(Type type) {
  return type == Type::FP32 ? 4 : type == Type::FP8 ? 1 : 2;
}

__device__ __forceinline__ float half_value(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ u16 half_bits(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ u16 bfloat_bits(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Of four E4M3 numbers the lower two, or the upper two, in FP16, which holds each of them.
template <bool UPPER>
__device__ __forceinline__ u32 halves_of_e4m3(u32 four) {
  u32 both;
  if constexpr (UPPER)
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, b; }" : "=r"(both) : "r"(four));
  else
    asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }" : "=r"(both) : "r"(four));
  return both;
}

// The nearest E4M3 number, at most 448.
__device__ __forceinline__ u8 e4m3_of(float value) {
  u16 bits;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(0.0f), "f"(value));
  return u8(bits);
}

template <Type T>
__device__ __forceinline__ float load_element(const u8* at) {
  if constexpr (T == Type::FP32) return *reinterpret_cast<const float*>(at);
  if constexpr (T == Type::FP8) return half_value(u16(halves_of_e4m3<false>(*at)));
  const u16 bits = *reinterpret_cast<const u16*>(at);
  return T == Type::BF16 ? bits_as<float>(u32(bits) << 16) : half_value(bits);
}

template <Type T>
__device__ __forceinline__ void store_element(u8* at, float value) {
  if constexpr (T == Type::FP32) {
    *reinterpret_cast<float*>(at) = value;
  } else if constexpr (T == Type::FP8) {
    *at = e4m3_of(value);
  } else {
    *reinterpret_cast<u16*>(at) = T == Type::BF16 ? bfloat_bits(value) : half_bits(value);
  }
}

// Two stored values of one word, in order.
template <Type T>
__device__ __forceinline__ void unpack(u32 word, float& first, float& second) {
  if constexpr (T == Type::BF16) {
    first = bits_as<float>(word << 16);
    second = bits_as<float>(word & 0xFFFF0000u);
  } else {
    first = half_value(u16(word & 0xFFFFu));
    second = half_value(u16(word >> 16));
  }
}

__device__ __forceinline__ float infinity() { return bits_as<float>(0x7F800000u); }
__device__ __forceinline__ float exp32(float x) { return expf(x); }
__device__ __forceinline__ float log32(float x) { return logf(x); }
__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
__device__ __forceinline__ float inverse_root(float x) { return rsqrtf(x); }

// ---- exchange memory: relaxed words, past the first-level cache. Those that other GPUs write or
// read (`far`) are of the system's scope, all others of the GPU's.

#define TWIN_SCOPED(far, code, ...)                     \
  if constexpr (PEERS) {                                \
    if (far) {                                          \
      asm volatile(code("sys") __VA_ARGS__ : "memory"); \
    } else {                                            \
      asm volatile(code("gpu") __VA_ARGS__ : "memory"); \
    }                                                   \
  } else {                                              \
    asm volatile(code("gpu") __VA_ARGS__ : "memory");   \
  }

__device__ __forceinline__ float load_shared(const float* at, bool far = false) {
  float value;
#define TWIN_CODE(scope) "ld.relaxed." scope ".global.f32 %0, [%1];"
  TWIN_SCOPED(far, TWIN_CODE, : "=f"(value) : "l"(at))
#undef TWIN_CODE
  return value;
}

// Goes on when a loaded word is here. The compiler takes a load out whose word nothing uses, also
// one of an asm volatile (ptxas 13.0): so an instruction looks at it. The pause after one word in
// four billion harms nobody.
__device__ __forceinline__ void await_word(u32 word) {
  asm volatile("{ .reg .pred odd; setp.eq.u32 odd, %0, 0x7FC0DEAD; @odd nanosleep.u32 20; }" ::"r"(
                   word)
               : "memory");
}

__device__ __forceinline__ float2 load_pair(const float* at, bool far = false) {
  float2 v;
#define TWIN_CODE(scope) "ld.relaxed." scope ".global.v2.f32 {%0, %1}, [%2];"
  TWIN_SCOPED(far, TWIN_CODE, : "=f"(v.x), "=f"(v.y) : "l"(at))
#undef TWIN_CODE
  return v;
}

__device__ __forceinline__ float4 load_quad(const float* at, bool far = false) {
  float4 v;
#define TWIN_CODE(scope) "ld.relaxed." scope ".global.v4.f32 {%0, %1, %2, %3}, [%4];"
  TWIN_SCOPED(far, TWIN_CODE, : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at))
#undef TWIN_CODE
  return v;
}

// Loads four words of this GPU where `wanted`; else `v` stays. Such loads are under way together: of
// a condition in front of a load the compiler makes a branch, and waits before the next one.
__device__ __forceinline__ void load_quad_if(bool wanted, const float* at, float (&v)[4]) {
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, "
      "[%4]; }"
      : "+f"(v[0]), "+f"(v[1]), "+f"(v[2]), "+f"(v[3])
      : "l"(at), "r"(u32(wanted)));
}

// Words that a thread reads back, four neighbours each time, on their way together.
struct Confirmed {
  static constexpr int AT_ONCE = 4, WORDS = 4;
  float4 seen[AT_ONCE];

  __device__ __forceinline__ void load(int j, const float* at) { seen[j] = load_quad(at, true); }
  __device__ __forceinline__ void await() const {
    u32 all = 0;
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      all |= bits_as<u32>(seen[j].x) | bits_as<u32>(seen[j].y) | bits_as<u32>(seen[j].z) |
             bits_as<u32>(seen[j].w);
    await_word(all);
  }
};

__device__ __forceinline__ void store_shared(float* at, float value, bool far = false) {
#define TWIN_CODE(scope) "st.relaxed." scope ".global.f32 [%0], %1;"
  TWIN_SCOPED(far, TWIN_CODE, ::"l"(at), "f"(value))
#undef TWIN_CODE
}
__device__ __forceinline__ void store_peer(float* at, float value) {
  store_shared(at, value, true);
}
__device__ __forceinline__ void store_four(float* at, const Pack<4>& v, bool far) {
#define TWIN_CODE(scope) "st.relaxed." scope ".global.v4.f32 [%0], {%1, %2, %3, %4};"
  TWIN_SCOPED(far, TWIN_CODE, ::"l"(at), "f"(v.at[0]), "f"(v.at[1]), "f"(v.at[2]), "f"(v.at[3]))
#undef TWIN_CODE
}

__device__ __forceinline__ void arrive(u32* counter, bool far = true) {
#define TWIN_CODE(scope) "red.release." scope ".global.add.u32 [%0], 1;"
  TWIN_SCOPED(far, TWIN_CODE, ::"l"(counter))
#undef TWIN_CODE
}

__device__ __forceinline__ u32 arrivals(const u32* counter, bool far = true) {
  u32 value;
#define TWIN_CODE(scope) "ld.acquire." scope ".global.u32 %0, [%1];"
  TWIN_SCOPED(far, TWIN_CODE, : "=r"(value) : "l"(counter))
#undef TWIN_CODE
  return value;
}
__device__ __forceinline__ void arrived(bool) {}

// Earlier writes of this thread, and what it has observed, before its later publications.
__device__ __forceinline__ void publish_fence(bool far) {
#define TWIN_CODE(scope) "fence.acq_rel." scope ";"
  TWIN_SCOPED(far, TWIN_CODE, ::)
#undef TWIN_CODE
}

// Read once: it leaves the first-level cache to the plan's tables.
__device__ __forceinline__ float4 load_once(const float* at) {
  float4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at));
  return v;
}

template <int N, int ALIGNED>
__device__ __forceinline__ Pack<N> load_pack(const float* at, bool far = false) {
  Pack<N> pack;
  if constexpr (N % 4 == 0 && ALIGNED >= 16) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const float4 v = load_quad(at + i, far);
      pack.at[i] = v.x, pack.at[i + 1] = v.y, pack.at[i + 2] = v.z, pack.at[i + 3] = v.w;
    }
  } else if constexpr (N % 2 == 0 && ALIGNED >= 8) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 v = load_pair(at + i, far);
      pack.at[i] = v.x, pack.at[i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) pack.at[i] = load_shared(at + i, far);
  }
  return pack;
}

__device__ __forceinline__ bool missing(float v) { return bits_as<u32>(v) == SENTINEL; }

template <int N>
__device__ __forceinline__ bool missing(const Pack<N>& pack) {
  bool any = false;
#pragma unroll
  for (int i = 0; i < N; ++i) any |= missing(pack.at[i]);
  return any;
}

template <class T>
__device__ __forceinline__ T load_host(const T* at) {
  return *reinterpret_cast<const volatile T*>(at);
}
template <class T>
__device__ __forceinline__ void store_host(T* at, T value) {
  __threadfence_system();
  *reinterpret_cast<volatile T*>(at) = value;
}
__device__ __forceinline__ void host_fence() { __threadfence_system(); }
__device__ __forceinline__ bool claim(int* at, int expected, int wanted) {
  return atomicCAS_system(at, expected, wanted) == expected;
}

__device__ __forceinline__ u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// ---- ring ---------------------------------------------------------------------------------------

// An address in shared memory, from here on a number like any other: computed again for each use it
// costs a look-up of where the block lies in its cluster, 30 cycles on the way of every tile.
__device__ __forceinline__ u32 shared_address(const void* at) {
  u32 address = u32(__cvta_generic_to_shared(at));
  asm volatile("" : "+r"(address));
  return address;
}

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}

// The same without suspending the thread: for those who look at something else as well.
__device__ __forceinline__ bool barrier_seen(u32 barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed;
}

__device__ __forceinline__ void barrier_arrive(u32 barrier, int count = 1) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(barrier),
               "r"(count)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_passed(barrier, parity)) {}
}

// Weights are read once a step: tables, norms, cached keys and values stay in the second-level
// cache.
__device__ __forceinline__ u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 read_again() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// What this thread has read and written in shared memory comes before what bulk copies will write
// there. An arrival at a barrier does not wait for loads whose results nobody has used yet.
__device__ __forceinline__ void leave_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// The same of the device's memory, of which bulk copies will read.
__device__ __forceinline__ void leave_cache_to_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// The barrier's phase ends when `bytes` of copies have arrived.
__device__ __forceinline__ void expect_copies(u32 barrier, int bytes) {
  asm volatile(
      "{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier),
      "r"(bytes)
      : "memory");
}

// Starts a copy of `bytes` from global to shared memory, which the barrier expects.
__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, int bytes, u32 barrier,
                                          u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// ---- integers -----------------------------------------------------------------------------------

// Sixteen bytes of shared memory.
__device__ __forceinline__ void load_four(u32 at, u32* to) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(at));
}
__device__ __forceinline__ void load_two(u32 at, u32* to) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(at));
}
__device__ __forceinline__ void load_one(u32 at, u32* to) {
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to[0]) : "r"(at));
}
__device__ __forceinline__ float load_float(u32 at) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(at));
  return value;
}
__device__ __forceinline__ void store_four(u32 at, const u32 (&from)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(from[0]), "r"(from[1]),
               "r"(from[2]), "r"(from[3])
               : "memory");
}
// Four neighbouring numbers.
__device__ __forceinline__ void load_floats(u32 at, float* to) {
  u32 bits[4];
  load_four(at, bits);
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = bits_as<float>(bits[i]);
}
__device__ __forceinline__ void store_floats(u32 at, const float* from) {
  store_four(at, {bits_as<u32>(from[0]), bits_as<u32>(from[1]), bits_as<u32>(from[2]),
                  bits_as<u32>(from[3])});
}
__device__ __forceinline__ void store_float(u32 at, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(value) : "memory");
}
__device__ __forceinline__ void load_half(u32 at, u32* to) {  // two bytes, and zeros
  asm volatile("{ .reg .b16 two; ld.shared.b16 two, [%1]; cvt.u32.u16 %0, two; }"
               : "=r"(to[0])
               : "r"(at));
}
__device__ __forceinline__ int dot4(u32 a, u32 b, int sum) {  // + the products of four signed bytes
  asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ int dot4_unsigned(u32 a, u32 b, int sum) {  // the same, those of a >= 0
  asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
  return sum;
}
__device__ __forceinline__ u32 thread_of_warp() {
  u32 lane;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
}
// The bytes of b:a that the four digits of `chosen` number, the last digit's lowest. Of a digit
// beyond 7: the sign of that byte, eight times.
__device__ __forceinline__ u32 bytes_of(u32 a, u32 b, u32 chosen) {
  u32 out;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(chosen));
  return out;
}
// The upper sixteen bits of a word, as both halves, by an addition of FP16 numbers: that pipe is
// idle where the one that shifts looks codes up. Their bits 15 and 11 are zero, so they are a number,
// and positive. `none`: a zero that the assembler does not know.
__device__ __forceinline__ u32 upper_half(u32 word, u32 none) {
  u32 out;
  asm("{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, %1; mov.b32 both, {high, high}; "
      "add.f16x2 %0, both, %2; }"
      : "=r"(out)
      : "r"(word), "r"(none));
  return out;
}
// What another thread of the warp has; all of them ask.
__device__ __forceinline__ u32 of_thread(u32 value, u32 thread) {
  u32 found;
  asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xFFFFFFFF;"
               : "=r"(found)
               : "r"(value), "r"(thread));
  return found;
}
__device__ __forceinline__ float of_thread(float value, u32 thread) {
  return bits_as<float>(of_thread(bits_as<u32>(value), thread));
}
__device__ __forceinline__ float of_neighbour(float value) {
  return of_thread(value, thread_of_warp() ^ 1u);
}
// d += A * B of a warp, signed bytes: 16 rows, 32 columns; B has eight columns (PTX ISA, "Matrix
// Fragments for mma.m16n8k32").
__device__ __forceinline__ void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                               u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The lower two of E4M3 numbers.
__device__ __forceinline__ void two_e4m3(u32 pair, float (&out)[2]) {
  u32 both;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.rn.f16x2.e4m3x2 %0, a; }"
      : "=r"(both)
      : "r"(pair));
  unpack<Type::FP16>(both, out[0], out[1]);
}
// Four E4M3 weights: FP16 holds each of them, and FP32 each of those.
__device__ __forceinline__ void four_e4m3(u32 word, float (&out)[4]) {
  u32 low, high;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, "
      "b; }"
      : "=r"(low), "=r"(high)
      : "r"(word));
  unpack<Type::FP16>(low, out[0], out[1]);
  unpack<Type::FP16>(high, out[2], out[3]);
}
// Of a normal number, to a unit in the last place; no division, whose code for rare numbers is
// called.
__device__ __forceinline__ float about_reciprocal(float x) {
  float one;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one) : "f"(x));
  return one;
}
// Of numbers below 2^22: added to 1.5 * 2^23, they leave their whole part in its last bits. A
// conversion takes eight times as long.
__device__ __forceinline__ int nearest(float x) {
  return bits_as<int>(x + 0x1.8p23f) - bits_as<int>(0x1.8p23f);
}

}  // namespace twin

#include "entries.h"
#include "head_shapes.h"
#include "coded.h"
#include "coded_values.h"
#include "cuda_few.cuh"
#include "cuda_copies.cuh"
#include "cuda_products.cuh"
#include "cuda_attend.cuh"
#include "cuda_decode.cuh"
#include "cuda_delta.cuh"
#include "cuda_rounds.cuh"
#include "cuda_prompt.cuh"
#include "cuda_ring.cuh"
#include "cuda_scan.cuh"
#include "cuda_layout.cuh"
#include "cuda_activation.cuh"
#include "cuda_cached.cuh"

#include "cuda_coded.cuh"
#include "cuda_quantised.cuh"
#include "cuda_split.cuh"

#include "cuda_core.cuh"  // of all of these
#include "cuda_draft.cuh"
