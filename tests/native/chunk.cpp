// The products of a prompt pass as an NVIDIA block makes them (native/platform/cuda_prompt.cuh),
// with every thread an OS thread. Tensor-core instructions are computed by their definition; a copy
// is made only when its group is awaited, so that a read that comes too early finds what was there
// before. Compiled with CHUNK (tokens), STORED (FP16 or BF16); for low-bit weights that are decoded
// first (cuda_decode.cuh) with CODED_AS (a bit for each code), and for experts with HELD (of a
// layer) and CHOICES.
#include <pthread.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __forceinline__ inline
#define TWIN_ONCE
#include "../../native/platform/facts.h"

namespace twin {
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

enum class Type : int { FP32, BF16, FP16 };
constexpr Type WEIGHT = Type::STORED, KV = WEIGHT;
constexpr int CONSUMER_WARPS = 8, CONSUMERS = 32 * CONSUMER_WARPS, HEAD_DIM = 64, PAGE_BYTES = 4096,
              UNIT_BYTES = facts::UNIT_BYTES;
enum class StageKind {
  QKV, GATE_UP, O_PROJ, DOWN, ROUTER, ROUTED_UP, ROUTED_DOWN, DELTA_IN, CONV_IN, SHARED_UP
};
#ifdef CODED_AS
constexpr bool CODED = true;
constexpr u32 CODES = CODED_AS;
constexpr int CODED_PACK = 16;
#else
constexpr bool CODED = false;
constexpr u32 CODES = 1u;
constexpr int CODED_PACK = 0;
#endif

#ifndef HELD
#define HELD 0
#define CHOICES 1
#endif
struct Experts {
  static constexpr bool ANY = HELD > 0;
  static constexpr int COUNT = ANY ? HELD : 1, TOP_K = CHOICES, VISITED = CHOICES;
};
struct RoutedUp {
  static constexpr int code = -1;  // any
};
using RoutedDown = RoutedUp;
struct NonRouted {
  static constexpr bool GATED = false;
};
struct Additions {
  static constexpr bool EXPERT_BIAS = Experts::ANY;
};

struct Plan {
  static constexpr int prompt_chunk = CHUNK;
  static constexpr int prompt_bytes = 224 * 1024;
  static constexpr bool tensor_pass = false;
};
struct PassScan {};  // attention of a pass is not compiled here, nor are recurrent states, nor rounds
constexpr bool FEW_TOKENS = false, STREAMED_ROUNDS = false;
struct Few {
  static constexpr int BEGIN = 0, INPUT_BYTES = 0;
};
struct FewProducts {
  FewProducts(u32, const u8*, int, int);
  template <class At>
  void bring(int, At) const;
  template <int UNIT, class... More>
  bool run(const More&...) const;
};
struct PassStates {
  static constexpr bool FITS = false;
};
template <class Core>
struct Solving;
template <class Core>
struct Carrying;
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
struct Pack {
  float at[N];
};
struct Span {
  int lo, hi;
};
struct Stage {
  int owned, cols, tile_cols, tile_rows, unit, kind;
  int code, row_bytes, last_bytes, row_scales, last_scales;  // of low-bit weights
  int bias, expert_page, expert_units, expert_rows, expert_cols, expert_group, expert_gap;
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
float half_value(u16 bits) { return float(bits_as<_Float16>(bits)); }
float stored(u16 bits) {
  return WEIGHT == Type::BF16 ? bits_as<float>(u32(bits) << 16) : half_value(bits);
}
template <Type T>
float load_element(const u8* at) {
  u32 bits = 0;
  memcpy(&bits, at, T == Type::FP32 ? 4 : 2);
  if (T == Type::FP32) return bits_as<float>(bits);
  return T == Type::BF16 ? bits_as<float>(bits << 16) : half_value(u16(bits));
}
template <Type T>
void unpack(u32 word, float& first, float& second) {
  const auto one = [](u32 bits) {
    return T == Type::BF16 ? bits_as<float>(bits << 16) : half_value(u16(bits));
  };
  first = one(word & 65535u), second = one(word >> 16);
}
template <Type T>
u32 packed(float first, float second) {
  const auto one = [](float x) { return u32(T == Type::BF16 ? bfloat_bits(x) : half_bits(x)); };
  return one(first) | one(second) << 16;
}
u32 bytes_of(u32 a, u32 b, u32 chosen) {
  u32 out = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 digit = chosen >> 4 * i & 7u;
    out |= ((digit < 4 ? a : b) >> 8 * (digit % 4) & 255u) << 8 * i;
  }
  return out;
}
void four_e4m3(u32 word, float (&out)[4]);

// ---- a block of threads -------------------------------------------------------------------------

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
  float added[CONSUMERS];
  alignas(1024) u8 shared[227 * 1024];
};

