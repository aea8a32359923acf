// The few names of HIP that the kernel needs: no ROCm header is installed where this is compiled.
#pragma once

#define __device__ __attribute__((device))
#define __host__ __attribute__((host))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))

__device__ inline void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
__device__ inline int thread_index() { return int(__builtin_amdgcn_workitem_id_x()); }
// The same in all lanes, which the compiler then knows.
__device__ inline int wave_index() { return __builtin_amdgcn_readfirstlane(thread_index() / 64); }
__device__ inline int block_index() { return int(__builtin_amdgcn_workgroup_id_x()); }

// The number of this GPU's die (XCD), register 20 (XCC_ID), 4 bits from 0 on.
__device__ inline int die() { return int(__builtin_amdgcn_s_getreg(20 | 0 << 6 | (4 - 1) << 11)); }

// The value of the thread `mask` away (exclusive or), within a wave of 64.
__device__ inline int thread_xor(int value, int mask) {
  const int thread = int(__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)));
  return __builtin_amdgcn_ds_bpermute((thread ^ mask) << 2, value);
}
