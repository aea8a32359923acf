// How the host's blocks wait for each other: spinning, yielding, napping, parked on a futex.
#pragma once

#include <sched.h>
#if defined(TWIN_FAULTS)
#include <string.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace twin {

// Where blocks that share a core wait for each other. sched_yield would not do: recent Linux
// schedulers charge every yield a whole slice, and a block that had polled for a while was seen not
// to run again for tens of seconds.
struct Parking {
  alignas(LINE) int epoch;  // publications so far, of all blocks
  alignas(LINE) int sleepers;
};

// pauses, before a block with a core of its own begins to sleep
constexpr u32 PATIENT_SPINS = 20000;
// that a block tries before it parks: waking a core that went idle costs 20-50 us
constexpr u32 POLITE_YIELDS = 64;
// but no more once one of them took long: the core is busy, and sleeping is fairer
constexpr u64 POLITE_NS = 50000;
constexpr long NAP_NS = 20000;  // then: another process wants the core, and will have it
// a parked block looks at the abort word at least this often
constexpr long PARKED_NS = 1000000;

inline void nap(long ns) {
  const timespec time = {0, ns};
  nanosleep(&time, nullptr);
}

inline void park(Parking& parking, int seen) {
#if defined(__linux__)
  const timespec time = {0, PARKED_NS};
  __atomic_fetch_add(&parking.sleepers, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &parking.epoch, FUTEX_WAIT_PRIVATE, seen, &time, nullptr, 0);
  __atomic_fetch_sub(&parking.sleepers, 1, __ATOMIC_SEQ_CST);
#else
  if (__atomic_load_n(&parking.epoch, __ATOMIC_SEQ_CST) == seen) sched_yield();
#endif
}

inline void unpark(Parking& parking) {
  __atomic_fetch_add(&parking.epoch, 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&parking.sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &parking.epoch, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, nullptr, nullptr, 0);
#endif
}

// A build of the tests' in which blocks stop for a while at random: between two stages, behind
// their reads, behind what they published. With TWIN_FAULTS one rank's alone, or one rank never
// runs, as the environment says when a run starts: TWIN_FAULT="nap 1", "dead 1".
#if defined(TWIN_NAPS)
inline thread_local bool awake = false;  // this block never stops

inline void nap_at_random() {
  static u32 started = 0;
  static thread_local u32 state =
      0x9E3779B9u * (1u + __atomic_fetch_add(&started, 1u, __ATOMIC_RELAXED));
  if (awake) return;
  state = state * 1664525u + 1013904223u;
  if (state >> 29 == 0) nap(long(state >> 12 & 0x1FFFFu));
}
#else
inline void nap_at_random() {}
#endif

#if defined(TWIN_FAULTS)
// Is it this rank's fault? Rank -1: nobody's.
inline bool at_fault(const char* kind, int rank) {
  const char* said = getenv("TWIN_FAULT");
  char which[8] = "";
  int whose = -1;
  return said && sscanf(said, "%7s %d", which, &whose) == 2 && !strcmp(which, kind) &&
         whose == rank;
}
#endif

}  // namespace twin
