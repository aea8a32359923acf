// Attention of one token: each block scans the pages of its own items and publishes unnormalised
// partials.
#pragma once

#include "heads.cuh"

namespace twin {

template <class S>
constexpr int PARTIAL = S::HEAD_DIM + facts::PARTIAL_EXTRA;  // in shared memory: outputs, maximum, sum
static_assert(facts::PARTIAL_EXTRA == 2,
              "PARTIAL_EXTRA in twin/plan/attention.py: a maximum and a sum");

__device__ __forceinline__ float softmax_weight(float most, float top) { return exp32(most - top); }

// What an item (kv head, split) publishes: outputs of all query heads, then maximum and sum of
// each, to a multiple of 16 bytes. Outputs of a 16-bit cache are divided by their sum and go two to
// a word: every block reads those of all items. FP16 whatever the cache's type: means of values lie
// within its range, and it keeps three bits more than BF16.
template <class S>
struct Outputs {
  static constexpr bool PAIRED = KV != Type::FP32;
  static constexpr int TOGETHER = PAIRED ? 2 : 1;  // elements of a word
  static constexpr int ENDS = S::GROUP * S::HEAD_DIM / TOGETHER,
                       WORDS = (ENDS + 2 * S::GROUP + 3) / 4 * 4;

  // `scale`: of cached values.
  __device__ __forceinline__ static float word(const float (&element)[TOGETHER], float total,
                                               float scale) {
    if constexpr (!PAIRED) return element[0];
    const float by =
        total > 0.0f ? (CACHE_SCALED ? scale : 1.0f) / total : 0.0f;  // nothing was looked at
    u16 half[2];
    TWIN_UNROLL
    for (int e = 0; e < TOGETHER; ++e)
      store_element<Type::FP16>(reinterpret_cast<u8*>(half + e), element[e] * by);
    return bits_as<float>(u32(half[0]) | u32(half[TOGETHER - 1]) << 16);
  }
  __device__ __forceinline__ static float element(float word, int number) {
    const u16 half = u16(bits_as<u32>(word) >> 16 * number);
    return PAIRED ? load_element<Type::FP16>(reinterpret_cast<const u8*>(&half)) : word;
  }
  // What a split's elements count, `by` being its softmax weight.
  __device__ __forceinline__ static float weight(float by, float total) {
    return PAIRED ? by * total : by;
  }
};

__device__ __forceinline__ int position_at(const Plan& plan, const Request& wanted, int step) {
  return plan.probe ? plan.context - 1 : wanted.read + step;
}
__device__ __forceinline__ int position_of(const Block& b) {
  return position_at(b.plan, b.launch.request, b.at.step);
}

// Pages of a KV head belong to splits: the first `together` splits take them in turn until each has
// `first_pages`, then the next ones do; when all have, all take them in turn. So few splits hold a
// short context. Attention in twin/plan/attention.py says the same.
template <class S>
__device__ __forceinline__ bool all_take(const Plan& plan, int page) {
  return S::first_pages(plan) == 0 || page >= S::splits(plan) * S::first_pages(plan);
}

// Those before: the first split that takes a page, and how many do; the last ones may be fewer.
template <class S>
__device__ __forceinline__ int first_taking(const Plan& plan, int page) {
  return int(u32(page) / u32(S::together(plan) * S::first_pages(plan)) * u32(S::together(plan)));
}
template <class S>
__device__ __forceinline__ int taking(const Plan& plan, int first) {
  return S::splits(plan) % S::together(plan) ? least(S::together(plan), S::splits(plan) - first) : S::together(plan);
}

struct PagePlace {  // of a page
  int split;
  int page;  // of that split
};

template <class S>
__device__ __forceinline__ PagePlace place_of(const Plan& plan, int page) {
  if (all_take<S>(plan, page)) return {page % S::splits(plan), page / S::splits(plan)};
  const int first = first_taking<S>(plan, page), at = page - first * S::first_pages(plan),
            splits = taking<S>(plan, first);
  return {first + at % splits, at / splits};
}

// Splits, the first ones, that hold positions once this one is held.
template <class S>
__device__ __forceinline__ int filled_splits(const Plan& plan, int position) {
  const int page = position / plan.page;
  if (all_take<S>(plan, page)) return least(S::splits(plan), page + 1);
  const int first = first_taking<S>(plan, page);
  return first + least(taking<S>(plan, first), page + 1 - first * S::first_pages(plan));
}

// Positions below `position` that a split holds: whole pages, and its part of the one that is not
// full. Unsigned: divisions of signed numbers took registers that some kernels spilled.
template <class S>
__device__ __forceinline__ int held(const Plan& plan, int position, int split) {
  const u32 full = u32(position) / u32(plan.page), rest = u32(position) % u32(plan.page);
  u32 first = 0, splits = u32(S::splits(plan)), behind = full;
  if (!all_take<S>(plan, int(full))) {
    first = u32(first_taking<S>(plan, int(full))), splits = u32(taking<S>(plan, int(first)));
    if (u32(split) < first) return S::first_pages(plan) * plan.page;
    if (u32(split) >= first + splits) return 0;
    behind = full - first * u32(S::first_pages(plan));
  }
  const u32 rounds = behind / splits, current = first + behind % splits;
  const u32 last = u32(split) == current ? rest : 0u;
  return int((rounds + (u32(split) < current)) * u32(plan.page) + last);
}

// A warp looks at some query heads of an item, and at warp_threads() / POSITION_THREADS positions
// at a time, of which a thread holds PIECE elements. Neighbouring positions go to different
// subwarps, so that a short context keeps every subwarp's chain short.
template <class S>
constexpr int PIECE = (S::HEAD_DIM + Core::Cached<S>::POSITION_THREADS - 1) /
                      Core::Cached<S>::POSITION_THREADS;
template <class S>
constexpr int SUBWARPS = Core::warp_threads() / Core::Cached<S>::POSITION_THREADS;  // of a warp

// Where a byte of a cached row lies in it: rows that follow each other begin in other banks, where
// the tensor cores load eight at once.
template <class S>
__device__ __forceinline__ int swizzled(int row, int byte) {
  return Core::Cached<S>::TENSOR_SCAN ? byte ^ row_swizzle<S::ROW>(row) << 4 : byte;
}

// Sets of HEADS query heads that share one read of a key.
template <class S, int HEADS>
struct HeadSets {
  static constexpr int COUNT = (S::GROUP + HEADS - 1) / HEADS;
  // each by warps of its own
  static constexpr int AT_ONCE = COUNT < Core::warps() ? COUNT : Core::warps();
  // that share a set's positions
  static constexpr int WARPS = Core::warps() / AT_ONCE;
};

// Running softmax of some query heads over the positions that one subwarp scanned.
template <class S, int HEADS>
struct Partial {
  using Cached = Core::Cached<S>;
  static constexpr int HEAD_DIM = S::HEAD_DIM, PIECE = twin::PIECE<S>,
                       POSITION_THREADS = Cached::POSITION_THREADS;

