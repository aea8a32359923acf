// Publications, waits and barriers, as twin/sim/handoff.py.
#pragma once

#include "pipes.h"

namespace twin {

inline Int record_of(const State& s, Int rank, Int step, Int channel) {
  return (rank * s.machine->steps + step) * s.machine->channels + channel;
}

// The block that b is, or whose scheduler it is.
inline Int owner_of(const State& s, Int b) {
  return b < s.machine->blocks ? b : b - s.machine->blocks;
}

inline Binder binder_of(const State& s, Int b) {
  return {owner_of(s, b), s.blocks[b].stage, s.machine->now};
}

inline Int* counter_times(State& s, Int r, Int channel) {
  return s.counter_times + r / s.machine->channels * s.machine->counter_total +
         s.channels[channel].counter;
}

// A record and its sights, which are set when somebody comes to it first.
inline Record& record_at(State& s, Int r) {
  Record& record = s.records[r];
  if (record.begun) return record;
  record.begun = 1;
  const Int dies = s.machine->dies;
  for (Sight* sight = s.sights + r * dies; sight != s.sights + (r + 1) * dies; ++sight)
    sight->local = sight->order = sight->head = NONE;
  return record;
}

// Sentinel: when the last needed element reaches each die.
inline void see(State& s, Int r, Int channel) {
  const Machine& m = *s.machine;
  const Record& record = s.records[r];
  Sight* sights = s.sights + r * m.dies;
  const bool near = s.channels[channel].near;
  const Int spread = m.link_spread - (m.link_spread >> s.channels[channel].sectors),
            remote = record.remote > 0 ? record.remote + spread : record.remote;
  for (Int die = 0; die < m.dies; ++die) {
    Int time = remote, cause = COLLECTIVE;
    Binder who = record.remote_who;
    for (Int producer = 0; producer < m.dies; ++producer) {
      if (sights[producer].local == NONE) continue;
      const Int cross = near              ? s.crossings[producer * m.dies + die]
                        : producer != die ? m.cross
                                          : 0;
      const Int arrival = sights[producer].local + m.hop + cross;
      if (arrival > time) {
        time = arrival;
        cause = s.channels[channel].cause;
        who = sights[producer].local_who;
      }
    }
    sights[die].time = time + (near ? m.near_poll : m.poll);
    sights[die].cause = cause;
    sights[die].who = who;
  }
}

// Counter: arrivals are served one after the other; all dies see it complete at once.
inline void see_counted(State& s, Int r, Int channel) {
  const Machine& m = *s.machine;
  const Record& record = s.records[r];
  Int* times = counter_times(s, r, channel);
  std::sort(times, times + record.arrived);
  Int free = 0;
  for (Int i = 0; i < record.arrived; ++i) free = std::max(free, times[i]) + m.atomic;
  for (Int die = 0; die < m.dies; ++die) {
    Sight& sight = s.sights[r * m.dies + die];
    sight.time = free + m.hop + m.cross + m.poll;
    sight.cause = record.last_remote ? Int(COLLECTIVE) : s.channels[channel].cause;
    sight.who = record.last_who;
  }
}

// Does what other GPUs publish count at it?
inline bool fed_by_others(const State& s, Int channel) {
  return s.machine->mirrors && s.channels[channel].remote;
}

// More arrivals. After the last one everybody who waits learns it, in the order in which their dies
// began to wait.
inline void complete(State& s, Int r, Int channel, Int arrivals = 1) {
  const Int dies = s.machine->dies;
  Record& record = s.records[r];
  if ((record.arrived += arrivals) < s.channels[channel].arrivals) return;
  record.seen = 1;
  record.group = s.machine->group;
  record.loose = s.machine->loose;
  if (record.early && record.waits) doubt(s);  // somebody would see when it came
  s.channels[channel].counted ? see_counted(s, r, channel) : see(s, r, channel);
  for (Int place = 0; place < record.waits; ++place)
    for (Int sight = r * dies; sight < (r + 1) * dies; ++sight)
      if (s.sights[sight].order == place) schedule(s, s.sights[sight].time, SEE, sight);
}

// The latest arrival at a counter is remembered; of equal ones the last.
inline void count(State& s, Int b, Int r, Int channel, Int time, bool remote) {
  Record& record = s.records[r];
  counter_times(s, r, channel)[record.arrived] = time;
  if (time < record.last) return;
  record.last = time;
  record.last_remote = remote;
  record.last_who = binder_of(s, b);
}

inline void arrive(State& s, Int b, Int rank, Int channel, Int time) {
  const Machine& m = *s.machine;
  const Int r = record_of(s, rank, s.blocks[b].step, channel);
  record_at(s, r);
  Sight& sight = s.sights[r * m.dies + s.blocks[b].die];
  if (s.channels[channel].counted) {
    count(s, b, r, channel, time + m.hop + m.cross, false);
  } else if (time > sight.local) {
    sight.local = time;
    sight.local_who = binder_of(s, b);
  }
  complete(s, r, channel);
}

inline void arrive_remote(State& s, Int b, Int rank, Int channel, Int time) {
  const Int r = record_of(s, rank, s.blocks[b].step, channel);
  Record& record = record_at(s, r);
  if (s.channels[channel].counted) {
    count(s, b, r, channel, time, true);
  } else if (time > record.remote) {
    record.remote = time;
    record.remote_who = binder_of(s, b);
  }
  complete(s, r, channel);
}

// To the other GPUs, which push the same to this one: what that makes of the links is found when
// the group's pushes are all known.
inline void end_pushes(State& s);

inline void push_to_mirrors(State& s, Int b, Int size, const Wires& wires, Int stored) {
  Machine& m = *s.machine;
  if (m.pushed == m.blocks) {
    doubt(s);
    if (m.error != FINISHED) return;
    end_pushes(s);
  }
  if (!m.pushed) m.hop_then = hop_between(s, s.blocks[b].package, s.blocks[b].package, m.now);
  s.pushes[m.pushed++] = {&wires - s.wires, record_of(s, s.blocks[b].rank, s.blocks[b].step, 0),
                          size, stored, binder_of(s, b)};
}

inline void arrive_from_mirrors(State& s, const Push& push, Int arrival, Int early) {
  const Wires& wires = s.wires[push.wires];
  for (Int i = wires.others; i < wires.others_end; ++i) {
    Record& record = record_at(s, push.first + s.feeds[i]);
    record.early = std::max(record.early, early);
    if (arrival > record.remote) {
      record.remote = arrival;
      record.remote_who = push.who;
    }
    complete(s, push.first + s.feeds[i], s.feeds[i], s.machine->mirrors);
  }
}

inline bool feed_the_same(const State& s, const Wires& a, const Wires& b) {
  return std::equal(s.feeds + a.others, s.feeds + a.others_end, s.feeds + b.others,
                    s.feeds + b.others_end);
}

// How much earlier some of a group's pushes may arrive than is worked out here, where a place in it
// is loose. If each is there before the links have passed those before it, their order decides only
// which of them is last; that is the same if they feed the same.
inline Int earliness(State& s, Int pushed) {
  const Push& first = s.pushes[0];
  bool same = true;
  Int passed[2] = {std::max(s.pipes[s.routes[0]].free, first.stored),
                   std::max(s.pipes[s.routes[1]].free, first.stored)},
      sum = 0;
  for (const Push* push = s.pushes; push != s.pushes + pushed; ++push) {
    same = same && feed_the_same(s, s.wires[first.wires], s.wires[push->wires]);
    for (Int way = 0; way < 2; ++way) {
      if (push->stored > passed[way]) doubt(s);
      passed[way] += cost_of(s, s.routes[way], push->size);
    }
    sum += s.machine->sends * cost_of(s, s.routes[1], push->size);
  }
  return same ? 0 : sum;
}

// Pushes of a group, all of one GPU's before those of the next: the last GPU's count. In a mesh
// each pair has its own link. A switch lets each GPU's pushes in one by one to each of the others,
// and out as they come from all of them.
inline void end_pushes(State& s) {
  Machine& m = *s.machine;
  const Int *route = s.routes, pushed = m.pushed;
  m.pushed = m.loose = 0;
  if (!pushed) return;
  const Int early = m.loosened && m.sends > 1 && pushed > 1 ? earliness(s, pushed) : 0;
  for (Int source = 1; source < m.sends; ++source)
    for (const Push* push = s.pushes; push != s.pushes + pushed; ++push)
      reserve(s, route[1], push->stored, push->size);
  for (const Push* push = s.pushes; push != s.pushes + pushed; ++push) {
    Int in = push->stored;
    for (Int target = 0; target < m.sends; ++target)
      in = reserve(s, route[0], push->stored, push->size);
    const Int out = route[1] == NONE ? in : reserve(s, route[1], push->stored, push->size);
    if (in > out) doubt(s);
    arrive_from_mirrors(s, *push, std::max(push->stored, out) + m.hop_then, early);
  }
}

// To every other rank. `late`: when a store inside this GPU is as good as `stored` without a load.
// Returns the last arrival.
inline Int push(State& s, Int b, Int size, const Wires& wires, Int stored, Int late) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  Int last = stored;
  for (Int rank = 0; rank < m.ranks; ++rank) {
    if (rank == block.rank) continue;
    const Block& target = s.blocks[rank * m.blocks_of_rank];
    if (target.gpu == block.gpu) {
      for (Int i = wires.others; i < wires.others_end; ++i) arrive(s, b, rank, s.feeds[i], late);
      continue;
    }
    const Int arrival = send(s, block, target, stored, size);
    last = std::max(last, arrival);
    for (Int i = wires.others; i < wires.others_end; ++i)
      arrive_remote(s, b, rank, s.feeds[i], arrival);
  }
  return last;
}

