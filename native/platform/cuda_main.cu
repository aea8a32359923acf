// The device's entry: divides a block's shared memory and its warps, then runs the monokernel.
#include "../monokernel/kernel.cuh"

namespace twin {

__host__ __device__ constexpr int up16(int bytes) { return (bytes + 15) / 16 * 16; }

// Shared memory of a block, in bytes from its start. The ring comes first: bulk copies want 128-byte alignment.
struct Shared {
  static constexpr int input = Plan::ring_slots * Plan::slot_bytes;
  static constexpr int scratch = input + (Plan::probe ? up16(4 * Plan::input_floats) : 0);  // models keep vectors in registers
  static constexpr int residual = scratch + up16(4 * Plan::scratch_floats);
  static constexpr int step = residual + (Plan::hidden ? Core::Residual::BYTES : 0);
  static constexpr int barriers = Plan::prompt_chunk > 1 && ChunkShared::bytes > step ? ChunkShared::bytes : step;
  static constexpr int signals = barriers + 2 * 8 * int(Ring::BARRIERS);
  static constexpr int progress = signals + up16(int(sizeof(Signals)));
  static constexpr int bytes = progress + up16(int(sizeof(Progress)));
};
static_assert(Shared::bytes <= SHARED_BYTES, "the plan's ring and vectors exceed a block's shared memory: use fewer ring slots");
static_assert(Shared::bytes == TWIN_SHARED_BYTES, "the driver asks for what the kernel divides");
static_assert(sizeof(Launch) == 16 + MAX_RANKS * sizeof(RankMemory) + sizeof(Request), "the launch is shared with Python");
static_assert(Plan::window_slots <= Plan::ring_slots, "the window lies inside the ring");
static_assert(3 * CONSUMERS <= Plan::scratch_floats || !Plan::full, "the sampler's sums of all threads fit the scratch");

// Does this launch begin with the prompt's passes? With one kernel per stage they are a launch of their own, of no stages.
__device__ __forceinline__ bool reads_chunks(const Request& wanted, int last) {
  return Plan::prompt_chunk > 1 && wanted.read > 0 && (Plan::resident || last == 0);
}

__device__ Progress* kept_progress(const RankMemory& memory, int block) {
  return reinterpret_cast<Progress*>(memory.state + u64(block) * Plan::state_floats + (Plan::state_floats - 32));
}

// Copies a block's residual and progress between shared memory and what outlives a kernel.
__device__ void keep(Block& b, bool store) {
  float* kept = b.memory.state + u64(b.block) * Plan::state_floats;
  int* words = reinterpret_cast<int*>(&b.at);
  Core::Hidden residual = Plan::hidden ? b.residual.open(b.core) : Core::Hidden::in(nullptr, 0);
  if (Plan::hidden) residual.each(b.core, [&](int i, float& value) { (store ? kept[i] : value) = store ? value : kept[i]; });
  if (Plan::hidden) b.residual.close(b.core, residual);
  TWIN_EACH(i, int(sizeof(Progress) / 4)) {
    int* at = reinterpret_cast<int*>(kept_progress(b.memory, b.block)) + i;
    (store ? *at : words[i]) = store ? words[i] : *at;
  }
  b.core.barrier();
}

// The prompt has been read, without the ring. False: the run has ended.
__device__ bool passes_over(Signals& signals) {
  while (!barrier_passed(&signals.passed, 0))
    if (barrier_seen(&signals.left, 0)) return false;
  return true;
}

__device__ void load_weights(const Launch& launch, const RankMemory& memory, int block, Loader& loader, Signals& signals, int step, int first,
                             int last) {
  const Plan& plan = launch.plan;
  const u8* stream = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
  if (reads_chunks(launch.request, last) && !passes_over(signals)) return;
  if (Plan::resident) step = 0;
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

// The keeper warp: what a stage owes but no other block waits for. It makes the resets once the stage's reads have
// succeeded, while the consumers compute; hands out tokens; and looks whether the host wants the run to end.
//
// A reset is done when its words, read back past the first-level cache, have been seen: they lie then where all blocks
// look. A fence would say the same, but waits for the bulk copies under way and empties the first-level cache.
__device__ void keep_house(const Launch& launch, const RankMemory& memory, int rank, int block, Signals& signals, const Progress& progress,
                           int first, int last) {
  const Plan& plan = launch.plan;
  const int lane = int(threadIdx.x % 32);
  const bool tells = Plan::resident && lane == 0 && delivers(plan, rank, block);
  int step = 0;
  int& delivered = signals.delivered;  // steps whose token has been handed out
  u32 stages = 0;
  Words* const resets = signals.resets;
  do {
    for (int index = first; index < last; ++index, ++stages) {
      const Stage& stage = plan.stages_at(index);
      int spans = 0;  // words to reset; looked up while the consumers wait
      __syncwarp();
      reset(plan, memory, block, Plan::resident ? step : 1, stage, [&](float* at, int count) {
        if (lane == 0 && spans < MOST_RESETS) resets[spans] = {at, count};
        ++spans;
      });
      __syncwarp();
      while (!barrier_passed(&signals.go, stages & 1u)) {
        if (!barrier_seen(&signals.left, 0)) continue;
        if (tells && progress.step > delivered) deliver(launch, progress.step - 1, progress.chosen);
        return;
      }
      if (!Plan::resident && stages == 0) step = progress.step;
      auto erase = [&](float* at, int count) {
        for (int i = lane; i < count; i += 32) store_shared(at + i, bits_as<float>(SENTINEL));
      };
      auto confirm = [&](float* at, int count) {
        constexpr int AT_ONCE = 4;
        for (int i = lane; i < count; i += 32 * AT_ONCE) {
          float seen[AT_ONCE];
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) seen[j] = load_shared(at + (i + 32 * j < count ? i + 32 * j : i));
#pragma unroll
          for (int j = 0; j < AT_ONCE; ++j) asm volatile("" ::"f"(seen[j]) : "memory");
        }
      };
      if (Plan::resident && spans <= MOST_RESETS) {
        for (int i = 0; i < spans; ++i) erase(resets[i].at, resets[i].count);
        for (int i = 0; i < spans; ++i) confirm(resets[i].at, resets[i].count);
      } else {
        reset(plan, memory, block, step, stage, erase);
        reset(plan, memory, block, step, stage, confirm);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(&signals.done);
      if (!Plan::resident || index > 0) continue;
      if (lane == 0 && load_host(launch.request.abort)) *const_cast<volatile u16*>(&signals.told) = 1;
      if (tells && step > delivered) {
        int done = step - 1;
        asm volatile("" : "+r"(done));  // addresses are computed here, not carried from step to step in scarce registers
        deliver(launch, done, progress.chosen);
        delivered = step;
      }
    }
    ++step;
  } while (Plan::resident);
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
  Signals& signals = *reinterpret_cast<Signals*>(shared + Shared::signals);
  Progress& progress = *reinterpret_cast<Progress*>(shared + Shared::progress);
  const Ring ring = {shared, full, full + Ring::BARRIERS, 0};
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < Ring::BARRIERS; ++i) {
      barrier_init(ring.full + i, 1);
      barrier_init(ring.empty + i, CONSUMER_WARPS);
    }
    signals = {};
    barrier_init(&signals.go, CONSUMER_WARPS);
    barrier_init(&signals.done, 1);
    barrier_init(&signals.left, 1);
    barrier_init(&signals.passed, CONSUMERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    progress = {};
  }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
    if (threadIdx.x / 32 == KEEPER_WARP) keep_house(launch, memory, rank, block, signals, progress, first, last);
    if (threadIdx.x == 32 * LOADER_WARP) {
      Loader loader = {ring, &signals.left};
      load_weights(launch, memory, block, loader, signals, step, first, last);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Block b = {{ring, signals, int(threadIdx.x), 0},
               launch,
               launch.plan,
               launch.control,
               memory,
               rank,
               block,
               progress,
               {reinterpret_cast<float4*>(shared + Shared::residual)},
               reinterpret_cast<float*>(shared + Shared::input),
               reinterpret_cast<float*>(shared + Shared::scratch),
               0};
    const bool reporter = rank == 0 && block == 0 && threadIdx.x == 0;
    if (Plan::resident) {
      if (reporter) store_host(&launch.control->started, now_ns());
      run(b);
    } else if (last == 0) {
      if (reporter) store_host(&launch.control->started, now_ns());
      if (!read_prompt(b) && threadIdx.x == 0) kept_progress(memory, block)->stop = 1;  // launches that are already queued do nothing
    } else {
      keep(b, false);
      if (reporter && first == 0 && b.at.step == 0 && launch.request.read == 0) store_host(&launch.control->started, now_ns());
      bool going = !b.at.stop;  // after a stop token, launches that are already queued do nothing
      for (int index = first; index < last && going; ++index) going = run_stage(b, index);
      if (going && last == Plan::stage_count) end_step(b);
      keep(b, true);
    }
    b.core.forget();  // else the comparison below is kept in a register from the kernel's start
    b.core.barrier();
    if (b.core.thread() == 0) barrier_arrive(&signals.left);
  }
}
