// The loader of one block, as twin/sim/ring.py and twin/sim/gated.py.
#pragma once

#include "pipes.h"

namespace twin {

inline Int path_of(const Block& block, Int number, bool warm) {
  const bool hit = warm && (number + 1) * block.kept / SHARES > number * block.kept / SHARES;
  return hit ? block.cached : block.memory;
}

// Of a request that is among the last `capacity`.
inline Int& arrival_of(State& s, Int b, Int request) {
  return s.arrivals[b * s.machine->capacity + request % s.machine->capacity];
}

inline bool may_request(const State& s, const Block& block) {
  return block.issued < block.limit && block.issued - block.freed < s.machine->capacity;
}

inline Int window_opens(State& s, Int b) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  const Int at = block.wide_end ? block.issued % block.per_step : 0;
  const Int window = block.wide_begin <= at && at < block.wide_end ? m.wide_window : m.window;
  if (window == m.capacity || block.issued < window) return block.copied;
  return std::max(block.copied, arrival_of(s, b, block.issued - window));
}

inline void wake_at(State& s, Int b, Int time) {
  if (s.blocks[b].waiting) return;
  s.blocks[b].waiting = 1;
  schedule(s, time, WAKE_LOADER, b);
}

// Requests a slot; in the order of requests, even when a cache answers sooner than memory did.
inline Int request_slot(State& s, Int b, Int slot, Int size, bool warm) {
  const Machine& m = *s.machine;
  Block& block = s.blocks[b];
  const Int path = path_of(block, slot, warm);
  Int arrived = request(s, path, m.now, size);
  if (m.answers && path == block.memory)  // never before the slowest pipe has let it through
    arrived += std::max(s.answers[(block.first_answer + block.issued) % m.answers],
                        -s.paths[path].latency);
  if (block.issued) arrived = std::max(arrived, arrival_of(s, b, block.issued - 1));
  arrival_of(s, b, block.issued) = arrived;
  if (m.pace) block.copied = m.now + m.pace;
  if (block.history != NONE) {
    s.history[2 * (block.history + block.issued)] = m.now;
    s.history[2 * (block.history + block.issued) + 1] = arrived;
  }
  ++block.issued;
  return arrived;
}

inline void pump_plain(State& s, Int b) {
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
  const Int slot = block.issued;
  request_slot(s, b, slot, s.slots[s.streams[block.stream].slots + slot % block.per_step],
               slot >= block.per_step);
  if (may_request(s, block)) wake_at(s, b, std::max(now, window_opens(s, b)));
}

// ---- gated: weights of experts cannot be requested before the routing is known; as
// twin/sim/gated.py

inline const Stream& stream_of(const State& s, Int b, Int step) {
  const Machine& m = *s.machine;
  const Int variant = s.choices[step * m.ranks + s.blocks[b].rank];
  return s.streams[variant * m.blocks_of_rank + b % m.blocks_of_rank];
}

inline const Int* starts_of(const State& s, Int b) { return s.starts + b * (s.machine->steps + 2); }

// When a gate of a step was opened; NONE: it is closed.
inline Int& opened(State& s, Int b, Int step, Int gate) {
  return s.opened[(b * (s.machine->steps + 1) + step) * s.machine->gates + gate];
}

inline bool is_open(State& s, Int b, Int step, const Stretch& stretch) {
  return stretch.gate == NONE || opened(s, b, step, stretch.gate) != NONE;
}

// The entry of the slot that the consumer needs next.
inline There* there(State& s, Int b) {
  const Int capacity = s.machine->capacity;
  There* first = s.there + b * capacity;
  for (There* entry = first; entry != first + capacity; ++entry)
    if (entry->slot == s.blocks[b].freed) return entry;
  return nullptr;
}

inline Int* beyond_of(State& s, Int b) { return s.beyond + b * (s.machine->ahead + 1); }

inline bool is_beyond(State& s, Int b, Int slot) {
  const Int* first = beyond_of(s, b);
  return std::find(first, first + s.blocks[b].beyond, slot) != first + s.blocks[b].beyond;
}

