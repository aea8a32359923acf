// Rounds that are handed on: attention.
#pragma once

namespace twin {

struct HandedHeads : HandedProducts {
  using HandedProducts::HandedProducts;

  using Scan = PassScan;
  using Pairs = twin::Pairs<FirstHeads>;

  // A pair of outputs of a row of queries; where several splits make parts of it, their sum.
  __device__ __forceinline__ void put_output(int kv, int row, int column, float first,
                                             float second) {
    store_word(HandedAt::outputs(b.memory) +
                   ((row / GROUP * Plan::heads + kv * GROUP + row % GROUP) * HEAD_DIM + column) * 2,
               packed<WEIGHT>(first, second));
  }

  // The heads that a split needs, normed and turned: the round's queries; keys and values of those
  // of its tokens that the split caches, into the cache and into shared memory. Several heads' words
  // are under way together.
  __device__ __forceinline__ void prepare(int index, const Stage& stage, int kv, int split,
                                          u8* cache) {
    constexpr int TOGETHER = 3;
    const float* const from = HandedAt::heads(b.memory);
    const float* const cosines = b.memory.constants + rope_of(b.plan, stage);
    const long sines = (long(Plan::max_context) * HALF + 15) / 16 * 16;
    const int pitch = b.plan.stages_at(LAST_QKV).rows, sets = pass.tokens * (GROUP + 2);
    const CacheScales scales = cache_scales(b, stage, kv);
    Pairs query_norm, key_norm;
    if (stage.q_norm >= 0)
      query_norm.load(b, b.memory.constants + stage.q_norm),
          key_norm.load(b, b.memory.constants + stage.k_norm);
    TWIN_ONCE
    for (int set = b.core.warp(); set < sets; set += TOGETHER * CONSUMER_WARPS) {
      Pairs head[TOGETHER], turn[TOGETHER];
      u32 wanted = 0;
#pragma unroll
      for (int k = 0; k < TOGETHER; ++k) {
        const int one = set + k * CONSUMER_WARPS, token = one / (GROUP + 2), h = one % (GROUP + 2),
                  position = pass.first + token;
        if (one >= sets || (h >= GROUP && position / Scan::TILE % Plan::round_splits != split))
          continue;
        wanted |= 1u << k;
        const float* const cosine = cosines + long(position) * HALF;
#pragma unroll
        for (int p = 0; p < Pairs::PAIRS; ++p) {
          if (!Pairs::here(b, p)) continue;
          turn[k].x[p] = load_pack<1, 4>(cosine + Pairs::number(b, p));
          turn[k].y[p] = load_pack<1, 4>(cosine + sines + Pairs::number(b, p));
        }
      }
      Patience patience;
      for (u32 left = wanted; left;) {
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k) {
          const int one = set + k * CONSUMER_WARPS, token = one / (GROUP + 2),
                    h = one % (GROUP + 2);
          const int at = h < GROUP    ? kv * GROUP + h
                         : h == GROUP ? Plan::heads + kv
                                      : Plan::heads + Plan::kv_heads + kv;
          if (left >> k & 1u) head[k].load(b, from + token * pitch + at * HEAD_DIM);
        }
#pragma unroll
        for (int k = 0; k < TOGETHER; ++k)
          if ((left >> k & 1u) && !__any_sync(0xFFFFFFFFu, head[k].late(b))) left &= ~(1u << k);
        if (left) {
          b.core.agree(keep_waiting(b, patience, {index, -1, 0, 0}));
          __syncwarp();
          if (b.core.gave_up()) break;
        }
      }
      __syncwarp();
#pragma unroll
      for (int k = 0; k < TOGETHER; ++k) {
        if (!(wanted >> k & 1u)) continue;
        const int one = set + k * CONSUMER_WARPS, token = one / (GROUP + 2), h = one % (GROUP + 2),
                  position = pass.first + token;
        const bool query = h < GROUP, value = h > GROUP;
        if (!value) {
          if (stage.q_norm >= 0 && !Family::NORMS_TURNED)
            head[k].norm(b, Pairs::either(query, query_norm, key_norm));
          if constexpr (Family::NORMS_TURNED)
            head[k].rotate_and_norm(b, turn[k], Pairs::either(query, query_norm, key_norm), 1.0f);
          else head[k].rotate(turn[k], 1.0f);
        }
        if constexpr (CACHE_SCALED)
          head[k].multiply(query   ? score_factor() * scales.of_key
                           : value ? scales.to_value
                                   : scales.to_key);
        if (query) {
          u8* const to = shared + Few::QUERIES + (token * GROUP + h) * Few::QUERY_PITCH;
          head[k].each(b, [&](int d, float element) {
            const int column = CACHE_SCALED ? product_column(d) : d;
            store_element<MULTIPLIED>(to + column * type_bytes(MULTIPLIED), element);
          });
        } else {
          const CachedRow row(b.plan, cache, position, value);
          u8* const fresh = shared + Few::FRESH + (2 * token + value) * Few::CACHED_PITCH;
          head[k].each(b, [&](int d, float element) {
            store_element<KV>(row.at(d * type_bytes(KV)), element);
            store_element<KV>(fresh + d * type_bytes(KV), element);
          });
        }
      }
    }
  }

