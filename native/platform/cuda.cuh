// NVIDIA, compute capability 9.0: consumer warps, and one loader warp that streams weights into a ring in shared memory
// with bulk copies. No toolkit header is included, so NVRTC alone can compile the kernel.
#pragma once

#define TWIN_TABLE __device__ static const

#include "plan.h"
#include "source.h"

namespace twin {

constexpr int CONSUMER_WARPS = 12;  // bytes in flight of the consumers, not the ring, set the speed with fewer
constexpr int CONSUMERS = 32 * CONSUMER_WARPS;
constexpr int THREADS = CONSUMERS + 32;     // the last warp is the loader
constexpr int SHARED_BYTES = 227 * 1024;    // most dynamic shared memory of a block
constexpr int CONSUMER_BARRIER = 1;         // barrier 0 is __syncthreads

template <class To, class From>
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// ---- stored types ------------------------------------------------------------------------------------------

__host__ __device__ constexpr int type_bytes(Type type) { return type == Type::FP32 ? 4 : 2; }

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

template <Type T>
__device__ __forceinline__ float load_element(const u8* at) {
  if constexpr (T == Type::FP32) return *reinterpret_cast<const float*>(at);
  const u16 bits = *reinterpret_cast<const u16*>(at);
  return T == Type::BF16 ? bits_as<float>(u32(bits) << 16) : half_value(bits);
}

template <Type T>
__device__ __forceinline__ void store_element(u8* at, float value) {
  if constexpr (T == Type::FP32) {
    *reinterpret_cast<float*>(at) = value;
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
__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }

// ---- exchange memory: relaxed system-scope words, because peers write them too -------------------------------

__device__ __forceinline__ float load_shared(const float* at) {
  float value;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ float4 load_quad(const float* at) {
  float4 v;
  asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at) : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(float* at, float value) {
  asm volatile("st.relaxed.sys.global.f32 [%0], %1;" ::"l"(at), "f"(value) : "memory");
}

__device__ __forceinline__ void arrive(u32* counter) { asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(counter) : "memory"); }

__device__ __forceinline__ u32 arrivals(const u32* counter) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  return value;
}

// Earlier writes of this thread, and what it has observed, before its later publications.
__device__ __forceinline__ void publish_fence() {
  if constexpr (Plan::ranks > Plan::ranks_per_gpu) {
    asm volatile("fence.acq_rel.sys;" ::: "memory");
  } else {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
  }
}
__device__ __forceinline__ void acquire_fence() { publish_fence(); }

template <class T>
__device__ __forceinline__ T load_host(const T* at) {
  return *reinterpret_cast<const volatile T*>(at);
}
template <class T>
__device__ __forceinline__ void store_host(T* at, T value) {
  __threadfence_system();
  *reinterpret_cast<volatile T*>(at) = value;
}
__device__ __forceinline__ bool claim(int* at, int expected, int wanted) { return atomicCAS_system(at, expected, wanted) == expected; }

__device__ __forceinline__ u64 now_ns() {
  u64 time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// ---- ring --------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

__device__ __forceinline__ void barrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

__device__ __forceinline__ bool barrier_passed(u64* barrier, u32 parity) {
  u32 passed;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(passed)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return passed;
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

// Tile n lies in slot n % ring_slots, is announced by barrier n % BARRIERS, used by warp n % CONSUMER_WARPS, and given back.
// A parity tells two neighbouring phases apart, no more: so a barrier belongs to one warp, which has seen its last phase.
struct Ring {
  static constexpr u32 BARRIERS = u32((Plan::ring_slots + CONSUMER_WARPS - 1) / CONSUMER_WARPS * CONSUMER_WARPS);

  u8* slots;
  u64* full;   // [BARRIERS] bytes have arrived
  u64* empty;  // [BARRIERS] the warp is done
  u32 tile;    // tiles of the block so far
  u32 warp;

  __device__ static u32 barrier_of(u32 tile) { return tile % BARRIERS; }
  __device__ static u32 parity_of(u32 tile) { return tile / BARRIERS & 1u; }
  __device__ u8* slot() const { return slots + tile % u32(Plan::ring_slots) * u32(Plan::slot_bytes); }
  __device__ bool mine() const { return tile % u32(CONSUMER_WARPS) == warp; }
  __device__ const u8* acquire() const {
    wait(full, tile);
    return slot();
  }
  __device__ static void wait(u64* barriers, u32 tile) {
    while (!barrier_passed(barriers + barrier_of(tile), parity_of(tile))) {
    }
  }
  __device__ void release() const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty + barrier_of(tile));
  }
  __device__ void next(int) { ++tile; }
  __device__ void rewind() {}
};

// The loader's side: one thread copies tile after tile, as far ahead as the window and the ring allow.
struct Loader {
  Ring ring;
  const volatile int* stop;  // the consumers have left

