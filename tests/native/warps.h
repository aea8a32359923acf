// A GPU's block on the CPU, with the kernel's barriers, shuffles and warp-strided loops. Memory and
// stored types are the host platform's. Under a race detector every thread is an OS thread; else
// those of a block take turns on one, and each goes as far ahead of the others as barriers let it.
#pragma once

#include <pthread.h>
#include <setjmp.h>
#include <ucontext.h>

#include <vector>

#define Core HostCore
#define Ring HostRing
#define Piece HostPiece
#define CachedRows HostCachedRows
#include "../../native/platform/host.h"
#undef Core
#undef Ring
#undef Piece
#undef CachedRows

namespace twin {

constexpr int THREADS = 4, WARPS = 3, TEAM = THREADS * WARPS;

#if defined(__SANITIZE_THREAD__)
// a barrier whose threads sleep: a team has more of them than the computer has cores
struct Meeting {
  pthread_barrier_t barrier;

  explicit Meeting(int count = THREADS) {
    pthread_barrier_init(&barrier, nullptr, unsigned(count));
  }
  ~Meeting() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
};

inline void let_others() {
  const timespec nap = {0, 20000};
  nanosleep(&nap, nullptr);
}
#else
// The threads of a block, on the OS thread that runs the block.
struct Turns {
  static constexpr size_t STACK = 256 << 10;

  jmp_buf at[TEAM];
  ucontext_t first[TEAM], home;
  std::vector<char> stacks = std::vector<char>(STACK * TEAM);
  bool begun[TEAM] = {}, left[TEAM] = {};
  int now = 0;

  void next() {
    const int from = now;
    do now = (now + 1) % TEAM;
    while (left[now] && now != from);
    if (left[now]) setcontext(&home);
    if (now == from || _setjmp(at[from])) return;
    if (begun[now]) _longjmp(at[now], 1);
    begun[now] = true;
    setcontext(&first[now]);
  }
};
inline thread_local Turns* turns;

struct Meeting {
  int count, here = 0, met = 0;

  explicit Meeting(int count = THREADS) : count(count) {}
  void wait() {
    const int before = met;
    if (++here == count) here = 0, ++met;
    while (met == before) turns->next();
  }
};

inline void let_others() {
  if (turns) turns->next();
  if (turns && turns->now > 0) return;  // one of a block sleeps for all
  const timespec nap = {0, 20000};
  nanosleep(&nap, nullptr);
}
#endif

struct Team {  // what the threads of a block share
  Meeting all = Meeting(TEAM), warps[WARPS];
  u64 slots[TEAM];
};

struct Ring {
  const u8* stream;
  u64 cursor;
  u64 ahead;
  u32 tile = 0;
  u32 warp = 0;

  bool mine() const { return tile % u32(WARPS) == warp; }
  const u8* acquire() const { return stream + cursor; }
  void release() {}
  void next(int bytes) {
    cursor += u64(bytes);
    ++tile;
  }
  void rewind() { cursor = 0; }
};

template <class S>
struct Piece {  // a thread's part of a cached key or value; two threads share a position
  static constexpr int HEAD_DIM = S::HEAD_DIM;
  static constexpr int THREADS = 2, SIZE = (HEAD_DIM + THREADS - 1) / THREADS;
  float at[SIZE];

  template <class Core>
  void load(const Core& core, const u8* row) {
    for (int d = 0; d < SIZE; ++d) {
      const int from = core.warp_thread() % THREADS * SIZE + d;
      at[d] = from < HEAD_DIM ? load_element<KV>(row + from * type_bytes(KV)) : 0.0f;
    }
  }
  template <class Core>
  void load_near(const Core& core, const u8* from) {
    load(core, from);
  }
  void clear() {
    for (int d = 0; d < SIZE; ++d) at[d] = 0.0f;
  }
  void unpack(float* out) const {
    for (int d = 0; d < SIZE; ++d) out[d] = at[d];
  }
};

// Its warps hold the same columns, as row groups of a GPU's teams do, and share their splits.
struct SharedVector : MemoryVector {
  static constexpr int SHARERS = WARPS, SHARING_THREADS = THREADS;
  static constexpr int SIDE_BY_SIDE = 0, SIDE_WIDTH = 0;

  static SharedVector in(float* memory, int count) { return {{memory, count}}; }
  static int row_group(int me) { return me / THREADS; }
  static int sharing_thread(int me) { return me % THREADS; }

  template <class Core, class Make>
  bool packs(Core& core, Make make) {
    bool good = true;
    const int me = core.thread();
    float unused[PACK];
    // all threads make as many: they meet
    for (int begin = 0; begin < count; begin += THREADS * PACK) {
      const int first[1] = {begin + sharing_thread(me) * PACK};
      const bool here[1] = {first[0] < count};
      float* const out[1] = {here[0] && row_group(me) == 0 ? at + first[0] : unused};
      good &= make(first, here, out);
    }
    return good;
  }
};

template <class S>
struct CachedRows {
  using Piece = twin::Piece<S>;
  static constexpr int POSITIONS = 3;
  // what a group of more than 4 leaves over is passed by
  static constexpr int SCAN_HEADS = S::GROUP < 4 ? S::GROUP : 4;
  static constexpr int POSITION_THREADS = Piece::THREADS;
  static constexpr int CACHE_TILE = 1;
  static constexpr bool TENSOR_SCAN = false;
  struct TileScan {
    static constexpr int WARPS = 1, PARTIALS = 1, POSITIONS = 1;
  };

