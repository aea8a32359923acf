// Attention of a prompt pass, with tensor cores and without.
#pragma once

namespace twin {

// ---- attention, tasks of (kv head, token) -------------------------------------------------------

// Neighbouring tasks of a block that share a kv head.
struct Tasks {
  int head;
  int begin, end;  // tokens of the chunk
  // first token whose key and value they need: all before are seen, unless they only append
  int oldest;
};

// In shared memory while a block attends; attention_bytes in twin/kernel/prompt.py counts the same.
struct Attending {
  // bytes of a position's key and value; neighbours begin in other banks
  static constexpr int PITCH = 2 * ROW + 64;
  static constexpr int TILE = 64 / type_bytes(KV);  // cached positions that come together
  static constexpr int TILES = 4;                   // one in use, the others under way

  float* heads;   // [2 * tokens + queries][HEAD_DIM] keys, values, queries of the tasks
  float* turns;   // [tokens][cosines, sines][HALF]
  u8* fresh;      // [tokens][PITCH] the chunk's keys and values as cached
  u8* tiles;      // [TILES][TILE][PITCH] cached ones, on their way and there
  float* merged;  // [warps][HEADS][PARTIAL]

  __device__ static constexpr int up(int floats) { return (floats + 31) / 32 * 32; }
  __device__ Attending(const Plan& plan, float* chip) {
    const int chunk = plan.prompt_chunk,
              tasks = (plan.kv_heads * chunk + plan.blocks - 1) / plan.blocks;
    heads = chip;
    turns = heads + up((2 * chunk + least(tasks, chunk) * GROUP) * HEAD_DIM);
    fresh = reinterpret_cast<u8*>(turns + up(chunk * HEAD_DIM));
    tiles = fresh + 4 * up(chunk * PITCH / 4);
    merged = reinterpret_cast<float*>(tiles + 4 * up(TILES * TILE * PITCH / 4));
  }
};

// What attention_bytes in twin/kernel/prompt.py counts.
static_assert(Attending::PITCH == 2 * ROW + facts::PASS_PITCH_BYTES,
              "PITCH_BYTES in twin/kernel/prompt.py is another");
static_assert(Attending::TILE * type_bytes(KV) == facts::PASS_TILE_BYTES,
              "TILE_BYTES in twin/kernel/prompt.py is another");
static_assert(Attending::TILES == facts::PASS_TILES, "TILES in twin/kernel/prompt.py is another");
static_assert(Attending::up(1) == facts::LINE_FLOATS,
              "LINE_FLOATS in twin/kernel/prompt.py is another");

// Where a position's key, or its value, is cached; `cache` is
// [splits][k, v][item_positions][HEAD_DIM] of the kv head.
struct CachedRow {
  u8* row;
  int slot;

