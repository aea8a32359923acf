// The consumer of one block, as twin/sim/block.py: a place for each point where it may have to
// wait.
#pragma once

#include "handoff.h"
#include "ring.h"

namespace twin {

// Continues at `place` at a time, or at once if that is now.
inline Int wait(State& s, Int b, Int place, Int time) {
  s.blocks[b].place = place;
  schedule(s, time, RUN, b);
  return NONE;
}

inline Int wait_beyond_now(State& s, Int b, Int place, Int time) {
  return time > s.machine->now ? wait(s, b, place, time) : place;
}

// A segment of the block's log, chained to the one before it in its stage.
inline void log(State& s, Int b, Int end, Int cause, Binder who = {NONE, NONE, NONE}) {
  const Int stage = s.blocks[b].log;
  if (stage == NONE) return;
  s.segments[s.machine->segments] = {end, cause, who, s.logs[stage]};
  s.logs[stage] = s.machine->segments++;
}

inline const Work& work_of(const State& s, const Block& block) {
  return s.works[s.variants[block.work]];
}

// Of a block in a step.
inline Int first_work(const State& s, Int b, Int step) {
  const Machine& m = *s.machine;
  return (s.choices[step * m.ranks + s.blocks[b].rank] * m.blocks_of_rank +
          owner_of(s, b) % m.blocks_of_rank) *
         m.stages;
}

inline const Wires& wires_of(const State& s, const Block& block) {
  return s.wires[block.wires + block.stage];
}

// What the block's read waits at; NONE: it need not.
inline Int channel_of(const State& s, const Block& block) {
  return s.waits[wires_of(s, block).reads + block.read - work_of(s, block).reads];
}

inline Sight& sight_of(State& s, const Block& block) {
  const Int step = block.step - s.reads[block.read].previous_step;
  return s
      .sights[record_of(s, block.rank, step, channel_of(s, block)) * s.machine->dies + block.die];
}

inline Int log_of(const State& s, Int b) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  return block.step < m.kept_from
             ? NONE
             : ((block.step - m.kept_from) * m.blocks + owner_of(s, b)) * m.stages + block.stage;
}

// All GPUs meet before a library collective; else each for itself. A scope is at one border at a
// time.
inline Int scope_of(const State& s, const Block& block) {
  return work_of(s, block).library ? s.machine->gpus : block.gpu;
}

// ---- shared cores -------------------------------------------------------------------------------

// A block that waits gives its core away; the next in line runs before any newcomer.
inline void suspend(State& s, Int b) {
  if (s.blocks[b].core == NONE) return;
  s.blocks[b].paused = 1;
  Core& core = s.cores[s.blocks[b].core];
  core.running = NONE;
  if (core.head == NONE) return;
  core.running = core.last;
  schedule(s, s.machine->now, RUN, core.head);
  core.head = s.blocks[core.head].next;
}

template <class Item>
Int sleep(State& s, Int b, Item& item, Int place) {
  suspend(s, b);
  join(s, item, b);
  s.blocks[b].place = place;
  return NONE;
}

// Back on its core, when it is its turn and the core has switched; then on to where it was.
inline Int resume(State& s, Int b, Int place) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  if (block.core == NONE) return block.after;
  Core& core = s.cores[block.core];
  if (place == RESUME) {
    block.resumed = m.now;
    if (core.running != NONE || core.head != NONE) {
      join(s, core, b);
      block.place = TURN;
      return NONE;
    }
  }
  if (place != SWITCHED) {
    core.running = b;
    if (core.last != NONE && core.last != b && m.switch_time)
      return wait(s, b, SWITCHED, m.now + m.switch_time);
  }
  core.last = b;
  if (m.now > block.resumed) log(s, b, m.now, CONSUMER);
  block.paused = 0;
  pump(s, b);
  return block.after;
}

inline Int resume_to(State& s, Int b, Int after) {
  s.blocks[b].after = after;
  return RESUME;
}

// ---- a stage, in order --------------------------------------------------------------------------

inline Int enter(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  block.log = log_of(s, b);
  block.read = work.reads;
  if (!m.borders) return ENTERED;
  const Int scope = scope_of(s, block);
  Border& border = s.borders[scope];
  if (++border.arrived == m.blocks_of_gpu * (work.library ? m.gpus : 1)) {
    border.arrived = 0;
    border.who = {b, block.stage - 1, m.now};
    schedule(s, m.now + work.launch_ps, PASS_BORDER, scope);
  }
  return sleep(s, b, border, AT_BORDER);
}

inline Int pass_border(State& s, Int b) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  log(s, b, m.now, LAUNCH, s.borders[scope_of(s, block)].who);
  open_ring(s, b, first_slot(s, b, block.step) + s.ends[block.work],
            m.now + (work.touches_memory ? m.restart : 0));
  return resume_to(s, b, ENTERED);
}

