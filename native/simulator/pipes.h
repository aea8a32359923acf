// Pipes, paths, loads and links, as twin/sim/memory.py and twin/sim/links.py.
#pragma once

#include "mirror.h"

namespace twin {

// Pipe.cost
inline Int cost_of(State& s, Int p, Int size) {
  const Int cost = s.costs[s.pipes[p].rate * s.machine->sizes + size];
  if (cost > LONGEST) fail(*s.machine, SLOW, p, size);
  return cost;
}

inline Int reserve(State& s, Int p, Int now, Int size) {
  Pipe& pipe = s.pipes[p];
  pipe.free = in_time(s, std::max(pipe.free, now) + cost_of(s, p, size));
  pipe.bytes += s.sizes[size];
  return pipe.free;
}

inline Int share(State& s, Int p, Int now, Int size) {
  Pipe& pipe = s.pipes[p];
  const Int start = std::max(pipe.small_free, now), cost = cost_of(s, p, size);
  const Int backlog = pipe.free - start;
  pipe.small_free = in_time(s, start + cost + (backlog > 0 ? std::min(backlog, cost) : 0));
  pipe.free = in_time(s, std::max(pipe.free, now) + cost);
  pipe.bytes += s.sizes[size];
  return pipe.small_free;
}

// Path.request
inline Int request(State& s, Int p, Int now, Int size) {
  const Path& path = s.paths[p];
  ++s.machine->requests;
  Int done = now;
  for (Int i = path.start; i < path.end; ++i)
    done = std::max(done, reserve(s, s.path_pipes[i], now, size));
  return done + path.latency;
}

// Path.request_now
inline Int request_now(State& s, Int p, Int now, Int size) {
  const Path& path = s.paths[p];
  // requested earlier: how busy that makes a pipe is not bounded
  s.machine->requests += now < s.machine->now ? LONGEST : 1;
  Int done = share(s, s.path_pipes[path.start], now, size);
  for (Int i = path.start + 1; i < path.end; ++i)
    done = std::max(done, share(s, s.path_pipes[i], now, size));
  return done + path.latency;
}

// What gathered and published elements pass: not before now.
inline Int exchange(State& s, const Block& block, Int now, Int size) {
  const Path& path = s.paths[block.exchange];
  Int done = now;
  for (Int i = path.start; i < path.end; ++i)
    done = std::max(done, share(s, s.path_pipes[i], now, size));
  return done;
}

// Slice.crowding
inline Int crowding(State& s, const Block& block) {
  if (block.slice == NONE) return 0;
  const Pipe& slice = s.pipes[block.slice];
  const auto served = static_cast<__int128>(slice.waiting) * slice.numerator;
  const __int128 late = (served + slice.denominator - 1) / slice.denominator - slice.period;
  return late > 0 ? in_time(s, 3 * late / 2) : 0;
}

// Pipe.busy
inline Int busy(const Pipe& pipe, Int now) {
  const auto served = static_cast<__int128>(pipe.bytes) * pipe.numerator / pipe.denominator;
  return static_cast<Int>(served) - std::max<Int>(0, pipe.free - now);
}

// Package.load
inline Int load(State& s, Int p, Int now, Int window) {
  Load& known = s.loads[p];
  if (now - known.marked >= std::max<Int>(1, window)) {
    const Package& package = s.packages[p];
    __int128 spent = 0;
    for (Int i = package.start; i < package.end; ++i)
      spent += busy(s.pipes[s.package_pipes[i]], now);
    known.load = share_of(spent - known.before, now - known.marked, package.domains);
    if (s.machine->mirrors) note_load(s, known, static_cast<Int>(spent), now - known.marked);
    known.marked = now;
    known.before = static_cast<Int>(spent);
  }
  return known.load;
}

// Package.queue
inline Int queue(const State& s, Int p, Int now) {
  const Package& package = s.packages[p];
  __int128 waiting = 0;
  for (Int i = package.start; i < package.end; ++i)
    waiting += std::max<Int>(0, s.pipes[s.package_pipes[i]].free - now);
  return static_cast<Int>(waiting / package.domains);
}

// Timing.queueing and Timing.fetching, whose growths refer to a queue of QUEUE
inline Int queueing(State& s, Int package, Int now) {
  const Int growth = s.machine->growth;
  return growth ? in_time(s, static_cast<__int128>(growth) * queue(s, package, now) / QUEUE) : 0;
}

inline Int fetching(State& s, Int package, Int now) {
  const Int growth = s.machine->fetch_growth;
  return growth ? in_time(s, static_cast<__int128>(growth) * queue(s, package, now) / QUEUE) : 0;
}

inline Int reading(State& s, Int package, Int now) {
  return s.machine->fetch_growth ? in_time(s, queue(s, package, now)) : 0;
}

// Links.hop_between, of packages.
inline Int hop_between(State& s, Int source, Int target, Int now) {
  const Machine& m = *s.machine;
  const Int here = load(s, source, now, m.link_window), there = load(s, target, now, m.link_window);
  return m.link_hop + floor_div(m.link_growth * std::min(here, there), Int(1000));
}

// Links.send, between GPUs.
inline Int send(State& s, const Block& source, const Block& target, Int now, Int size) {
  const Int* route = s.routes + 2 * (source.gpu * s.machine->gpus + target.gpu);
  Int done = std::max(now, reserve(s, route[0], now, size));
  if (route[1] != NONE) done = std::max(done, reserve(s, route[1], now, size));
  return done + hop_between(s, source.package, target.package, now);
}

}  // namespace twin