  // Wide queries stay in registers: read for each position they took more of the shared memory's
  // time than keys and values (0.6 us a position of eight heads of 512 on an H200, 0.17 us of 256).
  static constexpr bool KEPT = Core::CACHE_IN_RING && SUBWARPS<S> == 1 && PIECE >= 8;

  float output[HEADS][PIECE];
  float most[HEADS];
  float total[HEADS];
  float kept[KEPT ? HEADS : 1][KEPT ? PIECE : 1];

  __device__ __forceinline__ void keep(const Block& b, const float* queries, int heads) {
    if constexpr (KEPT)
      TWIN_UNROLL
      for (int h = 0; h < HEADS; ++h) query_of(b, queries, heads, h, kept[h]);
  }
  // This thread's elements of a head's query.
  __device__ __forceinline__ static void query_of(const Block& b, const float* queries, int heads,
                                                  int h, float (&query)[PIECE]) {
    const int first = b.core.warp_thread() % POSITION_THREADS * PIECE;
    TWIN_UNROLL
    for (int d = 0; d < PIECE; ++d)
      query[d] = h < heads && first + d < HEAD_DIM ? queries[h * HEAD_DIM + first + d] : 0.0f;
  }

  __device__ __forceinline__ void start() {
    TWIN_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      TWIN_UNROLL
      for (int d = 0; d < PIECE; ++d) output[h][d] = 0.0f;
      most[h] = LOWEST;
      total[h] = 0.0f;
    }
  }