inline Int begin(State& s, Int b) {
  Block& block = s.blocks[b];
  block.entered = s.machine->now;
  block.taken = 0;
  block.clock = block.entered;  // logged so far
  return TAKE;
}

// Back at `place` when the slot that comes next can be requested.
inline Int wait_for_request(State& s, Int b, Int place) {
  Machine& m = *s.machine;
  const Int time = wait_time(s, b);
  if (time) return wait(s, b, place, m.now + time);
  fail(m, STARVED, b, 0);
  return NONE;
}

// Waits for the stage's first slots before its reads, and frees them: what they hold lies in
// registers then. A fence comes before the last of a row group.
inline Int prefetch(State& s, Int b) {
  const Int now = s.machine->now, leave = s.machine->leave;
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  const Int count = work.ahead_end - work.ahead;
  while (block.taken < count) {
    const Int arrived = arrival(s, b);
    if (arrived == NONE) return wait_for_request(s, b, TAKE);
    if (arrived > now) return wait(s, b, TAKE, arrived);
    ++block.taken;
    if (leave && (block.taken % work.group == 0 || block.taken == count)) {
      if (now > block.clock) log(s, b, now, STREAMING);
      log(s, b, block.clock = now + leave, CONSUMER);
      return wait(s, b, LEAVE_AHEAD, block.clock);
    }
    free_slot(s, b);
  }
  if (now > block.clock) log(s, b, now, STREAMING);
  return READ;
}

inline Int leave_ahead(State& s, Int b) {
  free_slot(s, b);
  return TAKE;
}

// polled_bytes
inline Int polled_now(const State& s, const Block& block) {
  const bool counted = s.channels[channel_of(s, block)].counted;
  return counted ? LINE_BYTES : std::min(s.sizes[s.reads[block.read].size], POLLED_BYTES);
}

// Wait until all the needed elements are visible on the block's die.
inline Int read(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  for (;; ++block.read) {
    if (block.read == work_of(s, block).reads_end) return WORK;
    if (block.step || !s.reads[block.read].previous_step) break;
  }
  const Int load = std::max<Int>(0, m.load - s.reads[block.read].nearer);
  block.looked = m.now + load + (load ? fetching(s, block.package, m.now) : 0);
  if (channel_of(s, block) == NONE) return GATHER;
  Sight& sight = sight_of(s, block);
  Record& record = record_at(s, (&sight - s.sights) / m.dies);
  block.waited_group = m.group;
  if (record.seen && record.early && sight.time > m.now) doubt(s);
  if (record.seen && sight.time <= m.now) return GATHER;
  if (block.slice != NONE) s.pipes[block.slice].waiting += polled_now(s, block);
  if (!record.seen) {
    if (sight.order == NONE) sight.order = record.waits++;
    return sleep(s, b, sight, AT_READ);
  }
  wait(s, b, AT_READ, sight.time);
  suspend(s, b);
  return NONE;
}

inline Int see_read(State& s, Int b) {
  Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  if (block.slice != NONE) s.pipes[block.slice].waiting -= polled_now(s, block);
  const Sight& sight = sight_of(s, s.blocks[b]);
  // it came when the last push did: see mirror.h
  if (m.mirrors && fed_by_others(s, channel_of(s, s.blocks[b])))
    m.loose = s.blocks[b].waited_group == record_at(s, (&sight - s.sights) / m.dies).group;
  log(s, b, sight.time, sight.cause, sight.who);
  return resume_to(s, b, GATHER);
}

inline Int gather(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Read& read = s.reads[block.read];
  const Int start = std::max(m.now, block.looked) + m.fetch;
  const Int loads = read.rounds + (m.fetch > 0);
  const Int late =
      loads ? in_time(s, static_cast<__int128>(loads) * fetching(s, block.package, m.now)) : 0;
  block.clock = std::max(start + read.cost_ps + late, exchange(s, block, start, read.size));
  if (m.loose && block.clock <= m.now) doubt(s);
  return wait_beyond_now(s, b, GATHERED, block.clock);
}

// ---- the scheduler: a block of its own that makes sums of late parts, in the order of the plan -----

// The stage's reads have succeeded: the scheduler may begin the sums behind it.
inline void begin_sums(State& s, Int b, Int sums_behind) {
  const Int h = b + s.machine->blocks;
  Block& scheduler = s.blocks[h];
  s.blocks[b].owed = scheduler.sums_due;
  scheduler.sums_due += sums_behind;
  if (!sums_behind || scheduler.place != IDLE) return;
  scheduler.place = SUM;
  schedule(s, s.machine->now, RUN, h);
}

