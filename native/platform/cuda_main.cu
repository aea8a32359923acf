// The device's entries: divide a block's shared memory and its warps, then run the monokernel's
// steps, or, with TWIN_PASSES, a prompt's passes, or, with TWIN_ROUNDS, the passes that verify
// drafts. They are compiled separately: in one kernel the passes' registers are spilled by steps,
// which took up to 9 % longer.
#include "../monokernel/kernel.cuh"
#include "../monokernel/start.cuh"

namespace twin {

// Shared memory of a block, in bytes from its start. The ring comes first: bulk copies want
// 128-byte alignment.
struct Shared {
  static constexpr int input = Plan::ring_slots * Plan::slot_bytes;
  static constexpr int scratch = Core::SCRATCH;
  static constexpr int step = scratch + up16(4 * Plan::scratch_floats);
  static constexpr int barriers =
      Plan::prompt_chunk > 1 && ChunkShared::bytes > step ? ChunkShared::bytes : step;
  static constexpr int signals = barriers + 2 * facts::BARRIER_BYTES * int(Ring::BARRIERS);
  static constexpr int progress = signals + up16(int(sizeof(Signals)));
  static constexpr int bytes = progress + up16(int(sizeof(Progress)));
};
static_assert(Shared::bytes <= SHARED_BYTES,
              "the plan's ring and vectors exceed a block's shared memory: use fewer ring slots");
// a ring of fewer slots has fewer barriers
static_assert(STREAMED_ROUNDS ? Shared::bytes <= TWIN_SHARED_BYTES
                              : Shared::bytes == TWIN_SHARED_BYTES,
              "the driver asks for what the kernel divides");
static_assert(Ring::STEP == facts::BARRIER_BYTES,
              "twin/schedule/memory.py counts the bytes of the ring's barriers");
static_assert(sizeof(Launch) == 16 + MAX_RANKS * sizeof(RankMemory) + sizeof(Request),
              "the launch is shared with Python");
static_assert(Plan::window_slots <= Plan::ring_slots, "the window lies inside the ring");
static_assert(2 * CONSUMER_WARPS <= facts::MEETING_FLOATS, "a number of each warp of the sampler");

#if defined(TWIN_PASSES) || defined(TWIN_ROUNDS)
constexpr bool PASSES = true;
#else
constexpr bool PASSES = false;
#endif
#ifdef TWIN_ROUNDS
constexpr bool ROUNDS = true;
#else
constexpr bool ROUNDS = false;
#endif

// Is there a launch of passes before the first of steps?
__device__ __forceinline__ bool has_passes(const Request& wanted) {
  return Plan::prompt_chunk > 1 && wanted.read > wanted.kept;
}

__device__ Progress* kept_progress(const RankMemory& memory, int block) {
  constexpr int AT = Plan::state_floats - facts::STATE_EXTRA;  // behind the residual
  static_assert(sizeof(Progress) <= 4 * facts::STATE_EXTRA,
                "the progress fits behind a block's residual");
  return reinterpret_cast<Progress*>(memory.state + u64(block) * Plan::state_floats + AT);
}

// One word to what outlives a kernel, or from there.
template <class T>
__device__ __forceinline__ void move(T& chip, T& kept, bool store) {
  if (store) {
    kept = chip;
  } else {
    chip = kept;
  }
}

// Copies a block's residual and progress between the chip and what outlives a kernel.
__device__ void keep(Block& b, bool store) {
  float* kept = b.memory.state + u64(b.block) * Plan::state_floats;
  int* words = reinterpret_cast<int*>(&b.at);
  Core::Hidden residual = Plan::hidden ? b.residual.open(b.core) : Core::Hidden::in(nullptr, 0);
  if (Plan::hidden)
    residual.each(b.core, [&](int i, float& value) { move(value, kept[i], store); });
  if (Plan::hidden) b.residual.close(b.core, residual);
  TWIN_EACH(i, int(sizeof(Progress) / 4)) {
    int* kept_words = reinterpret_cast<int*>(kept_progress(b.memory, b.block));
    move(words[i], kept_words[i], store);
  }
  b.core.barrier();
}

}  // namespace twin

#include "cuda_scheduler.cuh"
#include "cuda_loader.cuh"
#include "cuda_handed.cuh"

