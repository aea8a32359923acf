// The device's entry: divides a block's shared memory and its warps, then runs the monokernel.
#include "../monokernel/kernel.cuh"

namespace twin {

__host__ __device__ constexpr int up16(int bytes) { return (bytes + 15) / 16 * 16; }

// Shared memory of a block, in bytes from its start. The ring comes first: bulk copies want 128-byte alignment.
struct Shared {
  static constexpr int input = Plan::ring_slots * Plan::slot_bytes;
  static constexpr int scratch = input + (Plan::probe ? up16(4 * Plan::input_floats) : 0);  // models keep vectors in registers
  static constexpr int step = scratch + up16(4 * Plan::scratch_floats);
  static constexpr int barriers = Plan::prompt_chunk > 1 && ChunkShared::bytes > step ? ChunkShared::bytes : step;
  static constexpr int signals = barriers + 2 * facts::BARRIER_BYTES * int(Ring::BARRIERS);
  static constexpr int progress = signals + up16(int(sizeof(Signals)));
  static constexpr int bytes = progress + up16(int(sizeof(Progress)));
};
static_assert(Shared::bytes <= SHARED_BYTES, "the plan's ring and vectors exceed a block's shared memory: use fewer ring slots");
static_assert(Shared::bytes == TWIN_SHARED_BYTES, "the driver asks for what the kernel divides");
static_assert(Ring::STEP == facts::BARRIER_BYTES,
              "twin/kernel/layout.py counts the bytes of the ring's barriers");
static_assert(sizeof(Launch) == 16 + MAX_RANKS * sizeof(RankMemory) + sizeof(Request), "the launch is shared with Python");
static_assert(Plan::window_slots <= Plan::ring_slots, "the window lies inside the ring");
static_assert(3 * CONSUMERS <= Plan::scratch_floats || !Plan::full, "the sampler's sums of all threads fit the scratch");

// Does this launch begin with the prompt's passes? With one kernel per stage they are a launch of their own, of no stages.
__device__ __forceinline__ bool reads_chunks(const Request& wanted, int last) {
  return Plan::prompt_chunk > 1 && wanted.read > 0 && (Plan::resident || last == 0);
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
  (store ? kept : chip) = store ? chip : kept;
}

// Copies a block's residual and progress between the chip and what outlives a kernel.
__device__ void keep(Block& b, bool store) {
  float* kept = b.memory.state + u64(b.block) * Plan::state_floats;
  int* words = reinterpret_cast<int*>(&b.at);
  Core::Hidden residual = Plan::hidden ? b.residual.open(b.core) : Core::Hidden::in(nullptr, 0);
  if (Plan::hidden) residual.each(b.core, [&](int i, float& value) { move(value, kept[i], store); });
  if (Plan::hidden) b.residual.close(b.core, residual);
  TWIN_EACH(i, int(sizeof(Progress) / 4)) {
    int* at = reinterpret_cast<int*>(kept_progress(b.memory, b.block)) + i;
    move(words[i], *at, store);
  }
  b.core.barrier();
}

// The prompt has been read, without the ring. False: the run has ended.
__device__ bool passes_over(const Signals& signals) {
  const u32 passed = shared_address(&signals.passed), left = shared_address(&signals.left);
  while (!barrier_passed(passed, 0))
    if (barrier_seen(left, 0)) return false;
  return true;
}

// What the ring brings of the cache: at each attention stage what the block's items hold, but for the newest key and value.
struct CacheStream {
  const Launch& launch;
  const RankMemory& memory;
  const Signals& signals;
  Loader& loader;
  int block;
  u32 stages = 0;      // of attention, with items of the block, so far
  u32 of_a_step = 0;