// To the next sum.
inline Int begin_sum(State& s, Int h) {
  Block& scheduler = s.blocks[h];
  while (!work_of(s, scheduler).by_scheduler) {
    ++scheduler.work;
    if (++scheduler.stage < s.machine->stages) continue;
    scheduler.stage = 0;
    scheduler.work = first_work(s, h, ++scheduler.step);
  }
  scheduler.log = log_of(s, h);
  scheduler.read = work_of(s, scheduler).reads;
  log(s, h, s.machine->now, OTHER);  // where its time begins
  return READ;
}

inline Int add(State& s, Int h) {
  Block& scheduler = s.blocks[h];
  const Work& work = work_of(s, scheduler);
  scheduler.clock = s.machine->now + work.fixed_ps;
  log(s, h, scheduler.clock, work.fixed_cause);
  return wait_beyond_now(s, h, SUMMED, scheduler.clock);
}

inline Int end_sum(State& s, Int h) {
  Block& scheduler = s.blocks[h];
  const Int b = owner_of(s, h);
  const Work& work = work_of(s, scheduler);
  if (work.size != NONE) publish(s, h, work, wires_of(s, scheduler));
  s.blocks[b].waited = binder_of(s, h);
  if (++scheduler.sums_made >= s.blocks[b].owed && s.blocks[b].place == OWED)
    schedule(s, s.machine->now, RUN, b);
  ++scheduler.work;
  ++scheduler.stage;  // sums stand inside a layer: the step goes on
  return scheduler.sums_made < scheduler.sums_due ? SUM : IDLE;
}

// The block publishes only when the sums of the stages before are made.
inline bool owes(const State& s, Int b) {
  return s.machine->has_schedulers && s.blocks[b + s.machine->blocks].sums_made < s.blocks[b].owed;
}

// What a stage costs once its inputs are there, before its weights.
inline Int work(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  if (m.has_schedulers) begin_sums(s, b, work.sums_behind);
  block.clock = m.now + work.fixed_ps;
  log(s, b, block.clock, work.fixed_cause);
  if (work.embed) log(s, b, block.clock += m.memory_latency + block.start, OTHER);
  if (work.library) log(s, b, block.clock += m.library, COLLECTIVE);
  block.slot = work.slots + block.taken;
  block.last_cause = NONE;
  if (block.taken) {
    for (Int slot = work.ahead; slot < work.ahead + block.taken; ++slot)
      block.clock += s.slot_costs[slot];
    log(s, b, block.clock, block.last_cause = work.fixed_cause);
  }
  if (m.on_demand && work.slots < work.slots_end)
    open_ring(s, b, first_slot(s, b, block.step) + s.ends[block.work], block.clock);
  return SLOT;
}

// A slot not before its arrival. Late ones are memory time, early ones the consumer's own.
inline Int consume(State& s, Int b) {
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  if (block.slot == work.slots_end) return ATTEND;
  const Int arrived = arrival(s, b);
  if (arrived == NONE) return wait_for_request(s, b, SLOT);
  const Int gate = s.stages[block.stage].gate;
  // what the request could not have saved is the routing's
  if (block.slot == work.slots && gate != NONE) {
    const Int known =
        std::min(arrived, opened(s, b, block.step, gate) + s.paths[block.memory].latency);
    if (known > block.clock) log(s, b, known, ROUTING);
  }
  const Int cause = arrived > block.clock ? STREAMING : work.fixed_cause;
  block.clock = std::max(arrived, block.clock) + s.slot_costs[block.slot];
  if (cause == block.last_cause && block.log != NONE) {
    s.segments[s.logs[block.log]].end = block.clock;
  } else {
    log(s, b, block.clock, cause);
  }
  block.last_cause = cause;
  return wait(s, b, SLOT_DONE, block.clock);
}

inline Int attend(State& s, Int b) {
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  if (work.kv == work.kv_end) return FINISH;
  block.kv = block.requested = 0;
  return wait_beyond_now(s, b, ITEM, block.open_at);
}

// Cached keys and values, requested some ahead.
inline Int item(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  const Int items = work.kv_end - work.kv, ahead = work.kv_ahead ? work.kv_ahead : m.window;
  Int* arrivals = s.kv_arrivals + b * m.kv_arrivals;
  if (block.kv == items) {
    log(s, b, block.clock, ATTENTION);
    return FINISH;
  }
  for (; block.requested < std::min(items, block.kv + ahead); ++block.requested) {
    const Int size = s.kv[work.kv + block.requested].size;
    const Int requested = work.kv_ahead && block.requested == 0 && !work.kv_after ? block.entered : m.now;
    const Int arrived = request_now(s, path_of(block, block.requested, block.step > 0), requested, size);
    arrivals[block.requested % ahead] = arrived + reading(s, block.package, m.now);
    block.consumed += s.sizes[size];
  }
  block.clock = std::max(block.clock, arrivals[block.kv % ahead]) + s.kv[work.kv + block.kv].cost;
  return wait(s, b, ITEM_DONE, block.clock);
}

