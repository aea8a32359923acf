// The heads of a new token: normed, turned, and stored as the scan and the cache want them.
#pragma once

#include "gemv.cuh"

#include "../platform/family.h"  // behind the platform, whose arithmetic it uses

namespace twin {

// of a prompt pass, whose plans have heads of one shape
constexpr int HALF = FirstHeads::HALF, ROW = FirstHeads::ROW;

// Where a layer's cosines begin among the constants; its sines follow.
__device__ __forceinline__ int rope_of(const Plan& plan, const Stage& stage) {
  return Family::ROPE_BY_LAYER ? stage.rope : plan.rope;
}

// A norm's weights and its factor times one head in shared memory, by one warp.
__device__ __forceinline__ void weigh_head(Block& b, float* head, const float* weight, float by) {
  for (int d = b.core.warp_thread(); d < HEAD_DIM; d += b.core.warp_threads())
    head[d] *= by * weight[d];
  b.core.warp_sync();
}

// RMSNorm of one head in shared memory by one warp.
__device__ __forceinline__ void norm_head(Block& b, float* head, const float* weight) {
  float squares = 0;
  for (int d = b.core.warp_thread(); d < HEAD_DIM; d += b.core.warp_threads())
    squares += head[d] * head[d];
  weigh_head(b, head, weight,
             inverse_root(b.core.warp_sum(squares) / HEAD_DIM + b.plan.norm_eps));
}

__device__ __forceinline__ void multiply_head(Block& b, float* head, float by) {
  for (int d = b.core.warp_thread(); d < HEAD_DIM; d += b.core.warp_threads()) head[d] *= by;
  b.core.warp_sync();
}

// Rotary embedding of one head by one warp; pair i holds elements (i, i + HEAD_DIM/2), or (2i, 2i +
// 1) when interleaved.
__device__ __forceinline__ void rotate_head(Block& b, float* head, const float* turns,
                                            float scale) {
  const int step = b.plan.interleaved ? 2 : 1, pitch = b.plan.interleaved ? 1 : HALF;
  for (int i = b.core.warp_thread(); i < HALF; i += b.core.warp_threads()) {
    const float x = head[i * step], y = head[i * step + pitch], cosine = turns[i],
                sine = turns[HALF + i];
    head[i * step] = (x * cosine - y * sine) * scale;
    head[i * step + pitch] = (y * cosine + x * sine) * scale;
  }
  b.core.warp_sync();
}

// A key or value head as it will be cached, by one warp.
__device__ __forceinline__ void store_head(Block& b, const float* head, u8* to) {
  for (int d = b.core.warp_thread(); d < HEAD_DIM; d += b.core.warp_threads())
    store_element<KV>(to + d * type_bytes(KV), head[d]);
}

// What a KV head's keys and values are multiplied by before they are cached, and behind that
// (twin/plan/cache_scales.py).
struct CacheScales {
  float to_key, of_key, to_value, of_value;
};
// `head`: of the rank. Of caches that are not scaled, and of a probe's, ones.
__device__ __forceinline__ CacheScales cache_scales(const Block& b, const Stage& stage, int head) {
  if constexpr (CACHE_SCALED) {
    const float* const at = TWIN_GLOBAL(b.memory.constants) + stage.cache_scales + 4 * head;
    if (!b.plan.probe) return {at[0], at[1], at[2], at[3]};
  }
  return {1.0f, 1.0f, 1.0f, 1.0f};
}

// Where a thread keeps a head while it is awaited, normed and turned: pairs that are turned
// together.
template <class S>
struct Pairs {
  static constexpr int HALF = S::HALF;
  // a probe may have no heads
  static constexpr int PAIRS = HALF ? (HALF + Core::warp_threads() - 1) / Core::warp_threads() : 1;

  Pack<1> x[PAIRS], y[PAIRS];

  __device__ __forceinline__ static int number(const Block& b, int k) {
    return b.core.warp_thread() + k * b.core.warp_threads();
  }
  __device__ __forceinline__ static bool here(const Block& b, int k) {
    return HALF % Core::warp_threads() == 0 || number(b, k) < HALF;
  }
  __device__ __forceinline__ static int first(const Block& b, int k) {
    return b.plan.interleaved ? 2 * number(b, k) : number(b, k);
  }
  __device__ __forceinline__ static int second(const Block& b, int k) {
    return first(b, k) + (b.plan.interleaved ? 1 : HALF);
  }

