// The start of a run on several GPUs. Each of them is launched by itself, so the first block of
// each tells the others that it runs, and waits for their word. Later waits then mean what they
// say: a GPU that was never started is named at once, and all clocks begin together.
#pragma once

#include "handoff.cuh"

namespace twin {

// GPU `gpu` writes it in the memory of a GPU's first rank, once: a word of its own, among those
// that a counter leaves free of its line. The host clears them all before it launches any GPU, so
// no word is lost.
__device__ __forceinline__ float* runs_at(const Launch& launch, const Plan& plan, int at, int gpu) {
  static_assert(1 + MAX_RANKS <= COUNTER_STRIDE, "a line holds a counter and a word of each GPU");
  u32* line = counter_of(launch.ranks[at * plan.ranks_per_gpu], plan.prompt_counter);
  return reinterpret_cast<float*>(line + 1 + gpu);
}

constexpr u32 RUNS = 1;

// By one thread of each GPU. It waits half as long as others do, so that its report comes first.
__device__ __forceinline__ void meet_gpus(const Launch& launch, const Plan& plan, int rank) {
  const int gpus = plan.ranks / plan.ranks_per_gpu, me = rank / plan.ranks_per_gpu;
  for (int gpu = 0; gpu < gpus; ++gpu)
    store_peer(runs_at(launch, plan, gpu, me), bits_as<float>(RUNS));
  const u64 deadline = now_ns() + launch.request.watchdog_ns / 2;
  for (int gpu = 0; gpu < gpus; ++gpu) {
    const float* word = runs_at(launch, plan, me, gpu);
    while (bits_as<u32>(load_shared(word, true)) != RUNS) {
      if (load_host(launch.request.abort)) return;
      if (now_ns() > deadline)
        return report_hang(launch, rank, 0, 0, {0, facts::START_BARRIER, gpu, -1});
    }
  }
}

}  // namespace twin