  __device__ __forceinline__ CachedRow(const Plan& plan, u8* cache, int position, bool value) {
    const PagePlace place = place_of<FirstHeads>(plan, position / plan.page);
    slot = place.page * plan.page + position % plan.page;
    row = cache + (u64(place.split * 2 + value) * u64(plan.item_positions) + u64(slot)) * ROW;
  }
  __device__ __forceinline__ u8* at(int byte) const { return row + swizzled<FirstHeads>(slot, byte); }
};
// The same of a byte of the key, or ROW behind it of the value.
__device__ __forceinline__ u8* cached(const Plan& plan, u8* cache, int position, int byte) {
  return CachedRow(plan, cache, position, byte >= ROW).at(byte % ROW);
}

// Numbers that a thread copies into shared memory at once, and how many such loads it has under
// way: each wait for one is a second-level cache's latency.
constexpr int COPY_PACK = HALF % 4 == 0 ? 4 : 1, COPIES = 4;

// at(i) for i in 0, COPY_PACK, .. below `count`: where COPY_PACK neighbours lie. They go to `to`.
template <class At>
__device__ __forceinline__ void copy_runs(Block& b, int count, float* to, At at) {
  const int step = b.core.threads() * COPY_PACK;
  TWIN_ONCE
  for (int i = b.core.thread() * COPY_PACK; i < count; i += step * COPIES) {
    Pack<COPY_PACK> got[COPIES];
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      if (i + k * step < count) got[k] = load_pack<COPY_PACK, 4 * COPY_PACK>(at(i + k * step));
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      TWIN_UNROLL
      for (int j = 0; j < COPY_PACK; ++j)
        if (i + k * step < count) to[i + k * step + j] = got[k].at[j];
  }
}

// RMSNorm's factor of `count` numbers, by one warp: of all heads of a token's q, or k, where these
// are normed as one vector.
__device__ __forceinline__ float factor_together(Block& b, const float* from, int count) {
  const int step = b.core.warp_threads() * COPY_PACK;
  float squares = 0;
  TWIN_ONCE
  for (int i = b.core.warp_thread() * COPY_PACK; i < count; i += step * COPIES) {
    Pack<COPY_PACK> got[COPIES];
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      if (i + k * step < count) got[k] = load_pack<COPY_PACK, 4 * COPY_PACK>(from + i + k * step);
    TWIN_UNROLL
    for (int k = 0; k < COPIES; ++k)
      TWIN_UNROLL
      for (int j = 0; j < COPY_PACK; ++j)
        if (i + k * step < count) squares += got[k].at[j] * got[k].at[j];
  }
  return inverse_root(b.core.warp_sum(squares) / float(count) + b.plan.norm_eps);
}

__device__ __forceinline__ float score_factor() {
  return Family::SCORE > 0.0f ? Family::SCORE : 1.0f / square_root(float(HEAD_DIM));
}

// The gates of a token's outputs, behind its queries, keys and values; what one lets pass.
__device__ __forceinline__ const float* gates_of(const Block& b, const Stage& stage, int token) {
  const Value& from = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  return pass_row(b.memory, from, token, from.elements) +
         (b.plan.heads + 2 * b.plan.kv_heads) * HEAD_DIM;
}
__device__ __forceinline__ float open_of(float gate) { return 1.0f / (1.0f + exp32(-gate)); }

// The tasks' queries, normed and turned, and the keys and values that they see of the chunk, as
// they are cached.
__device__ __forceinline__ void prepare_tasks(Block& b, const Stage& stage, const Pass& pass,
                                              const Tasks& tasks, int queries,
                                              const Attending& chip) {
  const Value& from = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  const int query_floats = b.plan.heads * HEAD_DIM, key_floats = b.plan.kv_heads * HEAD_DIM,
            width = from.elements;
  const int keys = tasks.end - tasks.oldest, count = 2 * keys + queries;
  const float* const published = pass_row(b.memory, from, 0, 0);
  const float* const angles = b.memory.constants + rope_of(b.plan, stage);
  const long sines = (long(b.plan.max_context) * HALF + 15) / 16 * 16;
  const float scale = score_factor();
  copy_runs(b, count * HEAD_DIM, chip.heads, [&](int i) {
    // a key, a value, a query
    const int h = i / HEAD_DIM, group = h < keys ? 0 : h < 2 * keys ? 1 : 2, query = h - 2 * keys;
    const int row = group == 2 ? tasks.begin + query / GROUP : tasks.oldest + h - group * keys;
    const int at = group == 2 ? (tasks.head * GROUP + query % GROUP) * HEAD_DIM
                              : query_floats + group * key_floats + tasks.head * HEAD_DIM;
    return published + long(row) * width + at + i % HEAD_DIM;
  });
  copy_runs(b, keys * HEAD_DIM, chip.turns, [&](int i) {
    const int at = i % HEAD_DIM;
    return angles + (at < HALF ? 0 : sines - HALF) +
           long(pass.first + tasks.oldest + i / HEAD_DIM) * HALF + at;
  });
  b.core.barrier();
  TWIN_ONCE
  for (int h = b.core.warp(); h < count; h += b.core.warps()) {
    const bool key = h < keys, query = h >= 2 * keys;
    const CacheScales scales = cache_scales(b, stage, tasks.head);
    float* at = chip.heads + h * HEAD_DIM;
    if (key || query) {
      const int norm = query ? stage.q_norm : stage.k_norm,
                token = query ? tasks.begin - tasks.oldest + (h - 2 * keys) / GROUP : h;
      if constexpr (Family::QK_NORMED_TOGETHER) {
        const int row = (query ? tasks.begin + (h - 2 * keys) / GROUP : tasks.oldest + h),
                  one = query ? tasks.head * GROUP + (h - 2 * keys) % GROUP : tasks.head;
        const float* const from = published + long(row) * width + (query ? 0 : query_floats);
        weigh_head(b, at, b.memory.constants + norm + one * HEAD_DIM,
                   factor_together(b, from, query ? query_floats : key_floats));
      } else if (norm >= 0 && !Family::NORMS_TURNED) {
        norm_head(b, at, b.memory.constants + norm);
      }
      float turned = query ? scale : 1.0f;
      if constexpr (CACHE_SCALED) turned *= query ? scales.of_key : scales.to_key;
      if constexpr (Family::NORMS_TURNED) {
        rotate_head(b, at, chip.turns + token * HEAD_DIM, 1.0f);
        norm_head(b, at, b.memory.constants + norm);
        multiply_head(b, at, turned);
      } else {
        rotate_head(b, at, chip.turns + token * HEAD_DIM, turned);
      }
    }
    if constexpr (CACHE_SCALED)
      if (!key && !query) multiply_head(b, at, scales.to_value);
    if (!query)
      store_head(
          b, at,
          chip.fresh + (tasks.oldest + (key ? h : h - keys)) * Attending::PITCH + (key ? 0 : ROW));
  }
  b.core.barrier();
}

using PassCached = Core::Cached<FirstHeads>;
constexpr int PASS_PARTIAL = PARTIAL<FirstHeads>, PASS_SUBWARPS = SUBWARPS<FirstHeads>;

// What a thread looks at together; in shared memory a position costs no wait, so that registers are
// the limit.
struct Near {
  static constexpr int POSITIONS = PassCached::POSITIONS < 4 ? 4 : PassCached::POSITIONS;
  PassCached::Piece key[POSITIONS], value[POSITIONS];
  bool held[POSITIONS];
};

// Positions first..first+count-1, whose keys and values lie in shared memory from `rows` on, for
// the query heads of a warp that sees from..to-1. `share` warps take them in turn.
__device__ __forceinline__ void scan_rows(Block& b, Partial<FirstHeads, Core::HEADS>& partial,
                                          const float* queries, int heads, const u8* rows,
                                          int first, int count, int from, int to, int share) {
  const int subwarp = b.core.warp_thread() / PassCached::POSITION_THREADS, end = least(count, to - first);
  TWIN_ONCE
  for (int p = (from > first ? from - first : 0) + b.core.warp() % share * PASS_SUBWARPS; p < end;
       p += share * PASS_SUBWARPS * Near::POSITIONS) {
    Near seen;
    TWIN_UNROLL
    for (int k = 0; k < Near::POSITIONS; ++k) {
      const int at = p + subwarp + k * share * PASS_SUBWARPS;
      seen.held[k] = at < end;
      if (at < end) {
        Chunk::load(b.core, seen.key[k], rows + at * Attending::PITCH);
        Chunk::load(b.core, seen.value[k], rows + at * Attending::PITCH + ROW);
      } else {
        seen.key[k].clear(), seen.value[k].clear();
      }
    }
    partial.scan(b, queries, heads, seen);
  }
}

// The logit that joins the softmax of a query head.
__device__ __forceinline__ float sink_of(const Block& b, const Stage& stage, int head) {
  return b.memory.constants[stage.sinks + head];
}

// Softmax of the tasks' query heads over what each sees. Cached keys and values come into shared
// memory tiles ahead, once for all warps; each warp takes a token's HEADS query heads, or shares
// their positions with others.
__device__ __forceinline__ void attend_tasks(Block& b, const Stage& stage, const Pass& pass,
                                             const Tasks& tasks, u8* cache, const Attending& chip,
                                             float* out) {
  constexpr int HEADS = Core::HEADS, TILE = Attending::TILE, TILES = Attending::TILES,
                PITCH = Attending::PITCH;
  constexpr int COPY = Chunk::COPY_BYTES, COPIED = 2 * ROW / COPY;  // of a position
  const int sets = (tasks.end - tasks.begin) * HeadSets<FirstHeads, HEADS>::COUNT, warps = b.core.warps(),
            columns = b.plan.heads * HEAD_DIM;
  TWIN_ONCE
  for (int done = 0; done < sets; done += warps) {
    const int together = least(warps, sets - done), share = warps / together,
              mine = b.core.warp() / share;
    const int set = done + least(mine, together - 1),
              token = tasks.begin + set / HeadSets<FirstHeads, HEADS>::COUNT,
              head = set % HeadSets<FirstHeads, HEADS>::COUNT * HEADS;
    const float* queries =
        chip.heads +
        (2 * (tasks.end - tasks.oldest) + (token - tasks.begin) * GROUP + head) * HEAD_DIM;
    auto oldest = [&](int of) {
      return stage.window && pass.first + of + 1 > stage.window ? pass.first + of + 1 - stage.window
                                                                : 0;
    };
    const int heads = least(HEADS, GROUP - head), from = oldest(token),
              to = mine < together ? pass.first + token + 1 : 0;
    const int begin = oldest(tasks.begin + done / HeadSets<FirstHeads, HEADS>::COUNT);
    auto place = [&](int tile) { return chip.tiles + tile % TILES * TILE * PITCH; };
    // Where a plan has drafts, the chunk's own follow in the same tiles: which positions a thread
    // looks at together then does not depend on where the chunk begins, so neither do sums.
    const bool follows = b.plan.drafts > 0;
    const int seen = pass.first + (follows ? tasks.end : 0);
    auto ask = [&](int tile) {
      const int first = begin + tile * TILE;
      TWIN_ONCE
      TWIN_EACH(i, least(TILE, seen - first) * COPIED) {
        const int position = i / COPIED, at = i % COPIED * COPY, of = first + position - pass.first;
        Chunk::copy(place(tile) + position * PITCH + at,
                    follows && of >= 0 ? chip.fresh + of * PITCH + at
                                       : cached(b.plan, cache, first + position, at));
      }
      Chunk::sent();
    };
    Partial<FirstHeads, HEADS> partial;
    partial.start();
    TWIN_ONCE
    for (int tile = 0; tile < TILES - 1; ++tile) ask(tile);
    int tile = 0;
    TWIN_ONCE
    for (int first = begin; first < seen; first += TILE, ++tile) {
      Chunk::arrived<TILES - 2>();
      b.core.barrier();
      ask(tile + TILES - 1);  // in the place of the one before, which all have used
      scan_rows(b, partial, queries, heads, place(tile), first, least(TILE, seen - first), from, to,
                share);
    }
    if (!follows)
      scan_rows(b, partial, queries, heads, chip.fresh, pass.first, tasks.end, from, to, share);
    partial.meet(b);
    partial.put(b, chip.merged + b.core.warp() * HEADS * PASS_PARTIAL);
    b.core.barrier();
    TWIN_ONCE
    TWIN_EACH(i, together * HEADS * HEAD_DIM) {
      const int one = i / (HEADS * HEAD_DIM), h = i / HEAD_DIM % HEADS, d = i % HEAD_DIM;
      const int query = (done + one) % HeadSets<FirstHeads, HEADS>::COUNT * HEADS + h;
      // of the set's first warp
      const float* row = chip.merged + (one * share * HEADS + h) * PASS_PARTIAL;
      if (query >= GROUP) continue;
      float top = LOWEST, sum = 0, total = 0;
      if constexpr (Additions::SINKS) top = sink_of(b, stage, tasks.head * GROUP + query);
      for (int w = 0; w < share; ++w)
        top = row[w * HEADS * PASS_PARTIAL + HEAD_DIM] > top ? row[w * HEADS * PASS_PARTIAL + HEAD_DIM] : top;
      if constexpr (Additions::SINKS)
        total = softmax_weight(sink_of(b, stage, tasks.head * GROUP + query), top);
      for (int w = 0; w < share; ++w) {
        const float weight = softmax_weight(row[w * HEADS * PASS_PARTIAL + HEAD_DIM], top);
        sum += weight * row[w * HEADS * PASS_PARTIAL + d];
        total += weight * row[w * HEADS * PASS_PARTIAL + HEAD_DIM + 1];
      }
      if constexpr (CACHE_SCALED) sum *= cache_scales(b, stage, tasks.head).of_value;
      const int of = tasks.begin + (done + one) / HeadSets<FirstHeads, HEADS>::COUNT,
                column = (tasks.head * GROUP + query) * HEAD_DIM + d;
      float made = sum / total;
      if constexpr (Outgoing::GATED) made *= open_of(load_shared(gates_of(b, stage, of) + column));
      Chunk::store(out, columns, of, column, made);
    }
    b.core.barrier();
  }
}

// Each task appends its token's key and value, and attends to all that came before. The last layer
// only appends. A block takes neighbouring tasks, so that most of them share what is prepared.
__device__ __forceinline__ void attend_chunk(Block& b, const Stage& stage, const Pass& pass,
                                             bool last, float* memory) {
  const Attending chip(b.plan, memory);
  const int all = b.plan.kv_heads * pass.tokens;
  const int end = int(long(b.block + 1) * all / b.plan.blocks);
  const u64 item_bytes = u64(b.plan.item_positions) * ROW * 2;
  TWIN_ONCE
  for (int task = int(long(b.block) * all / b.plan.blocks); task < end;) {
    const int head = task / pass.tokens, token = task % pass.tokens,
              stop = least(pass.tokens, token + end - task);
    const Tasks tasks = {head, token, stop, last ? token : 0};
    u8* const cache =
        b.memory.kv + (u64(stage.kv) * b.plan.kv_items + head * b.plan.splits) * item_bytes;
    prepare_tasks(b, stage, pass, tasks, last ? 0 : (stop - token) * GROUP, chip);
    TWIN_ONCE
    TWIN_EACH(i, (stop - token) * ROW) {
      const int of = token + i / ROW, at = i % ROW * 2;  // bytes of the token's key and value
      const u8* row = chip.fresh + of * Attending::PITCH + at;
      *reinterpret_cast<u16*>(cached(b.plan, cache, pass.first + of, at)) =
          *reinterpret_cast<const u16*>(row);
    }
    if (!last)
      attend_tasks(b, stage, pass, tasks, cache, chip,
                   b.memory.prompt + b.plan.values_at(stage.publishes).prompt);
    b.core.barrier();
    task += stop - token;
  }
}

// ---- the same on tensor cores: all heads of the chunk are prepared first, then blocks take rows
// of queries

constexpr int HEADS_AT_ONCE = 4;  // of a token, by a warp: their loads are under way together

// Queries as the tensor cores take them, [tokens][heads][HEAD_DIM], of caches of 8 bits in the order
// of their columns, times the scores' factor and their keys' scale.
__device__ __forceinline__ u8* pass_query(const Block& b, int token, int head) {
  return reinterpret_cast<u8*>(b.memory.prompt + b.plan.prompt_queries) +
         (long(token) * b.plan.heads + head) * HEAD_DIM * type_bytes(MULTIPLIED);
}

// All heads of the chunk, normed and turned: keys and values into the cache, queries for
// attend_rows. The last layer only appends.
__device__ __forceinline__ void prepare_chunk(Block& b, const Stage& stage, const Pass& pass,
                                              bool last) {
  const Value& published = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  const float* const rows = pass_row(b.memory, published, 0, 0);
  const float* const cosines = b.memory.constants + rope_of(b.plan, stage);
  const long sines = (long(b.plan.max_context) * HALF + 15) / 16 * 16;
  const int queries = b.plan.heads, keys = queries + b.plan.kv_heads, all = keys + b.plan.kv_heads,
            begin = last ? queries : 0;
  const int sets = (all - begin + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE,
            together = b.plan.blocks * b.core.warps();
  const u64 item_bytes = u64(b.plan.item_positions) * ROW * 2;
  using Pairs = twin::Pairs<FirstHeads>;
  Pairs query_norm, key_norm;
  if (!Family::QK_NORMED_TOGETHER && stage.q_norm >= 0)
    query_norm.load(b, b.memory.constants + stage.q_norm),
        key_norm.load(b, b.memory.constants + stage.k_norm);
  TWIN_ONCE
  for (int set = b.block * b.core.warps() + b.core.warp(); set < pass.tokens * sets;
       set += together) {
    const int token = set / sets, first = begin + set % sets * HEADS_AT_ONCE,
              position = pass.first + token;
    const float* const cosine = cosines + long(position) * HALF;
    Pairs turn, head[HEADS_AT_ONCE];
    TWIN_UNROLL
    for (int k = 0; k < Pairs::PAIRS; ++k) {
      if (!Pairs::here(b, k)) continue;
      turn.x[k] = load_pack<1, 4>(cosine + Pairs::number(b, k));
      turn.y[k] = load_pack<1, 4>(cosine + sines + Pairs::number(b, k));
    }
    TWIN_UNROLL
    for (int i = 0; i < HEADS_AT_ONCE; ++i)
      head[i].load(b,
                   rows + long(token) * published.elements + least(first + i, all - 1) * HEAD_DIM);
    float by_query = 1.0f, by_key = 1.0f;
    if constexpr (Family::QK_NORMED_TOGETHER) {
      const float* const row = rows + long(token) * published.elements;
      if (first < queries) by_query = factor_together(b, row, queries * HEAD_DIM);
      if (first < keys && first + HEADS_AT_ONCE > queries)
        by_key = factor_together(b, row + queries * HEAD_DIM, b.plan.kv_heads * HEAD_DIM);
    }
    TWIN_UNROLL
    for (int i = 0; i < HEADS_AT_ONCE; ++i) {
      const int h = first + i;
      if (h >= all) break;
      if (h < keys) {
        if constexpr (Family::QK_NORMED_TOGETHER) {
          const bool query = h < queries;
          const int own = query ? stage.q_norm + h * HEAD_DIM
                                : stage.k_norm + (h - queries) * HEAD_DIM;
          Pairs weight;
          weight.load(b, b.memory.constants + own);
          head[i].weigh(weight, query ? by_query : by_key);
        } else if (stage.q_norm >= 0 && !Family::NORMS_TURNED) {
          head[i].norm(b, Pairs::either(h < queries, query_norm, key_norm));
        }
        if constexpr (Family::NORMS_TURNED) {
          head[i].rotate_and_norm(b, turn, Pairs::either(h < queries, query_norm, key_norm), 1.0f);
        } else {
          head[i].rotate(turn, 1.0f);
        }
      }
      const int of = h < queries ? 0 : (h - queries) % b.plan.kv_heads;
      u8* const cache =
          b.memory.kv + (u64(stage.kv) * b.plan.kv_items + of * b.plan.splits) * item_bytes;
      const CachedRow row(b.plan, cache, position, h >= keys);
      u8* const query = pass_query(b, token, h < queries ? h : 0);
      if constexpr (CACHE_SCALED) {
        const CacheScales scales = cache_scales(b, stage, h < queries ? h / GROUP : of);
        head[i].multiply(h < queries ? score_factor() * scales.of_key
                         : h < keys  ? scales.to_key
                                     : scales.to_value);
        head[i].each(b, [&](int d, float element) {
          if (h < queries)
            store_element<MULTIPLIED>(query + product_column(d) * type_bytes(MULTIPLIED), element);
          else
            store_element<KV>(row.at(d * type_bytes(KV)), element);
        });
      } else {
        head[i].each(b, [&](int d, float element) {
          const int byte = d * type_bytes(KV);
          store_element<KV>(h < queries ? query + byte : row.at(byte), element);
        });
      }
    }
  }
}

// Rows of queries that share a KV head, over what each of them sees of the cache.
template <class C>
__device__ __forceinline__ void attend_rows(Block& b, const C& chunk, const Stage& stage,
                                            const Pass& pass, float* out) {
  using Scan = typename C::Scan;
  const u32 tiles = chunk.tiles();
  const int sets = (pass.tokens + Scan::TOKENS - 1) / Scan::TOKENS,
            columns = b.plan.heads * HEAD_DIM;
  const u64 item_bytes = u64(b.plan.item_positions) * ROW * 2;
  const float scale = Scan::LOG2_E * (CACHE_SCALED ? 1.0f : score_factor());
  TWIN_ONCE
  for (int set = b.block; set < sets * b.plan.kv_heads; set += b.plan.blocks) {
    const int kv = set / sets, first_token = set % sets * Scan::TOKENS,
              end_token = least(pass.tokens, first_token + Scan::TOKENS);
    const u8* const cache =
        b.memory.kv + (u64(stage.kv) * b.plan.kv_items + kv * b.plan.splits) * item_bytes;
    const auto oldest = [&](int token) {
      return stage.window && pass.first + token + 1 > stage.window
                 ? pass.first + token + 1 - stage.window
                 : 0;
    };
    const int begin = oldest(first_token) / Scan::TILE * Scan::TILE, end = pass.first + end_token;
    int token[2], head[2], from[2], to[2];
    TWIN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const int row = b.core.warp() * 16 + b.core.warp_thread() / 4 + 8 * i;
      token[i] = first_token + row / GROUP, head[i] = kv * GROUP + row % GROUP;
      if (row >= Scan::TOKENS * GROUP || token[i] >= pass.tokens) token[i] = -1;
      from[i] = oldest(token[i] < 0 ? first_token : token[i]);
      to[i] = pass.first + (token[i] < 0 ? first_token : token[i]) + 1;
    }
    Scan scan(b.core.warp_thread(), tiles, b.core.warp(), [&](int i) {
      return static_cast<const u8*>(
          pass_query(b, token[i] < 0 ? first_token : token[i], head[i] % b.plan.heads));
    });
    if constexpr (Additions::SINKS)
      TWIN_UNROLL
      for (int i = 0; i < 2; ++i)
        scan.join(i, sink_of(b, stage, head[i] % b.plan.heads));
    // of the warp's first token
    const int near = least(pass.first + first_token + b.core.warp() * 16 / GROUP, end - 1);
    const int far = least(pass.first + first_token + (b.core.warp() * 16 + 15) / GROUP, end - 1);
    const auto where = [&](int position, int byte) {
      return static_cast<const u8*>(cached(b.plan, const_cast<u8*>(cache), position, byte));
    };
    const auto ask = [&](int tile) {
      const int first = begin + tile * Scan::TILE;
      if (first < end)
        Scan::ask(tiles + u32(tile % Scan::TILES * 2 * Scan::PART), first, end, b.core.thread(),
                  where);
      C::sent();
    };
    TWIN_ONCE
    for (int tile = 0; tile < Scan::TILES - 1; ++tile) ask(tile);
    int tile = 0;
    TWIN_ONCE
    for (int first = begin; first < end; first += Scan::TILE, ++tile) {
      C::template arrived<Scan::TILES - 2>();
      b.core.barrier();
      b.core.forget();              // where copies go is found again
      ask(tile + Scan::TILES - 1);  // in the place of the one before, which all have used
      const bool all =
          first + Scan::TILE <= near + 1 && (!stage.window || first > far - stage.window);
      if (first <= far)
        scan.look(tiles + u32(tile % Scan::TILES * 2 * Scan::PART), first, from, to, all, scale);
    }
    const float by = cache_scales(b, stage, kv).of_value;
    const auto put = [&](int i, int column, float value, float next) {
      if constexpr (CACHE_SCALED) value *= by, next *= by;
      if (token[i] >= 0)
        C::store_pair(out, columns, token[i], head[i] * HEAD_DIM + column, value, next);
    };
    if constexpr (Outgoing::GATED) {
      scan.close_gated([&](int i) {
        return gates_of(b, stage, token[i] < 0 ? first_token : token[i]) +
               head[i] % b.plan.heads * HEAD_DIM;
      }, [](float gate) { return open_of(gate); }, put);
    } else {
      scan.close(put);
    }
    b.core.barrier();
  }
}

// ---- the same of a few tokens: splits of the cache by blocks, then their parts combined

// What a split made of a query head of a token: outputs, then the maximum and the sum of weights.
__device__ __forceinline__ float* part_of(const Block& b, int kv, int split, int row) {
  constexpr int PITCH = HEAD_DIM + facts::PART_ENDS;
  const int rows = (b.plan.drafts + 1) * GROUP;
  return b.memory.prompt + b.plan.round_parts +
         ((long(kv) * b.plan.round_splits + split) * rows + row) * PITCH;
}

// Tiles of cached positions that a pass's tokens see, from the first one on.
template <class Scan>
struct SeenTiles {
  int begin, count, splits;

