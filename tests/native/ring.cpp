// The ring of an NVIDIA block (native/platform/cuda_ring.cuh) with its loaders and teams as OS
// threads. Copies arrive late and in any order, teams go at paces of their own. Compiled with
// RING_SLOTS, RING_WINDOW, RING_HEAD_WINDOW, TEAMS and SLICES; says on stderr what went wrong.
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace twin {
using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int CONSUMER_WARPS = 8, LOADERS = 2;
struct Plan {
  static constexpr int ring_slots = RING_SLOTS, window_slots = RING_WINDOW,
                       head_window_slots = RING_HEAD_WINDOW, slot_bytes = 64;
};
thread_local struct {
  int x;
} threadIdx = {0};
void __syncwarp() {}

// ---- the machine: barriers of a count and a phase, and a memory that answers when it likes ------

struct Barrier {
  int count, pending;
  u32 phase;
};
struct Copy {
  u32 to, tile, barrier;
};

std::mutex lock;
std::map<u32, Barrier> barriers;
std::map<u32, u32> slots;  // address -> tile that lies there, or is on its way
std::vector<bool> arrived, released;
std::vector<Copy> copies;
std::atomic<int> faults{0};
thread_local std::minstd_rand chance;

void fault(const char* what, u32 tile) {
  if (faults++ < 5) fprintf(stderr, "%s: tile %u\n", what, tile);
}
void breathe() {
  if (chance() % 4 == 0) std::this_thread::yield();
}

u64 read_once() { return 0; }
bool barrier_seen(u32 at, u32 parity) {
  breathe();
  std::lock_guard guard(lock);
  return (barriers[at].phase & 1u) != parity;
}
bool barrier_passed(u32 at, u32 parity) { return barrier_seen(at, parity); }
void barrier_wait(u32 at, u32 parity) {
  while (!barrier_passed(at, parity)) {}
}
void arrive_locked(u32 at, int count) {
  Barrier& barrier = barriers[at];
  barrier.pending -= count;
  if (barrier.pending == 0) ++barrier.phase, barrier.pending = barrier.count;
}
void barrier_arrive(u32 at, int count = 1) {
  std::lock_guard guard(lock);
  arrive_locked(at, count);
}
void expect_copies(u32, int) {}  // a copy arrives whole, and ends the phase
bool wide_at(u32 tile) { return tile / 40 % 2; }  // as if an LM head came every 80 tiles
void bulk_copy(u32 to, const u8* from, int, u32 barrier, u64) {
  const u32 tile = u32(u64(from));
  std::lock_guard guard(lock);
  if (slots.count(to) && !released[slots[to]]) fault("a slot is filled that was not left", tile);
  const u32 window = wide_at(tile) ? RING_HEAD_WINDOW : RING_WINDOW;
  if (window < RING_SLOTS && tile >= window && !arrived[tile - window])
    fault("more is under way than the window allows", tile);
  slots[to] = tile;
  copies.push_back({to, tile, barrier});
}

constexpr bool STREAMED_ROUNDS = false;  // whose ring is smaller
struct Few {
  static constexpr int SLOTS = 0;
};

}  // namespace twin

#include "../../native/platform/cuda_ring.cuh"

using namespace twin;

namespace {

constexpr u32 FULL = 1 << 20, LEFT = 1 << 24;
constexpr int PORTIONS = (SLICES + TEAMS - 1) / TEAMS, GROUPS = SLICES < TEAMS ? TEAMS / SLICES : 1;

// One row group after the other, as Core::dot_tiles walks them.
void team(Ring ring, int me, const std::vector<int>& stages, pthread_barrier_t* met) {
  for (const int groups : stages) {
    const int row_group = SLICES < TEAMS ? me / SLICES : 0;
    for (int group = row_group; row_group < GROUPS && group < groups; group += GROUPS)
      for (int c = 0; c < PORTIONS; ++c) {
        const int slice = SLICES < TEAMS ? me % SLICES : me + c * TEAMS;
        if (slice >= SLICES) break;
        const u32 tile = ring.tile + u32(group * SLICES + slice), at = ring.acquire(tile);
        {
          std::lock_guard guard(lock);
          if (slots[at] != tile || !arrived[tile]) fault("a tile is used that is not there", tile);
          released[tile] = true;
        }
        if (me == 0 && chance() % 3 == 0) usleep(20);  // a slow team
        ring.release(tile, CONSUMER_WARPS);
      }
    ring.tile += u32(groups * SLICES);
    pthread_barrier_wait(met);
  }
}

void memory(const std::atomic<bool>& over) {
  while (!over || !copies.empty()) {
    breathe();
    std::lock_guard guard(lock);
    if (copies.empty()) continue;
    const size_t chosen = chance() % copies.size();
    const Copy copy = copies[chosen];
    copies.erase(copies.begin() + long(chosen));
    arrived[copy.tile] = true;
    arrive_locked(copy.barrier, 1);
  }
}

// `streamed` tiles are offered; the teams use those of `stages`, then leave.
void play(const std::vector<int>& stages, u32 streamed, u32 seed) {
  barriers.clear(), slots.clear(), copies.clear();
  arrived.assign(streamed, false), released.assign(streamed, false);
  const Ring ring = {0, FULL, 0};
  for (u32 i = 0; i < Ring::BARRIERS; ++i) {
    barriers[ring.full_of(i)] = {1, 1, 0};
    barriers[ring.empty_of(i)] = {CONSUMER_WARPS, CONSUMER_WARPS, 0};
  }
  barriers[LEFT] = {1, 1, 0};
  pthread_barrier_t met;
  pthread_barrier_init(&met, nullptr, TEAMS);
  std::atomic<bool> over{false};
  std::vector<std::thread> loaders, teams;
  std::thread answers([&] { chance.seed(seed), memory(over); });
  for (u32 i = 0; i < u32(LOADERS); ++i)
    loaders.emplace_back([&, i] {
      chance.seed(seed + 1 + i);
      Loader loader(ring, LEFT, i);
      bool more = true;
      for (u32 tile = 0; more && tile < streamed; ++tile)
        loader.wide = wide_at(tile), more = loader.fill(reinterpret_cast<const u8*>(u64(tile)), 64);
      loader.drain();
    });
  for (int i = 0; i < TEAMS; ++i)
    teams.emplace_back([&, i] { chance.seed(seed + 10 + u32(i)), team(ring, i, stages, &met); });
  for (std::thread& one : teams) one.join();
  barrier_arrive(LEFT);
  for (std::thread& one : loaders) one.join();
  {
    std::lock_guard guard(lock);
    if (!copies.empty()) fault("something is under way when the loaders have left", copies[0].tile);
  }
  over = true;
  answers.join();
}

}  // namespace

int main() {
  alarm(60);  // a hang ends the program
  for (u32 seed = 1; seed <= 8; ++seed) {
    std::minstd_rand number(seed);
    std::vector<int> stages;
    u32 used = 0;
    for (int i = 0; i < 5; ++i)
      stages.push_back(1 + int(number() % 7)), used += u32(stages.back() * SLICES);
    // every other time the teams leave before the stream ends
    play(stages, used + (seed % 2 ? 0 : 3 * SLICES), 100 * seed);
  }
  return faults ? 1 : 0;
}