struct Copy {
  u32 to;
  const u8* from;
  bool there;
  int bytes;
};

Machine* machine;
thread_local int thread;
thread_local std::deque<std::vector<Copy>> sent;
thread_local std::vector<Copy> pending;

// ---- what native/platform/cuda_copies.cuh asks of the machine -----------------------------------

u32 shared_address(const void* at) { return u32(static_cast<const u8*>(at) - machine->shared); }
u64 read_once() { return 0; }
u64 read_again() { return 0; }
void copy(u32 to, const u8* from, bool there, int bytes) {
  if (to % bytes || u64(from) % bytes) abort();
  pending.push_back({to, from, there, bytes});
}
void copy_weights(u32 to, const u8* from, bool there, u64) { copy(to, from, there, 16); }
void copy_activations(u32 to, const u8* from, bool there) { copy(to, from, there, 16); }
void copy_word(u32 to, const u8* from, bool there) { copy(to, from, there, 4); }
void copies_sent() {
  sent.push_back(pending);
  pending.clear();
}
void copies_arrived(int left) {
  for (; int(sent.size()) > left; sent.pop_front())
    for (const Copy& copy : sent.front())
      copy.there ? memcpy(machine->shared + copy.to, copy.from, size_t(copy.bytes))
                 : memset(machine->shared + copy.to, 0, size_t(copy.bytes));
}
template <int LEFT>
void copies_arrived() {
  copies_arrived(LEFT);
}
void load_four(u32 at, u32* to) { memcpy(to, machine->shared + at, 16); }
void store_four(u32 at, const u32 (&from)[4]) { memcpy(machine->shared + at, from, 16); }
float load_float(u32 at) {
  float value;
  memcpy(&value, machine->shared + at, 4);
  return value;
}
void prefetch_weights(const u8*, u32) {}
void leave_to_copies() {}
void leave_cache_to_copies() {}
void barrier_arrive(u64*) {}
void keep_here(int&) {}
float load_shared(const float* at) { return *at; }
template <int N, int ALIGNED>
Pack<N> load_pack(const float* at, bool) {
  Pack<N> pack;
  memcpy(pack.at, at, sizeof pack.at);
  return pack;
}
float4 load_quad(const float*) { return {}; }  // FP32 alone
float4 load_once(const float* at) {
  if (u64(at) % 16) abort();
  float4 four;
  memcpy(&four, at, sizeof four);
  return four;
}
float __shfl_xor_sync(u32, float, int) { return 0; }

// Products as PTX defines them, made when their group is awaited: rows of 128 bytes, their 16-byte
// units swizzled by the row.
struct Product {
  u32 a, b;  // where rows begin
  float* sums;
  int rows;  // of b
};
thread_local std::deque<std::vector<Product>> committed;
thread_local std::vector<Product> begun;
constexpr u64 NEXT_PRODUCT = 2;