  // `queries` lie in shared memory, [heads][HEAD_DIM].
  template <class Rows>
  __device__ TWIN_LARGE void scan(Block& b, const float* queries, int heads, const Rows& rows) {
    constexpr int POSITIONS = sizeof(rows.held);
    float score[HEADS][POSITIONS], key[POSITIONS][PIECE];
    TWIN_UNROLL
    for (int p = 0; p < POSITIONS; ++p) rows.key[p].unpack(key[p]);
    TWIN_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      float query[PIECE];
      if constexpr (KEPT) {
        TWIN_UNROLL
        for (int d = 0; d < PIECE; ++d) query[d] = kept[h][d];
      } else {
        query_of(b, queries, heads, h, query);
      }
      TWIN_UNROLL
      for (int p = 0; p < POSITIONS; ++p) {
        const float dot = capped_score(Cached::subwarp_sum(b.core, Cached::piece_dot(query, key[p])));
        score[h][p] = rows.held[p] ? dot : -infinity();
      }
    }
    TWIN_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      float top = most[h];
      TWIN_UNROLL
      for (int p = 0; p < POSITIONS; ++p) top = score[h][p] > top ? score[h][p] : top;
      const float shrink = softmax_weight(most[h], top);
      float sum = 0;
      TWIN_UNROLL
      for (int p = 0; p < POSITIONS; ++p) {
        score[h][p] = softmax_weight(score[h][p], top);
        sum += score[h][p];
      }
      total[h] = total[h] * shrink + sum;
      most[h] = top;
      TWIN_UNROLL
      for (int d = 0; d < PIECE; ++d) output[h][d] *= shrink;
    }
    TWIN_UNROLL
    for (int p = 0; p < POSITIONS; ++p) {
      float value[PIECE];
      rows.value[p].unpack(value);
      TWIN_UNROLL
      for (int h = 0; h < HEADS; ++h)
        TWIN_UNROLL
        for (int d = 0; d < PIECE; ++d) output[h][d] += score[h][p] * value[d];
    }
  }

  // Into [HEADS][PARTIAL] in shared memory; all subwarps hold the same.
  __device__ __forceinline__ void put(Block& b, float* rows) const {
    if (b.core.warp_thread() >= POSITION_THREADS) return;
    TWIN_UNROLL
    for (int h = 0; h < HEADS; ++h) {
      float* row = rows + h * PARTIAL<S>;
      TWIN_UNROLL
      for (int d = 0; d < PIECE; ++d)
        if (b.core.warp_thread() * PIECE + d < HEAD_DIM)
          row[b.core.warp_thread() * PIECE + d] = output[h][d];
      if (b.core.warp_thread() == 0) row[HEAD_DIM] = most[h], row[HEAD_DIM + 1] = total[h];
    }
  }

  // All subwarps of a warp into each of them.
  __device__ __forceinline__ void meet(Block& b) {
    TWIN_UNROLL
    for (int mask = POSITION_THREADS; mask < Core::warp_threads(); mask *= 2)
      TWIN_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        const float other = b.core.shuffle_xor(most[h], mask),
                    top = other > most[h] ? other : most[h];
        const float mine = softmax_weight(most[h], top), theirs = softmax_weight(other, top);
        total[h] = total[h] * mine + b.core.shuffle_xor(total[h], mask) * theirs;
        TWIN_UNROLL
        for (int d = 0; d < PIECE; ++d)
          output[h][d] = output[h][d] * mine + b.core.shuffle_xor(output[h][d], mask) * theirs;
        most[h] = top;
      }
  }
};

