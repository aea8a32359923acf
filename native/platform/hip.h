// AMD CDNA 3 (gfx942), waves of 64. There is no bulk copy engine: each wave reads its tiles from
// memory with non-temporal loads, several rows in flight; the wave scheduler overlaps them. Run by
// an interpreter of its machine code (tests/gfx942), never by a device.
#pragma once

#include "hip_runtime.h"

#define TWIN_TABLE __device__ static const
#define TWIN_LARGE_TABLE TWIN_TABLE

#define TWIN_UNROLL
#define TWIN_KEEP(x) asm volatile("" : "+v"(x))  // computed here, not kept from before
#define TWIN_HOLDS(what)
#define TWIN_ONCE _Pragma("unroll 1")
#define TWIN_GLOBAL(at) in_memory(at)
#define TWIN_SAME(number) __builtin_amdgcn_readfirstlane(number)

namespace twin {
// The compiler would take generic loads and stores, which count as those of local memory as well
// and end in no order: every wait for one load would be a wait for all. A number between the two
// pointers, else it undoes the casts.
template <class T>
__device__ __forceinline__ T* in_memory(T* at) {
  return (T*)(__attribute__((address_space(1))) T*)(unsigned long long)at;
}
}  // namespace twin

#include "tables.h"
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

}  // namespace twin

#include "e4m3.h"

namespace twin {

// ---- stored types -------------------------------------------------------------------------------

__host__ __device__ constexpr int type_bytes(Type type) {
  return type == Type::FP32 ? 4 : type == Type::FP8 ? 1 : 2;
}

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
  // its own E4M3 has another bias, and no negative zero
  if constexpr (T == Type::FP8) return e4m3_value(*at);
  const u16 bits = *reinterpret_cast<const u16*>(at);
  return T == Type::BF16 ? bits_as<float>(u32(bits) << 16) : half_value(bits);
}

