// The event queue, by (time, sequence), and lists of blocks that wait for an event. SimPy's one
// urgent kind of event, the start of a process, happens before the loop begins.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout.h"  // generated from twin/sim/compiled/state.py

namespace twin {

constexpr Int NONE = -1;

// Python's division of integers: rounds down, also below zero.
template <class Number>
Number floor_div(Number a, Number b) {
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

// The run ends with the first error; what is left of the present event goes on with values that
// fit.
inline void fail(Machine& m, Int error, Int stuck, __int128 beyond) {
  if (m.error != FINISHED) return;
  m.error = error;
  m.stuck = stuck;
  m.beyond = static_cast<Int>(beyond);
  m.beyond_high = static_cast<Int>(beyond >> 64);
}

// A time itself, up to where the clock ends: every time is at most LAST and every single cost at
// most LONGEST, so sums of a few of them fit 64 bits, and what may be longer comes here in 128. As
// in_time of twin/sim/clock.py.
inline Int in_time(State& s, __int128 time) {
  if (time <= LAST) return static_cast<Int>(time);
  fail(*s.machine, BEYOND, NONE, time);
  return LAST;
}

// Time, then sequence, as one number: compared without a branch.
inline unsigned __int128 key_of(const Event& event) {
  return static_cast<unsigned __int128>(event.time) << 64 | static_cast<uint64_t>(event.order);
}

// What happens: its kind and target stand behind the sequence number, so that one word orders and
// says it.
inline Int kind_of(const Event& event) { return event.order & ((Int(1) << KIND_BITS) - 1); }
inline Int sequence_of(const Event& event) { return event.order >> (KIND_BITS + TARGET_BITS); }
inline Int target_of(const Event& event) {
  return (event.order >> KIND_BITS) & ((Int(1) << TARGET_BITS) - 1);
}

inline void note_schedule(State& s, Int kind, Int target);  // mirror.h

// A heap of four children: half as deep as one of two, and four events are one cache line.
constexpr Int CHILDREN = 4;  // take() compares them two by two

inline void schedule(State& s, Int time, Int kind, Int target) {
  Machine& m = *s.machine;
  if (m.mirrors) note_schedule(s, kind, target);
  time = in_time(s, time);
  Int hole = m.queued++;
  while (hole > 0) {
    const Int above = (hole - 1) / CHILDREN;
    if (s.queue[above].time <= time) break;  // equal times: the newest comes last
    s.queue[hole] = s.queue[above];
    hole = above;
  }
  s.queue[hole] = {time, (m.sequence++ << TARGET_BITS | target) << KIND_BITS | kind};
}

// Removes the first event; the queue is not empty. Behind its end lie CHILDREN events of the end of
// time, so that all have four children.
inline Event take(State& s) {
  Event* queue = s.queue;
  const Event first = queue[0];
  const Int count = --s.machine->queued;
  const Event last = queue[count];
  queue[count] = {INT64_MAX, INT64_MAX};
  Int hole = 0;
  for (Int below = 1; below < count; below = CHILDREN * hole + 1) {
    const Event* child = queue + below;
    const Int left = key_of(child[1]) < key_of(child[0]),
              right = 2 + (key_of(child[3]) < key_of(child[2]));
    const Int least = key_of(child[right]) < key_of(child[left]) ? right : left;
    if (key_of(last) < key_of(child[least])) break;
    queue[hole] = child[least];
    hole = below + least;
  }
  queue[hole] = last;
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