// The last arrival of pushed data.
inline Int publish(State& s, Int b, const Work& work, const Wires& wires) {
  const Block& block = s.blocks[b];
  const Int now = s.machine->now;
  const Int stored = exchange(s, block, now, work.size) + crowding(s, block);
  const Int late = stored + queueing(s, block.package, now);
  for (Int i = wires.own; i < wires.own_end; ++i) arrive(s, b, block.rank, s.feeds[i], late);
  if (work.pushed && s.machine->mirrors)
    return push_to_mirrors(s, b, work.size, wires, stored), stored;
  return work.pushed ? push(s, b, work.size, wires, stored, late) : stored;
}

// ---- barriers: a rank is in one at a time, so each has one entry --------------------------------

// Ranks from `first` to `end` are complete: when the reader's blocks know it.
inline void release(State& s, Int reader, Int first, Int end, Int polled) {
  const Machine& m = *s.machine;
  Barrier& read = s.barriers[reader];
  const Block& here = s.blocks[reader * m.blocks_of_rank];
  Int last = NONE;
  for (Int rank = first; rank < end; ++rank) {
    const Barrier& done = s.barriers[rank];
    const Block& there = s.blocks[rank * m.blocks_of_rank];
    const bool remote = there.gpu != here.gpu;
    const Int seen =
        remote ? std::max(done.time + hop_between(s, there.package, here.package, m.now), done.data)
               : done.time + m.hop + m.cross + polled;
    if (seen <= last) continue;
    last = seen;
    read.cause = remote ? COLLECTIVE : HAND_OFF;
    read.waited_for = done.who;
  }
  schedule(s, last + m.poll, PASS_BARRIER, reader);
}