  __device__ __forceinline__ bool attend(int index, const Stage& stage) {
    const int splits = Plan::round_splits, kv = b.block / splits, split = b.block % splits;
    parts = 0;
    if (kv >= Plan::kv_heads) return true;
    const int end = pass.first + pass.tokens, rows = pass.tokens * GROUP;
    const SeenTiles<Scan> seen(b, stage, pass);
    const bool alone = seen.count == 1;
    const float of_values = CACHE_SCALED ? cache_scales(b, stage, kv).of_value : 1.0f;
    if (seen.some(split)) {
      if (!look(index, stage, kv, split, seen, end, rows, alone, of_values)) return false;
    }
    if (alone) return true;
    // The block's share of the KV head's outputs, from all splits' parts, in their order: one in
    // which a row saw nothing weighs nothing, so how many tokens the round has changes no sum.
    constexpr int PAIRS = HEAD_DIM / 2, SPLITS = Plan::round_splits;
    TWIN_ONCE
    for (int at = split * CONSUMERS + b.core.thread(); at < rows * PAIRS;
         at += SPLITS * CONSUMERS) {
      const int row = at / PAIRS, pair = at % PAIRS * 2;
      Pack<2> value[SPLITS ? SPLITS : 1], ends[SPLITS ? SPLITS : 1];
      Patience patience;
      for (;;) {
        bool late = false;
#pragma unroll
        for (int j = 0; j < SPLITS; ++j) {
          value[j] = {}, ends[j] = {{LOWEST, 0.0f}};
          if (!seen.some(j)) continue;
          const float* const part = part_of(b, kv, j, row);
          value[j] = load_pack<2, 8>(part + pair), ends[j] = load_pack<2, 8>(part + HEAD_DIM);
        }
#pragma unroll
        for (int j = 0; j < SPLITS; ++j) late |= missing(value[j]) || missing(ends[j]);
        if (!late || !b.core.agree(keep_waiting(b, patience, {index, -1, 1, row})) ||
            b.core.gave_up())
          break;
      }
      float top = LOWEST, total = 0.0f, first = 0.0f, second = 0.0f;
#pragma unroll
      for (int j = 0; j < SPLITS; ++j) top = Scan::larger(top, ends[j].at[0]);
#pragma unroll
      for (int j = 0; j < SPLITS; ++j) {
        const float by = ends[j].at[1] * Scan::power(ends[j].at[0] - top);
        total += by;
        first = __fmaf_rn(by, value[j].at[0], first);
        second = __fmaf_rn(by, value[j].at[1], second);
      }
      const float by = of_values / total;
      put_output(kv, row, pair, first * by, second * by);
    }
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ bool look(int index, const Stage& stage, int kv, int split,
                                       const SeenTiles<Scan>& seen, int end, int rows, bool alone,
                                       float of_values) {
    const u32 tiles = shared_address(shared);
    const u64 item_bytes = u64(Plan::item_positions) * ROW * 2;
    u8* const cache =
        b.memory.kv + (u64(stage.kv) * Plan::kv_items + kv * Plan::splits) * item_bytes;
    const int splits = Plan::round_splits, warp = b.core.warp(), lane = b.core.warp_thread();
    const float scale = Scan::LOG2_E * (CACHE_SCALED ? 1.0f : score_factor());
    const auto first_of = [&](int number) {
      return (seen.first(split) + number * splits) * Scan::TILE;
    };
    const auto place = [&](int number) { return number % Scan::TILES * 2 * Scan::PART; };
    // Positions before the round's, and zeros behind it, on their way.
    const auto ask = [&](int number) {
      const int first = first_of(number);
      TWIN_ONCE
      for (int i = b.core.thread(); first < end && i < Scan::TILE * 2 * Scan::UNITS;
           i += CONSUMERS) {
        const int position = first + i / (2 * Scan::UNITS), unit = i % (2 * Scan::UNITS),
                  value = unit / Scan::UNITS;
        if (position >= pass.first && position < end) continue;
        const bool there = position < pass.first;
        copy_activations(tiles + u32(place(number) + value * Scan::PART +
                                     (position - first) * Scan::PITCH + unit % Scan::UNITS * 16),
                         cached(b.plan, cache, there ? position : 0, unit * 16), there);
      }
      copies_sent();
    };
    b.core.barrier();  // the sums before are used up
    ask(0);
    prepare(index, stage, kv, split, cache);
    b.core.barrier();
    if (b.core.gave_up()) return false;
    int from[2], to[2], row[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = warp * 16 + lane / 4 + 8 * i;
      if (row[i] >= rows) row[i] = -1;
      to[i] = pass.first + (row[i] < 0 ? 0 : row[i] / GROUP) + 1;
      from[i] = stage.window && to[i] > stage.window ? to[i] - stage.window : 0;
    }
    const bool mine = warp * 16 < rows;
    Scan scan(lane, tiles + u32(Few::QUERIES + (mine ? warp : 0) * 16 * Few::QUERY_PITCH));
    TWIN_ONCE
    for (int number = 0; first_of(number) < end; ++number) {
      const int first = first_of(number);
      copies_arrived<0>();
      TWIN_ONCE
      for (int i = b.core.thread(); i < pass.tokens * 2 * Scan::UNITS; i += CONSUMERS) {
        const int token = i / (2 * Scan::UNITS), unit = i % (2 * Scan::UNITS),
                  value = unit / Scan::UNITS, at = pass.first + token - first;
        if (at < 0 || at >= Scan::TILE) continue;
        *reinterpret_cast<uint4*>(shared + place(number) + value * Scan::PART + at * Scan::PITCH +
                                  unit % Scan::UNITS * 16) =
            *reinterpret_cast<const uint4*>(shared + Few::FRESH +
                                            (2 * token + value) * Few::CACHED_PITCH +
                                            unit % Scan::UNITS * 16);
      }
      b.core.barrier();
      b.core.forget();
      ask(number + 1);  // in the place of the one before, which all have used
      if (mine) scan.look(tiles + u32(place(number)), first, from, to, false, scale);
    }
    const float sum[2] = {scan.sum_of(0), scan.sum_of(1)},
                by[2] = {of_values / sum[0], of_values / sum[1]};
    scan.template close<true>([&](int i, int column, float value, float next) {
      if (row[i] < 0) return;
      if (alone) {  // as if its part were combined
        put_output(kv, row[i], column, __fmul_rn(sum[i], value) * by[i],
                   __fmul_rn(sum[i], next) * by[i]);
      } else {
        Chunk::store_two(part_of(b, kv, split, row[i]) + column, unlike_sentinel(value),
                         unlike_sentinel(next));
      }
    });
    if (!alone) {
      parts = rows * (HEAD_DIM + facts::PART_ENDS);
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (row[i] >= 0 && lane % 4 == 0)
          Chunk::store_two(part_of(b, kv, split, row[i]) + HEAD_DIM, unlike_sentinel(scan.most[i]),
                           unlike_sentinel(sum[i]));
    }
    copies_arrived<0>();
    b.core.barrier();  // the tiles are used up
    return true;
  }
};

}  // namespace twin