// The first position that a layer attends to.
__device__ __forceinline__ int oldest(const Stage& stage, int position) {
  return stage.window && position + 1 > stage.window ? position + 1 - stage.window : 0;
}

// What an item (kv head, split) has in the cache at a step.
template <class S>
struct Item {
  u8* keys;  // [item_positions][HEAD_DIM]; the values follow
  u8* values;
  int from;  // its positions that count
  int to;
  int newest;  // the present token's, the last of them, or -1 when another split holds it

  // Where its keys lie, and `bytes` behind them its values.
  __device__ __forceinline__ static u8* keys_of(const Plan& plan, const RankMemory& memory,
                                                const Stage& stage, int item, u64& bytes) {
    bytes = u64(S::item_positions(plan)) * S::ROW;
    return memory.kv + S::begin(plan) + (u64(stage.kv) * S::kv_items(plan) + item) * 2 * bytes;
  }
  __device__ __forceinline__ void open(const Plan& plan, const RankMemory& memory,
                                       const Stage& stage, int item, int position) {
    u64 bytes;
    keys = keys_of(plan, memory, stage, item, bytes);
    values = keys + bytes;
    const int split = item % S::splits(plan);
    const PagePlace place = place_of<S>(plan, position / plan.page);
    newest = !plan.probe && place.split == split
                 ? place.page * plan.page + position % plan.page
                 : -1;
    from = held<S>(plan, oldest(stage, position), split);
    to = held<S>(plan, position + 1, split);
  }
  // behind the last of them in memory
  __device__ __forceinline__ int cached() const { return newest < 0 ? to : to - 1; }
};

// What an item's cached values are multiplied by; nothing is kept where they have no scale.
template <bool SCALED>
struct ValueScale {
  float of_values;
};
template <>
struct ValueScale<false> {
  static constexpr float of_values = 1.0f;
};

// Attention of one item by the block.
template <class S>
struct Scan : Item<S>, ValueScale<CACHE_SCALED> {
  using Cached = Core::Cached<S>;
  using Outputs = twin::Outputs<S>;
  using Item<S>::keys, Item<S>::values, Item<S>::from, Item<S>::to, Item<S>::newest;
  using Item<S>::cached;
  static constexpr int HEAD_DIM = S::HEAD_DIM, GROUP = S::GROUP, ROW = S::ROW,
                       PARTIAL = twin::PARTIAL<S>, SUBWARPS = twin::SUBWARPS<S>,
                       POSITIONS = Cached::POSITIONS,
                       POSITION_THREADS = Cached::POSITION_THREADS;
  static constexpr bool TENSOR_SCAN = Cached::TENSOR_SCAN;

  struct Rows {  // under way, or there
    typename Cached::Piece key[POSITIONS], value[POSITIONS];
    bool held[POSITIONS];
  };

  static constexpr int HEADS = Cached::SCAN_HEADS;
  using Sets = HeadSets<S, HEADS>;
  using TileScan = typename Cached::TileScan;
  // partial results of a set in shared memory: of the warps that share its positions
  static constexpr int WARPS = TENSOR_SCAN ? TileScan::PARTIALS : Sets::WARPS;
  // are there more of these, which meet before?
  static constexpr bool MEET = TENSOR_SCAN && WARPS < TileScan::WARPS;
  // words of its outputs that a thread merges at a time
  static constexpr int MERGED_WORDS =
      TENSOR_SCAN && GROUP * HEAD_DIM / Outputs::TOGETHER > Core::threads() ? 2 : 1;
  // positions that one looks at
  static constexpr int AT_ONCE = TENSOR_SCAN ? TileScan::POSITIONS : SUBWARPS;
  // partial results that one warp of each set makes: the last set may have fewer heads
  static constexpr int ROWS = TENSOR_SCAN ? least(Sets::AT_ONCE * HEADS, GROUP)
                                                : Sets::AT_ONCE * HEADS;
  static constexpr int PARTIALS = WARPS * ROWS;
  // positions that all warps of a set look at together
  static constexpr int PITCH = Sets::WARPS * SUBWARPS;
  static constexpr int STRIDE = PITCH * POSITIONS;  // the same, in one of their rounds
  static_assert(!Core::CACHE_IN_RING || Sets::COUNT == Sets::AT_ONCE,
                "what came through the ring is there once");

