// Recurrent states of a prompt pass as an NVIDIA block carries them on
// (native/platform/cuda_delta.cuh), with every thread an OS thread. Tensor-core instructions are
// computed by their definition, of TF32; a copy is made only when its group is awaited. Compiled
// with the constants of Delta.
#include <pthread.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define TWIN_OWN_PRODUCTS
#include "../../native/platform/facts.h"

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;

constexpr int CONSUMER_WARPS = 8, CONSUMERS = 32 * CONSUMER_WARPS;
struct Delta {
  static constexpr bool ANY = true;
  static constexpr int KEY_DIM = KEYS_OF, VALUE_DIM = VALUES_OF, CONV = TAPS_OF,
                       KEY_HEADS = KEY_HEADS_OF, VALUE_HEADS = HEADS_OF, COLUMNS = COLUMNS_OF;
  static constexpr bool MAMBA = MAMBA_OF, BIASED = MAMBA;
  static constexpr float LEAST_STEP = MAMBA ? 0.05f : 0.0f, MOST_STEP = MAMBA ? 2.0f : 0.0f;
};
struct Plan {
  static constexpr int prompt_chunk = 256, prompt_bytes = 224 * 1024;
};
template <int N>
struct Pack {
  float at[N];
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
template <class To, class From>
To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
float exp32(float x) { return expf(x); }
float log32(float x) { return logf(x); }
float square_root(float x) { return sqrtf(x); }
float inverse_root(float x) { return 1.0f / sqrtf(x); }

struct Meeting {
  pthread_barrier_t barrier;

  explicit Meeting(int count) { pthread_barrier_init(&barrier, nullptr, unsigned(count)); }
  ~Meeting() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
};
struct Machine {
  Meeting all = Meeting(CONSUMERS);
  Meeting warps[CONSUMER_WARPS] = {Meeting(32), Meeting(32), Meeting(32), Meeting(32),
                                   Meeting(32), Meeting(32), Meeting(32), Meeting(32)};
  u32 words[CONSUMERS][8];
  alignas(1024) u8 shared[227 * 1024];
};
struct Copy {
  u32 to;
  const u8* from;
  bool there;
};
Machine* machine;
thread_local int thread;
thread_local std::deque<std::vector<Copy>> sent;
thread_local std::vector<Copy> pending;

u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - machine->shared); }
void copy_activations(u32 to, const u8* from, bool there) {
  if (to % 16 || size_t(from) % 16) abort();
  pending.push_back({to, from, there});
}
void copies_sent() {
  sent.push_back(pending);
  pending.clear();
}
template <int LEFT>
void copies_arrived() {
  for (; int(sent.size()) > LEFT; sent.pop_front())
    for (const Copy& copy : sent.front())
      copy.there ? memcpy(machine->shared + copy.to, copy.from, 16)
                 : memset(machine->shared + copy.to, 0, 16);
}
float load_shared(const float* at) { return *at; }
void store_shared(float* at, float value) { *at = value; }
template <int N, int ALIGNED>
Pack<N> load_pack(const float* at) {
  if (size_t(at) % ALIGNED) abort();
  Pack<N> pack;
  memcpy(pack.at, at, sizeof pack.at);
  return pack;
}

// All of a warp have written their `words`.
template <class Made>
auto together(Made made) {
  Meeting& mine = machine->warps[thread / 32];
  mine.wait();
  auto result = made(machine->words + thread / 32 * 32);
  mine.wait();
  return result;
}
float of_thread(float value, u32 other) {
  machine->words[thread][0] = bits_as<u32>(value);
  return together([&](const u32(*of)[8]) { return bits_as<float>(of[other][0]); });
}
float tf32(float value) { return bits_as<float>((bits_as<u32>(value) + 0x1000u) & ~0x1FFFu); }
float taken(u32 bits) { return bits_as<float>(bits & ~0x1FFFu); }
void load_matrices(u32 (&to)[4], u32 from) {
  machine->words[thread][0] = from;
  together([&](const u32(*of)[8]) {
    for (int i = 0; i < 4; ++i)
      memcpy(&to[i], machine->shared + of[8 * i + thread % 32 / 4][0] + thread % 4 * 4, 4);
    return 0;
  });
}
void multiply_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(machine->words[thread], mine, sizeof mine);
  together([&](const u32(*of)[8]) {
    for (int i = 0; i < 4; ++i) {
      const int row = thread % 32 / 4 + (i > 1 ? 8 : 0), column = thread % 4 * 2 + i % 2;
      for (int k = 0; k < 8; ++k)
        d[i] += taken(of[row % 8 * 4 + k % 4][(row > 7) + 2 * (k > 3)]) *
                taken(of[column * 4 + k % 4][4 + (k > 3)]);
    }
    return 0;
  });
}

}  // namespace twin

#include "../../native/platform/cuda_delta.cuh"

namespace {

using namespace twin;

struct Core {
  int thread() const { return twin::thread; }
  int warp() const { return twin::thread / 32; }
  int warp_thread() const { return twin::thread % 32; }
  void barrier() const { machine->all.wait(); }
  void warp_sync() const { machine->warps[warp()].wait(); }
  float warp_sum(float v) const {
    machine->words[twin::thread][0] = bits_as<u32>(v);
    return together([&](const u32(*of)[8]) {
      float sum = 0;
      for (int i = 0; i < 32; ++i) sum += bits_as<float>(of[i][0]);
      return sum;
    });
  }
};

}  // namespace

// One pass: `rows` [tokens][width], of which strengths and decays begin at `steering`; `states`
// [items][FLOATS] are carried on; `outputs` [tokens][heads][VALUE_DIM].
extern "C" void delta_pass(const float* rows, int width, int steering, const float* taps,
                           const float* decays, float* states, float* outputs, float* solved,
                           int first, int tokens) {
  PassStates::Memory of = {};
  of.rows = rows, of.width = of.steering_width = width, of.steering = rows + steering;
  of.taps = taps, of.decays = decays, of.states = states, of.outputs = outputs;
  of.first = first, of.tokens = tokens;
  of.solved(solved, Plan::prompt_chunk);
  Machine made;
  machine = &made;
  memset(made.shared, 0xFF, sizeof made.shared);  // numbers that are none
  std::vector<std::thread> threads;
  for (int at = 0; at < CONSUMERS; ++at)
    threads.emplace_back([&, at] {
      thread = at;
      Core core;
      float* const chip = reinterpret_cast<float*>(made.shared);
      for (int i = 0; i < of.chunks() * Delta::KEY_HEADS; ++i)
        Solving<Core>(core, of, chip).run(i / Delta::KEY_HEADS, i % Delta::KEY_HEADS);
      for (int item = 0; item < Delta::VALUE_HEADS * PassStates::SPLITS; ++item)
        Carrying<Core>(core, of, chip, item).run();
    });
  for (std::thread& one : threads) one.join();
}