namespace twin {

// By one thread, before the others go on.
__device__ __forceinline__ void begin_block(const Ring& ring, Signals& signals,
                                            Progress& progress) {
  for (u32 i = 0; i < Ring::BARRIERS; ++i) {
    barrier_init(ring.full_of(i), 1);
    barrier_init(ring.empty_of(i), CONSUMER_WARPS);
  }
  signals = {};
  barrier_init(shared_address(&signals.go), CONSUMER_WARPS);
  barrier_init(shared_address(&signals.done), 1);
  barrier_init(shared_address(&signals.left), 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  progress = {};
}

// The start of several GPUs, by a warp that has nothing else to do: consumers have no registers
// left for it, and what they wait for is not there before all GPUs run.
__device__ __forceinline__ void start_together(const Launch& launch, const RankMemory& memory,
                                               int rank, int block, int first) {
  if (rank % Plan::ranks_per_gpu || block) return;
  const bool begins = ROUNDS ? !has_passes(launch.request) : PASSES || (first == 0 && !has_passes(launch.request) &&
                                 (Plan::resident || kept_progress(memory, block)->step == 0));
  if (!begins) return;
  meet_gpus(launch, launch.plan, rank);
  store_host(&launch.control->started, now_ns());
}

// What the consumers do in a launch: the prompt's passes; all steps where the plan is resident; or
// stages first..last-1.
__device__ __forceinline__ void consume(Block& b, int first, int last) {
#ifdef TWIN_NAPS
  b.core.naps = b.rank / Plan::ranks_per_gpu == TWIN_NAPS;
#endif
  const Launch& launch = b.launch;
  const bool reporter = !PEERS && b.rank == 0 && b.block == 0 && threadIdx.x == 0;
  if constexpr (ROUNDS) {
    if (reporter && !has_passes(launch.request)) store_host(&launch.control->started, now_ns());
    if constexpr (HANDED_ON) run_handed_rounds(b);
    else run_rounds(b);
  } else if constexpr (PASSES) {
    if (reporter) store_host(&launch.control->started, now_ns());
    // launches that are already queued do nothing
    if (!read_prompt(b) && !Plan::resident && threadIdx.x == 0)
      kept_progress(b.memory, b.block)->stop = 1;
  } else if constexpr (Plan::resident) {
    if (!has_passes(launch.request)) {
      if (reporter) store_host(&launch.control->started, now_ns());
    } else if (Experts::ANY ? b.at.stop
                            : b.core.any(threadIdx.x == 0 && load_host(launch.request.abort))) {
      return;  // the passes ended early
    }
    run_steps(b);
  } else {
    keep(b, false);
    if (reporter && first == 0 && b.at.step == 0 && !has_passes(launch.request))
      store_host(&launch.control->started, now_ns());
    bool going = !b.at.stop;  // after a stop token, launches that are already queued do nothing
    for (int index = first; index < last && going; ++index) going = run_stage(b, index);
    if (going && last == Plan::stage_count) end_step(b);
    keep(b, true);
  }
}

}  // namespace twin

#if defined(TWIN_ROUNDS)
#define TWIN_ENTRY twin_rounds
#elif defined(TWIN_PASSES)
#define TWIN_ENTRY twin_passes
#else
#define TWIN_ENTRY twin_kernel
#endif

// One block per SM and rank-block of this GPU. All passes of a prompt; all rounds of drafts; or,
// resident, all steps.
// Else: stages first..last-1 of one step; step -1 is the one that the block has reached, so that
// one graph serves all steps.
extern "C" __global__ void __launch_bounds__(twin::THREADS, 1)
    TWIN_ENTRY(const __grid_constant__ twin::Launch launch, int first_rank, int step, int first,
               int last) {
  using namespace twin;
  extern __shared__ __align__(128) u8 shared[];
  Signals& signals = *reinterpret_cast<Signals*>(shared + Shared::signals);
  Progress& progress = *reinterpret_cast<Progress*>(shared + Shared::progress);
  // Each group of warps requests these itself: a value that both hold is spilled for both where the
  // side warps' few registers are full.
  const auto worker = [] {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    return number;
  };
  const auto ring_here = [&] {
    return Ring{shared_address(shared), shared_address(shared + Shared::barriers), 0};
  };
  if (threadIdx.x == 0) begin_block(ring_here(), signals, progress);
  if constexpr (Experts::ANY)
    if (threadIdx.x == 0) {
      no_choice<LOADERS>(launch.plan, reinterpret_cast<float*>(shared + Shared::scratch));
      // did the passes end early? Read by consumers, it cost registers: Mixtral's spilled 72 bytes
      if (!PASSES && has_passes(launch.request)) progress.stop = load_host(launch.request.abort);
    }
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SIDE_REGISTERS));
    const int me = worker(), rank = first_rank + me / Plan::blocks, block = me % Plan::blocks;
    const RankMemory& memory = launch.ranks[rank];
    if (!PASSES && threadIdx.x / 32 == SCHEDULER_WARP)
      keep_house(launch, memory, rank, block, signals, progress, first, last);
    if constexpr (HANDED_ON)
      if (threadIdx.x / 32 == SCHEDULER_WARP)
        keep_rounds(launch, memory, block, signals, progress,
                    *reinterpret_cast<HandedNote*>(shared + HandedNote::AT));
    if ((!PASSES || STREAMED_ROUNDS) && threadIdx.x >= 32 * LOADER_WARP &&
        threadIdx.x < 32 * (LOADER_WARP + LOADERS) && threadIdx.x % 32 == 0) {
      const Ring ring = ring_here();
      Loader loader(ring, shared_address(&signals.left), threadIdx.x / 32 - LOADER_WARP);
      if constexpr (STREAMED_ROUNDS) load_rounds(launch, memory, block, loader);
      else load_weights(launch, memory, block, loader, signals, step, first, last);
    }
    if constexpr (PEERS)
      if (threadIdx.x == 32 * (LOADER_WARP + LOADERS))
        start_together(launch, memory, rank, block, first);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    const int me = worker(), rank = first_rank + me / Plan::blocks, block = me % Plan::blocks;
    const RankMemory& memory = launch.ranks[rank];
    Block b = {{ring_here(), signals, shared_address(&signals.go), int(threadIdx.x), 0},
               launch,
               launch.plan,
               launch.control,
               memory,
               rank,
               block,
               progress,
               {},
               reinterpret_cast<float*>(shared + Shared::input),
               reinterpret_cast<float*>(shared + Shared::scratch),
               0};
    consume(b, first, last);
    b.core.forget();  // else the comparison below is kept in a register from the kernel's start
    b.core.barrier();
    if (b.core.thread() == 0) barrier_arrive(shared_address(&signals.left));
  }
}