u64 swizzled_rows(u32 at) {
  if (at % 1024) abort();
  return at / 16;
}
void products_begin() {}
void products_sent() {
  committed.push_back(begun);
  begun.clear();
}
float swizzled(u32 at, int row, int column) {
  // a later product of the same rows begins within the first
  const u32 start = at / 1024 * 1024, byte = at % 1024 + u32(column) * 2;
  u16 bits;
  memcpy(&bits,
         machine->shared + start + row / 8 * 1024 + row % 8 * 128 +
             ((byte / 16 ^ u32(row) % 8) * 16) + byte % 16,
         2);
  return stored(bits);
}
void make(const Product& product) {
  for (int i = 0; i < product.rows / 2; ++i) {
    const int row = thread / 32 % 4 * 16 + thread % 32 / 4 + i / 2 % 2 * 8,
              column = i / 4 * 8 + thread % 4 * 2 + i % 2;
    for (int k = 0; k < 16; ++k)
      product.sums[i] += swizzled(product.a, row, k) * swizzled(product.b, column, k);
  }
}
template <int LEFT>
void products_made() {
  for (; int(committed.size()) > LEFT; committed.pop_front())
    for (const Product& product : committed.front()) make(product);
}
template <int N>
void hold_sums(float (&)[N]) {}
template <Type T, int N>
void multiply_group(float (&d)[N / 2], u64 a, u64 b) {
  begun.push_back({u32(a) * 16, u32(b) * 16, d, N});
}

}  // namespace twin

#include "../../native/platform/coded.h"
#include "../../native/platform/coded_values.h"

namespace twin {
void four_e4m3(u32 word, float (&out)[4]) {
  for (int i = 0; i < 4; ++i) out[i] = e4m3_value(word >> 8 * i & 255u);
}
}  // namespace twin

#include "../../native/platform/cuda_decode.cuh"
#include "../../native/platform/entries.h"
#include "../../native/platform/cuda_prompt.cuh"

#include "../../native/monokernel/row_batches.cuh"

namespace {

using namespace twin;

struct Signals {
  u64 passed;
};
struct Core {
  Signals signals;
  int thread() const { return twin::thread; }
  int warp() const { return twin::thread / 32; }
  int warp_thread() const { return twin::thread % 32; }
  void barrier() const { machine->all.wait(); }
  float warp_sum(float v) const {
    Meeting& mine = machine->warps[warp()];
    machine->added[twin::thread] = v;
    mine.wait();
    float sum = 0;
    for (int i = 0; i < 32; ++i) sum += machine->added[warp() * 32 + i];
    mine.wait();
    return sum;
  }
};
struct Memory {
  const u8* stream;
  float* prompt;
  const float* constants;
};
struct Start {
  int page;
};
struct Spans {
  // of the memory, before the stage's input
  static constexpr int ring_slots = 2, slot_bytes = 1024;
  static constexpr int prompt_decoded = 32;
  int prompt_normed_floats, prompt_summed_floats;  // of a block's decoded rows
  int blocks;
  const Span* own;
  const Start* starts;
  int prompt_batch, prompt_owners, hidden;
  const Span& owned_of(int, int block) const { return own[block]; }
  const Start& streams_at(int block) const { return starts[block]; }
};
struct Block {
  Core core;
  Memory memory;
  Spans plan;
  int block;
  float* input;
};

// walk(machine) by every thread of a block, whose memory in shared memory has numbers that are
// none.
template <class Walk>
void run_block(Walk walk) {
  Machine made;
  machine = &made;
  memset(made.shared, 0xFF, sizeof made.shared);
  std::vector<std::thread> threads;
  for (int at = 0; at < CONSUMERS; ++at)
    threads.emplace_back([&, at] {
      thread = at;
      walk(made);
    });
  for (std::thread& one : threads) one.join();
}

}  // namespace