inline Int finish(State& s, Int b) {
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  if (work.sample_ps) log(s, b, block.clock += work.sample_ps, SAMPLING);
  if (work.pushed && s.machine->further)
    log(s, b, block.clock += s.machine->further, COLLECTIVE);
  return wait_beyond_now(s, b, FENCE, block.clock);
}

// Behind the work: what is in flight then is what the fence waits among.
inline Int fence(State& s, Int b) {
  Block& block = s.blocks[b];
  const Work& work = work_of(s, block);
  const Int fences = work.fence_ps + work.far_fences * s.machine->link_fence;
  if (!fences) return PUBLISH;
  block.clock = s.machine->now + fences + 2 * queueing(s, block.package, s.machine->now);
  log(s, b, block.clock, HAND_OFF);
  return wait_beyond_now(s, b, PUBLISH, block.clock);
}

inline Int pay(State& s, Int b) {
  log(s, b, s.machine->now, HAND_OFF, s.blocks[b].waited);
  return PUBLISH;
}

inline Int publish_stage(State& s, Int b) {
  if (owes(s, b)) {
    s.blocks[b].place = OWED;
    return NONE;
  }
  const Work& work = work_of(s, s.blocks[b]);
  if (work.stored != NONE) {
    request_now(s, s.blocks[b].memory, s.machine->now, work.stored);
    s.blocks[b].consumed += s.sizes[work.stored];
  }
  const Int data =
      work.size == NONE ? s.machine->now : publish(s, b, work, wires_of(s, s.blocks[b]));
  const Stage& stage = s.stages[s.blocks[b].stage];
  if (stage.opens != NONE) open_gate(s, b, stage.opens);
  if (!s.machine->barriers) return LEAVE;
  arrive_at_barrier(s, b, stage, data);
  return sleep(s, b, s.barriers[s.blocks[b].rank], AT_BARRIER);
}

inline Int pass_barrier(State& s, Int b) {
  const Barrier& barrier = s.barriers[s.blocks[b].rank];
  log(s, b, s.machine->now, barrier.cause, barrier.waited_for);
  return resume_to(s, b, LEAVE);
}

// To the next stage, the next step, or the end.
inline Int leave(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  do {
    ++block.work;
    ++block.stage;
  } while (block.stage < m.stages && work_of(s, block).by_scheduler);
  if (block.stage < m.stages) return ENTER;
  s.ended[block.step * m.blocks + b] = m.now;
  block.stage = 0;
  if (++block.step < m.steps) {
    block.work = first_work(s, b, block.step);
    return ENTER;
  }
  suspend(s, b);
  schedule(s, m.now, END, b);
  return NONE;
}

// Runs block b until it waits for something.
inline void advance(State& s, Int b) {
  Int place = s.blocks[b].place;
  while (place != NONE) {
    switch (place) {
      case ENTER: place = enter(s, b); break;
      case AT_BORDER: place = pass_border(s, b); break;
      case ENTERED: place = begin(s, b); break;
      case TAKE: place = prefetch(s, b); break;
      case LEAVE_AHEAD: place = leave_ahead(s, b); break;
      case READ: place = read(s, b); break;
      case AT_READ: place = see_read(s, b); break;
      case GATHER: place = gather(s, b); break;
      case GATHERED:
        log(s, b, s.blocks[b].clock, s.reads[s.blocks[b].read++].cause);
        place = READ;
        break;
      case WORK: place = b < s.machine->blocks ? work(s, b) : add(s, b); break;
      case SLOT_DONE:
        free_slot(s, b);
        ++s.blocks[b].slot;
        place = SLOT;
        break;
      case SLOT: place = consume(s, b); break;
      case ATTEND: place = attend(s, b); break;
      case ITEM_DONE:
        ++s.blocks[b].kv;
        place = ITEM;
        break;
      case ITEM: place = item(s, b); break;
      case FINISH: place = finish(s, b); break;
      case FENCE: place = fence(s, b); break;
      case PUBLISH: place = publish_stage(s, b); break;
      case AT_BARRIER: place = pass_barrier(s, b); break;
      case LEAVE: place = leave(s, b); break;
      case OWED: place = pay(s, b); break;
      case IDLE: s.blocks[b].place = IDLE; return;
      case SUM: place = begin_sum(s, b); break;
      case SUMMED: place = end_sum(s, b); break;
      default: place = resume(s, b, place); break;  // RESUME, TURN, SWITCHED
    }
  }
}

}  // namespace twin
