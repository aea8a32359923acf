// The scheduler warp's way through a plan: resets, sums of late parts, tokens, and whether the
// host wants the end.
#pragma once

namespace twin {

// Elements of a thread whose parts are loaded together: 14 of the side warps' 40 registers; 3
// spill.
constexpr int LATE_AT_ONCE = facts::LATE_AT_ONCE;
// of them, parts at once
constexpr int LATE_PARTS = Plan::ranks == 1 ? 1 : Plan::ranks < 9 ? Plan::ranks - 1 : 7;

// The other ranks' parts p, p + 1 ... of a thread's next `left` elements at `own`, all under way
// before the first is looked at. The last part that is not there yet, or -1.
__device__ __forceinline__ int load_late_parts(const float* own, int stride, int rank, int p,
                                               int left, float (&got)[LATE_PARTS][LATE_AT_ONCE]) {
  int me = rank, pitch = stride;
  // addresses are computed here, not carried from loop to loop in scarce registers
  asm volatile("" : "+r"(me), "+r"(pitch));
  const float* part = own + (p + (p > me)) * pitch;
  int late = -1;
#pragma unroll
  for (int j = 0; j < LATE_PARTS; ++j, part += pitch) {
    if (p + j == me) part += pitch;
    asm volatile("" : "+l"(part));
#pragma unroll
    for (int i = 0; i < LATE_AT_ONCE; ++i)
      if (p + j < Plan::ranks - 1) got[j][i] = i < left ? load_shared(part + 32 * i, true) : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < LATE_PARTS; ++j)
#pragma unroll
    for (int i = 0; i < LATE_AT_ONCE; ++i)
      if (p + j < Plan::ranks - 1 && missing(got[j][i])) late = p + j;
  return late;
}

// The scheduler warp's share of a stage REDUCE (`Stage.late`): the other ranks' parts of what this
// block owns of a module's output, summed in rank order and published within the rank. False: the
// wait was given up.
//
// Why the order that the proof assumes of a stage holds, although consumers are elsewhere in the
// plan meanwhile: - What precedes it. The scheduler warp comes here behind `go` of the stage
// before, so all reads of the
//   block's stages before have succeeded, and behind its own resets of those stages.
// - Reads before later resets and publications. The scheduler warp walks the plan in its order, and
// a sum
//   is stored when all parts of its element were there. Consumers publish in the stage behind only
//   after `cleared` has seen `done` of that stage, which the scheduler warp arrives at after this one; so
//   whoever sees that publication may rely on this stage's reads.
// - Reads before this stage's own publication. Of one element, yes; a portion's sums may be seen
//   while parts of the next portion are awaited. Nobody is misled: those parts' words are reset by
//   their owner, which is this block's scheduler warp itself, later in its order, and whatever else may
//   happen to them comes after that reset. (The proof refuses sums of elements that the block does
//   not own.)
// - Consumers' polls in the stage behind may begin before this stage ends. The proof grants them
//   nothing that it learns or does. Consumers never run further: `begin` of the stage after next
//   waits for `done` of the next one.
__device__ __forceinline__ bool sum_as_scheduler(const Launch& launch, const RankMemory& memory,
                                              int rank, int block, int step, int index) {
  const Plan& plan = launch.plan;
  const Stage& stage = plan.stages_at(index);
  const Value& value = plan.values_at(plan.reads_at(stage.first_read).value);
  const Span own = plan.owned_of(value.owned, block);
  const int stride = value.part_stride, out = plan.values_at(stage.publishes).offset - value.offset;
  float* element = memory.exchange + value.offset + own.lo + int(threadIdx.x % 32);
  int left = (own.hi - own.lo - int(threadIdx.x % 32) + 31) / 32;  // elements of this thread
  Patience patience;
#pragma unroll 1
  for (; left > 0; left -= LATE_AT_ONCE, element += 32 * LATE_AT_ONCE) {
    float sum[LATE_AT_ONCE] = {};
#pragma unroll
    for (int p = 0; p < Plan::ranks - 1; p += LATE_PARTS) {
      float got[LATE_PARTS][LATE_AT_ONCE];
      for (;;) {
        const int late = load_late_parts(element, stride, rank, p, left, got);
        if (late < 0) break;
        auto waiting = [&] {
          int again = index;
          TWIN_KEEP(again);  // looked up again, not kept
          const int id = plan.reads_at(plan.stages_at(again).first_read).value;
          return Waiting{again, id, late + (late >= rank),
                         int(element - memory.exchange) - plan.values_at(id).offset};
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
      if (i < left) store_shared(element + away + 32 * i, unlike_sentinel(sum[i]));
  }
  return true;
}

// Of the widest scope that there is: a span does not say whether other GPUs write there next.
__device__ __forceinline__ void erase_words(float* words, int count, int thread) {
  for (int i = thread; i < count; i += 32) store_shared(words + i, bits_as<float>(SENTINEL), true);
}

// Reads spans of words back, by the whole warp: the words lie then where all blocks look. Their
// neighbours in the same 16 bytes come along.
template <class Spans>  // span_of(number)
__device__ __forceinline__ void confirm_spans(Spans span_of, int count, int thread) {
  constexpr int WORDS = Confirmed::WORDS;
  Confirmed seen;
  int turn = 0;  // first of this turn's words of the span
#pragma unroll 1
  for (int s = 0; s < count;) {
#pragma unroll
    for (int j = 0; j < Confirmed::AT_ONCE; ++j) {
      const Words span = span_of(s < count ? s : count - 1);
      const int before = int(reinterpret_cast<size_t>(span.at) / sizeof(float) % WORDS);
      const int at = turn + WORDS * thread, all = before + span.count;
      seen.load(j, span.at - before + (at < all ? at : 0));
      turn += 32 * WORDS;
      if (turn < all) continue;
      turn = 0;
      ++s;
    }
    seen.await();
  }
}

// A stage REDUCE of late parts, by the scheduler warp. Where a wait was given up, the consumers
// find a note.
__device__ __forceinline__ void sum_stage(const Launch& launch, const RankMemory& memory, int rank,
                                          int block, Signals& signals, int step, int index,
                                          int thread) {
  if (TRACE && thread == 0) mark(launch, rank, block, step, index, 0);
  if (!sum_as_scheduler(launch, memory, rank, block, step, index))
    *const_cast<volatile u16*>(&signals.lost) = 1;
  __syncwarp();
  if (TRACE && thread == 0) mark(launch, rank, block, step, index, 1);
}

// The words that a stage will reset into `resets`, as many as it holds; looked up while the
// consumers wait. How many spans there are.
__device__ __forceinline__ int look_up_resets(const Plan& plan, const RankMemory& memory, int block,
                                              int step, const Stage& stage, Words* resets,
                                              int thread) {
  int spans = 0;
  __syncwarp();
  reset(plan, memory, block, step, stage, [&](float* words, int count) {
    if (count == 0) return;
    if (thread == 0 && spans < MOST_RESETS) resets[spans] = {words, count};
    ++spans;
  });
  __syncwarp();
  return spans;
}

// The words that a stage resets. Those of a resident plan were looked up in `resets`.
__device__ __forceinline__ void make_resets(const Plan& plan, const RankMemory& memory, int block,
                                            int step, const Stage& stage, const Words* resets,
                                            int spans, int thread) {
  auto erase = [&](float* words, int count) { erase_words(words, count, thread); };
  if (Plan::resident && spans <= MOST_RESETS)
    for (int i = 0; i < spans; ++i) erase(resets[i].at, resets[i].count);
  else
    reset(plan, memory, block, step, stage, erase);
}

// The same words seen where all blocks look.
__device__ __forceinline__ void confirm_resets(const Plan& plan, const RankMemory& memory,
                                               int block, int step, const Stage& stage,
                                               const Words* resets, int spans, int thread) {
  if (Plan::resident && spans <= MOST_RESETS)
    confirm_spans([&](int s) { return resets[s]; }, spans, thread);
  else
    reset(plan, memory, block, step, stage,
          [&](float* words, int count) {
            if (count > 0) confirm_spans([&](int) { return Words{words, count}; }, 1, thread);
          });
}

// The token that the step before `step` chose; `delivered` counts the steps whose token has been
// handed out.
__device__ __forceinline__ void hand_out(const Launch& launch, const Progress& progress, int step,
                                         int& delivered) {
  int before = step - 1;
  // addresses are computed here, not carried from step to step in scarce registers
  asm volatile("" : "+r"(before));
  deliver(launch, before, progress.chosen);
  delivered = step;
}

// The scheduler warp: what a stage owes but no other block waits for. It makes the resets once
// the stage's reads have succeeded, while the consumers compute; hands out tokens; and looks
// whether the host wants the generation to end.
//
// A reset is done when its words, read back past the first-level cache, have been seen: they lie
// then where all blocks look. A fence would say the same, but waits for the bulk copies under way
// and empties the first-level cache. The scheduler warp looks behind `done`, so a block does not
// wait for it: what it publishes in the stage behind comes after these resets, and the proof
// requests no more (happens_before.py). Those of the LM head, and of a plan that is not resident,
// are seen before `done`.
__device__ void keep_house(const Launch& launch, const RankMemory& memory, int rank, int block,
                           Signals& signals, const Progress& progress, int first, int last) {
  const Plan& plan = launch.plan;
  int thread = int(threadIdx.x % 32);
  const bool tells = Plan::resident && thread == 0 && delivers(plan, rank, block);
  int step = 0;
  int& delivered = signals.delivered;  // steps whose token has been handed out
  u32 stages = 0;
  Words* const resets = signals.resets;
  const u32 go = shared_address(&signals.go), done = shared_address(&signals.done),
            left = shared_address(&signals.left);
  do {
    for (int index = first; index < last; ++index) {
      const Stage& stage = plan.stages_at(index);
      TWIN_KEEP(thread);  // what is made of these is made again in each stage: registers are scarce
      TWIN_KEEP(step);
      if (scheduler_sums(plan) && stage.kind == int(StageKind::REDUCE)) {
        sum_stage(launch, memory, rank, block, signals, step, index, thread);
        continue;
      }
      const int spans =
          look_up_resets(plan, memory, block, Plan::resident ? step : 1, stage, resets, thread);
      while (!barrier_passed(go, stages & 1u)) {
        if (!barrier_seen(left, 0)) continue;
        if (tells && progress.step > delivered) deliver(launch, progress.step - 1, progress.chosen);
        return;
      }
      if (!Plan::resident && stages == 0) step = progress.step;
      ++stages;
      make_resets(plan, memory, block, step, stage, resets, spans, thread);
      const bool at_once = !Plan::resident || stage.kind == int(StageKind::LM_HEAD);
      __syncwarp();
      if (thread == 0 && !at_once) barrier_arrive(done);
      confirm_resets(plan, memory, block, step, stage, resets, spans, thread);
      __syncwarp();
      if (thread == 0 && at_once) barrier_arrive(done);
      if (!Plan::resident || index > 0) continue;
      if (thread == 0 && load_host(launch.request.abort))
        *const_cast<volatile u16*>(&signals.stop) = 1;
      if (tells && step > delivered) hand_out(launch, progress, step, delivered);
    }
    ++step;
  } while (Plan::resident);
}

}  // namespace twin