  // From exchange memory or constants: requested at once, in the order of the program.
  __device__ __forceinline__ void load(const Block& b, const float* at) {
    // one address, to which the others add constants
    const float* const from = at + first(b, 0);
    const int next = b.core.warp_threads() * (b.plan.interleaved ? 2 : 1);
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) {
      if (!here(b, k)) continue;
      x[k] = load_pack<1, 4>(from + k * next);
      y[k] = load_pack<1, 4>(from + k * next + (b.plan.interleaved ? 1 : HALF));
    }
  }
  __device__ __forceinline__ bool late(const Block& b) const {
    bool any = false;
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) any |= here(b, k) && (missing(x[k]) || missing(y[k]));
    return any;
  }
  // RMSNorm's factor.
  __device__ __forceinline__ float factor(Block& b) const {
    float squares = 0;
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k)
      if (here(b, k)) squares += x[k].at[0] * x[k].at[0] + y[k].at[0] * y[k].at[0];
    return inverse_root(b.core.warp_sum(squares) / S::HEAD_DIM + b.plan.norm_eps);
  }
  __device__ __forceinline__ void norm(Block& b, const Pairs& weight) { weigh(weight, factor(b)); }
  __device__ __forceinline__ void norm_alone(Block& b) {  // without weights
    const float by = factor(b);
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) x[k].at[0] *= by, y[k].at[0] *= by;
  }
  // Element by element: of two addresses one would have to be in memory.
  __device__ __forceinline__ static Pairs either(bool first, const Pairs& one, const Pairs& other) {
    Pairs chosen;
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) {
      chosen.x[k].at[0] = first ? one.x[k].at[0] : other.x[k].at[0];
      chosen.y[k].at[0] = first ? one.y[k].at[0] : other.y[k].at[0];
    }
    return chosen;
  }
  __device__ __forceinline__ void weigh(const Pairs& weight, float by) {
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) {
      x[k].at[0] *= by * weight.x[k].at[0];
      y[k].at[0] *= by * weight.y[k].at[0];
    }
  }
  // The rotary embedding, times `scale`; `turn` has cosines and sines.
  __device__ __forceinline__ void rotate(const Pairs& turn, float scale) {
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) {
      const float along = x[k].at[0], across = y[k].at[0], cosine = turn.x[k].at[0],
                  sine = turn.y[k].at[0];
      x[k].at[0] = (along * cosine - across * sine) * scale;
      y[k].at[0] = (across * cosine + along * sine) * scale;
    }
  }
  // Turned first, then normed, which a turn leaves as long as it was.
  __device__ __forceinline__ void rotate_and_norm(Block& b, const Pairs& turn, const Pairs& weight,
                                                  float scale) {
    rotate(turn, scale * factor(b));
    weigh(weight, 1.0f);
  }
  __device__ __forceinline__ void multiply(float by) {
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) x[k].at[0] *= by, y[k].at[0] *= by;
  }
  template <class Put>
  __device__ __forceinline__ void each(const Block& b, Put put) const {
    TWIN_UNROLL
    for (int k = 0; k < PAIRS; ++k) {
      if (!here(b, k)) continue;
      put(first(b, k), x[k].at[0]);
      put(second(b, k), y[k].at[0]);
    }
  }
};

// An element of query `number` of those in shared memory, [heads][HEAD_DIM], as the scan wants it.
template <class S, class Core>
__device__ __forceinline__ void put_query(const Core&, float* heads, int number, int d,
                                          float value) {
  using Cached = typename Core::template Cached<S>;
  float* const head = heads + number * S::HEAD_DIM;
  if constexpr (Cached::TENSOR_SCAN) {
    Cached::TileScan::store_query(head, number % S::GROUP, d, value);
  } else {
    head[d] = value;
  }
}

// RMSNorm's factors of all heads of q as one vector, and of k: the stage's second read has them
// all.
struct Together {
  float query, key;
  int first;  // kv head of the block's items: each head has its own weights
};

template <class S>
__device__ __forceinline__ bool norm_together(Block& b, int index, const Stage& stage,
                                              Together& by) {
  const Read& read = b.plan.reads_at(stage.first_read + 1);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const int queries = S::heads(b.plan) * S::HEAD_DIM, keys = S::kv_heads(b.plan) * S::HEAD_DIM;
  // with one word under way at a time OLMo-2-7B's blocks waited 8 us a layer
  constexpr int QUAD = S::HEAD_DIM % 4 ? 1 : 4, AT_ONCE = 4;
  const int all = queries + keys, pitch = QUAD * b.core.threads();
  float query = 0, key = 0;
  Patience patience;
  bool good = true;
  TWIN_ONCE
  for (int from = QUAD * b.core.thread(); from < all && good; from += pitch * AT_ONCE) {
    Pack<QUAD> x[AT_ONCE];
    for (;;) {  // all under way before the first is looked at
      int late = -1;
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j)
        if (from + j * pitch < all)
          x[j] = load_pack<QUAD, 4 * QUAD>(source.at(0) + from + j * pitch);
      TWIN_UNROLL
      for (int j = 0; j < AT_ONCE; ++j)
        if (from + j * pitch < all && missing(x[j])) late = from + j * pitch;
      if (late < 0 || !source.polled) break;
      good = keep_waiting(b, patience, {index, read.value, 0, late});
      if (!good) break;
    }
    TWIN_UNROLL
    for (int j = 0; j < AT_ONCE; ++j) {
      if (from + j * pitch >= all) continue;
      float squares = 0;
      TWIN_UNROLL
      for (int i = 0; i < QUAD; ++i) squares += x[j].at[i] * x[j].at[i];
      (from + j * pitch < queries ? query : key) += squares;
    }
  }
  if (!b.core.agree(good)) return false;
  by.first = b.plan.owned_of(stage.items, b.block).lo / S::splits(b.plan);
  by.query = inverse_root(b.core.sum(query) / float(queries) + b.plan.norm_eps);
  by.key = inverse_root(b.core.sum(key) / float(keys) + b.plan.norm_eps);
  return !b.core.gave_up();
}