  __device__ __forceinline__ SeenTiles(const Block& b, const Stage& stage, const Pass& pass)
      : splits(b.plan.round_splits) {
    const int oldest =
        stage.window && pass.first + 1 > stage.window ? pass.first + 1 - stage.window : 0;
    begin = oldest / Scan::TILE;
    count = (pass.first + pass.tokens - 1) / Scan::TILE + 1 - begin;
  }
  // A split's first one; behind the last one where it has none.
  __device__ __forceinline__ int first(int split) const {
    return begin + (split + splits - begin % splits) % splits;
  }
  __device__ __forceinline__ bool some(int split) const { return first(split) < begin + count; }
};

template <class C>
__device__ __forceinline__ void attend_splits(Block& b, const C& chunk, const Stage& stage,
                                              const Pass& pass) {
  using Scan = typename C::Scan;
  const u32 tiles = chunk.tiles();
  const int splits = b.plan.round_splits, end = pass.first + pass.tokens;
  const u64 item_bytes = u64(b.plan.item_positions) * ROW * 2;
  const float scale = Scan::LOG2_E * (CACHE_SCALED ? 1.0f : score_factor());
  const SeenTiles<Scan> seen(b, stage, pass);
  TWIN_ONCE
  for (int item = b.block; item < splits * b.plan.kv_heads; item += b.plan.blocks) {
    const int kv = item / splits, split = item % splits;
    if (!seen.some(split)) continue;
    const u8* const cache =
        b.memory.kv + (u64(stage.kv) * b.plan.kv_items + kv * b.plan.splits) * item_bytes;
    int row[2], from[2], to[2];
    TWIN_UNROLL
    for (int i = 0; i < 2; ++i) {
      row[i] = b.core.warp() * 16 + b.core.warp_thread() / 4 + 8 * i;
      if (row[i] >= pass.tokens * GROUP) row[i] = -1;
      const int position = pass.first + (row[i] < 0 ? 0 : row[i] / GROUP);
      to[i] = position + 1, from[i] = stage.window && to[i] > stage.window ? to[i] - stage.window : 0;
    }
    Scan scan(b.core.warp_thread(), tiles, b.core.warp(), [&](int i) {
      const int of = row[i] < 0 ? 0 : row[i];
      return static_cast<const u8*>(pass_query(b, of / GROUP, kv * GROUP + of % GROUP));
    });
    const auto where = [&](int position, int byte) {
      return static_cast<const u8*>(cached(b.plan, const_cast<u8*>(cache), position, byte));
    };
    const auto first_of = [&](int number) {
      return (seen.first(split) + number * splits) * Scan::TILE;
    };
    const auto ask = [&](int number) {
      if (first_of(number) < end)
        Scan::ask(tiles + u32(number % Scan::TILES * 2 * Scan::PART), first_of(number), end,
                  b.core.thread(), where);
      C::sent();
    };
    TWIN_ONCE
    for (int number = 0; number < Scan::TILES - 1; ++number) ask(number);
    const bool mine = b.core.warp() * 16 < pass.tokens * GROUP;
    TWIN_ONCE
    for (int number = 0; first_of(number) < end; ++number) {
      C::template arrived<Scan::TILES - 2>();
      b.core.barrier();
      b.core.forget();
      ask(number + Scan::TILES - 1);  // in the place of the one before, which all have used
      if (mine)
        scan.look(tiles + u32(number % Scan::TILES * 2 * Scan::PART), first_of(number), from, to,
                  false, scale);
    }
    scan.template close<true>([&](int i, int column, float value, float next) {
      if (row[i] >= 0) C::store_two(part_of(b, kv, split, row[i]) + column, value, next);
    });
    TWIN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const float sum = scan.sum_of(i);
      if (row[i] >= 0 && b.core.warp_thread() % 4 == 0)
        C::store_two(part_of(b, kv, split, row[i]) + HEAD_DIM, scan.most[i], sum);
    }
    b.core.barrier();
  }
}

