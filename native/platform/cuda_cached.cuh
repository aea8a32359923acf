// What a thread has of cached keys and values where no tensor cores look at them.
#pragma once

namespace twin {

// A thread's part of a cached key or value. THREADS threads share a position.
template <class S>
struct CachedPiece {
  static constexpr int HEAD_DIM = S::HEAD_DIM;
  static constexpr int THREADS = HEAD_DIM <= facts::NARROW_HEAD   ? 8
                                 : HEAD_DIM <= facts::MIDDLE_HEAD ? 16
                                                                  : 32;
  static constexpr int SIZE = (HEAD_DIM + THREADS - 1) / THREADS;
  static constexpr int BYTES = SIZE * type_bytes(KV);
  static constexpr bool WIDE = HEAD_DIM % THREADS == 0 && BYTES % 4 == 0;
  static constexpr int WORDS = WIDE ? BYTES / 4 : SIZE;

  u32 word[WORDS];

  // From the cache in memory; it leaves the first-level cache to the plan's tables.
  template <class Core>
  __device__ __forceinline__ void load(const Core& core, const u8* row) {
    const u8* at = row + core.warp_thread() % THREADS * BYTES;
    if constexpr (!WIDE) {
      load_near(core, row);
    } else if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3])
                     : "l"(at + 4 * i)
                     : "memory");
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 2)
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                     : "=r"(word[i]), "=r"(word[i + 1])
                     : "l"(at + 4 * i)
                     : "memory");
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i)
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];"
                     : "=r"(word[i])
                     : "l"(at + 4 * i)
                     : "memory");
    }
  }
  // From the chip, where rows begin at multiples of 16 bytes.
  template <class Core>
  __device__ __forceinline__ void load_near(const Core& core, const u8* row) {
    const int thread = core.warp_thread() % THREADS;
    const u8* at = row + thread * BYTES;
    if constexpr (!WIDE) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        const int from = thread * SIZE + i;
        word[i] =
            bits_as<u32>(from < HEAD_DIM ? load_element<KV>(row + from * type_bytes(KV)) : 0.0f);
      }
    } else if constexpr (BYTES % 16 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 four = *reinterpret_cast<const uint4*>(at + 4 * i);
        word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
      }
    } else if constexpr (BYTES % 8 == 0) {
#pragma unroll
      for (int i = 0; i < WORDS; i += 2) {
        const uint2 two = *reinterpret_cast<const uint2*>(at + 4 * i);
        word[i] = two.x, word[i + 1] = two.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) word[i] = *reinterpret_cast<const u32*>(at + 4 * i);
    }
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) word[i] = 0;
  }
  __device__ __forceinline__ void unpack(float (&out)[SIZE]) const {
#pragma unroll
    for (int d = 0; d < SIZE; ++d) {
      if constexpr (!WIDE || KV == Type::FP32) {
        out[d] = bits_as<float>(word[d]);
      } else if constexpr (KV == Type::FP8) {
        float low, high;
        const u32 four = word[d / 4];
        twin::unpack<Type::FP16>(d & 2 ? halves_of_e4m3<true>(four) : halves_of_e4m3<false>(four),
                                 low, high);
        out[d] = d % 2 ? high : low;
      } else {
        float low, high;
        twin::unpack<KV>(word[d / 2], low, high);
        out[d] = d % 2 ? high : low;
      }
    }
  }
};

}  // namespace twin