// The queries, keys and values of a block's items, each head by one warp, which awaits it, norms
// and turns it: queries into `heads`, keys and values as they are cached into `fresh`,
// [kv_heads][k, v][HEAD_DIM]. No barrier, as in gather_vector.
template <class S>
__device__ __forceinline__ bool prepare_heads(Block& b, int index, const Stage& stage, int kv_heads,
                                              int position, float* heads, u8* fresh) {
  constexpr int HEAD_DIM = S::HEAD_DIM, GROUP = S::GROUP, HALF = S::HALF, ROW = S::ROW;
  using Pairs = twin::Pairs<S>;
  Together by = {};
  if constexpr (Family::QK_NORMED_TOGETHER)
    if (!norm_together<S>(b, index, stage, by)) return false;
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  // of whole heads: queries, keys, values
  const SpanRow row = b.plan.rows_at(read.spans + b.block);
  const float scale = Family::SCORE > 0.0f ? Family::SCORE : 1.0f / square_root(float(HEAD_DIM)),
              *const from = source.at(0);
  const float* const cosine = b.memory.constants + rope_of(b.plan, stage) + long(position) * HALF;
  const float* const sine = cosine + (long(b.plan.max_context) * HALF + 15) / 16 * 16;
  Pairs turn;
  TWIN_UNROLL
  for (int k = 0; k < Pairs::PAIRS; ++k) {
    if (!Pairs::here(b, k)) continue;
    turn.x[k] = load_pack<1, 4>(cosine + Pairs::number(b, k));
    turn.y[k] = load_pack<1, 4>(sine + Pairs::number(b, k));
  }
  Patience patience;
  bool good = true;
  TWIN_ONCE
  for (int h = b.core.warp(); h < kv_heads * (GROUP + 2); h += b.core.warps()) {
    const bool query = h < kv_heads * GROUP, value = h >= kv_heads * (GROUP + 1),
               normed = stage.q_norm >= 0 && !value;
    Pairs weight = {}, head;
    if constexpr (Family::QK_NORMED_TOGETHER) {
      const int one = query ? by.first * GROUP + h : by.first + h - kv_heads * GROUP;
      if (normed)
        weight.load(b, b.memory.constants + (query ? stage.q_norm : stage.k_norm) + one * HEAD_DIM);
    } else {
      if (normed) weight.load(b, b.memory.constants + (query ? stage.q_norm : stage.k_norm));
    }
    CacheScales scales = {};
    if constexpr (CACHE_SCALED) {
      const int own = query ? h / GROUP : (h - kv_heads * GROUP) % kv_heads;
      scales = cache_scales(b, stage,
                            b.plan.owned_of(stage.items, b.block).lo / S::splits(b.plan) + own);
    }
    // values that are keys lie where these do
    int at = (S::VALUES_ARE_KEYS && value ? h - kv_heads : h) * HEAD_DIM;
    Span span = b.plan.spans_at(row.first);
    TWIN_ONCE
    for (int i = row.first + 1; at >= span.hi - span.lo && i < row.first + row.count; ++i) {
      at -= span.hi - span.lo;
      span = b.plan.spans_at(i);
    }
    at += span.lo;
    for (;;) {
      head.load(b, from + at);
      if (!source.polled || !head.late(b)) break;
      good = keep_waiting(b, patience, {index, read.value, 0, at});
      if (!good) break;  // on to where all threads of the warp meet
    }
    b.core.warp_sync();
    if constexpr (Family::QK_NORMED_TOGETHER) {
      if (normed) head.weigh(weight, query ? by.query : by.key);
    } else if constexpr (!Family::NORMS_TURNED) {
      if (normed) head.norm(b, weight);
    }
    if constexpr (Family::VALUES_NORMED)
      if (value) head.norm_alone(b);
    if constexpr (Family::NORMS_TURNED) {
      float turned = query ? scale : 1.0f;
      if constexpr (CACHE_SCALED) turned = query ? scale * scales.of_key : scales.to_key;
      if (!value) head.rotate_and_norm(b, turn, weight, turned);
      if constexpr (CACHE_SCALED)
        if (value) head.multiply(scales.to_value);
    } else if constexpr (CACHE_SCALED) {
      if (value) head.multiply(scales.to_value);
      else head.rotate(turn, query ? scale * scales.of_key : scales.to_key);
    } else {
      if (!value) head.rotate(turn, query ? scale : 1.0f);
    }
    if (query) {
      head.each(b,
                [&](int d, float element) { put_query<S>(b.core, heads, h, d, element); });
    } else {
      u8* const to = fresh + ((h - kv_heads * GROUP) % kv_heads * 2 + value) * ROW;
      head.each(b,
                [&](int d, float element) { store_element<KV>(to + d * type_bytes(KV), element); });
    }
  }
  return b.core.agree(good);
}

}  // namespace twin
