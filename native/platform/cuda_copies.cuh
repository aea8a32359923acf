// What prompt passes and scans of the cache ask of the machine: tensor-core products and
// asynchronous copies. tests/native/chunk.cpp and scan.cpp stand in for it on a CPU.
#pragma once

namespace twin {

// d += a * b for 16 tokens, 8 weight rows and 16 columns. Not volatile: the loads of later columns
// may go first.
template <Type T = WEIGHT>
__device__ __forceinline__ void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                             u32 b1) {
  if constexpr (T == Type::BF16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit values, each row at the address of one thread: the fragment of a 16
// x 16 matrix.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}
__device__ __forceinline__ u32 transposed(u32 fragment) {
  u32 to;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(fragment));
  return to;
}
template <Type T>
__device__ __forceinline__ u32 packed(float first, float second) {
  u32 word;
  if constexpr (T == Type::BF16) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  }
  return word;
}

// 16 bytes on their way to shared memory, or zeros.
__device__ __forceinline__ void copy_weights(u32 to, const u8* from, bool there, u64 once) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to),
      "l"(from), "r"(there ? 16 : 0), "l"(once)
      : "memory");
}
__device__ __forceinline__ void copy_activations(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void copy_word(u32 to, const u8* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

// A thread's copies since the last time are one group. All but the last LEFT groups have arrived,
// for this thread.
__device__ __forceinline__ void copies_sent() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT>
__device__ __forceinline__ void copies_arrived() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// As many groups as are known when the kernel runs.
__device__ __forceinline__ void copies_arrived(int left) {
  switch (left) {
    case 1: return copies_arrived<1>();
    case 2: return copies_arrived<2>();
    case 3: return copies_arrived<3>();
    case 4: return copies_arrived<4>();
    case 5: return copies_arrived<5>();
    case 6: return copies_arrived<6>();
    case 7: return copies_arrived<7>();
    case 8: return copies_arrived<8>();
    case 9: return copies_arrived<9>();
    case 10: return copies_arrived<10>();
    case 11: return copies_arrived<11>();
    case 12: return copies_arrived<12>();
    case 13: return copies_arrived<13>();
    case 14: return copies_arrived<14>();
    case 15: return copies_arrived<15>();
    case 16: return copies_arrived<16>();
    case 17: return copies_arrived<17>();
    case 18: return copies_arrived<18>();
    case 19: return copies_arrived<19>();
    case 20: return copies_arrived<20>();
    case 21: return copies_arrived<21>();
    case 22: return copies_arrived<22>();
    case 23: return copies_arrived<23>();
    default: return copies_arrived<0>();
  }
}

// Towards the second-level cache; 16-byte units.
__device__ __forceinline__ void prefetch_weights(const u8* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

}  // namespace twin