  const u8* fresh;  // the newest key and value, in shared memory
  // in shared memory: a logit without a value for each query head of the first split; null: none
  const float* sinks;
  // from memory: to look at next, and after that; of the block's first item requested before the
  // queries were there
  Rows rows, next;

  __device__ __forceinline__ void open(const Block& b, const Stage& stage, int item, int position) {
    Item<S>::open(b.plan, b.memory, stage, item, position);
    fresh = nullptr;
    sinks = nullptr;
  }

  // the warps of its set
  __device__ static int among(const Block& b) { return b.core.warp() / Sets::AT_ONCE; }
  __device__ static int subwarp(const Block& b) {
    return among(b) * SUBWARPS + b.core.warp_thread() / POSITION_THREADS;
  }

  // Asks memory for the positions at + k * all subwarps. The newest is read from the chip once it
  // is there.
  __device__ TWIN_LARGE void ask(const Block& b, Rows& rows, int at, bool again) const {
    TWIN_UNROLL
    for (int k = 0; k < POSITIONS; ++k) {
      const int p = at + k * PITCH;
      if (again && p != newest) continue;
      rows.held[k] = p < to;
      const bool here = p == newest;
      if (p >= to || (here && !fresh)) {
        if (!again) rows.key[k].clear(), rows.value[k].clear();
        continue;
      }
      if (here) {
        rows.key[k].load_near(b.core, fresh);
        rows.value[k].load_near(b.core, fresh + ROW);
      } else {
        rows.key[k].load(b.core, keys + u64(p) * ROW);
        rows.value[k].load(b.core, values + u64(p) * ROW);
      }
    }
  }
  __device__ __forceinline__ void prefetch(const Block& b) {
    if (Core::CACHE_IN_RING) return;  // a loader has been there
    ask(b, rows, from + subwarp(b), false);
    ask(b, next, from + subwarp(b) + STRIDE, false);
  }

  // A warp's positions of the item, from memory.
  __device__ __forceinline__ void look_at_memory(Block& b, Partial<S, HEADS>& partial,
                                                 const float* queries, int heads, bool prefetched) {
    int at = from + subwarp(b);
    ask(b, rows, at, prefetched);
    ask(b, next, at + STRIDE, prefetched);
    auto look = [&](Rows& seen, int p) {
      partial.scan(b, queries, heads, seen);
      if (p + 2 * STRIDE < to) ask(b, seen, at + 2 * STRIDE, false);
      at += STRIDE;
    };
    TWIN_ONCE
    // by turns: what moves to other registers is awaited first
    for (int p = from + among(b) * SUBWARPS; p < to; p += 2 * STRIDE) {
      look(rows, p);
      if (p + STRIDE < to) look(next, p + STRIDE);
    }
  }

  // The same from tiles of the ring, of `core.CACHE_TILE` positions each: keys, behind them values.
  template <class Core>
  __device__ __forceinline__ void look_at_ring(Block& b, Core& core, Partial<S, HEADS>& partial,
                                               const float* queries, int heads) {
    constexpr int TILE = Cached::CACHE_TILE;
    partial.keep(b, queries, heads);
    TWIN_ONCE
    for (int first = from; first < to; first += TILE) {
      const bool streamed = first < cached();  // else the newest is alone
      const u8* const tile = streamed ? core.cache_tile() : nullptr;
      const int count = least(TILE, to - first), here = newest - first;
      TWIN_ONCE
      for (int p = among(b) * SUBWARPS; p < count && heads > 0; p += STRIDE) {
        TWIN_UNROLL
        for (int k = 0; k < POSITIONS; ++k) {
          const int at = p + b.core.warp_thread() / POSITION_THREADS + k * PITCH;
          const bool near = at == here || !streamed;
          // numbers, also where nothing is held
          const u8* const key = near ? fresh : tile + (at < count ? at : 0) * ROW;
          rows.held[k] = at < count;
          rows.key[k].load_near(core, key);
          rows.value[k].load_near(core, key + (near ? ROW : TILE * ROW));
        }
        partial.scan(b, queries, heads, rows);
      }
      if (streamed) core.leave_cache_tile();
    }
  }

