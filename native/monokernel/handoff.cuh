// Hand-offs: wait, reset, publish, arrive. The three protocols differ only here.
#pragma once

#include "block.cuh"

namespace twin {

// Build option: when the stage's inputs were there (0) and when it was finished (1).
__device__ __forceinline__ void mark(const Launch& launch, int rank, int block, int step, int index,
                                     int end) {
  if (!launch.request.trace) return;
  const u64 blocks = u64(launch.plan.ranks) * u64(launch.plan.blocks),
            me = u64(rank) * u64(launch.plan.blocks) + u64(block);
  const u64 row = (u64(step) * blocks + me) * u64(launch.plan.stage_count) + u64(index);
  TWIN_GLOBAL(launch.request.trace)[2 * row + u64(end)] = now_ns();
}

__device__ __forceinline__ void mark(const Block& b, int index, int end) {
  if (b.core.thread() == 0) mark(b.launch, b.rank, b.block, b.at.step, index, end);
}

// ---- waiting ------------------------------------------------------------------------------------

struct Waiting {  // what a block waits for, for the watchdog's report
  int stage;
  int value;
  int part;
  int element;
};

constexpr u32 POLLS_PER_CHECK = 64;  // between two looks at the abort word and the clock

struct Patience {
  u32 polls = 0;
  u64 deadline = 0;
};

// Tells all blocks, and the host, that the generation has failed.
__device__ __forceinline__ void leave_all(const Launch& launch) {
  store_host(launch.request.abort, 1);
  store_host(&launch.control->abort, 1);
}

__device__ __forceinline__ void report_hang(const Launch& launch, int rank, int block,
                                            const int& step, const Waiting& what) {
  Control* control = launch.control;
  // its address is computed here, not carried from step to step in scarce registers
  TWIN_KEEP(control);
  Control& c = *TWIN_GLOBAL(control);
  // somebody else hung first
  if (!claim(&c.status, int(Status::RUNNING), int(Status::HUNG))) return;
  c.hung_rank = rank;
  c.hung_block = block;
  c.hung_stage = what.stage;
  c.hung_value = what.value;
  c.hung_part = what.part;
  c.hung_element = what.element;
  c.hung_step = step;
  leave_all(launch);
}

// Looks up now and then. False: give up, because the generation was cancelled, failed elsewhere, or
// hangs here, for what() then.
template <class What>
__device__ __forceinline__ bool may_wait(const Launch& launch, int rank, int block, const int& step,
                                         Patience& patience, What what) {
  if (patience.polls % POLLS_PER_CHECK) return true;
  if (load_host(launch.request.abort)) return false;
  const u64 now = now_ns();
  if (!patience.deadline) patience.deadline = now + launch.request.watchdog_ns;
  if (now < patience.deadline) return true;
  report_hang(launch, rank, block, step, what());
  return false;
}

// Called between two polls.
__device__ __forceinline__ bool keep_waiting(Block& b, Patience& patience, const Waiting& what) {
  if (++patience.polls == 1) b.core.published();  // what this block arrived at, others wait for
  b.core.relax(patience.polls);
  return may_wait(b.launch, b.rank, b.block, b.at.step, patience, [&] { return what; });
}

// `pushed`: other GPUs may have arrived, too.
__device__ __forceinline__ bool wait_counter(Block& b, const u32* counter, u32 target,
                                             const Waiting& what, bool pushed = true) {
  Patience patience;
  while (int(arrivals(counter, pushed) - target) < 0)  // the difference: counters wrap around
    if (!keep_waiting(b, patience, what)) return false;
  arrived(pushed);
  return true;
}

// ---- reading ------------------------------------------------------------------------------------

__device__ __forceinline__ u32* counter_of(const RankMemory& memory, int counter) {
  return memory.counters + counter * COUNTER_STRIDE;
}

__device__ __forceinline__ bool skipped(const Block& b, int previous_step) {
  return previous_step && b.at.step == 0;
}

// The parts that a read sums, in rank order; with counters, also waits until they are complete.
__device__ __forceinline__ Source source_of(Block& b, int stage, const Read& read) {
  const Value& value = b.plan.values_at(read.value);
  const int own = value.pushed ? b.rank : 0, ranks = value.pushed ? b.plan.ranks : 1;
  const bool counted = b.plan.handoff == int(HandOff::COUNTER),
             others = read.parts == int(Parts::OTHERS);
  Source source = {b.memory.exchange + value.offset,
                   value.part_stride,
                   ranks,
                   0,
                   MAX_RANKS,
                   b.plan.handoff == int(HandOff::SENTINEL),
                   false,
                   value.pushed != 0,
                   0};
  if (read.parts == int(Parts::OWN)) source.first = own, source.parts = 1;
  if (others) source.hole = own, source.parts = ranks - 1;
  const u32 target =
      u32(b.at.step - read.previous_step) * u32(value.arrivals_per_step) + u32(value.arrivals);
  for (int p = b.core.thread(); p < source.parts && counted && !source.lost;
       p += b.core.threads()) {
    const int part = source.part(p);
    source.lost = !wait_counter(b, counter_of(b.memory, value.counter + (value.pushed ? part : 0)),
                                target, {stage, read.value, part, -1}, value.pushed != 0);
  }
  if (counted) source.lost = b.core.any(source.lost);
  return source;
}

// Elements lo..hi-1 of a read into out[0..], all threads of the block together. Ends with a block
// barrier, and tells every thread the same: a thread that left alone would keep the others at the
// next barrier forever.
__device__ __forceinline__ bool gather(Block& b, int stage, const Read& read, const Source& source,
                                       int lo, int hi, float* out) {
  Patience patience;
  const bool good = b.core.gather(source, lo, hi, out, [&](int part, int element) {
    return keep_waiting(b, patience, {stage, read.value, part, element});
  });
  return !b.core.any(!good);
}

// All spans of this block's part of a read, one after the other in `out`; polled side by side.
__device__ __forceinline__ bool gather_spans(Block& b, int stage, const Read& read, float* out) {
  if (skipped(b, read.previous_step)) return true;
  const Source source = source_of(b, stage, read);
  if (source.lost) return false;
  const SpanRow row = b.plan.rows_at(read.spans + b.block);
  Patience patience;
  bool good = true;
  int done = 0;
  for (int i = row.first; i < row.first + row.count && good; ++i) {
    const Span span = b.plan.spans_at(i);
    auto stall = [&](int part, int element) {
      return keep_waiting(b, patience, {stage, read.value, part, element});
    };
    good = b.core.gather(source, span.lo, span.hi, out + done, stall, done);
    done += span.hi - span.lo;
  }
  return !b.core.any(!good);
}

// The same of short spans of several reads: each begins with a warp of its own. Threads of one warp
// that poll different spans wait for them one after the other. `warp`: the first one, then the
// first that has none; `good`: of this thread. False, to all threads alike: the read is lost.
__device__ __forceinline__ bool poll_spans(Block& b, int stage, const Read& read, float* out,
                                           int& warp, bool& good) {
  constexpr int WORDS = 4 * Core::warp_threads();  // of a warp
  if (skipped(b, read.previous_step)) return true;
  const Source source = source_of(b, stage, read);
  if (source.lost) return false;
  const SpanRow row = b.plan.rows_at(read.spans + b.block);
  Patience patience;
  auto stall = [&](int part, int element) {
    return keep_waiting(b, patience, {stage, read.value, part, element});
  };
  for (int i = row.first; i < row.first + row.count && good; ++i) {
    const Span span = b.plan.spans_at(i);
    good = b.core.gather(source, span.lo, span.hi, out, stall, warp * WORDS);
    out += span.hi - span.lo;
    warp += (span.hi - span.lo + WORDS - 1) / WORDS;
  }
  return true;
}

// A whole value into a vector of the block. No barrier: a thread that gave up leaves a note that
// all threads see after the next one.
template <class Vector>
__device__ __forceinline__ bool gather_vector(Block& b, int stage, const Read& read, Vector& x) {
  if (skipped(b, read.previous_step)) return true;
  Source source = source_of(b, stage, read);
  if (source.lost) return false;
  // a rank's own part is there first: it is read while the other one is on its way
  if (b.plan.ranks == 2 && source.parts == 2) source.swap = b.rank;
  Patience patience;
  return b.core.agree(x.gather(b.core, source, [&](int part, int element) {
    return keep_waiting(b, patience, {stage, read.value, part, element});
  }));
}

// ---- writing ------------------------------------------------------------------------------------

// Each block sets what it owns, in every part of its own rank's memory, back to the sentinel:
// fill(first word, count).
template <class Fill>
__device__ __forceinline__ void reset(const Plan& plan, const RankMemory& memory, int block,
                                      int step, const Stage& stage, Fill fill) {
  for (int i = stage.first_reset; i < stage.first_reset + stage.resets; ++i) {
    const Reset& reset = plan.resets_at(i);
    if (reset.previous_step && step == 0) continue;
    const Value& value = plan.values_at(reset.value);
    const Span own = plan.owned_of(value.owned, block);
    for (int part = 0; part < value.parts; ++part)
      fill(memory.exchange + value.offset + part * value.part_stride + own.lo, own.hi - own.lo);
  }
}

// All reads have succeeded: from here on the block owes nothing to others' pace. What it publishes
// next may be seen only after its resets: `cleared` waits for them where a scheduler warp makes
// them.
__device__ __forceinline__ void begin(Block& b, int index, const Stage& stage) {
  if constexpr (TRACE) {
    b.core.barrier();
    mark(b, index, 0);
  }
  b.core.begin();
  if constexpr (!Core::SCHEDULER) {
    reset(b.plan, b.memory, b.block, b.at.step, stage,
          [&](float* at, int count) { b.core.fill(at, count, SENTINEL); });
    if (stage.resets) publish_fence(stage.pushes);
  }
}

// Does the scheduler warp sum the late parts while consumers are in other stages? It polls, so only
// where hand-offs are sentinels.
__device__ __forceinline__ bool scheduler_sums(const Plan& plan) {
  return Core::SCHEDULER && plan.resident && plan.handoff == int(HandOff::SENTINEL) &&
         plan.kinds >> int(StageKind::REDUCE) & 1;
}

// The stage that a block's consumers run next: they pass by what the scheduler warp does, without a
// look at it.
__device__ __forceinline__ int next_stage(const Plan& plan, int index) {
  if (!scheduler_sums(plan)) return index + 1;
  TWIN_KEEP(index);  // its row is addressed here, not kept through the stage
  return plan.stages_at(index).next;
}

// Where a stage's elements go: into one part, on this rank or on all of them.
struct Output {
  const Value* value;
  const Launch* launch;
  float* own;  // element 0 on this rank
  long at;     // the same, as an offset into any rank's exchange memory
  int others;  // ranks besides this one that receive it
};

__device__ __forceinline__ Output output_of(const Block& b, const Stage& stage) {
  const Value& value = b.plan.values_at(stage.publishes);
  const long at = long(value.offset) + long(value.pushed ? b.rank : 0) * value.part_stride;
  return {&value, &b.launch, b.memory.exchange + at, at, value.pushed ? b.plan.ranks - 1 : 0};
}

// No NaN may look like the sentinel.
__device__ __forceinline__ float unlike_sentinel(float value) {
  return value == value ? value : bits_as<float>(PUBLISHED_NAN);
}

// Each rank starts with its next neighbour, so that no link is hit by all: store(where).
template <class Store>
__device__ __forceinline__ void push(const Block& b, const Output& out, int element, Store store) {
  for (int i = 1; i <= out.others; ++i) {
    const int rank = b.rank + i < b.plan.ranks ? b.rank + i : b.rank + i - b.plan.ranks;
    store(out.launch->ranks[rank].exchange + out.at + element);
  }
}

__device__ __forceinline__ void publish(const Block& b, const Output& out, int element,
                                        float value) {
  const float safe = unlike_sentinel(value);
  store_shared(out.own + element, safe);
  push(b, out, element, [&](float* at) { store_peer(at, safe); });
}

// Four neighbours, none of which looks like the sentinel.
template <class Four>
__device__ __forceinline__ void publish_four(const Block& b, const Output& out, int element,
                                             const Four& four) {
  store_four(out.own + element, four, false);
  push(b, out, element, [&](float* at) { store_four(at, four, true); });
}

// After the last element of a stage: the arrivals that readers may wait for.
__device__ __forceinline__ bool finish(Block& b, int index, const Stage& stage) {
  const bool counted = b.plan.handoff == int(HandOff::COUNTER) && stage.publishes >= 0;
  const bool barrier = b.plan.handoff == int(HandOff::GRID) && b.plan.resident;
  if (!counted && !barrier) return true;
  b.core.settle();
  b.core.barrier();
  bool good = true;
  if (b.core.thread() == 0) {
    // of all threads' publications: the barrier has ordered them before it
    publish_fence(stage.pushes);
    if (counted) {
      const Output out = output_of(b, stage);
      const Span own = b.plan.owned_of(out.value->owned, b.block);
      for (int rank = 0; rank < b.plan.ranks && own.lo < own.hi; ++rank)
        if (rank == b.rank || out.others)
          arrive(counter_of(b.launch.ranks[rank], out.value->counter + (out.others ? b.rank : 0)),
                 out.others > 0);
    }
    if (barrier) {
      b.at.grid_local += u32(b.plan.blocks);
      arrive(counter_of(b.memory, b.plan.grid_counter), false);
      if (stage.pushes) {
        b.at.grid_all += u32(b.plan.blocks) * u32(b.plan.ranks);
        for (int rank = 0; rank < b.plan.ranks; ++rank)
          arrive(counter_of(b.launch.ranks[rank], b.plan.grid_counter + 1), true);
        good = wait_counter(b, counter_of(b.memory, b.plan.grid_counter + 1), b.at.grid_all,
                            {index, -1, -1, -1});
      }
      good = good && wait_counter(b, counter_of(b.memory, b.plan.grid_counter), b.at.grid_local,
                                  {index, -1, -1, -1}, stage.pushes);
    }
  }
  return !b.core.any(!good);
}

}  // namespace twin