  __device__ bool fill(const u8* from, int bytes) {
    const u32 slots = u32(Plan::ring_slots), last = ring.tile - slots;  // the slot's last tenant
    while (ring.tile >= slots && !barrier_passed(ring.empty + Ring::barrier_of(last), Ring::parity_of(last)))
      if (*stop) return false;
    if (Plan::window_slots < Plan::ring_slots && ring.tile >= u32(Plan::window_slots)) Ring::wait(ring.full, ring.tile - u32(Plan::window_slots));
    const u32 full = shared_address(ring.full + Ring::barrier_of(ring.tile));
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(full), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(ring.slot())),
                 "l"(from), "r"(bytes), "r"(full)
                 : "memory");
    ring.next(bytes);
    return !*stop;
  }

  // Nothing may arrive after the block has left.
  __device__ void drain() {
    const u32 last = ring.tile < u32(Plan::ring_slots) ? ring.tile : u32(Plan::ring_slots);
    for (u32 back = 1; back <= last; ++back) Ring::wait(ring.full, ring.tile - back);
  }
};

// ---- one block ---------------------------------------------------------------------------------------------

struct Core {
  Ring ring;
  u64* meeting;  // [CONSUMER_WARPS] one value of each warp

  static constexpr int POSITIONS = 4;
  static constexpr int HEADS = GROUP < 4 ? GROUP : 4;
  static constexpr int PIECE = (HEAD_DIM + 31) / 32;

  __device__ static int thread() { return int(threadIdx.x); }
  __device__ static constexpr int threads() { return CONSUMERS; }
  __device__ static int warp() { return int(threadIdx.x / 32); }
  __device__ static constexpr int warps() { return CONSUMER_WARPS; }
  __device__ static int lane() { return int(threadIdx.x % 32); }
  __device__ static constexpr int lanes() { return 32; }
  __device__ static void barrier() { asm volatile("bar.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(CONSUMERS) : "memory"); }
  __device__ static bool any(bool mine) {  // a barrier that tells every thread whether one of them said yes
    u32 yes;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, 0, q; }"
        : "=r"(yes)
        : "r"(u32(mine)), "n"(CONSUMER_BARRIER), "n"(CONSUMERS)
        : "memory");
    return yes;
  }
  __device__ static void warp_sync() { __syncwarp(); }

  template <class T>
  __device__ static T warp_sum(T v) {  // butterfly: the same order, so the same bits, in every lane
    for (int apart = 16; apart; apart /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, apart);
    return v;
  }

  template <class T>
  __device__ T sum(T v) {
    T* met = reinterpret_cast<T*>(meeting);
    v = warp_sum(v);
    barrier();
    if (lane() == 0) met[warp()] = v;
    barrier();
    T total = met[0];
    for (int w = 1; w < CONSUMER_WARPS; ++w) total += met[w];
    return total;
  }

  template <class Wins>
  __device__ Candidate best(Candidate mine, Wins wins) {
    for (int apart = 16; apart; apart /= 2) {
      const Candidate other = {__shfl_xor_sync(0xFFFFFFFFu, mine.logit, apart), __shfl_xor_sync(0xFFFFFFFFu, mine.index, apart)};
      if (wins(other, mine)) mine = other;
    }
    Candidate* met = reinterpret_cast<Candidate*>(meeting);
    barrier();
    if (lane() == 0) met[warp()] = mine;
    barrier();
    for (int w = 0; w < CONSUMER_WARPS; ++w)
      if (wins(met[w], mine)) mine = met[w];
    return mine;
  }

  __device__ float dot(const float* a, const float* b, int n) {
    float part = 0;
    for (int i = thread() * 4; i < n; i += CONSUMERS * 4) {  // vectors are padded to 4 with anything: the tail is cut here
      const float4 x = *reinterpret_cast<const float4*>(a + i), y = *reinterpret_cast<const float4*>(b + i);
      part += x.x * y.x;
      if (i + 1 < n) part += x.y * y.y;
      if (i + 2 < n) part += x.z * y.z;
      if (i + 3 < n) part += x.w * y.w;
    }
    return sum(part);
  }

