// Attention of one token: each block scans the pages of its own items and publishes unnormalised partials.
#pragma once

#include "gemv.cuh"

namespace twin {

constexpr int PARTIAL = HEAD_DIM + 2;  // outputs, maximum, sum

// Positions below `position` that a split holds: whole pages, and its part of the one that is not full.
__device__ inline int held(const Plan& plan, int position, int split) {
  const int full = position / plan.page, rest = position % plan.page;
  const int rounds = full / plan.splits, current = full % plan.splits;
  return (rounds + (split < current)) * plan.page + (split == current ? rest : 0);
}

struct Item {  // one (kv head, split): keys, then values, [item_positions][HEAD_DIM] each
  u8* keys;
  u8* values;
  int head;
  int split;
};

__device__ inline Item item_at(const Block& b, const Stage& stage, int item) {
  const u64 rows = u64(b.plan.item_positions) * HEAD_DIM * type_bytes(KV);
  u8* keys = b.memory.kv + (u64(stage.kv) * b.plan.kv_items + item) * 2 * rows;
  return {keys, keys + rows, item / b.plan.splits, item % b.plan.splits};
}

// RMSNorm of one head by one warp; `weight` is null when the model has none.
__device__ inline void norm_head(Block& b, float* head, const float* weight) {
  if (!weight) return;
  float squares = 0;
  for (int d = b.core.lane(); d < HEAD_DIM; d += b.core.lanes()) squares += head[d] * head[d];
  const float scale = 1.0f / square_root(b.core.warp_sum(squares) / HEAD_DIM + b.plan.norm_eps);
  for (int d = b.core.lane(); d < HEAD_DIM; d += b.core.lanes()) head[d] *= scale * weight[d];
  b.core.warp_sync();
}

// Rotary embedding of one head by one warp; pair i holds elements (i, i + HEAD_DIM/2), or (2i, 2i + 1) when interleaved.
__device__ inline void rotate_head(Block& b, float* head, int position, float scale) {
  constexpr int HALF = HEAD_DIM / 2;
  const float* cosine = b.memory.constants + b.plan.rope + long(position) * HALF;
  const float* sine = cosine + (long(b.plan.max_context) * HALF + 15) / 16 * 16;
  const int step = b.plan.interleaved ? 2 : 1, apart = b.plan.interleaved ? 1 : HALF;
  for (int i = b.core.lane(); i < HALF; i += b.core.lanes()) {
    const float x = head[i * step], y = head[i * step + apart];
    head[i * step] = (x * cosine[i] - y * sine[i]) * scale;
    head[i * step + apart] = (y * cosine[i] + x * sine[i]) * scale;
  }
  b.core.warp_sync();
}

__device__ inline void append(const Block& b, const Item& item, int slot, const float* k, const float* v) {
  constexpr int SIZE = type_bytes(KV);
  const u64 at = u64(slot) * HEAD_DIM * SIZE;
  TWIN_EACH(d, HEAD_DIM) {
    store_element<KV>(item.keys + at + d * SIZE, k[d]);
    store_element<KV>(item.values + at + d * SIZE, v[d]);
  }
}

// Running softmax of some query heads over the positions that one warp scanned. A lane holds PIECE elements of each head.
struct Partial {
  static constexpr int HEADS = Core::HEADS, PIECE = Core::PIECE, POSITIONS = Core::POSITIONS;
  float query[HEADS][PIECE];
  float output[HEADS][PIECE];
  float most[HEADS];
  float total[HEADS];

  __device__ void start(const Block& b, const float* q, int heads) {
    for (int h = 0; h < HEADS; ++h) {
      for (int d = 0; d < PIECE; ++d) {
        const int at = b.core.lane() * PIECE + d;
        query[h][d] = h < heads && at < HEAD_DIM ? q[h * HEAD_DIM + at] : 0.0f;
        output[h][d] = 0.0f;
      }
      most[h] = -infinity();
      total[h] = 0.0f;
    }
  }

