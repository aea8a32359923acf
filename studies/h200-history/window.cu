// How long a hand-off of 2,048 floats between all blocks takes, and what the stream reaches beside
// it, against the bytes under way. nvcc -O3 -std=c++17 -arch=sm_90a window.cu -o window && ./window
#include <cstdint>
#include <cstdio>

typedef unsigned long long u64;
typedef unsigned u32;

constexpr int ELEMENTS = 2048, COPIES = 4, CONSUMERS = 256, LOADER = CONSUMERS, SHARED = 212992;

__device__ u32 address(const void* at) { return u32(__cvta_generic_to_shared(at)); }

__device__ void wait(u64* barrier, u32 parity) {
  for (u32 done = 0; !done;)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(address(barrier)), "r"(parity)
        : "memory");
}

// One thread copies `chunk` bytes after the other, `window` of them under way, until the consumers
// have finished.
__device__ void stream(u64* full, unsigned char* slots, const char* weights, u64 bytes, int chunk,
                       int window, volatile int* stop, u64* total) {
  const char* const begin = weights + u64(blockIdx.x) * bytes;
  const char* from = begin;
  u32 n = 0;
  for (; !*stop; ++n) {
    const int slot = n % window;
    if (n >= u32(window)) wait(full + slot, (n / window - 1) & 1);
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], %1; }" ::"r"(
                     address(full + slot)),
                 "r"(chunk)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(address(slots + slot * chunk)),
        "l"(from), "r"(chunk), "r"(address(full + slot))
        : "memory");
    from = from + chunk < begin + bytes ? from + chunk : begin;
  }
  for (u32 back = 1; back <= (n < u32(window) ? n : u32(window)); ++back)
    wait(full + (n - back) % window, (n - back) / window & 1);
  atomicAdd(total, u64(n) * chunk);
}

// Each block publishes its share and polls everybody's; zero is the sentinel, cleared two turns
// later.
__global__ void __launch_bounds__(CONSUMERS + 32, 1)
    chain(float* exchange, int turns, const char* weights, u64 bytes, u64* total, int chunk,
          int window) {
  extern __shared__ __align__(128) unsigned char slots[];
  __shared__ u64 full[64];
  __shared__ volatile int stop;
  const int t = threadIdx.x, share = ELEMENTS / 128;
  if (t == 0) {
    for (int i = 0; i < 64; ++i)
      asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(address(full + i)));
    stop = 0;
  }
  __syncthreads();
  if (t >= LOADER) {
    if (t == LOADER && window) stream(full, slots, weights, bytes, chunk, window, &stop, total);
    return;
  }
  float kept = 0;
  for (int turn = 0; turn < turns; ++turn) {
    float* const now = exchange + turn % COPIES * ELEMENTS;
    float* const old = exchange + (turn + 2) % COPIES * ELEMENTS;
    for (int e = blockIdx.x * share + t; t < share && e < ELEMENTS; e += gridDim.x * share) {
      asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(now + e), "f"(1.0f + 0.0f * kept)
                   : "memory");
      asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(old + e), "f"(0.0f) : "memory");
    }
    float4 v[2];
    bool there;
    do {
      there = true;
      for (int k = 0; k < 2; ++k)
        asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(v[k].x), "=f"(v[k].y), "=f"(v[k].z), "=f"(v[k].w)
                     : "l"(now + 8 * t + 4 * k)
                     : "memory");
      for (int k = 0; k < 2; ++k) there &= v[k].x != 0 && v[k].y != 0 && v[k].z != 0 && v[k].w != 0;
    } while (!there);
    kept += v[0].x + v[1].w;
    asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS));
  }
  if (t == 0) stop = 1;
  if (kept < 0) exchange[0] = kept;
}

int main() {
  float* exchange;
  char* weights;
  u64* total;
  const u64 size = 8ull << 30;
  u64 bytes = size / 132 & ~65535ull;
  cudaMalloc(&exchange, 4 * ELEMENTS * COPIES);
  cudaMalloc(&weights, size);
  cudaMallocManaged(&total, 8);
  cudaFuncSetAttribute(chain, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED);
  int chunk = 16384, turns = 1500;
  for (int window : {0, 1, 2, 3, 4, 5, 6, 8, 12}) {
    float ms = 0;
    for (int run = 0; run < 2; ++run) {  // the first warms up
      cudaMemset(exchange, 0, 4 * ELEMENTS * COPIES);
      *total = 0;
      cudaEvent_t begin, end;
      cudaEventCreate(&begin), cudaEventCreate(&end);
      void* arguments[] = {&exchange, &turns, &weights, &bytes, &total, &chunk, &window};
      cudaEventRecord(begin);
      cudaLaunchCooperativeKernel(reinterpret_cast<void*>(chain), dim3(132), dim3(CONSUMERS + 32),
                                  arguments, SHARED, 0);
      cudaEventRecord(end);
      cudaDeviceSynchronize();
      cudaEventElapsedTime(&ms, begin, end);
    }
    printf("%3d KiB under way: %6.2f us an exchange, %.2f TB/s (%s)\n", window * chunk / 1024,
           ms * 1e3 / turns, *total / (ms * 1e-3) / 1e12, cudaGetErrorString(cudaGetLastError()));
  }
}
