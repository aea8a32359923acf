// Prompt passes: the weights of all layers once for up to `prompt_chunk` tokens, to fill the key-value cache. The prompt's
// last token is an ordinary step. All blocks of all ranks meet after every stage, so nothing is polled or reset.
#pragma once

#include "attention.cuh"

namespace twin {

struct Pass {
  int number;
  int first;     // position of the chunk's first token
  int tokens;
  u32 arrivals;  // at the barrier, that this block has waited for
};

// What a pass keeps of a value on this rank: rows of tokens.
__device__ __forceinline__ float* pass_row(const RankMemory& memory, const Value& value, int token, int columns) {
  return memory.prompt + value.prompt + long(token) * columns;
}

// A full barrier of all ranks: one counter a GPU, in the memory of its first rank. The arrival releases what all threads
// wrote before the block barrier, and the last poll acquires it.
__device__ __forceinline__ bool meet(Block& b, int index, Pass& pass) {
  pass.arrivals += u32(b.plan.blocks) * u32(b.plan.ranks);
  bool good = true;
  b.core.barrier();
  if (b.core.thread() == 0) {
    for (int rank = 0; rank < b.plan.ranks; rank += b.plan.ranks_per_gpu) arrive(counter_of(b.launch.ranks[rank], b.plan.prompt_counter));
    b.core.published();
    const RankMemory& near = b.launch.ranks[b.rank / b.plan.ranks_per_gpu * b.plan.ranks_per_gpu];
    good = wait_counter(b, counter_of(near, b.plan.prompt_counter), pass.arrivals, {index, -2, pass.number, -1});
  }
  return !b.core.any(!good);
}

// ---- residual and norm, whole tokens by one block each -------------------------------------------------------------

constexpr int NORM_RUN = 8;  // neighbours of a token that a thread sums at once
static_assert(NORM_RUN == Chunk::RUN, "activations are stored as many at a time");

// x += scale * each of the read's parts, in rank order.
__device__ __forceinline__ void add_read(const Block& b, const Read& read, int token, int at, Run<NORM_RUN>& x) {
  constexpr int AT_ONCE = 2;  // their loads are under way together; more cost registers that a step needs
  const Value& value = b.plan.values_at(read.value);
  const bool own = read.parts == int(Parts::OWN) || !value.pushed, others = read.parts == int(Parts::OTHERS);
  const int count = own ? 1 : b.plan.ranks - others, first = own ? b.rank : 0;
  TWIN_ONCE
  for (int p = 0; p < count; p += AT_ONCE) {
    Run<NORM_RUN> got[AT_ONCE];
    TWIN_UNROLL
    for (int j = 0; j < AT_ONCE; ++j) {
      const int rank = first + p + j + (others && p + j >= b.rank);
      if (p + j < count) got[j] = load_run<NORM_RUN, 16>(pass_row(b.launch.ranks[rank], value, token, b.plan.hidden) + at);
    }
    TWIN_UNROLL
    for (int j = 0; j < AT_ONCE; ++j)
      TWIN_UNROLL
      for (int i = 0; i < NORM_RUN; ++i)
        if (p + j < count) x.at[i] += read.scale * got[j].at[i];
  }
}

// The residual of this block's tokens after the stage's reads, and its norm as the stage's input. The block's warps divide its
// tokens among them; `sums` on the chip holds a sum of squares of each warp.
__device__ __forceinline__ void norm_chunk(Block& b, const Stage& stage, const Pass& pass, float* sums) {
  const int hidden = b.plan.hidden, warps = b.core.warps(), tokens = (pass.tokens - b.block + b.plan.blocks - 1) / b.plan.blocks;
  const float* weight = b.memory.constants + stage.norm;
  const int together = least(warps, tokens), group = together > 0 ? warps / together : 1;  // tokens at once, warps of each
  const int team = b.core.warp() / group, step = group * b.core.lanes() * NORM_RUN;
  const int start = (b.core.warp() % group * b.core.lanes() + b.core.lane()) * NORM_RUN;
  for (int done = 0; done < tokens; done += together) {
    const int token = b.block + (done + team) * b.plan.blocks;
    const int end = team < together && token < pass.tokens ? hidden : 0;  // of this warp's columns
    float* residual = b.memory.prompt + b.plan.prompt_residual + long(token) * hidden;
    const int id = end ? b.launch.request.chunks[pass.first + token] : 0;
    const u8* row = b.memory.embedding + u64(id) * u64(hidden) * type_bytes(WEIGHT);
    float squares = 0;
    TWIN_ONCE
    for (int i = start; i < end; i += step) {
      Run<NORM_RUN> x;
      if (stage.reads == 0) {
        TWIN_UNROLL
        for (int j = 0; j < NORM_RUN; ++j) x.at[j] = load_element<WEIGHT>(row + (i + j) * type_bytes(WEIGHT));
      } else {
        x = load_run<NORM_RUN, 16>(residual + i);
      }
      TWIN_ONCE
      for (int r = stage.first_read; r < stage.first_read + stage.reads; ++r) add_read(b, b.plan.reads_at(r), token, i, x);
      TWIN_UNROLL
      for (int j = 0; j < NORM_RUN; ++j) {
        squares += x.at[j] * x.at[j];
        store_shared(residual + i + j, x.at[j]);
      }
    }
    squares = b.core.warp_sum(squares);
    if (b.core.lane() == 0) sums[b.core.warp()] = squares;
    b.core.barrier();
    float total = 0;
    for (int w = 0; w < group && end; ++w) total += sums[team * group + w];
    const float scale = 1.0f / square_root(total / float(hidden) + b.plan.norm_eps);
    TWIN_ONCE
    for (int i = start; i < end; i += step) {
      Run<NORM_RUN> x = load_run<NORM_RUN, 16>(residual + i);
      TWIN_UNROLL
      for (int j = 0; j < NORM_RUN; ++j) x.at[j] *= scale * weight[i + j];
      Chunk::store_run(b.memory.prompt + b.plan.prompt_normed, hidden, token, i, x);
    }
    b.core.barrier();
  }
}

// ---- attention, units of (kv head, token) ----------------------------------------------------------------------------

// Keys and values that a token's query heads see: those of earlier passes from the cache, the chunk's from the chip.
struct Seen {
  struct Rows {
    Core::Piece key[Core::POSITIONS], value[Core::POSITIONS];
    bool held[Core::POSITIONS];
  };

