// For platforms on which it makes no difference where a word's readers run: they write and read all
// exchanged words alike. cuda.cuh and hip.h have two scopes instead, one GPU and all GPUs.
#pragma once

namespace twin {

__device__ __forceinline__ void store_peer(float* at, float value) { store_shared(at, value); }
__device__ __forceinline__ void arrive(u32* counter, bool) { arrive(counter); }
__device__ __forceinline__ void publish_fence(bool) { publish_fence(); }
__device__ __forceinline__ u32 arrivals(const u32* counter, bool) { return arrivals(counter); }
__device__ __forceinline__ void arrived(bool) {}

}  // namespace twin
