// The loaders' way through a plan: weights of every stage, and what its attention
// reads of the cache.
#pragma once

namespace twin {

// The prompt has been read, without the ring. False: the generation has ended.
__device__ bool passes_over(const Signals& signals) {
  const u32 passed = shared_address(&signals.passed), left = shared_address(&signals.left);
  while (!barrier_passed(passed, 0))
    if (barrier_seen(left, 0)) return false;
  return true;
}

// What the ring brings of the cache: at each attention stage what the block's items hold, but for
// the newest key and value.
struct CacheStream {
  const Launch& launch;
  const RankMemory& memory;
  const Signals& signals;
  Loader& loader;
  int block;
  u32 stages = 0;  // of attention, with items of the block, so far
  u32 of_a_step = 0;

  // What was appended a step ago has to be there. False: the generation is over.
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
        if (!loader.fill(item.keys + u64(first) * ROW, count * ROW, item.values + u64(first) * ROW,
                         Core::CACHE_TILE * ROW, policy))
          return false;
      }
    }
    return true;
  }
};

__device__ void load_weights(const Launch& launch, const RankMemory& memory, int block,
                             Loader& loader, const Signals& signals, int step, int first,
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
    stream_stages(plan, block, first, last, head_needed(launch.request, step), fill,
                  [&](const Stage& stage) { return cache(stage, step, false); });
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

}  // namespace twin
