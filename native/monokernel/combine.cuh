// The output projection's input: the heads' outputs, from the partial ones of their splits.
#pragma once

#include "attention.cuh"

namespace twin {

// x = the heads' outputs, their splits weighed by maxima and sums in split order. Of an item that
// holds no position yet one word is looked at, by one thread: that it has come is what the plan's
// proof rests on. One function: divided into loading, weighing and waiting it became other machine code, on GPUs
// and CPUs.
template <class Vector>
__device__ __forceinline__ bool combine(Block& b, int index, const Stage& stage, Vector& x) {
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const float* base = source.at(0);  // a value of one part
  constexpr int PACK = Vector::PACK, WORDS = PACK / Outputs::TOGETHER, WIDTH = Outputs::WORDS;
  constexpr int ALIGNED = least(4 * WORDS, 16);  // bytes; an item's words start at a multiple of 16
  const int splits = b.plan.splits, filled = filled_splits(b.plan, position_of(b)),
            empty = splits - filled, watched = source.polled ? b.plan.kv_heads * empty : 0;
  const auto word_of = [&](int number) {  // of an item without positions
    return (number / empty * splits + filled + number % empty) * WIDTH + Outputs::ENDS;
  };
  int watching = b.core.thread(), word = watching < watched ? word_of(watching) : 0;
  const auto watch_next = [&] {
    watching += b.core.threads();
    if (watching < watched) word = word_of(watching);
  };
  Patience patience;
  bool good = x.packs(b.core, [&](const auto& first, const auto& valid, const auto& out) {
    constexpr int PACKS = int(sizeof(first) / sizeof(int)),
                  AT_ONCE = PACKS > 1 && Core::SPLITS > 1 ? Core::SPLITS / 2 : Core::SPLITS;
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
    for (int s = 0; s < filled && good && valid[0]; s += AT_ONCE) {
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