  // What was appended a step ago has to be there. False: the run is over.
  __device__ __forceinline__ bool appended() const {
    const u32 scanned = shared_address(&signals.scanned);
    for (;;) {
      u32 seen;
      asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(scanned) : "memory");
      if (seen + of_a_step > stages) return true;
      if (barrier_seen(loader.left, 0)) return false;
    }
  }
  __device__ __forceinline__ bool operator()(const Stage& stage, int step, bool follows) {
    const Plan& plan = launch.plan;
    const Span items = plan.owned_of(stage.items, block);
    if (items.lo >= items.hi) return true;
    if (follows && !appended()) return false;
    ++stages;
    const u64 policy = read_again();
    for (int i = items.lo; i < items.hi; ++i) {
      Item item;
      item.open(plan, memory, stage, i, position_at(plan, launch.request, step));
      for (int first = item.from; first < item.cached(); first += Core::CACHE_TILE) {
        const int count = least(Core::CACHE_TILE, item.cached() - first);
        if (!loader.fill(item.keys + u64(first) * ROW, count * ROW, item.values + u64(first) * ROW, Core::CACHE_TILE * ROW, policy)) return false;
      }
    }
    return true;
  }
};

__device__ void load_weights(const Launch& launch, const RankMemory& memory, int block, Loader& loader, const Signals& signals, int step, int first,
                             int last) {
  const Plan& plan = launch.plan;
  const u8* const stream = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
  if (reads_chunks(launch.request, last) && !passes_over(signals)) return;
  CacheStream cache = {launch, memory, signals, loader, block};
  const u8* from = stream;
  const auto fill = [&](int bytes) {
    const bool filled = loader.fill(from, bytes);
    from += bytes;
    return filled;
  };
  if (!Plan::resident) {
    if (step < 0) step = kept_progress(memory, block)->step;
    from += u64(plan.starts_at(first * Plan::blocks + block).units) * UNIT_BYTES;
    stream_stages(plan, block, first, last, head_needed(launch.request, step), fill, [&](const Stage& stage) { return cache(stage, step, false); });
  }
  bool more = Plan::resident;
  for (step = Plan::resident ? 0 : step; more && step < launch.request.steps; ++step) {
    more = stream_stages(plan, block, 0, Plan::stage_count, head_needed(launch.request, step), fill,
                         [&](const Stage& stage) { return cache(stage, step, step > 0); });
    from = stream;
    if (step == 0) cache.of_a_step = cache.stages;
  }
  loader.drain();
}

// Elements of a lane whose parts are loaded together: 14 of the helpers' 40 registers; 3 spill.
constexpr int LATE_AT_ONCE = facts::LATE_AT_ONCE;
constexpr int LATE_PARTS = Plan::ranks == 1 ? 1 : Plan::ranks < 9 ? Plan::ranks - 1 : 7;  // of them, parts at once