  template <class Core>
  static float subwarp_sum(Core& core, float v) {
    return core.template threads_sum<POSITION_THREADS>(v);
  }
  static float piece_dot(const float* a, const float* b) {
    float sum = 0;
    for (int d = 0; d < Piece::SIZE; ++d) sum += a[d] * b[d];
    return sum;
  }
};

struct Core {
  using Hidden = MemoryVector;
  using Normed = Hidden;
  using Residual = MemoryResidual;
  template <class S>
  using Heads = SharedVector;
  using States = SharedVector;
  using Ffn = MemoryVector;
  using Shared = MemoryVector;
  using Dense = MemoryVector;
  template <class S>
  using Cached = CachedRows<S>;

  Ring ring;
  Parking* parking;
  bool alone = false;  // as host_main.cpp fills it; a team sleeps anyway
  Team* team = nullptr;
  int me = 0;

  static constexpr int HEADS = GROUP < 2 ? GROUP : 2;
  static constexpr int SPLITS = 4;  // of a head, looked at together
  static constexpr bool SCHEDULER = false;
  static constexpr bool FOURS = false;
  static constexpr bool CACHE_IN_RING = false;
  static constexpr bool EXPERTS_IN_RING = false;
  static constexpr bool OWN_GPUS = false;  // ranks have GPUs of their own

  int thread() const { return me; }
  static constexpr int threads() { return TEAM; }
  int warp() const { return me / THREADS; }
  static constexpr int warps() { return WARPS; }
  int warp_thread() const { return me % THREADS; }
  static constexpr int warp_threads() { return THREADS; }
  void barrier() { team->all.wait(); }
  void warp_sync() { team->warps[warp()].wait(); }
  void settle() {}
  static void quantise(const Stage&, const MemoryVector&, Nothing) {}
  static void quantise_chunk(const Stage&, const float*, int) {}
  static void chunk_done() {}
  static const MemoryVector& normed(const MemoryVector& x, Span) { return x; }

  template <class T, class Add>
  // the same order, so the same bits, in every thread
  T fold(T v, int first, int count, Add add, Meeting& meeting) {
    T* slots = reinterpret_cast<T*>(team->slots);
    constexpr int pitch = 8 / sizeof(T);
    meeting.wait();
    slots[me * pitch] = v;
    meeting.wait();
    T total = slots[first * pitch];
    for (int i = 1; i < count; ++i) total = add(total, slots[(first + i) * pitch]);
    meeting.wait();
    return total;
  }
  float warp_sum(float v) {
    return fold(
        v, warp() * THREADS, THREADS, [](float a, float b) { return a + b; }, team->warps[warp()]);
  }
  template <class T>
  T sum(T v) {
    return fold(v, 0, TEAM, [](T a, T b) { return a + b; }, team->all);
  }
  bool any(bool mine) { return sum(int(mine)) != 0; }
  template <int POSITION_THREADS>
  float threads_sum(float v) {
    return fold(
        v, me / POSITION_THREADS * POSITION_THREADS, POSITION_THREADS,
        [](float a, float b) { return a + b; }, team->warps[warp()]);
  }
  template <class T>
  T shuffle_xor(T v, int mask) {
    return fold(v, me ^ mask, 1, [](T a, T) { return a; }, team->warps[warp()]);
  }
  static u32 count(u32* at, u32 by) { return __atomic_fetch_add(at, by, __ATOMIC_RELAXED); }
  static void confirm(const float*, int) {}
  bool agree(bool good) { return !any(!good); }
  bool gave_up() { return false; }
  void forget() {}
  void begin() {}
  void cleared() {}
  bool abort_requested(const int* abort) { return load_host(abort); }
  template <class Vector>
  Nothing prefetch(const Stage&, Span, bool) {
    return {};
  }
  void dot_tiles(const Stage& stage, const MemoryVector& x, int lo, int hi, float* sums, int batch,
                 Nothing) {
    dot_memory_tiles(*this, stage, x, lo, hi, sums, batch);
  }
  template <class Wins>
  Candidate best(Candidate mine, Wins wins) {
    return fold(
        mine, 0, TEAM, [&](Candidate a, Candidate b) { return wins(b, a) ? b : a; }, team->all);
  }
  float dot(const float* a, const float* b, int n) {
    float part = 0;
    for (int i = me; i < n; i += TEAM) part += a[i] * b[i];
    return sum(part);
  }

  void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    for (int r = 0; r < rows; ++r) {
      float part = 0;
      for (int c = warp_thread(); c < cols; c += THREADS)
        part += load_element<WEIGHT>(w + (long(r) * cols + c) * type_bytes(WEIGHT)) * x[c];
      const float total = warp_sum(part);
      if (warp_thread() == r % THREADS) sums[r] = total;
    }
  }
  static void appended() {}
  static void scanned() {}
  static void chosen(u32*) {}
  void relax(u32) { let_others(); }
  void published() {}

  template <class Stall>
  bool gather(const Source& source, int lo, int hi, float* out, Stall stall, int = 0) {
    for (int i = lo + me; i < hi; i += TEAM) {
      float sum = 0;
      for (int p = 0; p < source.parts; ++p) {
        float got = load_shared(source.at(p) + i);
        while (source.polled && bits_as<u32>(got) == SENTINEL) {
          if (!stall(source.part(p), i)) return false;
          got = load_shared(source.at(p) + i);
        }
        sum = p ? sum + got : got;
      }
      out[i - lo] = sum;
    }
    return true;
  }

  void fill(float* at, int count, u32 bits) const {
    for (int i = me; i < count; i += TEAM) store_shared(at + i, bits_as<float>(bits));
  }
};

}  // namespace twin