  __device__ void scan(Block& b, const Item& item, int lo, int hi) {
    constexpr int ROW = HEAD_DIM * type_bytes(KV);
    float score[HEADS][POSITIONS];
    const int count = hi - lo;
    for (int p = 0; p < POSITIONS; ++p) {
      if (p < count) {
        float key[PIECE];
        b.core.load_piece(item.keys + u64(lo + p) * ROW, key);
        for (int h = 0; h < HEADS; ++h) score[h][p] = b.core.warp_sum(b.core.piece_dot(query[h], key));
      } else {
        for (int h = 0; h < HEADS; ++h) score[h][p] = -infinity();
      }
    }
    for (int h = 0; h < HEADS; ++h) {
      float top = most[h];
      for (int p = 0; p < POSITIONS; ++p) top = score[h][p] > top ? score[h][p] : top;
      const float shrink = exp32(most[h] - top);
      for (int p = 0; p < POSITIONS; ++p) score[h][p] = exp32(score[h][p] - top);
      float sum = 0;
      for (int p = 0; p < POSITIONS; ++p) sum += score[h][p];
      total[h] = total[h] * shrink + sum;
      most[h] = top;
      for (int d = 0; d < PIECE; ++d) output[h][d] *= shrink;
    }
    for (int p = 0; p < POSITIONS; ++p) {
      if (p >= count) break;
      float value[PIECE];
      b.core.load_piece(item.values + u64(lo + p) * ROW, value);
      for (int h = 0; h < HEADS; ++h)
        for (int d = 0; d < PIECE; ++d) output[h][d] += score[h][p] * value[d];
    }
  }
};

// One head of the partials of all warps, merged in warp order: store(d, value) for each of PARTIAL elements.
// `rows` is [warps][PARTIAL] on the chip.
template <class Store>
__device__ void merge_head(Block& b, const Partial& mine, int h, float* rows, Store store) {
  float* row = rows + b.core.warp() * PARTIAL;
  for (int d = 0; d < Partial::PIECE; ++d) {
    const int at = b.core.lane() * Partial::PIECE + d;
    if (at < HEAD_DIM) row[at] = mine.output[h][d];
  }
  if (b.core.lane() == 0) {
    row[HEAD_DIM] = mine.most[h];
    row[HEAD_DIM + 1] = mine.total[h];
  }
  b.core.barrier();
  float top = rows[HEAD_DIM];
  for (int w = 1; w < b.core.warps(); ++w) top = rows[w * PARTIAL + HEAD_DIM] > top ? rows[w * PARTIAL + HEAD_DIM] : top;
  TWIN_EACH(d, PARTIAL) {
    float sum = 0;
    for (int w = 0; w < b.core.warps(); ++w) {
      const float* from = rows + w * PARTIAL;
      if (from[HEAD_DIM] > -infinity()) sum += from[d] * exp32(from[HEAD_DIM] - top);
    }
    store(d, d == HEAD_DIM ? top : sum);
  }
  b.core.barrier();
}

// All query heads of one item over the local positions lo..hi-1; store(query head, d, value).
template <class Store>
__device__ void attend(Block& b, const Item& item, const float* queries, int lo, int hi, float* rows, Store store) {
  for (int first = 0; first < GROUP; first += Partial::HEADS) {
    const int heads = least(Partial::HEADS, GROUP - first);
    Partial partial;
    partial.start(b, queries + first * HEAD_DIM, heads);
    for (int p = lo + b.core.warp() * Partial::POSITIONS; p < hi; p += b.core.warps() * Partial::POSITIONS)
      partial.scan(b, item, p, least(p + Partial::POSITIONS, hi));
    for (int h = 0; h < Partial::HEADS; ++h)
      if (h < heads) merge_head(b, partial, h, rows, [&](int d, float value) { store(first + h, d, value); });
  }
}

}  // namespace twin
