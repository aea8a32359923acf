// The device's entry: divides a block's shared memory and its warps, then runs the monokernel.
#include "../monokernel/kernel.cuh"

namespace twin {

__host__ __device__ constexpr int up16(int bytes) { return (bytes + 15) / 16 * 16; }

// Shared memory of a block, in bytes from its start. The ring comes first: bulk copies want 128-byte alignment.
struct Shared {
  static constexpr int residual = Plan::ring_slots * Plan::slot_bytes;
  static constexpr int input = residual + up16(4 * Plan::hidden);
  static constexpr int scratch = input + up16(4 * Plan::input_floats);
  static constexpr int barriers = scratch + up16(4 * Plan::scratch_floats);
  static constexpr int meeting = barriers + 2 * 8 * int(Ring::BARRIERS);
  static constexpr int progress = meeting + 8 * CONSUMER_WARPS;
  static constexpr int left = progress + up16(int(sizeof(Progress)));
  static constexpr int bytes = left + 16;
};
static_assert(Shared::bytes <= SHARED_BYTES, "the plan's ring and vectors exceed a block's shared memory: use fewer ring slots");
static_assert(Shared::bytes == TWIN_SHARED_BYTES, "the driver asks for what the kernel divides");
static_assert(sizeof(Launch) == 16 + MAX_RANKS * sizeof(RankMemory) + sizeof(Request), "the launch is shared with Python");
static_assert(Plan::window_slots <= Plan::ring_slots, "the window lies inside the ring");
static_assert(3 * CONSUMERS <= Plan::scratch_floats || !Plan::full, "the sampler's sums of all threads fit the scratch");

__device__ Progress* kept_progress(const RankMemory& memory, int block) {
  return reinterpret_cast<Progress*>(memory.state + u64(block) * Plan::state_floats + (Plan::state_floats - 32));
}

// Copies a block's residual and progress between shared memory and what outlives a kernel.
__device__ void keep(Block& b, bool store) {
  float* kept = b.memory.state + u64(b.block) * Plan::state_floats;
  int* words = reinterpret_cast<int*>(&b.at);
  TWIN_EACH(i, Plan::hidden) (store ? kept[i] : b.residual[i]) = store ? b.residual[i] : kept[i];
  TWIN_EACH(i, int(sizeof(Progress) / 4)) {
    int* at = reinterpret_cast<int*>(kept_progress(b.memory, b.block)) + i;
    (store ? *at : words[i]) = store ? words[i] : *at;
  }
  b.core.barrier();
}

__device__ void load_weights(const Launch& launch, const RankMemory& memory, int block, Loader& loader, int step, int first, int last) {
  const Plan& plan = launch.plan;
  const u8* stream = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
  if (!Plan::resident) {
    if (step < 0) step = kept_progress(memory, block)->step;
    const u8* from = stream + u64(plan.starts_at(first * Plan::blocks + block).units) * UNIT_BYTES;
    stream_stages(plan, block, first, last, head_needed(launch.request, step), [&](int bytes) {
      const bool more = loader.fill(from, bytes);
      from += bytes;
      return more;
    });
  }
  for (bool more = Plan::resident; more && step < launch.request.steps; ++step) {
    const u8* from = stream;
    more = stream_stages(plan, block, 0, Plan::stage_count, head_needed(launch.request, step), [&](int bytes) {
      const bool filled = loader.fill(from, bytes);
      from += bytes;
      return filled;
    });
  }
  loader.drain();
}

}  // namespace twin

// One block per SM and rank-block of this GPU. Resident: the whole generation. Else: stages first..last-1 of one step;
// step -1 is the one that the block has reached, so that one graph serves all steps.
extern "C" __global__ void __launch_bounds__(twin::THREADS, 1)
    twin_kernel(const __grid_constant__ twin::Launch launch, int first_rank, int step, int first, int last) {
  using namespace twin;
  extern __shared__ __align__(128) u8 shared[];
  const int rank = first_rank + int(blockIdx.x) / Plan::blocks, block = int(blockIdx.x) % Plan::blocks;
  const RankMemory& memory = launch.ranks[rank];
  u64* full = reinterpret_cast<u64*>(shared + Shared::barriers);
  Progress* progress = reinterpret_cast<Progress*>(shared + Shared::progress);
  int* left = reinterpret_cast<int*>(shared + Shared::left);  // the consumers are done
  const Ring ring = {shared, full, full + Ring::BARRIERS, 0, threadIdx.x / 32};
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < Ring::BARRIERS; ++i) {
      barrier_init(ring.full + i, 1);
      barrier_init(ring.empty + i, 1);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    *progress = {};
    *left = 0;
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    Loader loader = {ring, left};
    if (threadIdx.x == CONSUMERS) load_weights(launch, memory, block, loader, step, first, last);
    return;
  }
  Block b = {{ring, reinterpret_cast<u64*>(shared + Shared::meeting)},
             launch,
             launch.plan,
             launch.control,
             memory,
             rank,
             block,
             *progress,
             reinterpret_cast<float*>(shared + Shared::residual),
             reinterpret_cast<float*>(shared + Shared::input),
             reinterpret_cast<float*>(shared + Shared::scratch)};
  const bool reporter = rank == 0 && block == 0 && threadIdx.x == 0;
  if (Plan::resident) {
    if (reporter) store_host(&launch.control->started, now_ns());
    run(b);
  } else {
    keep(b, false);
    if (reporter && first == 0 && b.at.step == 0) store_host(&launch.control->started, now_ns());
    bool going = !b.at.stop;  // after a stop token, launches that are already queued do nothing
    for (int index = first; index < last && going; ++index) going = run_stage(b, index);
    if (going && last == Plan::stage_count) end_step(b);
    keep(b, true);
  }
  b.core.barrier();
  if (threadIdx.x == 0) *reinterpret_cast<volatile int*>(left) = 1;
}