// The keeper's share of a stage REDUCE (`Stage.late`): the other ranks' parts of what this block owns of a module's output, summed in
// rank order and published within the rank. False: the wait was given up.
//
// Why the order that the validator assumes of a stage holds, although consumers are elsewhere in the plan meanwhile:
// - What precedes it. The keeper comes here behind `go` of the stage before, so all reads of the block's stages before have succeeded,
//   and behind its own resets of those stages.
// - Reads before later resets and publications. The keeper walks the plan in its order, and a sum is stored when all parts of its
//   element were there. Consumers publish in the stage behind only after `cleared` has seen `done` of that stage, which the keeper
//   arrives at after this one; so whoever sees that publication may rely on this stage's reads.
// - Reads before this stage's own publication. Of one element, yes; a chunk's sums may be seen while parts of the next chunk are awaited.
//   Nobody is misled: those parts' words are reset by their owner, which is this block's keeper itself, later in its order, and whatever
//   else may happen to them comes after that reset. (The validator refuses sums of elements that the block does not own.)
// - Consumers' polls in the stage behind may begin before this stage ends. The validator grants them nothing that it learns or does.
// Consumers never run further: `begin` of the stage after next waits for `done` of the next one.
__device__ __forceinline__ bool sum_as_keeper(const Launch& launch, const RankMemory& memory, int rank, int block, int step,
                                              int index) {
  const Plan& plan = launch.plan;
  const Stage& stage = plan.stages_at(index);
  const Value& value = plan.values_at(plan.reads_at(stage.first_read).value);
  const Span own = plan.owned_of(value.owned, block);
  const int stride = value.part_stride, out = plan.values_at(stage.publishes).offset - value.offset;
  float* at = memory.exchange + value.offset + own.lo + int(threadIdx.x % 32);
  int left = (own.hi - own.lo - int(threadIdx.x % 32) + 31) / 32;  // elements of this lane
  Patience patience;
#pragma unroll 1
  for (; left > 0; left -= LATE_AT_ONCE, at += 32 * LATE_AT_ONCE) {
    float sum[LATE_AT_ONCE] = {};
#pragma unroll
    for (int p = 0; p < Plan::ranks - 1; p += LATE_PARTS) {
      float got[LATE_PARTS][LATE_AT_ONCE];
      for (;;) {
        int me = rank, apart = stride;
        asm volatile("" : "+r"(me), "+r"(apart));  // addresses are computed here, not carried from loop to loop in scarce registers
        const float* part = at + (p + (p > me)) * apart;
        int late = -1;
#pragma unroll
        for (int j = 0; j < LATE_PARTS; ++j, part += apart) {
          if (p + j == me) part += apart;
          asm volatile("" : "+l"(part));
#pragma unroll
          for (int i = 0; i < LATE_AT_ONCE; ++i)
            if (p + j < Plan::ranks - 1) got[j][i] = i < left ? load_shared(part + 32 * i) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < LATE_PARTS; ++j)
#pragma unroll
          for (int i = 0; i < LATE_AT_ONCE; ++i)
            if (p + j < Plan::ranks - 1 && missing(got[j][i])) late = p + j;
        if (late < 0) break;
        auto waiting = [&] {
          int again = index;
          TWIN_KEEP(again);  // looked up again, not kept
          const int id = plan.reads_at(plan.stages_at(again).first_read).value;
          return Waiting{again, id, late + (late >= rank), int(at - memory.exchange) - plan.values_at(id).offset};
        };
        ++patience.polls;
        if (!may_wait(launch, rank, block, step, patience, waiting)) return false;
      }
#pragma unroll
      for (int j = 0; j < LATE_PARTS; ++j)
#pragma unroll
        for (int i = 0; i < LATE_AT_ONCE; ++i)
          if (p + j < Plan::ranks - 1) sum[i] = p + j ? sum[i] + got[j][i] : got[j][i];
    }
    int away = out;
    asm volatile("" : "+r"(away));
#pragma unroll
    for (int i = 0; i < LATE_AT_ONCE; ++i)
      if (i < left) store_shared(at + away + 32 * i, unlike_sentinel(sum[i]));
  }
  return true;
}

__device__ __forceinline__ void erase_words(float* at, int count, int lane) {
  for (int i = lane; i < count; i += 32) store_shared(at + i, bits_as<float>(SENTINEL));
}

// Reads the words back: they lie then where all blocks look.
__device__ __forceinline__ void confirm_words(const float* at, int count, int lane) {
  constexpr int AT_ONCE = 4;
  for (int i = lane; i < count; i += 32 * AT_ONCE) {
    float seen[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) seen[j] = load_shared(at + (i + 32 * j < count ? i + 32 * j : i));
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) asm volatile("" ::"f"(seen[j]) : "memory");
  }
}

