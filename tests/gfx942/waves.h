// The platform of AMD's GPUs (native/platform/hip.h), as it is, on the CPU: what it asks of the
// machine is answered by threads of 64 a wave and 512 a block, each with a stack of its own, that
// take turns on one OS thread a block. Memory is the CPU's, in order: caches and waits are the
// interpreter's to test.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

namespace waves {

constexpr int LANES = 64, THREADS = TWIN_THREADS, WAVES = THREADS / LANES;
constexpr size_t STACK = 128 << 10;

// What a thread waits for. SWAP: values of its wave are exchanged; WAVE: nothing is.
enum Wait { RUNS, NAPS, SWAP, WAVE_SYNC, BLOCK, LEFT };

struct Thread {
  jmp_buf at;
  ucontext_t first;
  bool begun = false;
  Wait wait = RUNS;
  const void* site;  // threads of a wave meet where they have come to the same place
  int give, from;    // SWAP: its value; the lane whose value it wants, -1: none
  int got;
  bool valid;  // that lane was there
};

struct Block {
  int number, die;
  const void* arguments;
  void (*kernel)(const void* arguments);
  Thread threads[THREADS];
  uint8_t* stacks;
  int running = 0;
  jmp_buf scheduler;
  ucontext_t home;
  uint64_t state;  // of the order of turns

  Block() : stacks(static_cast<uint8_t*>(mmap(nullptr, STACK* THREADS, PROT_READ | PROT_WRITE,
                                              MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Block() { munmap(stacks, STACK * THREADS); }

  void begin(int t);
  void resume(int t);
  void pause(Wait wait);
  bool meet(int wave);
  bool turn();
  void run();
  uint32_t below(uint32_t n) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return uint32_t(state >> 33) % n;
  }
};

extern thread_local Block* block;

inline Thread& me() { return block->threads[block->running]; }

// Gives a value and takes that of lane `from`, 0 where it is not here. Convergent: no compiler may
// give threads that go together places of their own.
__attribute__((convergent, noinline)) int exchange(int value, int from, bool& valid);
__attribute__((convergent, noinline)) void wave_sync();
__attribute__((convergent, noinline)) void block_sync();
__attribute__((convergent, noinline)) void nap();

__attribute__((convergent)) inline int dpp(int old, int value, int code, int rows, int banks,
                                           bool zero) {
  const int lane = block->running % LANES, row = lane / 16 * 16;
  int from = -1;
  if (code < 0x100) from = lane / 4 * 4 + (code >> 2 * (lane % 4) & 3);
  if (code == 0x140) from = row + 15 - lane % 16;
  if (code == 0x141) from = lane / 8 * 8 + 7 - lane % 8;
  if (code == 0x142) from = row - 1;
  if (code == 0x143) from = lane < 32 ? -1 : 31;
  if (code > 0x143) abort();
  bool valid;
  const int got = exchange(value, from, valid);
  const bool chosen = rows >> (lane / 16) & 1 && banks >> (lane % 16 / 4) & 1;
  return chosen && (valid || zero) ? got : old;
}

__attribute__((convergent)) inline int bpermute(int address, int value) {
  bool valid;
  return exchange(value, address / 4 % LANES, valid);
}

inline float dot2(const _Float16* a, const _Float16* b, float sum) {
  return __builtin_fmaf(float(a[1]), float(b[1]),
                        __builtin_fmaf(float(a[0]), float(b[0]), sum));
}

template <class T>
T load(const T* at) {
  return __atomic_load_n(at, __ATOMIC_SEQ_CST);
}
template <class T, class V>
void store(T* at, V value) {
  __atomic_store_n(at, T(value), __ATOMIC_SEQ_CST);
}

inline uint64_t clock_10ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return uint64_t(now.tv_sec) * 100000000u + uint64_t(now.tv_nsec) / 10u;
}

}  // namespace waves

// ---- the machine's words, answered by the above -------------------------------------------------

#define address_space(n)  // there is one
#define __HIP_MEMORY_SCOPE_SYSTEM 0
#define __HIP_MEMORY_SCOPE_AGENT 0
#define __hip_atomic_load(at, ...) waves::load(at)
#define __hip_atomic_store(at, value, ...) waves::store(at, value)
#define __hip_atomic_fetch_add(at, value, ...) __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST)
#define __hip_atomic_compare_exchange_strong(at, expected, wanted, ...) \
  __atomic_compare_exchange_n(at, expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)
#define __builtin_amdgcn_fence(...) __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __builtin_amdgcn_s_barrier() waves::block_sync()
#define __builtin_amdgcn_wave_barrier() waves::wave_sync()
#define __builtin_amdgcn_s_sleep(n) waves::nap()
#define __builtin_amdgcn_workitem_id_x() waves::block->running
#define __builtin_amdgcn_workgroup_id_x() waves::block->number
#define __builtin_amdgcn_s_getreg(which) waves::block->die
#define __builtin_amdgcn_kernarg_segment_ptr() waves::block->arguments
#define __builtin_amdgcn_mbcnt_lo(mask, sum) 0u
#define __builtin_amdgcn_mbcnt_hi(mask, sum) unsigned(waves::block->running % waves::LANES)
#define __builtin_amdgcn_ds_bpermute(address, value) waves::bpermute(address, value)
#define __builtin_amdgcn_update_dpp(old, value, code, rows, banks, zero) \
  waves::dpp(old, value, code, rows, banks, zero)
#define __builtin_amdgcn_readlane(value, lane)       \
  [&](int given) __attribute__((convergent)) {       \
    bool valid;                                      \
    return waves::exchange(given, lane, valid);      \
  }(value)
#define __builtin_amdgcn_readfirstlane(value) (value)  // requested of what all lanes have
#define __builtin_amdgcn_sched_barrier(which) ((void)0)
#define __builtin_amdgcn_fdot2(a, b, sum, clamp)                                        \
  waves::dot2(reinterpret_cast<const _Float16*>(&a), reinterpret_cast<const _Float16*>(&b), sum)
#define __builtin_readsteadycounter() waves::clock_10ns()
// registers that are computed again, stores that are waited for: nothing of either here
#define asm
#define volatile(...) \
  do {                \
  } while (false)

#include "../../native/platform/hip_runtime.h"
#undef __launch_bounds__
#define __launch_bounds__(threads)
#undef __shared__
#define __shared__ thread_local  // a block has an OS thread of its own

#include "../../native/platform/hip.h"