// Sums of each element's first and last row, [tokens][elements] each, of all blocks' rows,
// spans[blocks][2]; `x` is [tokens][cols]. `stream` holds each block's rows as they are packed,
// from page starts[block] on, twice: the second time is what counts, with the first one's leavings
// in shared memory. `coding`: code, row_bytes, last_bytes, row_scales, last_scales.
template <int UNIT>
void multiply_all(const u8* stream, const float* x, int tokens, int blocks, const int* spans,
                  const int* starts, int cols, int tile_cols, int tile_rows, const int* coding,
                  float* first, float* last) {
  std::vector<float> rounded(size_t(cols + 64) * CHUNK / 2 + 64, 0.0f);
  for (int token = 0; token < tokens; ++token)
    for (int column = 0; column < cols; column += Chunk::PACK) {
      Pack<Chunk::PACK> pack;
      memcpy(pack.at, x + long(token) * cols + column, sizeof pack.at);
      Chunk::store_pack(rounded.data(), cols, token, column, pack);
    }
  const Span* own = reinterpret_cast<const Span*>(spans);
  const int elements = own[blocks - 1].hi / UNIT;
  int widest = 0;
  for (int block = 0; block < blocks; ++block)
    widest = own[block].hi - own[block].lo > widest ? own[block].hi - own[block].lo : widest;
  const int floats = (widest * cols / 2 + 31) / 32 * 32;
  std::vector<uint4> memory(size_t(8 + blocks * (2 * floats + 32) / 4), uint4{~0u, ~0u, ~0u, ~0u});
  // stages that follow each other have their decoded rows in different places
  const auto stage_of = [&](int time) {
    return Stage{0, cols, tile_cols, tile_rows, UNIT, int(time ? StageKind::DOWN : StageKind::QKV),
                 coding[0], coding[1], coding[2], coding[3], coding[4]};
  };
  const auto on_each = [&](auto use) {
    for (int block = 0; block < blocks; ++block)
      run_block([&](Machine& made) {
        Block b = {{},
                   {stream, reinterpret_cast<float*>(memory.data()), nullptr},
                   {floats, floats + 32, blocks, own, reinterpret_cast<const Start*>(starts)},
                   block,
                   reinterpret_cast<float*>(made.shared + Spans::ring_slots * Spans::slot_bytes)};
        Chunk chunk(b);
        chunk.open(b, tokens);
        for (int time = 0; time < 2; ++time) use(b, chunk, stage_of(time));
      });
  };
  if (CODED)
    on_each([](Block& b, Chunk& chunk, const Stage& stage) {
      chunk.prefetch(b, stage);
      chunk.decode(b, stage);
    });
  on_each([&](Block& b, Chunk& chunk, const Stage& stage) {
    chunk.multiply<UNIT>(
        b, stage, rounded.data(), tokens,
        [&] {
          b.core.barrier();
          return true;
        },
        [&](int token, int element, float low, float high, bool both = false) {
          if (both && element % 2) abort();
          const int at = token * elements + element;
          first[at] = low;
          last[at] = both ? low : high;
          if (both) first[at + 1] = last[at + 1] = high;
        });
  });
}

extern "C" int chunk_sharing(int tiles, int blocks) { return Chunk::sharing(tiles, blocks); }

extern "C" void chunk_products(const u8* stream, const float* x, int tokens, int blocks,
                               const int* spans, const int* starts, int cols, int tile_cols,
                               int tile_rows, int unit, const int* coding, float* first,
                               float* last) {
  (unit == 2 ? multiply_all<2> : multiply_all<1>)(stream, x, tokens, blocks, spans, starts, cols,
                                                  tile_cols, tile_rows, coding, first, last);
}

#if HELD

