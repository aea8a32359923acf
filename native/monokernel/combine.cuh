// The output projection's input: the heads' outputs, from the partial ones of their splits.
#pragma once

#include "attention.cuh"

namespace twin {

// The first split that a thread looks at, `each` being those of a sharer at once; all for one that
// shares no work.
template <class Vector>
__device__ __forceinline__ int first_looked_at(const Block& b, int each, int all) {
  if constexpr (Vector::SHARERS > 1) {
    const int number = Vector::row_group(b.core.thread());
    return number < Vector::SHARERS ? number * each : all;
  } else {
    return 0;
  }
}

// What the sharers of the same columns found into each of them, in the order of their numbers.
// Where they meet lie the partial sums of the stage before and of this one: barriers separate
// them.
template <class Vector, int PACKS, int PACK>
__device__ __forceinline__ void meet_sharers(Block& b, float (&most)[PACKS], float (&total)[PACKS],
                                             float (&sum)[PACKS][PACK]) {
  constexpr int SHARERS = Vector::SHARERS, PITCH = Vector::SHARING_THREADS;
  const int me = b.core.thread(), number = Vector::row_group(me);
  float* const room = b.scratch + Vector::sharing_thread(me);
  TWIN_HOLDS(SHARERS * PACKS * (PACK + 2) * PITCH <= b.plan.scratch_floats);
  const auto at = [&](int sharer, int r, int k) {
    return room + ((sharer * PACKS + r) * (PACK + 2) + k) * PITCH;
  };
  TWIN_UNROLL
  for (int r = 0; r < PACKS; ++r) {
    if (number >= SHARERS) break;
    *at(number, r, PACK) = most[r];
    *at(number, r, PACK + 1) = total[r];
    TWIN_UNROLL
    for (int d = 0; d < PACK; ++d) *at(number, r, d) = sum[r][d];
  }
  b.core.barrier();
  TWIN_UNROLL
  for (int r = 0; r < PACKS; ++r) {
    float by[SHARERS];
    most[r] = LOWEST, total[r] = 0;
    TWIN_UNROLL
    for (int i = 0; i < SHARERS; ++i) {
      by[i] = *at(i, r, PACK);
      most[r] = by[i] > most[r] ? by[i] : most[r];
    }
    TWIN_UNROLL
    for (int i = 0; i < SHARERS; ++i) {
      by[i] = softmax_weight(by[i], most[r]);
      total[r] += by[i] * *at(i, r, PACK + 1);
    }
    TWIN_UNROLL
    for (int d = 0; d < PACK; ++d) {
      sum[r][d] = 0;
      TWIN_UNROLL
      for (int i = 0; i < SHARERS; ++i) sum[r][d] += by[i] * *at(i, r, d);
    }
  }
  b.core.barrier();
}

// x = the heads' outputs, their splits weighed by maxima and sums in split order. Of an item that
// holds no position yet one word is looked at, by one thread: that it has come is what the plan's
// proof rests on. One function: divided into loading, weighing and waiting it became other machine
// code, on GPUs and CPUs.
//
// Of threads that hold the same columns each looks at its share of the splits, and they meet in
// shared memory. When all of them requested all splits, blocks waited for the few lines that every
// one of them polled: 2 us longer where four teams have all of 512 columns.
template <class S, class Vector>
__device__ __forceinline__ bool combine(Block& b, int index, const Stage& stage, Vector& x) {
  using Outputs = twin::Outputs<S>;
  constexpr int HEAD_DIM = S::HEAD_DIM, GROUP = S::GROUP;
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const float* base = source.at(0);  // a value of one part
  constexpr int PACK = Vector::PACK, WORDS = PACK / Outputs::TOGETHER, WIDTH = Outputs::WORDS;
  constexpr int ALIGNED = least(4 * WORDS, 16);  // bytes; an item's words start at a multiple of 16
  const int splits = S::splits(b.plan), filled = filled_splits<S>(b.plan, position_of(b)),
            empty = splits - filled, watched = source.polled ? S::kv_heads(b.plan) * empty : 0;
  const auto word_of = [&](int number) {  // of an item without positions
    return (number / empty * splits + filled + number % empty) * WIDTH + Outputs::ENDS;
  };
  int watching = b.core.thread(), word = watching < watched ? word_of(watching) : 0;
  const auto watch_next = [&] {
    watching += b.core.threads();
    if (watching < watched) word = word_of(watching);
  };
  // the stage before may still add up its sums where sharers meet
  if constexpr (Vector::SHARERS > 1) b.core.barrier();
  Patience patience;
  bool good = x.packs(b.core, [&](const auto& first, const auto& valid, const auto& out) {
    constexpr int PACKS = int(sizeof(first) / sizeof(int)),
                  TOGETHER = PACKS > 1 && Core::SPLITS > 1 ? Core::SPLITS / 2 : Core::SPLITS,
                  SHARERS = Vector::SHARERS,
                  AT_ONCE = TOGETHER > SHARERS ? TOGETHER / SHARERS : 1;
    int outputs[PACKS], sums[PACKS];
    float most[PACKS], total[PACKS];
    float sum[PACKS][PACK] = {};
    TWIN_UNROLL
    for (int r = 0; r < PACKS; ++r) {
      const int head = first[r] / HEAD_DIM, item = head / GROUP * splits * WIDTH;
      outputs[r] = item + (head % GROUP * HEAD_DIM + first[r] % HEAD_DIM) / Outputs::TOGETHER;
      sums[r] = item + Outputs::ENDS + 2 * (head % GROUP);
      most[r] = LOWEST, total[r] = 0;
    }
    bool good = true;
    TWIN_ONCE
    // a thread without a first pack has none
    for (int s = first_looked_at<Vector>(b, AT_ONCE, filled); s < filled && good && valid[0];
         s += SHARERS * AT_ONCE) {
      Pack<WORDS> part[PACKS][AT_ONCE];
      Pack<2> end[PACKS][AT_ONCE];
      for (;;) {  // all are under way before the first is looked at
        bool late = false;
        Pack<1> other;
        if (watching < watched) other = load_pack<1, 4>(base + word);
        TWIN_UNROLL
        for (int r = 0; r < PACKS; ++r)
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j) {
            // the last once more, for nothing
            const float* partial = base + least(s + j, filled - 1) * WIDTH;
            if (r > 0 && !valid[r]) continue;
            part[r][j] = load_pack<WORDS, ALIGNED>(partial + outputs[r]);
            end[r][j] = load_pack<2, 8>(partial + sums[r]);
          }
        TWIN_UNROLL
        for (int r = 0; r < PACKS; ++r)
          TWIN_UNROLL
          for (int j = 0; j < AT_ONCE; ++j)
            late |= (r == 0 || valid[r]) && (missing(part[r][j]) || missing(end[r][j]));
        late |= watching < watched && missing(other);
        if (!late || !source.polled) break;
        good = keep_waiting(b, patience, {index, read.value, 0, s * WIDTH + outputs[0]});
        if (!good) break;
      }
      if (watching < watched) watch_next();
      TWIN_UNROLL
      for (int r = 0; r < PACKS; ++r) {
        float top = most[r];
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) top = end[r][j].at[0] > top ? end[r][j].at[0] : top;
        const float before = softmax_weight(most[r], top);
        total[r] *= before;
        most[r] = top;
        TWIN_UNROLL
        for (int d = 0; d < PACK; ++d) sum[r][d] *= before;
        TWIN_UNROLL
        for (int j = 0; j < AT_ONCE; ++j) {
          const float by = s + j < filled ? softmax_weight(end[r][j].at[0], top) : 0.0f,
                      weight = Outputs::weight(by, end[r][j].at[1]);
          total[r] += end[r][j].at[1] * by;
          TWIN_UNROLL
          for (int d = 0; d < PACK; ++d)
            sum[r][d] += weight * Outputs::element(part[r][j].at[d / Outputs::TOGETHER],
                                                   d % Outputs::TOGETHER);
        }
      }
    }
    // Together again. In plans with low-bit weights one that gave up has left.
    if constexpr (!CODED) b.core.warp_sync();
    if constexpr (SHARERS > 1) meet_sharers<Vector>(b, most, total, sum);
    TWIN_UNROLL
    for (int r = 0; r < PACKS; ++r) {
      const float by = 1.0f / total[r];
      TWIN_UNROLL
      for (int d = 0; d < PACK; ++d) out[r][d] = sum[r][d] * by;
    }
    return good;
  });
  TWIN_ONCE
  for (; watching < watched && good; watch_next())
    while (good && missing(load_pack<1, 4>(base + word)))
      good = keep_waiting(b, patience, {index, read.value, 0, word});
  return b.core.agree(good);
}

}  // namespace twin
