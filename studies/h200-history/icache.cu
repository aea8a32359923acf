// How many cycles an instruction takes in a circle of straight-line code, against the code's size:
// one warp and eight, with the other multiprocessors idle and streaming. nvcc -O3 -std=c++17
// -arch=sm_90a icache.cu -o icache && ./icache
#include <cstdio>

constexpr int THREADS = 256, INSTRUCTIONS = 1024 / 16, ROUNDS = 30, WARM_UP = 3;
constexpr size_t STREAM = size_t(1) << 30;  // bytes; the second-level cache holds a twentieth

__device__ volatile int stop;

// Eight chains: an instruction waits for none of the seven before it.
#define FMA(r) "fma.rn.f32 %" #r ", %" #r ", %8, %9;\n"
#define FMA8 FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7)
#define FMA64 FMA8 FMA8 FMA8 FMA8 FMA8 FMA8 FMA8 FMA8

// Cycles of a round of KIB kibibytes of instructions, the mean.
template <int KIB>
__device__ long long walk(float a, float* out) {
  float r[8];
  for (int i = 0; i < 8; ++i) r[i] = a + i;
  long long sum = 0;
#pragma unroll 1
  for (int round = 0; round < WARM_UP + ROUNDS; ++round) {
    const long long begin = clock64();
#pragma unroll
    for (int k = 0; k < KIB; ++k)
      asm volatile(FMA64
                   : "+f"(r[0]), "+f"(r[1]), "+f"(r[2]), "+f"(r[3]), "+f"(r[4]), "+f"(r[5]),
                     "+f"(r[6]), "+f"(r[7])
                   : "f"(a), "f"(a + 0.5f));
    if (round >= WARM_UP) sum += clock64() - begin;
  }
  for (int i = 0; i < 8; ++i) out[threadIdx.x] += r[i];
  return sum / ROUNDS;
}

// Until the first block has walked.
__device__ void stream(const float4* memory, float* out) {
  const size_t all = STREAM / sizeof(float4), step = size_t(gridDim.x) * THREADS;
  float sum = 0;
  for (size_t i = size_t(blockIdx.x) * THREADS + threadIdx.x; !stop;) {
    float4 v[8];
    for (int j = 0; j < 8; ++j) {
      v[j] = __ldcs(memory + i);
      i = i + step < all ? i + step : i + step - all;
    }
    for (int j = 0; j < 8; ++j) sum += v[j].x;
  }
  out[size_t(blockIdx.x) * THREADS + threadIdx.x] = sum;
}

template <int KIB>
__global__ void __launch_bounds__(THREADS)
    measure(int warps, bool beside, const float4* memory, float* out, long long* cycles) {
  if (blockIdx.x > 0) {
    if (beside) stream(memory, out);
  } else if (threadIdx.x < 32 * warps) {
    const long long took = walk<KIB>(1.0f + threadIdx.x * 1e-9f, out);
    if (threadIdx.x > 0) return;
    *cycles = took;
    stop = 1;
    __threadfence();
  }
}

template <int KIB>
void row(const float4* memory, float* out, long long* cycles) {
  printf("%4d KiB:", KIB);
  for (int warps : {1, 8})
    for (bool beside : {false, true}) {
      const int go = 0;
      cudaMemcpyToSymbol(stop, &go, sizeof(go));
      measure<KIB><<<132, THREADS>>>(warps, beside, memory, out, cycles);
      if (const cudaError_t error = cudaDeviceSynchronize())
        printf(" (%s)", cudaGetErrorString(error));
      printf(" %8.2f", double(*cycles) / (KIB * INSTRUCTIONS));
    }
  printf("\n");
}

template <int... KIB>
void rows(const float4* memory, float* out, long long* cycles) {
  (row<KIB>(memory, out, cycles), ...);
}

int main() {
  float4* memory;
  float* out;
  long long* cycles;
  cudaMalloc(&memory, STREAM);
  cudaMemset(memory, 0, STREAM);
  cudaMalloc(&out, 132 * THREADS * sizeof(float));
  cudaMallocManaged(&cycles, sizeof(*cycles));
  printf(
      "cycles an instruction: one warp alone, beside streams; eight warps alone, beside streams\n");
  rows<8, 16, 24, 32, 48, 64, 80, 96, 112, 120, 128, 136, 144, 160, 192, 224, 256, 320>(memory, out,
                                                                                        cycles);
}