// The keeper warp: what a stage owes but no other block waits for. It makes the resets once the stage's reads have
// succeeded, while the consumers compute; hands out tokens; and looks whether the host wants the run to end.
//
// A reset is done when its words, read back past the first-level cache, have been seen: they lie then where all blocks
// look. A fence would say the same, but waits for the bulk copies under way and empties the first-level cache.
__device__ void keep_house(const Launch& launch, const RankMemory& memory, int rank, int block, Signals& signals, const Progress& progress,
                           int first, int last) {
  const Plan& plan = launch.plan;
  int lane = int(threadIdx.x % 32);
  const bool tells = Plan::resident && lane == 0 && delivers(plan, rank, block);
  int step = 0;
  int& delivered = signals.delivered;  // steps whose token has been handed out
  u32 stages = 0;
  Words* const resets = signals.resets;
  const u32 go = shared_address(&signals.go), done = shared_address(&signals.done), left = shared_address(&signals.left);
  do {
    for (int index = first; index < last; ++index) {
      const Stage& stage = plan.stages_at(index);
      TWIN_KEEP(lane);  // what is made of these is made again in each stage: registers are scarce
      TWIN_KEEP(step);
      if (sums_aside(plan) && stage.kind == int(StageKind::REDUCE)) {
        if (TRACE && lane == 0) mark(launch, rank, block, step, index, 0);
        if (!sum_as_keeper(launch, memory, rank, block, step, index)) *const_cast<volatile u16*>(&signals.lost) = 1;
        __syncwarp();
        if (TRACE && lane == 0) mark(launch, rank, block, step, index, 1);
        continue;
      }
      int spans = 0;  // words to reset; looked up while the consumers wait
      __syncwarp();
      reset(plan, memory, block, Plan::resident ? step : 1, stage, [&](float* at, int count) {
        if (lane == 0 && spans < MOST_RESETS) resets[spans] = {at, count};
        ++spans;
      });
      __syncwarp();
      while (!barrier_passed(go, stages & 1u)) {
        if (!barrier_seen(left, 0)) continue;
        if (tells && progress.step > delivered) deliver(launch, progress.step - 1, progress.chosen);
        return;
      }
      if (!Plan::resident && stages == 0) step = progress.step;
      ++stages;
      auto erase = [&](float* at, int count) { erase_words(at, count, lane); };
      auto confirm = [&](float* at, int count) { confirm_words(at, count, lane); };
      if (Plan::resident && spans <= MOST_RESETS) {
        for (int i = 0; i < spans; ++i) erase(resets[i].at, resets[i].count);
        for (int i = 0; i < spans; ++i) confirm(resets[i].at, resets[i].count);
      } else {
        reset(plan, memory, block, step, stage, erase);
        reset(plan, memory, block, step, stage, confirm);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done);
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

// By one thread, before the others go on.
__device__ __forceinline__ void begin_block(const Ring& ring, Signals& signals, Progress& progress) {
  for (u32 i = 0; i < Ring::BARRIERS; ++i) {
    barrier_init(ring.full_of(i), 1);
    barrier_init(ring.empty_of(i), CONSUMER_WARPS);
  }
  signals = {};
  barrier_init(shared_address(&signals.go), CONSUMER_WARPS);
  barrier_init(shared_address(&signals.done), 1);
  barrier_init(shared_address(&signals.left), 1);
  barrier_init(shared_address(&signals.passed), CONSUMERS);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  progress = {};
}

}  // namespace twin

// One block per SM and rank-block of this GPU. Resident: the whole generation. Else: stages first..last-1 of one step;
// step -1 is the one that the block has reached, so that one graph serves all steps.
extern "C" __global__ void __launch_bounds__(twin::THREADS, 1)
    twin_kernel(const __grid_constant__ twin::Launch launch, int first_rank, int step, int first, int last) {
  using namespace twin;
  extern __shared__ __align__(128) u8 shared[];
  Signals& signals = *reinterpret_cast<Signals*>(shared + Shared::signals);
  Progress& progress = *reinterpret_cast<Progress*>(shared + Shared::progress);
  // Each group of warps asks for these itself: a value that both hold is spilled for both where the helpers' few registers are full.
  const auto worker = [] {
    int number;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(number));
    return number;
  };
  const auto ring_here = [&] { return Ring{shared_address(shared), shared_address(shared + Shared::barriers), 0}; };
  if (threadIdx.x == 0) begin_block(ring_here(), signals, progress);
  __syncthreads();
  if (threadIdx.x >= CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(HELPER_REGISTERS));
    const int me = worker(), rank = first_rank + me / Plan::blocks, block = me % Plan::blocks;
    const RankMemory& memory = launch.ranks[rank];
    if (threadIdx.x / 32 == KEEPER_WARP) keep_house(launch, memory, rank, block, signals, progress, first, last);
    if (threadIdx.x >= 32 * LOADER_WARP && threadIdx.x < 32 * (LOADER_WARP + LOADERS) && threadIdx.x % 32 == 0) {
      const Ring ring = ring_here();
      Loader loader(ring, shared_address(&signals.left), threadIdx.x / 32 - LOADER_WARP);
      load_weights(launch, memory, block, loader, signals, step, first, last);
    }
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
    if (b.core.thread() == 0) barrier_arrive(shared_address(&signals.left));
  }
}
