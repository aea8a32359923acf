// The event queue, by (time, sequence), and lists of blocks that wait for an event. SimPy's one urgent kind of event, the start of
// a process, happens before the loop begins.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"  // generated from twin/sim/compiled/state.py

namespace twin {

constexpr Int NONE = -1;

// Python's division of integers: rounds down, also below zero.
inline Int floor_div(Int a, Int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

inline bool before(const Event& a, const Event& b) { return a.time < b.time || (a.time == b.time && a.sequence < b.sequence); }

inline void schedule(State& s, Int time, Int kind, Int target) {
  Machine& m = *s.machine;
  Int hole = m.queued++;
  while (hole > 0) {
    const Int above = (hole - 1) / 2;
    if (s.queue[above].time <= time) break;  // equal times: the newest comes last
    s.queue[hole] = s.queue[above];
    hole = above;
  }
  s.queue[hole] = {time, m.sequence++, kind, target};
}

// Removes the first event; the queue is not empty.
inline Event take(State& s) {
  const Event first = s.queue[0];
  const Int count = --s.machine->queued;
  const Event last = s.queue[count];
  Int hole = 0;
  for (Int below = 1; below < count; below = 2 * hole + 1) {
    if (below + 1 < count && before(s.queue[below + 1], s.queue[below])) ++below;
    if (before(last, s.queue[below])) break;
    s.queue[hole] = s.queue[below];
    hole = below;
  }
  s.queue[hole] = last;
  return first;
}

// Block b goes to the end of the list that `item` heads. A block is in one list at a time.
template <class Item>
void join(State& s, Item& item, Int b) {
  s.blocks[b].next = NONE;
  if (item.head == NONE) {
    item.head = b;
  } else {
    s.blocks[item.tail].next = b;
  }
  item.tail = b;
}

}  // namespace twin