template <Type T>
__device__ __forceinline__ void store_element(u8* at, float value) {
  if constexpr (T == Type::FP32) {
    *reinterpret_cast<float*>(at) = value;
  } else if constexpr (T == Type::FP8) {
    *at = u8(e4m3_bits(value));
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
__device__ __forceinline__ float log32(float x) { return __builtin_logf(x); }
__device__ __forceinline__ float square_root(float x) { return __builtin_sqrtf(x); }
__device__ __forceinline__ float inverse_root(float x) { return 1.0f / square_root(x); }

// ---- exchange memory
// --------------------------------------------------------------------------------------- A CU has
// a first-level cache, a die (XCD) a second-level cache, and neither sees what others write. A load
// or store of agent scope passes by both of them, one of system scope also by what other GPUs and
// the host do not see. Sentinels are polled with such loads, so they need no invalidation; words
// whose arrival a counter proves are plain, written back before the arrival and invalidated behind
// it, once for each wait.

template <class T>
// a generic address would take the counters of local memory as well
using Global = __attribute__((address_space(1))) T;

constexpr bool PEERS = Plan::ranks > Plan::ranks_per_gpu;
constexpr bool POLLED = Plan::handoff == int(HandOff::SENTINEL);

template <class T>
__device__ __forceinline__ Global<T>* global(T* at) {
  return (Global<T>*)at;
}

// A load that passes by the caches of this CU and die; `far`: and by those of this GPU.
template <class T>
__device__ __forceinline__ T load_word(const T* at, bool far) {
  if (PEERS && far)
    return __hip_atomic_load(global(at), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  return __hip_atomic_load(global(at), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
template <class T>
__device__ __forceinline__ void store_word(T* at, T value, bool far) {
  if (PEERS && far)
    return __hip_atomic_store(global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(global(at), value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

__device__ __forceinline__ float load_shared(const float* at, bool far = false) {
  if constexpr (!POLLED) return *global(at);
  return bits_as<float>(load_word(reinterpret_cast<const u32*>(at), far));
}
__device__ __forceinline__ void store_shared(float* at, float value, bool far = false) {
  if constexpr (POLLED) {
    store_word(reinterpret_cast<u32*>(at), bits_as<u32>(value), far);
  } else {
    *global(at) = value;
  }
}
__device__ __forceinline__ void store_peer(float* at, float value) {
  store_shared(at, value, true);
}

// This wave's stores are where their readers look: at the scope that each of them has.
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}

// Nothing is written back for sentinels, whose stores pass by the caches.
__device__ __forceinline__ void publish_fence(bool far) {
  if constexpr (POLLED) {
    wait_for_stores();
  } else if (PEERS && far) {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  }
}
__device__ __forceinline__ void arrive(u32* counter, bool far = true) {  // behind a fence
  if (PEERS && far) {
    __hip_atomic_fetch_add(global(counter), 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  } else {
    __hip_atomic_fetch_add(global(counter), 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
}
__device__ __forceinline__ u32 arrivals(const u32* counter, bool far) {
  return load_word(counter, far);
}
__device__ __forceinline__ void arrived(bool far) {
  if (PEERS && far) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  }
}

// Words that the host and the device tell each other. One that is read says all by itself, so
// nothing is invalidated for it.
template <class T>
__device__ __forceinline__ T load_host(const T* at) {
  return __hip_atomic_load(global(at), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
template <class T>
__device__ __forceinline__ void store_host(T* at, T value) {
  __hip_atomic_store(global(at), value, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
}
__device__ __forceinline__ void host_fence() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }
__device__ __forceinline__ bool claim(int* at, int expected, int wanted) {
  return __hip_atomic_compare_exchange_strong(global(at), &expected, wanted, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}

// the constant clock of 100 MHz
__device__ __forceinline__ u64 now_ns() { return __builtin_readsteadycounter() * 10u; }

// ---- one block ----------------------------------------------------------------------------------
}  // namespace twin

#include "coded.h"
#include "coded_values.h"
#include "entries.h"
#include "head_shapes.h"
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

// Moves between the threads of a row of 16, and of a row's last value into later rows: the codes of
// DPP.
constexpr int QUAD_SWAP_1 = 0xB1, QUAD_SWAP_2 = 0x4E, MIRROR = 0x140, HALF_MIRROR = 0x141,
              BROADCAST_15 = 0x142, BROADCAST_31 = 0x143;

// The value of another thread; 0 in rows that `rows` leaves out.
template <int CODE, int ROWS = 0xF, class T>
__device__ __forceinline__ T moved(T v) {
  return bits_as<T>(__builtin_amdgcn_update_dpp(0, bits_as<int>(v), CODE, ROWS, 0xF, false));
}

template <class S>
struct Piece {  // a thread's part of a cached key or value
  static constexpr int HEAD_DIM = S::HEAD_DIM;
  static constexpr int THREADS = HEAD_DIM <= 128 ? 16 : 32,
                       SIZE = (HEAD_DIM + THREADS - 1) / THREADS;
  float at[SIZE];

  template <class Core>
  __device__ void load(const Core& core, const u8* row) {
    load_near(core, in_memory(row));
  }
  template <class Core>
  __device__ void load_near(const Core& core, const u8* row) {
    for (int d = 0; d < SIZE; ++d) {
      const int from = core.warp_thread() % THREADS * SIZE + d;
      at[d] = from < HEAD_DIM ? load_element<KV>(row + from * type_bytes(KV)) : 0.0f;
    }
  }
  __device__ void clear() {
    for (int d = 0; d < SIZE; ++d) at[d] = 0.0f;
  }
  __device__ void unpack(float* out) const {
    for (int d = 0; d < SIZE; ++d) out[d] = at[d];
  }
};

}  // namespace twin

#include "hip_stream.h"
#include "hip_vector.h"

namespace twin {

// How a block looks at cached rows of heads of a shape.
template <class S>
struct CachedRows {
  using Piece = twin::Piece<S>;
  // with 2, eight threads needed 39 registers more than the 256 there are
  static constexpr int POSITIONS = 1;
  static constexpr int SCAN_HEADS = 1;
  static constexpr int POSITION_THREADS = Piece::THREADS;
  static constexpr int CACHE_TILE = 1;
  static constexpr bool TENSOR_SCAN = false;
  struct TileScan {
    static constexpr int WARPS = 1, PARTIALS = 1, POSITIONS = 1;
  };

  template <class Core>
  __device__ static float subwarp_sum(const Core&, float v) {
    return Core::template threads_sum<POSITION_THREADS>(v);
  }
  __device__ static float piece_dot(const float* a, const float* b) {
    float sum = 0;
    for (int d = 0; d < Piece::SIZE; ++d) sum += a[d] * b[d];
    return sum;
  }
};

struct Core {
  using Hidden = MemoryVector;
  using Normed = Hidden;
  using Residual = RegisterResidual;
  template <class S>
  using Heads = MemoryVector;
  using States = MemoryVector;
  using Ffn = InputOf<NARROW>::Type;
  using Shared = MemoryVector;
  using Dense = Ffn;  // of models without experts the same
  template <class S>
  using Cached = CachedRows<S>;

  Ring ring;
  u64* meeting;  // [WAVES] one value of each wave
  const float* nothing;  // [STEP] zeros: the input of lanes beyond a tile's last column
  Known* known;          // of this wave
  int me;
  Strips strips;

  static constexpr int HEADS = 1;
  static constexpr int SPLITS = 4;  // of a head, looked at together
  static constexpr bool SCHEDULER = false;
  static constexpr bool FOURS = false;
  static constexpr bool CACHE_IN_RING = false;
  static constexpr bool EXPERTS_IN_RING = false;
  static constexpr bool OWN_GPUS = PEERS;  // ranks have GPUs of their own

  __device__ int thread() const { return me; }
  __device__ static constexpr int threads() { return THREADS; }
  __device__ int warp() const { return me / WAVE; }
  __device__ static constexpr int warps() { return WAVES; }
  __device__ int warp_thread() const { return me % WAVE; }
  __device__ static constexpr int warp_threads() { return WAVE; }
  __device__ static void barrier() { __syncthreads(); }
  __device__ static void warp_sync() { __builtin_amdgcn_wave_barrier(); }
  // A barrier does not wait for stores, and the fence of the thread that arrives does not wait for
  // those of other waves.
  __device__ static void settle() { wait_for_stores(); }

  __device__ bool any(bool mine) { return sum(int(mine)) != 0; }

  __device__ static float wave_xor(float v, int mask) {
    return bits_as<float>(thread_xor(bits_as<int>(v), mask));
  }
  __device__ static int wave_xor(int v, int mask) { return thread_xor(v, mask); }
  __device__ static u64 wave_xor(u64 v, int mask) {
    const u64 low = u32(thread_xor(int(u32(v)), mask)),
              high = u32(thread_xor(int(u32(v >> 32)), mask));
    return low | (high << 32);
  }
  __device__ static double wave_xor(double v, int mask) {
    return bits_as<double>(wave_xor(bits_as<u64>(v), mask));
  }

  // Sums of 4, 8, 16 threads and of all 64, the same bits in each of them, without a trip to local
  // memory.
  template <class T>
  __device__ static T row_sum(T v) {
    v += moved<QUAD_SWAP_1>(v);
    v += moved<QUAD_SWAP_2>(v);
    v += moved<HALF_MIRROR>(v);  // the other four of eight, which all hold the same
    v += moved<MIRROR>(v);
    return v;
  }
  template <class T>
  __device__ static T warp_sum(T v) {
    if constexpr (sizeof(T) == 4) {
      v = row_sum(v);
      v += moved<BROADCAST_15, 0xA>(v);  // into rows 1 and 3
      v += moved<BROADCAST_31, 0xC>(v);  // into rows 2 and 3
      return bits_as<T>(__builtin_amdgcn_readlane(bits_as<int>(v), WAVE - 1));
    } else {
      for (int mask = WAVE / 2; mask; mask /= 2) v += wave_xor(v, mask);
      asm volatile("" : "+v"(v));  // known before the barrier that follows
      return v;
    }
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

  template <int POSITION_THREADS>
  __device__ static float threads_sum(float v) {
    v = row_sum(v);
    if constexpr (POSITION_THREADS > 16) v += wave_xor(v, 16);
    return v;
  }
  template <class T>
  __device__ static T shuffle_xor(T v, int mask) {
    return wave_xor(v, mask);
  }
  __device__ bool agree(bool good) { return !any(!good); }
  __device__ static bool gave_up() { return false; }
  // What is computed from the thread's number is computed again in each stage: kept, it spilled
  // registers.
  __device__ void forget() { asm volatile("" : "+v"(me)); }
  __device__ static void begin() {}
  __device__ static void cleared() {}
  __device__ static bool abort_requested(const int* abort) { return load_host(abort); }

  // ---- weights ----------------------------------------------------------------------------------

  // All strips from the kernel's start on.
  __device__ void begin_strips(const Plan& plan, const Walk& walk) {
    Known now = {walk, {}, 0};
#pragma unroll
    for (int k = 0; k < STRIPS; ++k) strips.load(plan, now, k, warp_thread());
    *known = now;
  }
  template <class Vector>
  __device__ static Nothing prefetch(const Stage&, Span, bool) {
    return {};
  }
  template <class Vector>
  __device__ static void quantise(const Stage&, const Vector&, Nothing) {}
  __device__ static void quantise_chunk(const Stage&, const float*, int) {}
  __device__ static void chunk_done() {}
  __device__ static const MemoryVector& normed(const MemoryVector& x, Span) { return x; }

  template <class Vector>
  __device__ void dot_tiles(const Stage& stage, const Vector& x, int lo, int hi, float* sums,
                            int batch, Nothing) {
    if constexpr (CODED) dot_memory_tiles(*this, stage, x, lo, hi, sums, batch);
    else dot_strips(Plan{}, x, sums, batch);
  }
  // The strips of a batch of rows; in the place of each, once it is multiplied, comes the one that
  // lies STRIPS further, of whatever batch, stage or step.
  template <class Vector>
  __device__ void dot_strips(const Plan& plan, const Vector& x, float* sums, int batch) {
    const int lane = warp_thread();
    Known now = *known;
    warp_sync();  // all lanes have looked before one of them writes
    now.keep_same();
    float sum[STRIP_ROWS] = {};
    while (now.strip[0].batch == now.batch)
#pragma unroll
      for (int k = 0; k < STRIPS; ++k) {
        const Strip strip = now.strip[k];
        // zeros times an empty one, too: with a condition, the compiler would wait for all strips
        const bool holds = lane * STEP < strip.cols;
        const Columns<WEIGHT> seen(elements(x, holds, strip.col + lane * STEP, nothing));
#pragma unroll
        for (int r = 0; r < STRIP_ROWS; ++r) {
          sum[r] = seen.dot(strips.words[k][r], sum[r]);
          TWIN_KEEP(sum[r]);
        }
        in_this_order();  // else the next strip gets other registers, and is waited for to be moved
        strips.load(plan, now, k, lane);
        in_this_order();
        if (!strip.ends()) continue;
        float* const at = sums + strip.part * batch + strip.row;
#pragma unroll
        for (int r = 0; r < STRIP_ROWS; ++r) {
          const float total = warp_sum(sum[r]);
          if (lane == r && r < strip.rows) at[r] = total;
          sum[r] = 0;
        }
      }
    ++now.batch;
    *known = now;
  }

  template <class Wins>
  __device__ Candidate best(Candidate mine, Wins wins) {
    for (int mask = WAVE / 2; mask; mask /= 2) {
      const Candidate other = {wave_xor(mine.logit, mask), wave_xor(mine.index, mask)};
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

  // Lanes stride over the columns 16 bytes at a time; the loads of 4 rows are under way before the
  // first is used, 32 KiB of a CU's 8 waves. 8 rows spilled 34 registers of Laneformer-2B's kernel.
  __device__ void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    constexpr int ROWS = 4, STEP = 16 / type_bytes(WEIGHT);
    const int stride = cols * type_bytes(WEIGHT);
    for (int first = 0; first < rows; first += ROWS, w += ROWS * stride) {
      float sum[ROWS] = {};
      for (int c = warp_thread() * STEP; c < cols; c += WAVE * STEP) {
        quad_words got[ROWS];
        for (int r = 0; r < ROWS; ++r)
          if (first + r < rows)
            got[r] = __builtin_nontemporal_load(global(
                reinterpret_cast<const quad_words*>(w + r * stride + c * type_bytes(WEIGHT))));
        const Columns<WEIGHT> seen{Elements(x + c)};
        for (int r = 0; r < ROWS; ++r)
          if (first + r < rows) sum[r] = seen.dot(got[r], sum[r]);
      }
      for (int r = 0; r < ROWS; ++r) {
        const float total = warp_sum(sum[r]);
        if (warp_thread() == r && first + r < rows) sums[first + r] = total;
      }
    }
  }

  // Low-bit weights are decoded one by one: threads stride over the columns of one row.
  __device__ void dot_coded(Code code, const u8* w, int rows, int cols, const float* x,
                            float* sums) {
    if (code == Code::PLAIN) return dot_tile(w, rows, cols, x, sums);
    const Element element = code_element(code);
    const int bits = code_bits(code), block = code_block(code) ? code_block(code) : cols;
    const long pitch = long(cols) * bits / 8;
    const Scales scales = {code, w + whole_rows(code, rows) * pitch, scaled_rows(rows),
                           (cols + block - 1) / block};
    for (int r = 0; r < rows; ++r) {
      float sum = 0;
      for (int c = warp_thread(); c < cols; c += WAVE)
        sum += (coded_value(element, code_at(element, w + r * pitch, c)) -
                scales.zero(r, c / block)) *
               scales.of(r, c / block) * x[c];
      const float total = warp_sum(sum);
      if (warp_thread() == 0) sums[r] = total;
    }
  }

  // Adds to a word that the block's threads share in LDS; what it held.
  __device__ static u32 count(u32* at, u32 by) {
    return __hip_atomic_fetch_add((__attribute__((address_space(3))) u32*)at, by, __ATOMIC_RELAXED,
                                  __HIP_MEMORY_SCOPE_WORKGROUP);
  }
  // What this thread wrote is where its readers look, or a fence will bring it there.
  __device__ static void confirm(const float*, int) { settle(); }

  // polls slow the streams of other CUs
  __device__ static void relax(u32) { __builtin_amdgcn_s_sleep(1); }
  __device__ static void appended() {}
  __device__ static void scanned() {}
  __device__ static void chosen(u32*) {}
  __device__ static void published() {}

  template <class Stall>
  __device__ bool gather(const Source& source, int lo, int hi, float* out, Stall stall, int = 0) {
    return gather_each(source, lo, hi, [&](int i, float sum) { out[i - lo] = sum; }, stall);
  }
  // put(element, sum) of elements lo..hi-1; a thread's next ones are under way together.
  template <class Put, class Stall>
  __device__ bool gather_each(const Source& source, int lo, int hi, Put put, Stall stall) {
    constexpr int AT_ONCE = 4;
    bool good = true;
    for (int i = lo + thread(); i < hi && good; i += AT_ONCE * THREADS) {
      float sum[AT_ONCE] = {};
      for (int p = 0; p < source.parts && good; ++p) {
        const float* const from = source.at(p);
        float got[AT_ONCE];
        for (;;) {
          int late = -1;
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) {
            const int at = i + j * THREADS;
            got[j] = load_shared(from + (at < hi ? at : i), source.pushed);
          }
#pragma unroll
          for (int j = AT_ONCE - 1; j >= 0; --j)
            if (bits_as<u32>(got[j]) == SENTINEL) late = i + j * THREADS;
          if (late < 0 || !source.polled) break;
          good = stall(source.part(p), late);
          if (!good) break;
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j) sum[j] = p ? sum[j] + got[j] : got[j];
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (i + j * THREADS < hi) put(i + j * THREADS, sum[j]);
    }
    return good;
  }

  __device__ void fill(float* at, int count, u32 bits) {
    // peers may write there next
    for (int i = thread(); i < count; i += THREADS)
      store_shared(at + i, bits_as<float>(bits), true);
  }
};

}  // namespace twin
