// The loader of one block, as twin/sim/ring.py.
#pragma once

#include "pipes.h"

namespace twin {

inline Int path_of(const Block& block, Int number, bool warm) {
  const bool hit = warm && (number + 1) * block.kept / SHARES > number * block.kept / SHARES;
  return hit ? block.cached : block.memory;
}

inline Int& slot_arrival(State& s, Int b, Int slot) { return s.arrivals[b * s.machine->capacity + slot % s.machine->capacity]; }

inline bool may_request(const State& s, const Block& block) {
  return block.issued < block.limit && block.issued - block.freed < s.machine->capacity;
}

inline Int window_opens(State& s, Int b) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  if (m.window == m.capacity || block.issued < m.window) return block.copied;
  return std::max(block.copied, slot_arrival(s, b, block.issued - m.window));
}

inline void wake_at(State& s, Int b, Int time) {
  if (s.blocks[b].waiting) return;
  s.blocks[b].waiting = 1;
  schedule(s, time, WAKE_LOADER, b);
}

inline void request_slot(State& s, Int b) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Int slot = block.issued++;
  const Int size = s.slots[block.slot_base + slot % block.per_step].size;
  Int arrived = request(s, path_of(block, slot, slot >= block.per_step), m.now, size);
  if (slot) arrived = std::max(arrived, slot_arrival(s, b, slot - 1));
  slot_arrival(s, b, slot) = arrived;
  if (m.pace) block.copied = m.now + m.pace;
  if (block.history != NONE) {
    s.history[2 * (block.history + slot)] = m.now;
    s.history[2 * (block.history + slot) + 1] = arrived;
  }
}

inline void pump(State& s, Int b) {
  const Int now = s.machine->now;
  Block& block = s.blocks[b];
  if (block.paused) return;
  if (now < block.open_at) {
    if (block.issued < block.limit) wake_at(s, b, block.open_at);
    return;
  }
  if (!may_request(s, block)) return;
  const Int earliest = window_opens(s, b);
  if (earliest > now) return wake_at(s, b, earliest);
  request_slot(s, b);
  if (may_request(s, block)) wake_at(s, b, std::max(now, window_opens(s, b)));
}

inline void open_ring(State& s, Int b, Int limit, Int at) {
  s.blocks[b].limit = limit;
  s.blocks[b].open_at = at;
  pump(s, b);
}

// Of the slot that the consumer needs next; NONE: not requested yet.
inline Int arrival(State& s, Int b) {
  Block& block = s.blocks[b];
  if (block.freed == block.issued) {
    pump(s, b);
    if (block.freed == block.issued) return NONE;
  }
  return slot_arrival(s, b, block.freed);
}

// Until that slot can be requested; 0: it never will be.
inline Int wait_time(const State& s, const Block& block) {
  const Int wait = std::max(block.open_at, block.copied) - s.machine->now;
  return block.paused || block.freed >= block.limit ? 0 : std::max<Int>(0, wait);
}

}  // namespace twin