// The next barrier begins; what this one was waited for stays for those who wake.
inline void forget(Barrier& barrier) { barrier.arrived = barrier.data = barrier.complete = 0; }

inline void arrive_at_barrier(State& s, Int b, const Stage& stage, Int data) {
  const Machine& m = *s.machine;
  const Int rank = s.blocks[b].rank;
  Barrier& barrier = s.barriers[rank];
  Int* times = s.barrier_times + rank * m.blocks_of_rank;
  barrier.data = std::max(barrier.data, data);
  times[barrier.arrived++] = m.now + queueing(s, s.blocks[b].package, m.now);
  if (barrier.arrived < m.blocks_of_rank) return;
  std::sort(times, times + m.blocks_of_rank);
  Int free = 0;
  for (Int i = 0; i < m.blocks_of_rank; ++i)
    free = std::max(free, times[i] + m.hop + m.cross) + m.atomic;
  barrier.complete = 1;
  barrier.time = free;
  barrier.who = binder_of(s, b);
  // that all have arrived is a hand-off of its own
  const Int polled = queueing(s, s.blocks[b].package, m.now);
  if (!stage.across) {
    release(s, rank, rank, rank + 1, polled);
    return forget(barrier);
  }
  for (Int r = 0; r < m.ranks; ++r)
    if (!s.barriers[r].complete) return;
  for (Int reader = 0; reader < m.ranks; ++reader) release(s, reader, 0, m.ranks, polled);
  for (Int r = 0; r < m.ranks; ++r) forget(s.barriers[r]);
}

}  // namespace twin