// A routed stage of all blocks. `x` is [tokens][cols], or, of a down projection, an input for each
// entry; `choices` [tokens][Entries::CHOICE]. `shape`: rows and columns of an
// expert, columns and rows of a tile, units of an expert, of a whole row group, and between blocks;
// `spans` as above, of each block's rows in an expert. `first`, `last`: sums of each element's
// rows, [entries][elements], added to what is there: each is made once.
template <int UNIT, bool DOWN>
void multiply_entries(const u8* weights, const float* x, const float* choices, int tokens,
                      int blocks, const int* spans, const int* shape, const int* coding,
                      int batch, int owners, const float* biases, float* first, float* last) {
  const int rows = shape[0], cols = shape[1], inputs = DOWN ? tokens * CHOICES : tokens,
            elements = rows / UNIT;
  std::vector<float> rounded(size_t(cols + 64) * CHUNK * CHOICES / 2 + 64, 0.0f);
  for (int input = 0; input < inputs; ++input)
    for (int column = 0; column < cols; column += Chunk::PACK) {
      Pack<Chunk::PACK> pack;
      memcpy(pack.at, x + long(input) * cols + column, sizeof pack.at);
      Chunk::store_pack(rounded.data(), cols, input, column, pack);
    }
  const int floats = (rows * cols / 2 + 31) / 32 * 32;
  std::vector<uint4> memory(size_t(8 + blocks * floats / 4), uint4{~0u, ~0u, ~0u, ~0u});
  const Stage stage = {0,         cols,      shape[2],  shape[3],  UNIT,
                       int(DOWN ? StageKind::ROUTED_DOWN : StageKind::ROUTED_UP),
                       coding[0], coding[1], coding[2], coding[3], coding[4],
                       0,         0,         shape[4],  rows,      cols,
                       shape[5],  shape[6]};
  const std::vector<Start> starts(size_t(blocks), Start{0});
  for (int block = 0; block < blocks; ++block)
    run_block([&](Machine& made) {
      Block b = {{},
                 {weights, reinterpret_cast<float*>(memory.data()), biases},
                 {floats, 0, blocks, reinterpret_cast<const Span*>(spans), starts.data(), batch,
                  owners, cols},
                 block,
                 reinterpret_cast<float*>(made.shared + Spans::ring_slots * Spans::slot_bytes)};
      Chunk chunk(b);
      chunk.open(b, tokens);
      chunk.sort(b, choices, tokens);
      multiply_experts<UNIT, DOWN>(b, chunk, stage, rounded.data(),
                             [&](int entry, int element, float low, float high,
                                 bool both = false) {
                               if (both && element % 2) abort();
                               const long at = long(entry) * elements + element;
                               first[at] += low;
                               last[at] += both ? low : high;
                               if (both) first[at + 1] += high, last[at + 1] += high;
                             });
    });
}

extern "C" void chunk_experts(const u8* weights, const float* x, const float* choices, int tokens,
                              int blocks, const int* spans, int unit, int down, const int* shape,
                              const int* coding, int batch, int owners, const float* biases,
                              float* first, float* last) {
  (unit == 2 ? multiply_entries<2, false> : down ? multiply_entries<1, true>
                                                 : multiply_entries<1, false>)(
      weights, x, choices, tokens, blocks, spans, shape, coding, batch, owners, biases, first, last);
}

// Logits of up to as many tokens as a block has warps, [tokens][HELD]; `router` is
// [HELD][hidden] of the weight type, as it lies in the blocks' streams: whole rows of each block,
// `spans`, in column slices of `tile_cols`.
extern "C" void chunk_scores(const u8* router, const float* x, int tokens, int hidden, int blocks,
                             const int* spans, const int* pages, int tile_cols, int tile_rows,
                             const int* coding, float* logits) {
  std::vector<uint4> rows(size_t(HELD) * size_t(hidden) / 8, uint4{~0u, ~0u, ~0u, ~0u});
  u8* const at = reinterpret_cast<u8*>(rows.data());
  const Stage stage = {0, hidden, tile_cols, tile_rows, 1, int(StageKind::ROUTER),
                       coding[0], coding[1], coding[2], coding[3], coding[4]};
  const Span* own = reinterpret_cast<const Span*>(spans);
  for (int block = 0; block < blocks; ++block)
    run_block([&](Machine& made) {
      Block b = {{},
                 {router, nullptr, nullptr},
                 {0, 0, blocks, own, reinterpret_cast<const Start*>(pages), 0, 1, hidden},
                 block,
                 reinterpret_cast<float*>(made.shared + Spans::ring_slots * Spans::slot_bytes)};
      Chunk chunk(b);
      chunk.open(b, CHUNK);
      b.core.barrier();
      chunk.put_rows(b, stage, at + long(own[block].lo) * hidden * 2);
    });
  run_block([&](Machine& made) {
    float* const chip = reinterpret_cast<float*>(made.shared + 1024);
    for (int i = thread; i < tokens * hidden; i += CONSUMERS) chip[i] = x[i];
    Block b = {{}, {}, {0, 0, 1, own, nullptr, 0, 1, hidden}, 0, nullptr};
    b.core.barrier();
    Chunk::score(b, chip, tokens, logits,
                 [&](int expert) -> const u8* { return at + long(expert) * hidden * 2; });
  });
}

#endif