  const Block& b;
  u8* cache;        // [splits][k, v][item_positions][HEAD_DIM] of the kv head
  const u8* fresh;  // [tokens][k, v][HEAD_DIM]
  int first;        // position of the chunk's first token
  int to;

  __device__ __forceinline__ u8* cached(int position, int which) const {
    const int page = position / b.plan.page, split = page % b.plan.splits;
    const u64 slot = u64(page / b.plan.splits * b.plan.page + position % b.plan.page);
    return cache + (u64(split * 2 + which) * u64(b.plan.item_positions) + slot) * ROW;
  }

  __device__ __forceinline__ void ask(Rows& rows, int at) const {
    TWIN_UNROLL
    for (int k = 0; k < Core::POSITIONS; ++k) {
      const int p = at + k * POSITION_WARPS * UNITS;
      rows.held[k] = p < to;
      if (p >= to) {
        rows.key[k].clear(), rows.value[k].clear();
      } else if (p < first) {
        rows.key[k].load(b.core, cached(p, 0));
        rows.value[k].load(b.core, cached(p, 1));
      } else {
        const u8* near = fresh + (p - first) * 2 * ROW;
        rows.key[k].load_near(b.core, near);
        rows.value[k].load_near(b.core, near + ROW);
      }
    }
  }
};

// Softmax of the unit's query heads over positions from..seen.to-1: [GROUP * PARTIAL] into `result`.
__device__ __forceinline__ void attend_unit(Block& b, const Seen& seen, int from, const float* queries, float* merged, float* result) {
  constexpr int HEADS = Partial::HEADS, STRIDE = POSITION_WARPS * UNITS * Core::POSITIONS;
  const int busy = least(POSITION_WARPS, (seen.to - from + UNITS - 1) / UNITS);
  for (int set = 0; set < HEAD_SETS; set += SETS_AT_ONCE) {
    const int head = (set + b.core.warp() % SETS_AT_ONCE) * HEADS, heads = least(HEADS, GROUP - head);
    if (b.core.warp() / SETS_AT_ONCE < busy && heads > 0) {
      Partial partial;
      partial.start();
      int at = from + Scan::unit(b);
      for (int p = from + b.core.warp() / SETS_AT_ONCE * UNITS; p < seen.to; p += STRIDE, at += STRIDE) {
        Seen::Rows rows;
        seen.ask(rows, at);
        partial.scan(b, queries + head * HEAD_DIM, heads, rows);
      }
      partial.meet(b);
      partial.put(b, merged + b.core.warp() * HEADS * PARTIAL);
    }
    b.core.barrier();
    Scan::merge(b, set * HEADS, least(SETS_AT_ONCE * HEADS, GROUP - set * HEADS), busy, merged, [&](int i, float value) { result[i] = value; });
    b.core.barrier();
  }
}

__device__ constexpr int up_floats(int count) { return (count + 31) / 32 * 32; }

// Numbers that a thread copies onto the chip at once, and how many such loads it has under way: each wait for one is a
// second-level cache's latency.
constexpr int COPY_RUN = HALF % 4 == 0 ? 4 : 1, COPIES = 4;

// at(i) for i in 0, COPY_RUN, .. below `count`: where COPY_RUN neighbours lie. They go to `to`.
template <class At>
__device__ __forceinline__ void copy_runs(Block& b, int count, float* to, At at) {
  const int step = b.core.threads() * COPY_RUN;
  TWIN_ONCE
  for (int i = b.core.thread() * COPY_RUN; i < count; i += step * COPIES) {
    Run<COPY_RUN> got[COPIES];
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      if (i + k * step < count) got[k] = load_run<COPY_RUN, 4 * COPY_RUN>(at(i + k * step));
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      TWIN_UNROLL
      for (int j = 0; j < COPY_RUN; ++j)
        if (i + k * step < count) to[i + k * step + j] = got[k].at[j];
  }
}

// Each unit appends its token's key and value, and attends to all that came before. The last layer only appends.
__device__ __forceinline__ void attend_chunk(Block& b, const Stage& stage, const Pass& pass, bool last, float* chip) {
  const Value& from = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  const int chunk = b.plan.prompt_chunk, query_floats = b.plan.heads * HEAD_DIM, key_floats = b.plan.kv_heads * HEAD_DIM;
  float* heads = chip;                                                            // keys, values, queries of the unit
  float* turns = heads + up_floats((2 * chunk + GROUP) * HEAD_DIM);               // [tokens][cosines, sines][HALF]
  u8* fresh = reinterpret_cast<u8*>(turns + up_floats(chunk * HEAD_DIM));          // [tokens][k, v][HEAD_DIM] as cached
  float* merged = reinterpret_cast<float*>(fresh) + up_floats(2 * chunk * ROW / 4);  // [warps][HEADS][PARTIAL]
  float* result = merged + up_floats(Core::warps() * Core::HEADS * PARTIAL);
  const long sines = (long(b.plan.max_context) * HALF + 15) / 16 * 16;
  const float scale = 1.0f / square_root(float(HEAD_DIM));
  const float* const published = pass_row(b.memory, from, 0, 0);
  const float* const angles = b.memory.constants + b.plan.rope;
  const int width = from.elements;
  for (int unit = b.block; unit < b.plan.kv_heads * pass.tokens; unit += b.plan.blocks) {
    const int head = unit / pass.tokens, token = unit % pass.tokens, position = pass.first + token;
    const int oldest = last ? token : 0, keys = token + 1 - oldest, count = 2 * keys + (last ? 0 : GROUP);
    copy_runs(b, count * HEAD_DIM, heads, [&](int i) {
      const int h = i / HEAD_DIM, group = h < keys ? 0 : h < 2 * keys ? 1 : 2;  // a key, a value, a query
      const int row = group == 2 ? token : oldest + h - group * keys;
      const int at = group == 2 ? (head * GROUP + h - 2 * keys) * HEAD_DIM : query_floats + group * key_floats + head * HEAD_DIM;
      return published + long(row) * width + at + i % HEAD_DIM;
    });
    copy_runs(b, keys * HEAD_DIM, turns, [&](int i) {
      const int at = i % HEAD_DIM;
      return angles + (at < HALF ? 0 : sines - HALF) + long(pass.first + oldest + i / HEAD_DIM) * HALF + at;
    });
    b.core.barrier();
    for (int h = b.core.warp(); h < count; h += b.core.warps()) {
      const bool key = h < keys, query = h >= 2 * keys;
      float* at = heads + h * HEAD_DIM;
      if (key || query) {
        const int norm = query ? stage.q_norm : stage.k_norm;
        if (norm >= 0) norm_head(b, at, b.memory.constants + norm);
        rotate_head(b, at, turns + (query ? keys - 1 : h) * HEAD_DIM, query ? scale : 1.0f);
      }
      if (!query) store_head(b, at, fresh + u64((key ? h : h - keys) * 2 + !key) * ROW);
    }
    b.core.barrier();
    const u64 item_bytes = u64(b.plan.item_positions) * ROW * 2;
    const Seen seen = {b, b.memory.kv + (u64(stage.kv) * b.plan.kv_items + head * b.plan.splits) * item_bytes, fresh, pass.first, position + 1};
    const u16* own = reinterpret_cast<const u16*>(fresh + u64(keys - 1) * 2 * ROW);
    TWIN_EACH(i, ROW) reinterpret_cast<u16*>(seen.cached(position, i / (ROW / 2)))[i % (ROW / 2)] = own[i];
    if (!last) {
      const int begin = stage.window && position + 1 > stage.window ? position + 1 - stage.window : 0;
      attend_unit(b, seen, begin, heads + 2 * keys * HEAD_DIM, merged, result);
      float* out = b.memory.prompt + b.plan.values_at(stage.publishes).prompt;
      TWIN_EACH(i, GROUP * HEAD_DIM) {
        const float total = result[GROUP * HEAD_DIM + 2 * (i / HEAD_DIM) + 1];
        Chunk::store(out, query_floats, token, head * GROUP * HEAD_DIM + i, result[i] / total);
      }
    }
    b.core.barrier();
  }
}

// ---- a pass ------------------------------------------------------------------------------------------------------------

// `ready` waits until the stage's input is there; false ends the pass.
template <class Ready>
__device__ __forceinline__ bool multiply_chunk(Block& b, Chunk& chunk, const Stage& stage, const Pass& pass, Ready ready) {
  const Value& value = b.plan.values_at(stage.publishes);
  const StageKind kind = StageKind(stage.kind);
  const bool normed = kind == StageKind::QKV || kind == StageKind::GATE_UP;
  const float* x = b.memory.prompt + (normed ? b.plan.prompt_normed : b.plan.values_at(b.plan.reads_at(stage.first_read).value).prompt);
  float* const out = pass_row(b.memory, value, 0, 0);  // looked up here: an emitted sum must not wait for a table
  const int width = value.elements;
  if (kind == StageKind::GATE_UP) {
    return chunk.multiply(b, stage, x, pass.tokens, ready, [&](int token, int i, float gate, float up) {
      Chunk::store(out, width, token, i, gate / (1.0f + exp32(-gate)) * up);
    });
  }
  const float* bias = kind == StageKind::QKV && stage.bias >= 0 ? b.memory.constants + stage.bias : nullptr;
  return chunk.multiply(b, stage, x, pass.tokens, ready, [&](int token, int row, float sum, float) {
    store_shared(out + long(token) * width + row, bias ? sum + bias[row] : sum);
  });
}

// Each stage meets all blocks before it reads what they made.
__device__ __forceinline__ bool read_chunk(Block& b, Chunk& chunk, Pass& pass) {
  chunk.open(b);
  for (int index = 0; index < b.plan.prompt_stages; ++index) {
    const Stage& stage = b.plan.stages_at(index);
    const StageKind kind = StageKind(stage.kind);
    const bool last = index + 1 == b.plan.prompt_stages;
    b.core.forget();
    auto ready = [&] { return meet(b, index, pass); };
    if (kind == StageKind::EMBED || kind == StageKind::COLLECTIVE) continue;  // the first norm embeds; parts are read where they lie
    if (kind == StageKind::ATTENTION) {
      if (!last) chunk.prefetch(b, b.plan.stages_at(index + 1));
      if (!ready()) return false;
      attend_chunk(b, stage, pass, last, chunk.memory(b));
      continue;
    }
    if (kind == StageKind::QKV || kind == StageKind::GATE_UP) {
      chunk.prefetch(b, stage);
      if (!ready()) return false;
      norm_chunk(b, stage, pass, chunk.memory(b));
    }
    if (!multiply_chunk(b, chunk, stage, pass, ready)) return false;
  }
  return true;
}

// All passes of the request. False: the run is over.
__device__ __forceinline__ bool read_prompt(Block& b) {
  const Request& wanted = b.launch.request;
  Chunk chunk(b);
  Pass pass = {};
  for (; pass.first < wanted.read; pass.first += b.plan.prompt_chunk, ++pass.number) {
    pass.tokens = least(b.plan.prompt_chunk, wanted.read - pass.first);
    if (!read_chunk(b, chunk, pass)) return false;
    b.core.ring.rewind();
    if (b.rank == 0 && b.block == 0 && b.core.thread() == 0) wanted.pass_stamps[pass.number] = now_ns();
    if (b.core.any(b.core.thread() == 0 && load_host(wanted.abort))) return false;  // barriers are too short to look there
  }
  if (!meet(b, b.plan.prompt_stages - 1, pass)) return false;  // keys and values are there
  chunk.finish(b);
  b.core.forget();
  return true;
}

}  // namespace twin