  // Lanes stride over the columns 16 bytes at a time; 8 rows share one read of x.
  __device__ static void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    constexpr int ROWS = 8, STEP = 16 / type_bytes(WEIGHT);
    const int stride = cols * type_bytes(WEIGHT);
    for (int first = 0; first < rows; first += ROWS, w += ROWS * stride) {
      float sum[ROWS] = {};
      for (int c = lane() * STEP; c < cols; c += 32 * STEP) {
        float xs[STEP];
        for (int i = 0; i < STEP; i += 4) *reinterpret_cast<float4*>(xs + i) = *reinterpret_cast<const float4*>(x + c + i);
        for (int r = 0; r < ROWS; ++r)
          if (first + r < rows) sum[r] += piece(w + r * stride + c * type_bytes(WEIGHT), xs);
      }
      for (int r = 0; r < ROWS; ++r) {
        const float total = warp_sum(sum[r]);
        if (lane() == r && first + r < rows) sums[first + r] = total;
      }
    }
  }

  __device__ static float piece(const u8* at, const float* xs) {  // 16 bytes of one row
    const uint4 words = *reinterpret_cast<const uint4*>(at);
    const u32 word[4] = {words.x, words.y, words.z, words.w};
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      if constexpr (WEIGHT == Type::FP32) {
        sum += bits_as<float>(word[i]) * xs[i];
      } else {
        float a, b;
        unpack<WEIGHT>(word[i], a, b);
        sum += a * xs[2 * i];
        sum += b * xs[2 * i + 1];
      }
    }
    return sum;
  }

  __device__ static void load_piece(const u8* row, float* out) {
    constexpr int SIZE = type_bytes(KV);
    const u8* at = row + lane() * PIECE * SIZE;
    if constexpr (SIZE == 2 && PIECE % 2 == 0 && HEAD_DIM % 32 == 0) {
      for (int d = 0; d < PIECE; d += 2) unpack<KV>(*reinterpret_cast<const u32*>(at + d * SIZE), out[d], out[d + 1]);
    } else {
      for (int d = 0; d < PIECE; ++d) out[d] = lane() * PIECE + d < HEAD_DIM ? load_element<KV>(at + d * SIZE) : 0.0f;
    }
  }

  __device__ static float piece_dot(const float* a, const float* b) {
    float sum = 0;
    for (int d = 0; d < PIECE; ++d) sum += a[d] * b[d];
    return sum;
  }

  __device__ static void relax(u32) {}
  __device__ static void published() {}

  __device__ static bool missing(float v) { return bits_as<u32>(v) == SENTINEL; }
  __device__ static bool missing(float4 v) { return missing(v.x) || missing(v.y) || missing(v.z) || missing(v.w); }

  // Threads take neighbouring quads; the loads of all parts are under way before the first is looked at.
  template <class Stall>
  __device__ bool gather(const Source& source, int lo, int hi, float* out, bool add, float scale, Stall stall) {
    constexpr int AT_ONCE = Plan::ranks < 4 ? Plan::ranks : 4;
    const bool aligned = lo % 4 == 0 && (u64(out) & 15u) == 0;
    const int quads = aligned ? (hi - lo) / 4 : 0;
    bool good = true;
    for (int q = thread(); q < quads && good; q += CONSUMERS) {
      const int i = lo + 4 * q;
      float4 sum = {0, 0, 0, 0};
      for (int first = 0; first < source.parts; first += AT_ONCE) {
        float4 got[AT_ONCE];
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p)
          if (first + p < source.parts) got[p] = load_quad(source.at(first + p) + i);
#pragma unroll
        for (int p = 0; p < AT_ONCE; ++p) {
          if (first + p >= source.parts) continue;
          while (good && source.polled && missing(got[p])) {
            good = stall(source.part(first + p), i);
            got[p] = load_quad(source.at(first + p) + i);
          }
          sum = first + p ? float4{sum.x + got[p].x, sum.y + got[p].y, sum.z + got[p].z, sum.w + got[p].w} : got[p];
        }
      }
      float4* to = reinterpret_cast<float4*>(out + 4 * q);
      const float4 old = add ? *to : float4{0, 0, 0, 0};
      const float by = add ? scale : 1.0f;
      *to = {old.x + by * sum.x, old.y + by * sum.y, old.z + by * sum.z, old.w + by * sum.w};
    }
    for (int i = lo + 4 * quads + thread(); i < hi && good; i += CONSUMERS) {
      float sum = 0;
      for (int p = 0; p < source.parts; ++p) {
        float got = load_shared(source.at(p) + i);
        while (good && source.polled && missing(got)) {
          good = stall(source.part(p), i);
          got = load_shared(source.at(p) + i);
        }
        sum = p ? sum + got : got;
      }
      out[i - lo] = add ? out[i - lo] + scale * sum : sum;
    }
    acquire_fence();
    return good;
  }

  __device__ static void fill(float* at, int count, u32 bits) {
    for (int i = thread(); i < count; i += CONSUMERS) store_shared(at + i, bits_as<float>(bits));
  }
};

}  // namespace twin