  // The same by products of its warps with all of a set's heads, of which the first is the KV
  // head's `first_head`th; into rows `row` and on of `found`. True: the last tile has not been
  // left.
  template <class Core>
  __device__ __forceinline__ bool look_at_tiles(Core& core, const float* queries, int first_head,
                                                int heads, int me, float* found, int row) {
    const auto merged = TileScan::Found(found, PARTIALS).from(row);
    constexpr int TILE = Cached::CACHE_TILE, PRODUCTS = (TILE + AT_ONCE - 1) / AT_ONCE;
    TileScan partial(queries, first_head, heads, core.warp_thread());
    bool streamed = false;
    TWIN_ONCE
    for (int first = from; first < to; first += TILE) {
      if (streamed) core.leave_cache_tile();
      streamed = first < cached();
      const u8* const tile = streamed ? core.cache_tile() : nullptr;
      partial.look({tile, tile + TILE * ROW, fresh, least(TILE, to - first),
                    streamed ? newest - first : 0, first},
                   TILE % AT_ONCE ? (first - from) / TILE * PRODUCTS : (first - from) / AT_ONCE,
                   me);
    }
    if constexpr (MEET) {
      partial.close();
      TWIN_UNROLL
      // the last WARPS of them put what they found, those before meet it
      for (int warps = TileScan::WARPS; warps > WARPS; warps -= WARPS) {
        const int ahead = warps - me;
        if (ahead > 0 && ahead <= WARPS) partial.put(merged, heads);
        core.barrier();
        if (ahead > WARPS && ahead <= 2 * WARPS) partial.meet(merged, heads);
      }
    }
    if (me < WARPS) partial.put(merged, heads);
    return streamed;
  }

  template <class Core>
  __device__ static __forceinline__ void leave_last(Core& core, bool holds) {
    if constexpr (TENSOR_SCAN)
      if (holds) core.leave_cache_tile();
  }

  // The newest key and value into the cache.
  __device__ __forceinline__ void append(Block& b) {
    if (newest < 0 || !fresh) return;
    TWIN_EACH(i, ROW / 2) {
      const int to = swizzled<S>(newest, 2 * i) / 2;
      reinterpret_cast<u16*>(TWIN_GLOBAL(keys) + u64(newest) * ROW)[to] =
          reinterpret_cast<const u16*>(fresh)[i];
      reinterpret_cast<u16*>(TWIN_GLOBAL(values) + u64(newest) * ROW)[to] =
          reinterpret_cast<const u16*>(fresh + ROW)[i];
    }
    b.core.appended();
  }