// Outputs of the heads from their parts, in the order of splits: those in which a row saw nothing
// weigh nothing, so how many tokens the pass has changes no sum.
template <class C>
__device__ __forceinline__ void combine_splits(Block& b, const Stage& stage, const Pass& pass,
                                               float* out) {
  using Scan = typename C::Scan;
  constexpr int PAIRS = HEAD_DIM / 2;
  const int splits = b.plan.round_splits, columns = b.plan.heads * HEAD_DIM,
            count = pass.tokens * b.plan.heads * PAIRS;
  const SeenTiles<Scan> seen(b, stage, pass);
  TWIN_ONCE
  for (int at = b.block * b.core.threads() + b.core.thread(); at < count;
       at += b.plan.blocks * b.core.threads()) {
    const int pair = at % PAIRS * 2, head = at / PAIRS % b.plan.heads,
              token = at / (PAIRS * b.plan.heads), kv = head / GROUP,
              row = token * GROUP + head % GROUP;
    float top = LOWEST, total = 0.0f, first = 0.0f, second = 0.0f;
    if constexpr (Additions::SINKS) {
      top = Scan::LOG2_E * sink_of(b, stage, head);
      total = 1.0f;
    }
    constexpr int AT_ONCE = 8;  // whose loads are under way together
    TWIN_ONCE
    for (int begin = 0; begin < splits; begin += AT_ONCE) {
      Pack<2> value[AT_ONCE], ends[AT_ONCE];
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) {
        value[j] = ends[j] = {};
        ends[j].at[0] = LOWEST;
        if (begin + j >= splits || !seen.some(begin + j)) continue;
        const float* const part = part_of(b, kv, begin + j, row);
        value[j] = load_pack<2, 8>(part + pair), ends[j] = load_pack<2, 8>(part + HEAD_DIM);
      }
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j) {
        const float most = ends[j].at[0] > top ? ends[j].at[0] : top,
                    keep = Scan::power(top - most),
                    by = ends[j].at[1] * Scan::power(ends[j].at[0] - most);
        total = total * keep + by;
        first = first * keep + by * value[j].at[0], second = second * keep + by * value[j].at[1];
        top = most;
      }
    }
    float by = 1.0f / total;
    if constexpr (CACHE_SCALED) by *= cache_scales(b, stage, kv).of_value;
    first *= by, second *= by;
    if constexpr (Outgoing::GATED) {
      const float* const gates = gates_of(b, stage, token) + head * HEAD_DIM + pair;
      first *= open_of(load_shared(gates)), second *= open_of(load_shared(gates + 1));
    }
    C::store_pair(out, columns, token, head * HEAD_DIM + pair, first, second);
  }
}

}  // namespace twin
