// The device's entry: divides a block's local data share, notes the die (XCD) on which each block
// runs, numbers the blocks, then runs the monokernel. Resident execution only.
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
                  4 * ((INPUT_FLOATS + 3) / 4 * 4 + Plan::scratch_floats) + TWIN_STATUS_BYTES,
              "STATUS_BYTES in twin/schedule/local.py are fewer");
static_assert(THREADS == TWIN_THREADS, "the driver launches as many threads as a block has");

// ---- which of the GPU's blocks it is ------------------------------------------------------------

// Nobody promises how blocks are dealt to dies, so each tells all others where it is. `reported`
// [blocks of the GPU] holds -1 where nobody has: a word that is there is its own flag. A block's
// number is how many come before it, by die and then as the hardware counts them, so no two have
// the same and neighbours share a die. -1: some block did not say where it is.
constexpr bool BY_DIE = TWIN_BY_DIE;
constexpr int GPU_BLOCKS = Plan::blocks * Plan::ranks_per_gpu;
static_assert(!BY_DIE || GPU_BLOCKS <= THREADS, "a thread looks at one word of them");

__device__ __forceinline__ int numbered(const Launch& launch, int rank, int* reported, u64* meeting) {
  constexpr int LOST = 1 << 16;
  const int me = block_index(), other = thread_index();
  const int here = die();
  if (other == 0) store_word(reported + me, here, false);
  int counted = 0;
  if (other < GPU_BLOCKS) {
    Patience patience;
    const int at_start = 0;
    int there = load_word(reported + other, false);
    while (there < 0 && counted == 0) {
      ++patience.polls;
      Core::relax(patience.polls);
      const auto what = [&] {
        return Waiting{0, facts::START_BARRIER, rank / Plan::ranks_per_gpu, other};
      };
      if (!may_wait(launch, rank, 0, at_start, patience, what)) counted = LOST;
      there = load_word(reported + other, false);
    }
    if (counted == 0) counted = there < here || (there == here && other < me);
  }
  counted = Core::warp_sum(counted);
  if (other % WAVE == 0) meeting[wave_index()] = u64(counted);
  __syncthreads();
  int all = 0;
  for (int w = 0; w < WAVES; ++w) all += int(meeting[w]);
  return all < LOST ? TWIN_SAME(all) : -1;
}

}  // namespace twin

extern "C" __global__ void __launch_bounds__(twin::THREADS)
    twin_kernel(const twin::Launch, int first_rank, int* dies, int* reported) {
  using namespace twin;
  // Where it lies among the arguments: named, it would be copied into each thread's scratch memory,
  // to be indexed by rank.
  const Launch& launch = *(const Launch*)__builtin_amdgcn_kernarg_segment_ptr();
  static __shared__ Shared shared;
  int number = block_index();
  if constexpr (BY_DIE) {
    number = numbered(launch, first_rank, reported, shared.meeting);
    if (number < 0) return;
  }
  const int rank = first_rank + number / Plan::blocks, block = number % Plan::blocks;
  const RankMemory& memory = launch.ranks[rank];
  const u8* stream = memory.stream + u64(launch.plan.streams_at(block).page) * PAGE_BYTES;
  if (thread_index() < STEP) shared.nothing[thread_index()] = 0;
  if (thread_index() == 0) {
    shared.progress = {};
    if (dies) dies[number] = die();
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
