// The device's entry: divides a block's local data share, notes the die (XCD) on which each block
// runs, then runs the monokernel. Resident execution only.
#include "../monokernel/kernel.cuh"

namespace twin {

struct Shared {
  alignas(16) float input[(INPUT_FLOATS + 3) / 4 * 4];
  alignas(16) float scratch[Plan::scratch_floats];
  u64 meeting[WAVES];
  alignas(16) float nothing[STEP];
  alignas(16) u8 known[WAVES][sizeof(Known)];
  Progress progress;
};
static_assert(
    sizeof(Shared) <= SHARED_BYTES,
    "the plan's vectors exceed a compute unit's local data share: use more blocks or ranks");
static_assert(sizeof(Shared) <=
                  4 * ((INPUT_FLOATS + 3) / 4 * 4 + Plan::scratch_floats) + TWIN_BESIDE_BYTES,
              "BESIDE_BYTES in twin/engine/hip_build.py are fewer");
static_assert(THREADS == TWIN_THREADS, "the driver launches as many threads as a block has");

}  // namespace twin

extern "C" __global__ void __launch_bounds__(twin::THREADS)
    twin_kernel(const twin::Launch, int first_rank, int* dies) {
  using namespace twin;
  // Where it lies among the arguments: named, it would be copied into each thread's scratch memory,
  // to be indexed by rank.
  const Launch& launch = *(const Launch*)__builtin_amdgcn_kernarg_segment_ptr();
  static __shared__ Shared shared;
  const int rank = first_rank + block_index() / Plan::blocks, block = block_index() % Plan::blocks;
  const RankMemory& memory = launch.ranks[rank];
  const u8* stream = memory.stream + u64(launch.plan.streams_at(block).page) * PAGE_BYTES;
  if (thread_index() < STEP) shared.nothing[thread_index()] = 0;
  if (thread_index() == 0) {
    shared.progress = {};
    if (dies) dies[block_index()] = die();
  }
  __syncthreads();
  Block b = {{{stream, stream, 0, u32(wave_index())},
              shared.meeting,
              shared.nothing,
              reinterpret_cast<Known*>(shared.known[wave_index()]),
              thread_index(),
              {}},
             launch,
             launch.plan,
             launch.control,
             memory,
             rank,
             block,
             shared.progress,
             {},
             shared.input,
             shared.scratch,
             0};
  if (rank == 0 && block == 0 && thread_index() == 0)
    store_host(&launch.control->started, now_ns());
  const Request& wanted = launch.request;
  if constexpr (!CODED)
    b.core.begin_strips(launch.plan, {stream, memory.stream, block, wave_index(),
                                      wanted.every_position ? 0 : wanted.forced - 1});
  run(b);
}
