// One GPU of several that do the same: its blocks run, and what they push comes back as what the
// others push at the same time.
//
// In the whole machine the events of one time come in groups: those that events of one group have
// scheduled for one time. A group is done GPU by GPU, each GPU's part in the same order, and all of
// it before the next group. What the last GPU pushes in a group completes what the others wait for.
// A block that begins to wait in the very group whose pushes complete what it waits for therefore
// waits with the others on most GPUs, and comes too late and wakes after them on the last one: its
// place in later groups is loose, until it is alone in one. Everything else is ordered by the GPU
// itself, the same in each of them. A run ends as AMBIGUOUS where a difference could be seen:
// - a wake-up by other GPUs' pushes and another event of this GPU belong to one group;
// - a group has events of several dies, which share memory and fabric, and the place of one of them
//   is loose;
// - a group with a loose place pushes through a switch, not closely one after the other, or to
//   different waiters of whom one is waiting;
// - a switch lets the pushes of a group out later than it lets them in;
// - a load of memory would come out otherwise without the requests that this GPU has made in the
//   group;
// - something else is to happen at the time at which the run stops.
// A representative of more GPUs than are simulated otherwise goes on: it takes the order that it
// finds, and what that makes of a time is small (tests/sim/test_representatives.py).
#pragma once

#include "events.h"

namespace twin {

inline void doubt(State& s) {
  if (!s.machine->represents) fail(*s.machine, AMBIGUOUS, NONE, 0);
}

// Remembers which group scheduled it, and if from a loose place; of what makes a record seen the
// record does.
inline void note_schedule(State& s, Int kind, Int target) {
  const Machine& m = *s.machine;
  if (kind == RUN) s.blocks[target].run_group = 2 * m.group + m.loose;
  if (kind == WAKE_LOADER) s.blocks[target].wake_group = 2 * m.group + m.loose;
}

// The group that scheduled an event, doubled, and 1 more from a loose place.
inline Int origin_of(const State& s, const Event& event) {
  const Machine& m = *s.machine;
  switch (kind_of(event)) {
    case RUN: return s.blocks[target_of(event)].run_group;
    case WAKE_LOADER: return s.blocks[target_of(event)].wake_group;
    case SEE:
      return 2 * s.records[target_of(event) / m.dies].group +
             s.records[target_of(event) / m.dies].loose;
    default: return 2 * m.group;  // ends of blocks and of the run
  }
}

inline Int die_of(const State& s, const Event& event) {
  switch (kind_of(event)) {
    case RUN:
    case WAKE_LOADER: return s.blocks[target_of(event)].die;
    case SEE: return target_of(event) % s.machine->dies;
    default: return NONE;
  }
}

// Thousandths of a time for which a package was busy.
inline Int share_of(__int128 busy, Int time, Int domains) {
  return static_cast<Int>(
      std::min<__int128>(1000, floor_div(1000 * busy, static_cast<__int128>(time) * domains)));
}

// The first push of a group works out the load of all packages, where those of other GPUs may not
// have served the requests that this one has made in the group: each makes the time that a package
// has been busy shorter by a picosecond at most.
inline void note_load(State& s, Load& known, Int busy, Int elapsed) {
  const Machine& m = *s.machine;
  const Int most = busy + m.requests, domains = s.packages[0].domains;
  if (m.link_growth && share_of(busy - known.most, elapsed, domains) !=
                           share_of(most - known.before, elapsed, domains))
    doubt(s);
  known.most = most;
}

// Is the next event of another group than the one before it?
inline bool begins_group(const State& s, const Event& event) {
  return event.time != s.machine->now || origin_of(s, event) / 2 != s.machine->parent;
}

inline void begin_group(State& s, const Event& event) {
  Machine& m = *s.machine;
  m.parent = origin_of(s, event) / 2;
  m.die = die_of(s, event);
  ++m.group;
  m.plain = m.requests = m.loosened = 0;
  m.see = NONE;
}

// An event that was taken from the queue. `record` is what it makes seen, if other GPUs fed that;
// else NONE.
inline void note_event(State& s, const Event& event, Int record) {
  Machine& m = *s.machine;
  if (record == NONE) ++m.plain;
  if (m.see != NONE && m.see != record) doubt(s);
  if (record != NONE) m.see = record;
  if (m.see != NONE && m.plain) doubt(s);
  m.now = event.time;
  const bool alone =
      record == NONE && m.plain == 1 && (m.queued == 0 || begins_group(s, s.queue[0]));
  m.loose = !alone && origin_of(s, event) % 2;
  m.loosened |= m.loose;
  if (record == NONE && die_of(s, event) != m.die) m.die = NONE;
  if (m.loosened && m.die == NONE) doubt(s);
}

}  // namespace twin
