// AMD CDNA 3 (gfx942), waves of 64. There is no bulk copy engine: each wave reads its tiles from
// memory with non-temporal loads, several rows in flight; the wave scheduler overlaps them.
// Compiled and inspected only; never run on a device yet.
#pragma once

#include "hip_runtime.h"

#define TWIN_TABLE __device__ static const
#define TWIN_LARGE_TABLE TWIN_TABLE

#define TWIN_UNROLL
#define TWIN_KEEP(x)
#define TWIN_HOLDS(what)
#define TWIN_ONCE

#include "plan.h"
#include "source.h"

namespace twin {

constexpr int WAVE = 64;
constexpr int WAVES = 8;
constexpr int THREADS = WAVE * WAVES;
constexpr int SHARED_BYTES = 64 * 1024;

template <class To, class From>
// never of a vector's element: clang 19 and 22 would read element 0
__device__ __forceinline__ To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  return __builtin_bit_cast(To, from);
}

// ---- stored types -------------------------------------------------------------------------------

__host__ __device__ constexpr int type_bytes(Type type) { return type == Type::FP32 ? 4 : 2; }

__device__ __forceinline__ float half_value(u16 bits) { return float(bits_as<_Float16>(bits)); }
__device__ __forceinline__ u16 half_bits(float value) { return bits_as<u16>(_Float16(value)); }
__device__ __forceinline__ u16 bfloat_bits(float value) {
  const u32 bits = bits_as<u32>(value);
  return value != value ? u16((bits >> 16) | 0x40u)
                        : u16((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
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

__device__ __forceinline__ float infinity() { return __builtin_inff(); }
__device__ __forceinline__ float exp32(float x) { return __builtin_expf(x); }
__device__ __forceinline__ float square_root(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float inverse_root(float x) { return 1.0f / square_root(x); }

// ---- exchange memory: system scope, because plain and work-group loads may hit a stale cache of
// the CU

template <class T>
__device__ __forceinline__ T load_system(const T* at) {
  return __hip_atomic_load(at, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ float load_shared(const float* at) {
  return bits_as<float>(load_system(reinterpret_cast<const u32*>(at)));
}
__device__ __forceinline__ void store_shared(float* at, float value) {
  __hip_atomic_store(reinterpret_cast<u32*>(at), bits_as<u32>(value), __ATOMIC_RELAXED,
                     __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void arrive(u32* counter) {
  __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ u32 arrivals(const u32* counter) {
  return __hip_atomic_load(counter, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}

__device__ __forceinline__ void publish_fence() {
  if constexpr (Plan::ranks > Plan::ranks_per_gpu) {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent");
  }
}
__device__ __forceinline__ void acquire_fence() { publish_fence(); }

template <class T>
__device__ __forceinline__ T load_host(const T* at) {
  return __hip_atomic_load(at, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
__device__ __forceinline__ void store_host(T* at, T value) {
  __hip_atomic_store(at, value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ bool claim(int* at, int expected, int wanted) {
  return __hip_atomic_compare_exchange_strong(at, &expected, wanted, __ATOMIC_ACQ_REL,
                                              __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
}

// the constant clock of 100 MHz
__device__ __forceinline__ u64 now_ns() { return __builtin_readsteadycounter() * 10u; }

// ---- one block ----------------------------------------------------------------------------------
}  // namespace twin

#include "memory_vector.h"
#include "memory_prompt.h"

namespace twin {

// Tiles are read where they lie; waves take them in turn.
struct Ring {
  const u8* stream;
  const u8* at;
  u32 tile;
  u32 wave;

  __device__ bool mine() const { return tile % u32(WAVES) == wave; }
  __device__ const u8* acquire() const { return at; }
  __device__ void release() const {}
  __device__ void next(int bytes) {
    at += bytes;
    ++tile;
  }
  __device__ void rewind() { at = stream; }
};

typedef u32 quad_words __attribute__((ext_vector_type(4)));

struct Piece {  // a thread's part of a cached key or value
  static constexpr int THREADS = HEAD_DIM <= 128 ? 16 : 32,
                       SIZE = (HEAD_DIM + THREADS - 1) / THREADS;
  float at[SIZE];

  template <class Core>
  __device__ void load(const Core& core, const u8* row) {
    for (int d = 0; d < SIZE; ++d) {
      const int from = core.warp_thread() % THREADS * SIZE + d;
      at[d] = from < HEAD_DIM ? load_element<KV>(row + from * type_bytes(KV)) : 0.0f;
    }
  }
  template <class Core>
  __device__ void load_near(const Core& core, const u8* from) {
    load(core, from);
  }
  __device__ void clear() {
    for (int d = 0; d < SIZE; ++d) at[d] = 0.0f;
  }
  __device__ void unpack(float* out) const {
    for (int d = 0; d < SIZE; ++d) out[d] = at[d];
  }
};

struct Core {
  using Hidden = MemoryVector;
  using Residual = MemoryResidual;
  using Heads = MemoryVector;
  using Ffn = MemoryVector;
  using Piece = twin::Piece;

  Ring ring;
  u64* meeting;  // [WAVES] one value of each wave

  // with 2, eight threads needed 39 registers more than the 256 there are
  static constexpr int POSITIONS = 1;
  static constexpr int HEADS = 1, SCAN_HEADS = 1;
  static constexpr int SPLITS = 4;  // of a head, looked at together
  static constexpr int POSITION_THREADS = Piece::THREADS;
  static constexpr bool KEEPER = false;
  static constexpr bool CACHE_IN_RING = false;
  static constexpr bool EXPERTS_IN_RING = false;
  static constexpr int CACHE_TILE = 1;
  static constexpr bool TENSOR_SCAN = false;
  struct TileScan {
    static constexpr int WARPS = 1, POSITIONS = 1;
  };

  __device__ static int thread() { return thread_index(); }
  __device__ static constexpr int threads() { return THREADS; }
  __device__ static int warp() { return thread_index() / WAVE; }
  __device__ static constexpr int warps() { return WAVES; }
  __device__ static int warp_thread() { return thread_index() % WAVE; }
  __device__ static constexpr int warp_threads() { return WAVE; }
  __device__ static void barrier() { __syncthreads(); }
  __device__ static void warp_sync() { __builtin_amdgcn_wave_barrier(); }

  __device__ bool any(bool mine) { return sum(int(mine)) != 0; }

  __device__ static float apart_by(float v, int apart) {
    return bits_as<float>(thread_xor(bits_as<int>(v), apart));
  }
  __device__ static int apart_by(int v, int apart) { return thread_xor(v, apart); }
  __device__ static double apart_by(double v, int apart) {
    const u64 bits = bits_as<u64>(v);
    const u64 low = u32(thread_xor(int(u32(bits)), apart)),
              high = u32(thread_xor(int(u32(bits >> 32)), apart));
    return bits_as<double>(low | (high << 32));
  }

  template <class T>
  __device__ static T warp_sum(T v) {
    for (int apart = WAVE / 2; apart; apart /= 2) v += apart_by(v, apart);
    return v;
  }

  template <class T>
  __device__ T sum(T v) {
    T* met = reinterpret_cast<T*>(meeting);
    v = warp_sum(v);
    barrier();
    if (warp_thread() == 0) met[warp()] = v;
    barrier();
    T total = met[0];
    for (int w = 1; w < WAVES; ++w) total += met[w];
    return total;
  }

  __device__ static float scanner_sum(float v) {
    for (int apart = POSITION_THREADS / 2; apart; apart /= 2) v += apart_by(v, apart);
    return v;
  }
  __device__ static float thread_apart(float v, int apart) { return apart_by(v, apart); }
  __device__ bool agree(bool good) { return !any(!good); }
  __device__ static bool gave_up() { return false; }
  __device__ static void forget() {}
  __device__ static void begin() {}
  __device__ static void cleared() {}
  __device__ static bool told_to_leave(const int* abort) { return load_host(abort); }
  template <class Vector>
  __device__ Nothing take_ahead(const Stage&, Span, bool) {
    return {};
  }
  __device__ void dot_tiles(const Stage& stage, const MemoryVector& x, int lo, int hi, float* sums,
                            int batch, Nothing) {
    dot_memory_tiles(*this, stage, x, lo, hi, sums, batch);
  }

  template <class Wins>
  __device__ Candidate best(Candidate mine, Wins wins) {
    for (int apart = WAVE / 2; apart; apart /= 2) {
      const Candidate other = {apart_by(mine.logit, apart), apart_by(mine.index, apart)};
      if (wins(other, mine)) mine = other;
    }
    Candidate* met = reinterpret_cast<Candidate*>(meeting);
    barrier();
    if (warp_thread() == 0) met[warp()] = mine;
    barrier();
    for (int w = 0; w < WAVES; ++w)
      if (wins(met[w], mine)) mine = met[w];
    return mine;
  }

  __device__ float dot(const float* a, const float* b, int n) {
    float part = 0;
    for (int i = thread(); i < n; i += THREADS) part += a[i] * b[i];
    return sum(part);
  }

  // Lanes stride over the columns 16 bytes at a time; the loads of 8 rows are under way before the
  // first is used.
  __device__ static void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    constexpr int ROWS = 8, STEP = 16 / type_bytes(WEIGHT);
    const int stride = cols * type_bytes(WEIGHT);
    for (int first = 0; first < rows; first += ROWS, w += ROWS * stride) {
      float sum[ROWS] = {};
      for (int c = warp_thread() * STEP; c < cols; c += WAVE * STEP) {
        quad_words got[ROWS];
        for (int r = 0; r < ROWS; ++r)
          if (first + r < rows)
            got[r] = __builtin_nontemporal_load(
                reinterpret_cast<const quad_words*>(w + r * stride + c * type_bytes(WEIGHT)));
        for (int r = 0; r < ROWS; ++r)
          if (first + r < rows) sum[r] += piece(got[r], x + c);
      }
      for (int r = 0; r < ROWS; ++r) {
        const float total = warp_sum(sum[r]);
        if (warp_thread() == r && first + r < rows) sums[first + r] = total;
      }
    }
  }

  __device__ static float piece(quad_words words, const float* xs) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      const u32 word = words[i];
      if constexpr (WEIGHT == Type::FP32) {
        sum += bits_as<float>(word) * xs[i];
      } else {
        float a, b;
        unpack<WEIGHT>(word, a, b);
        sum += a * xs[2 * i];
        sum += b * xs[2 * i + 1];
      }
    }
    return sum;
  }

  __device__ static float piece_dot(const float* a, const float* b) {
    float sum = 0;
    for (int d = 0; d < Piece::SIZE; ++d) sum += a[d] * b[d];
    return sum;
  }

  // polls slow the streams of other CUs
  __device__ static void relax(u32) { __builtin_amdgcn_s_sleep(1); }
  __device__ static void appended() {}
  __device__ static void scanned() {}
  __device__ static void chosen(u32*) {}
  __device__ static void published() {}

  template <class Stall>
  __device__ bool gather(const Source& source, int lo, int hi, float* out, Stall stall, int = 0) {
    bool good = true;
    for (int i = lo + thread(); i < hi && good; i += THREADS) {
      float sum = 0;
      for (int p = 0; p < source.parts; ++p) {
        float got = load_shared(source.at(p) + i);
        while (good && source.polled && bits_as<u32>(got) == SENTINEL) {
          good = stall(source.part(p), i);
          got = load_shared(source.at(p) + i);
        }
        sum = p ? sum + got : got;
      }
      out[i - lo] = sum;
    }
    acquire_fence();
    return good;
  }

  __device__ static void fill(float* at, int count, u32 bits) {
    for (int i = thread(); i < count; i += THREADS) store_shared(at + i, bits_as<float>(bits));
  }
};

}  // namespace twin