// The slot to request next, if there is one and a place for it.
inline Int next_slot(State& s, Int b) {
  const Machine& m = *s.machine;
  const Block& block = s.blocks[b];
  if (block.issued - block.freed >= m.capacity || block.head >= block.limit) return NONE;
  Int step = block.head_step, stretch = block.head_stretch;
  if (is_open(s, b, step, s.stretches[stretch])) return block.head;
  if (block.beyond >= m.ahead) return NONE;
  const Int* starts = starts_of(s, b);
  for (Int begin = starts[step] + s.stretches[stretch].end; begin < block.limit;
       begin = starts[step] + s.stretches[stretch].end) {
    while (++stretch >= stream_of(s, b, step).stretches_end) {
      if (++step > m.steps) return NONE;
      stretch = stream_of(s, b, step).stretches - 1;
    }
    if (!is_open(s, b, step, s.stretches[stretch])) continue;
    const Int end = std::min(starts[step] + s.stretches[stretch].end, block.limit);
    for (Int slot = begin; slot < end; ++slot)
      if (!is_beyond(s, b, slot)) return slot;
  }
  return NONE;
}

// The first stretch of the head's step, or of the first step after it that has slots at all.
inline void find_stretch(State& s, Int b) {
  Block& block = s.blocks[b];
  for (; block.head_step <= s.machine->steps; ++block.head_step) {
    const Stream& stream = stream_of(s, b, block.head_step);
    block.head_stretch = stream.stretches;
    if (stream.stretches < stream.stretches_end) return;
  }
}

// The first slot that is not requested, and its stretch.
inline void advance_head(State& s, Int b) {
  Block& block = s.blocks[b];
  Int* first = beyond_of(s, b);
  for (Int *end = first + block.beyond, *found; (found = std::find(first, end, block.head)) != end;
       end = first + block.beyond) {
    *found = first[--block.beyond];
    ++block.head;
  }
  while (block.head_step <= s.machine->steps &&
         starts_of(s, b)[block.head_step] + s.stretches[block.head_stretch].end <= block.head) {
    if (++block.head_stretch < stream_of(s, b, block.head_step).stretches_end) continue;
    ++block.head_step;
    find_stretch(s, b);
  }
}

inline void take_slot(State& s, Int b, Int slot) {
  Block& block = s.blocks[b];
  const Int* starts = starts_of(s, b);
  Int step = block.head_step;
  while (slot >= starts[step + 1]) ++step;
  const Int size = s.slots[stream_of(s, b, step).slots + slot - starts[step]];
  const Int arrived = request_slot(s, b, slot, size, slot >= starts[1]);
  There* free = s.there + b * s.machine->capacity;
  while (free->slot != NONE) ++free;
  *free = {slot, arrived};
  beyond_of(s, b)[block.beyond++] = slot;
  advance_head(s, b);
}

inline void pump_gated(State& s, Int b) {
  const Int now = s.machine->now;
  Block& block = s.blocks[b];
  const Int slot = block.paused ? NONE : next_slot(s, b);
  if (slot == NONE) return;
  const Int earliest = std::max(block.open_at, window_opens(s, b));
  if (earliest > now) return wake_at(s, b, earliest);
  take_slot(s, b, slot);
  if (next_slot(s, b) != NONE) wake_at(s, b, std::max(now, window_opens(s, b)));
}

inline void open_gate(State& s, Int b, Int gate) {
  opened(s, b, s.blocks[b].step, gate) = s.machine->now;
  pump_gated(s, b);
}

// ---- either -------------------------------------------------------------------------------------

inline void pump(State& s, Int b) { s.machine->gated ? pump_gated(s, b) : pump_plain(s, b); }

inline void open_ring(State& s, Int b, Int limit, Int at) {
  s.blocks[b].limit = limit;
  s.blocks[b].open_at = at;
  pump(s, b);
}

inline Int first_slot(const State& s, Int b, Int step) {
  return s.machine->gated ? s.starts[b * (s.machine->steps + 2) + step]
                          : step * s.blocks[b].per_step;
}

// Of the slot that the consumer needs next; NONE: not requested yet.
inline Int arrival(State& s, Int b) {
  Block& block = s.blocks[b];
  if (s.machine->gated) {
    if (!there(s, b)) pump(s, b);
    const There* found = there(s, b);
    return found ? found->arrival : NONE;
  }
  if (block.freed == block.issued) {
    pump(s, b);
    if (block.freed == block.issued) return NONE;
  }
  return arrival_of(s, b, block.freed);
}

// Until that slot can be requested; 0: it never will be.
inline Int wait_time(State& s, Int b) {
  const Block& block = s.blocks[b];
  const Int wait = std::max(block.open_at, s.machine->gated ? window_opens(s, b) : block.copied) -
                   s.machine->now;
  return block.paused || block.freed >= block.limit ? 0 : std::max<Int>(0, wait);
}

// The consumer is done with its slot.
inline void free_slot(State& s, Int b) {
  if (s.machine->gated) there(s, b)->slot = NONE;
  ++s.blocks[b].freed;
  pump(s, b);
}

}  // namespace twin