  // All query heads of the item; store(word, value) for each of Outputs::WORDS. `merged` is
  // PARTIALS times PARTIAL in shared memory.
  template <class Store>
  __device__ __forceinline__ void attend(Block& b, const float* queries, bool prefetched,
                                         float* merged, Store store) {
    constexpr int SETS = Sets::AT_ONCE;
    for (int set = 0; set < Sets::COUNT; set += SETS) {
      const int head = (set + b.core.warp() % SETS) * HEADS, heads = least(HEADS, GROUP - head);
      const int row = MEET ? among(b) % WARPS : among(b);
      const int mine = row * ROWS + b.core.warp() % SETS * HEADS;
      bool holds = false;  // the last tile
      if constexpr (TENSOR_SCAN) {
        holds = look_at_tiles(b.core, queries + head * HEAD_DIM, head, heads, among(b),
                              merged, mine);
      } else {
        Partial<S, HEADS> partial;
        partial.start();
        if constexpr (Core::CACHE_IN_RING) {
          // each warp leaves each tile
          look_at_ring(b, b.core, partial, queries + head * HEAD_DIM, heads);
        } else if (heads > 0) {
          look_at_memory(b, partial, queries + head * HEAD_DIM, heads, prefetched && set == 0);
        }
        if (among(b) < WARPS) {
          partial.meet(b);
          partial.put(b, merged + mine * PARTIAL);
        }
      }
      b.core.barrier();
      b.core.cleared();
      merge(b, set * HEADS, least(SETS * HEADS, GROUP - set * HEADS), merged, store);
      // others wait for what was published; nobody for the cache before the next step
      if (set + SETS >= Sets::COUNT) append(b);
      leave_last(b.core, holds);
      b.core.barrier();
    }
  }

  // Where a warp's partial results of head h of those in shared memory lie: element d; maximum and
  // sum.
  template <class C = Cached>  // others have no such places
  __device__ __forceinline__ static int place(int warp, int h, int d) {
    if constexpr (C::TENSOR_SCAN)
      return (warp * ROWS + h / HEADS * HEADS) * HEAD_DIM + C::TileScan::Found::place(h % HEADS, d);
    return (warp * ROWS + h) * PARTIAL + d;
  }
  __device__ __forceinline__ static int end_place(int warp, int h) {
    const int row = warp * ROWS + h;
    return TENSOR_SCAN ? PARTIALS * HEAD_DIM + 2 * row : row * PARTIAL + HEAD_DIM;
  }

  // Heads head..head+heads-1 from the partials of their warps, in warp order; a warp that looked at
  // nothing weighs nothing.
  template <class Store>
  __device__ __forceinline__ void merge(Block& b, int head, int heads, const float* merged,
                                        Store store) const {
    constexpr int TOGETHER = Outputs::TOGETHER, WORDS = HEAD_DIM / TOGETHER,
                  // of a head's words as many as threads take, the others as far behind them
                  EACH = WORDS > MERGED_WORDS ? WORDS / MERGED_WORDS : 1;
    TWIN_EACH(i, heads * EACH) {
      const int h = i / EACH, d = i % EACH * TOGETHER, ends = Outputs::ENDS + 2 * (head + h);
      float top = LOWEST, total = 0, weight[WARPS], sum[MERGED_WORDS][TOGETHER] = {};
      TWIN_UNROLL
      for (int w = 0; w < WARPS; ++w) {
        weight[w] = merged[end_place(w, h)];
        top = weight[w] > top ? weight[w] : top;
      }
      if constexpr (Additions::SINKS)
        if (sinks) {
          const float sink = sinks[head + h];
          top = sink > top ? sink : top;
          total = softmax_weight(sink, top);
        }
      TWIN_UNROLL
      for (int w = 0; w < WARPS; ++w) {
        weight[w] = softmax_weight(weight[w], top);
        total += weight[w] * merged[end_place(w, h) + 1];
        TWIN_UNROLL
        for (int k = 0; k < MERGED_WORDS; ++k) {
          // set after set, each of HEADS heads
          const float* const from = merged + place(w, h, d + k * EACH * TOGETHER);
          TWIN_UNROLL
          for (int e = 0; e < TOGETHER; ++e) sum[k][e] += weight[w] * from[e];
        }
      }
      TWIN_UNROLL
      for (int k = 0; k < MERGED_WORDS; ++k)
        store((head + h) * WORDS + d / TOGETHER + k * EACH, Outputs::word(sum[k], total, this->of_values));
      TWIN_UNROLL
      for (int rest = Outputs::ENDS + 2 * GROUP; rest < Outputs::WORDS; ++rest)
        if (head + i == 0) store(rest, 0.0f);
      if (d == 0) store(ends, top);
      if (d == (EACH - 1) * TOGETHER) store(ends + 1, total);
    }
  }
};

}  // namespace twin
