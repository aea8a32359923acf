// The products of a prompt pass as an NVIDIA block makes them (native/platform/cuda_prompt.cuh), with every lane an OS thread.
// Tensor-core instructions are computed by their definition; a copy is made only when its group is awaited, so that a read that
// comes too early finds what was there before. Compiled with CHUNK (tokens) and STORED (FP16 or BF16).
#include <pthread.h>

#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#define __device__
#define __forceinline__ inline

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum class Type : int { FP32, BF16, FP16 };
constexpr Type WEIGHT = Type::STORED, KV = WEIGHT;
constexpr int CONSUMER_WARPS = 8, CONSUMERS = 32 * CONSUMER_WARPS, HEAD_DIM = 64, PAGE_BYTES = 4096;

struct Plan {
  static constexpr int prompt_chunk = CHUNK;
  static constexpr int prompt_bytes = 224 * 1024;
};
struct uint2 {
  u32 x, y;
};
struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
template <int N>
struct Run {
  float at[N];
};
struct Span {
  int lo, hi;
};
struct Stage {
  int owned, cols, tile_cols, tile_rows, unit;
};

constexpr int type_bytes(Type type) { return type == Type::FP32 ? 4 : 2; }

template <class To, class From>
To bits_as(From from) {
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
u16 half_bits(float value) { return bits_as<u16>(_Float16(value)); }
u16 bfloat_bits(float value) {
  const u32 bits = bits_as<u32>(value);
  return u16((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
float stored(u16 bits) { return WEIGHT == Type::BF16 ? bits_as<float>(u32(bits) << 16) : float(bits_as<_Float16>(bits)); }

// ---- a block of threads --------------------------------------------------------------------------------------

struct Meeting {
  pthread_barrier_t barrier;

  explicit Meeting(int count) { pthread_barrier_init(&barrier, nullptr, unsigned(count)); }
  ~Meeting() { pthread_barrier_destroy(&barrier); }
  void wait() { pthread_barrier_wait(&barrier); }
};

struct Warp {
  Meeting meeting = Meeting(32);
  u32 a[32][4], b[32][2];  // an instruction's operands
};

struct Machine {
  Meeting all = Meeting(CONSUMERS);
  Warp warps[CONSUMER_WARPS];
  alignas(128) u8 shared[227 * 1024];
};

struct Copy {
  u32 to;
  const u8* from;
  bool there;
};

Machine* machine;
thread_local int thread;
thread_local std::deque<std::vector<Copy>> sent;
thread_local std::vector<Copy> asked;

Warp& warp() { return machine->warps[thread / 32]; }
void __syncwarp() { warp().meeting.wait(); }

// ---- what native/platform/cuda_copies.cuh asks of the machine ------------------------------------------------

u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - machine->shared); }
u64 read_once() { return 0; }
void copy_weights(u32 to, const u8* from, bool there, u64) { asked.push_back({to, from, there}); }
void copy_activations(u32 to, const u8* from, bool there) { asked.push_back({to, from, there}); }
void copies_sent() {
  sent.push_back(asked);
  asked.clear();
}
template <int LEFT>
void copies_arrived() {
  for (; sent.size() > LEFT; sent.pop_front())
    for (const Copy& copy : sent.front()) copy.there ? memcpy(machine->shared + copy.to, copy.from, 16) : memset(machine->shared + copy.to, 0, 16);
}
void prefetch_weights(const u8*, u32) {}
void leave_to_copies() {}
void leave_cache_to_copies() {}
void barrier_arrive(u64*) {}
void keep_here(int&) {}
float load_shared(const float* at) { return *at; }
float4 load_quad(const float*) { return {}; }  // FP32 alone
float4 load_once(const float*) { return {}; }
float __shfl_xor_sync(u32, float, int) { return 0; }

// Fragments as PTX lays them out: of m16n8k16, lane l holds rows l / 4 and l / 4 + 8 of a, column l / 4 of b.
void multiply_add(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  const int lane = thread % 32;
  const u32 a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
  memcpy(warp().a[lane], a, sizeof a);
  memcpy(warp().b[lane], b, sizeof b);
  warp().meeting.wait();
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + (i > 1 ? 8 : 0), column = lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k) {
      const u32 x = warp().a[row % 8 * 4 + k % 8 / 2][(row > 7) + 2 * (k > 7)], y = warp().b[column * 4 + k % 8 / 2][k > 7];
      d[i] += stored(u16(x >> k % 2 * 16)) * stored(u16(y >> k % 2 * 16));
    }
  }
  warp().meeting.wait();
}

}  // namespace twin

#include "../../native/platform/facts.h"
#include "../../native/platform/cuda_prompt.cuh"

namespace {

using namespace twin;

struct Signals {
  u64 passed;
};
struct Core {
  Signals signals;
  int thread() const { return twin::thread; }
  void barrier() const { machine->all.wait(); }
};
struct Memory {
  const u8* stream;
};
struct Start {
  int page;
};
struct Spans {
  static constexpr int ring_slots = 2, slot_bytes = 1024;  // of the memory, before the stage's input

  Span own;
  Span owned_of(int, int) const { return own; }
  Start streams_at(int) const { return {0}; }
};
struct Block {
  Core core;
  Memory memory;
  Spans plan;
  int block;
  float* input;
};

}  // namespace

// Sums of each element's first and last row, [tokens][elements] each, of rows lo..hi-1; `x` is [tokens][cols]. `stream` holds
// the rows as they are packed, twice: the second time is what counts, with the first one's leavings on the chip.
extern "C" void chunk_products(const u8* stream, const float* x, int tokens, int lo, int hi, int cols, int tile_cols, int tile_rows, int unit,
                               float* first, float* last) {
  Machine made;
  machine = &made;
  memset(made.shared, 0xFF, sizeof made.shared);  // numbers that are none
  std::vector<float> packed(size_t(cols) * CHUNK / 2 + 64, 0.0f);
  for (int token = 0; token < tokens; ++token)
    for (int column = 0; column < cols; column += Chunk::RUN) {
      Run<Chunk::RUN> run;
      memcpy(run.at, x + long(token) * cols + column, sizeof run.at);
      Chunk::store_run(packed.data(), cols, token, column, run);
    }
  const Stage stage = {0, cols, tile_cols, tile_rows, unit};
  const int elements = (hi - lo) / unit;
  auto lane = [&](int at) {
    thread = at;
    Block b = {{}, {stream}, {{lo, hi}}, 0, reinterpret_cast<float*>(made.shared + Spans::ring_slots * Spans::slot_bytes)};
    Chunk chunk(b);
    chunk.open(b);
    for (int time = 0; time < 2; ++time)
      chunk.multiply(b, stage, packed.data(), tokens, [&] { b.core.barrier(); return true; }, [&](int token, int element, float low, float high) {
        first[token * elements + element - lo / unit] = low;
        last[token * elements + element - lo / unit] = high;
      });
  };
  std::vector<std::thread> lanes;
  for (int at = 0; at < CONSUMERS; ++at) lanes.emplace_back(lane, at);
  for (std::thread& one : lanes) one.join();
}
