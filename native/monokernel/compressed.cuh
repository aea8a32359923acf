// Attention over a window and compressed entries of what lies before it, keys that are values. An
// indexer's small keys choose among the entries of some layers.
//
// An entry, and a position of the window, belongs to one split: its block alone reads and writes it,
// so no hand-off lies between. The values and gates of positions that no entry holds yet are kept by
// the block that the entry will belong to.
#pragma once

#include "hyper.cuh"

namespace twin {

// What a stage keeps: two entries may be under way at a time where windows overlap.
struct Pending {
  static constexpr int BUFFERS = 2;

  float* at;  // [BUFFERS][values, gates][positions][dim]
  int positions, dim;

  __device__ __forceinline__ float* row(int entry, int gates, int position) const {
    return at + (((entry % BUFFERS) * 2 + gates) * positions + position) * dim;
  }
  __device__ __forceinline__ long floats() const { return long(BUFFERS) * 2 * positions * dim; }
};

// Of a stage of a layer: entries of `dim` elements as they are cached, and what waits to be one.
struct EntryCache {
  u8* cached;  // [entries][dim]
  Pending pending;
  const float *bias, *norm;
  int ratio, overlap, dim;

  __device__ __forceinline__ u8* of(int entry) const {
    return cached + long(entry) * dim * type_bytes(KV);
  }
};

__device__ __forceinline__ long whole_units(long bytes) {
  return (bytes + facts::STATE_ALIGNED - 1) / facts::STATE_ALIGNED * facts::STATE_ALIGNED;
}

// `before`: bytes of the stage's other caches; `dim`: of its entries.
template <class Stage>
__device__ __forceinline__ EntryCache entries_of(const Block& b, const Stage& stage, long before,
                                              int dim) {
  u8* const first = b.memory.kv + long(stage.cached) * facts::STATE_ALIGNED + before;
  const int count = stage.ratio ? b.plan.max_context / stage.ratio : 0;
  float* const behind =
      reinterpret_cast<float*>(first + whole_units(long(count) * dim * type_bytes(KV)));
  return {first,
          {behind, stage.overlap * stage.ratio, dim},
          constants(b, stage.compress_bias),
          constants(b, stage.compress_norm),
          stage.ratio,
          stage.overlap,
          dim};
}

// RMSNorm's factor of `count` elements in the block's scratch, by all threads.
__device__ __forceinline__ float factor_of(Block& b, const float* x, int count) {
  float squares = 0.0f;
  TWIN_EACH(i, count) squares += x[i] * x[i];
  return inverse_root(b.core.sum(squares) / float(count) + b.plan.norm_eps);
}

// The last elements of each of `rows` vectors turned to a position, or back from it.
template <class Stage>
__device__ __forceinline__ void turn(Block& b, const Stage& stage, float* x, int rows, int dim,
                                     int position, float back) {
  constexpr int PAIRS = Compressed::ROPE_DIM / 2;
  const float* const cosine = b.memory.constants + stage.rope + long(position) * PAIRS;
  const float* const sine = cosine + (long(b.plan.max_context) * PAIRS + 15) / 16 * 16;
  TWIN_EACH(i, rows * PAIRS) {
    float* const pair = x + long(i / PAIRS) * dim + dim - Compressed::ROPE_DIM + 2 * (i % PAIRS);
    const float c = cosine[i % PAIRS], s = back * sine[i % PAIRS], even = pair[0], odd = pair[1];
    pair[0] = even * c - odd * s;
    pair[1] = odd * c + even * s;
  }
  b.core.barrier();
}

// A new position's values and gates, [overlap * dim] each, join the entries that mix it; the one
// that it closes is cached. mine(entry): does it belong to this block? `made`: room for an entry.
template <class Stage, class Mine>
__device__ __forceinline__ void compress(Block& b, const Stage& stage, const EntryCache& own,
                                         int position, const float* values, const float* gates,
                                         float* made, Mine mine) {
  const int at = position % own.ratio, entry = position / own.ratio, dim = own.dim,
            two = own.overlap > 1, before = two ? own.ratio : 0;
  const float* const bias = own.bias + long(at) * own.overlap * dim;
  // of the present window the second half, for the next one the first
  for (int next = 0; next <= two; ++next) {
    if (!mine(entry + next)) continue;
    const int from = two && !next ? dim : 0, row = next ? at : before + at;
    float *const value = own.pending.row(entry + next, 0, row),
                *const gate = own.pending.row(entry + next, 1, row);
    TWIN_EACH(d, dim) {
      value[d] = values[from + d];
      gate[d] = gates[from + d] + bias[from + d];
    }
  }
  b.core.barrier();
  if (at != own.ratio - 1 || !mine(entry)) return;
  const int first = entry ? 0 : before, last = before + own.ratio;
  TWIN_EACH(d, dim) {
    float most = LOWEST, total = 0.0f, sum = 0.0f;
    for (int p = first; p < last; ++p) {
      const float gate = own.pending.row(entry, 1, p)[d];
      most = gate > most ? gate : most;
    }
    for (int p = first; p < last; ++p) {
      const float by = exp32(own.pending.row(entry, 1, p)[d] - most);
      total += by;
      sum += by * own.pending.row(entry, 0, p)[d];
    }
    made[d] = sum / total;
  }
  b.core.barrier();
  const float factor = factor_of(b, made, dim);
  TWIN_EACH(d, dim) made[d] *= factor * own.norm[d];
  b.core.barrier();
  turn(b, stage, made, 1, dim, position + 1 - own.ratio, 1.0f);
  TWIN_EACH(d, dim) store_element<KV>(own.of(entry) + d * type_bytes(KV), made[d]);
  b.core.barrier();
}

// ---- scores -------------------------------------------------------------------------------------

// Queries from the compressed ones, which are normed first.
template <class Stage>
__device__ __forceinline__ bool query(Block& b, int index, const Stage& stage) {
  if constexpr (Compressed::ANY) {
    const Work work = work_of(b, stage, 1);
    Core::Hidden x = Core::Hidden::in(b.input, stage.cols);
    auto ahead = b.core.template prefetch<Core::Hidden>(stage, work.own, true);
    b.core.barrier();
    if (!gather_spans(b, index, b.plan.reads_at(stage.first_read), b.input)) return false;
    begin(b, index, stage);
    const float factor = factor_of(b, b.input, stage.cols);
    const float* const weight = constants(b, stage.q_norm);
    x.each(b.core, [&](int i, float& value) { value *= factor * weight[i]; });
    return multiply(b, stage, work, x, ahead, unscaled,
                    [&](int row, float sum, float) { publish(b, work.out, row, sum); });
  }
  return false;
}

// A block's entries, by the sum over index heads of what is positive of query times key. Entries
// that do not exist yet come last.
template <class Stage>
__device__ __forceinline__ bool score_entries(Block& b, int index, const Stage& stage) {
  if constexpr (Compressed::ANY) {
    constexpr int HEADS = Compressed::INDEX_HEADS, DIM = Compressed::INDEX_DIM;
    const Span items = b.plan.owned_of(stage.items, b.block);
    const Output out = output_of(b, stage);
    const int position = position_of(b), count = (position + 1) / stage.ratio,
              wide = stage.overlap * DIM;
    float *const queries = b.scratch, *const fresh = queries + HEADS * DIM,
                 *const weights = fresh + 2 * wide, *const made = weights + HEADS;
    const bool any = items.lo < items.hi;
    if (any) {
      b.core.barrier();  // the stage before may still read the scratch
      const Read* const reads = &b.plan.reads_at(stage.first_read);
      if (!gather_spans(b, index, reads[0], queries)) return false;
      if (!gather_spans(b, index, reads[1], fresh)) return false;
    }
    begin(b, index, stage);
    if (!any) return true;
    const EntryCache own = entries_of(b, stage, 0, DIM);
    const int last = b.plan.owned_of(out.value->owned, b.block).hi,
              lo = items.lo * stage.page;
    compress(b, stage, own, position, fresh, fresh + wide, made,
             [&](int entry) { return entry >= lo && entry < last; });
    turn(b, stage, queries, HEADS, DIM, position, 1.0f);
    const float scale = 1.0f / square_root(float(HEADS * DIM));
    b.core.cleared();
    TWIN_EACH(i, last - lo) {
      float score = -infinity();
      if (lo + i < count) {
        const u8* const key = own.of(lo + i);
        score = 0.0f;
        for (int h = 0; h < HEADS; ++h) {
          float dot = 0.0f;
          for (int d = 0; d < DIM; ++d)
            dot += queries[h * DIM + d] * load_element<KV>(key + d * type_bytes(KV));
          score += dot > 0.0f ? weights[h] * scale * dot : 0.0f;
        }
      }
      publish(b, out, lo + i, score);
    }
    return true;
  }
  return false;
}

// ---- attention ----------------------------------------------------------------------------------

// Which of the first `count` entries are among the TOP_K best: those of higher scores than the
// last one, and of its equals the first ones.
struct Chosen {
  const float* scores;  // null: all are
  u32 last;             // the order of the last one's score
  int equals;           // that are among them

  // The larger the better; NaN comes first.
  __device__ __forceinline__ static u32 order(float score) {
    const u32 bits = bits_as<u32>(score != score ? infinity() : score == 0.0f ? 0.0f : score);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  __device__ __forceinline__ bool has(int entry) const {
    if (!scores) return true;
    const u32 mine = order(scores[entry]);
    if (mine != last) return mine > last;
    int before = 0;
    for (int e = 0; e < entry && before < equals; ++e) before += order(scores[e]) == last;
    return before < equals;
  }
};

// By all threads: one bit of the order after the other, from the highest.
__device__ __forceinline__ Chosen choose_entries(Block& b, const float* scores, int count) {
  constexpr int TOP_K = Compressed::TOP_K;
  if (!scores || count <= TOP_K) return {nullptr, 0, 0};
  u32 last = 0;
  int wanted = TOP_K;  // of those that agree with `last` so far
  for (u32 bit = 1u << 31; bit; bit >>= 1) {
    int above = 0;
    TWIN_EACH(e, count) {
      const u32 mine = Chosen::order(scores[e]);
      above += (mine & ~(bit - 1)) == (last | bit);
    }
    above = b.core.sum(above);
    if (above >= wanted) {
      last |= bit;
    } else {
      wanted -= above;
    }
  }
  return {scores, last, wanted};
}

struct PartialWords {  // of a group of heads of an item
  static constexpr int HEADS = Compressed::HEADS / Compressed::GROUPS, DIM = Compressed::HEAD_DIM;
  static constexpr bool PAIRED = KV != Type::FP32;
  static constexpr int TOGETHER = PAIRED ? 2 : 1, ENDS = HEADS * DIM / TOGETHER,
                       WORDS = ENDS + 2 * HEADS;
};

// Softmax of each head over the entries that the item has: outputs, not divided, [heads][dim];
// maxima and sums, [heads][2].
struct Attended {
  float *outputs, *ends;

  __device__ __forceinline__ void start(Block& b, const float* sinks) const {
    TWIN_EACH(i, Compressed::HEADS * Compressed::HEAD_DIM) outputs[i] = 0.0f;
    TWIN_EACH(h, Compressed::HEADS) {
      ends[2 * h] = sinks ? sinks[h] : LOWEST;
      ends[2 * h + 1] = sinks ? 1.0f : 0.0f;
    }
    b.core.barrier();
  }
  // `row`: a cached entry, key and value. A thread has whole heads.
  __device__ __forceinline__ void take(Block& b, const float* queries, const u8* row) const {
    constexpr int DIM = Compressed::HEAD_DIM;
    TWIN_EACH(h, Compressed::HEADS) {
      float* const output = outputs + h * DIM;
      float score = 0.0f;
      for (int d = 0; d < DIM; ++d)
        score += queries[h * DIM + d] * load_element<KV>(row + d * type_bytes(KV));
      const float most = ends[2 * h], top = score > most ? score : most,
                  shrink = softmax_weight(most, top), by = softmax_weight(score, top);
      ends[2 * h] = top;
      ends[2 * h + 1] = ends[2 * h + 1] * shrink + by;
      for (int d = 0; d < DIM; ++d)
        output[d] = output[d] * shrink + by * load_element<KV>(row + d * type_bytes(KV));
    }
  }
  __device__ __forceinline__ void put(Block& b, const Output& out, int item) const {
    using Words = PartialWords;
    constexpr int DIM = Words::DIM, GROUPS = Compressed::GROUPS;
    b.core.barrier();
    TWIN_EACH(i, GROUPS * Words::WORDS) {
      const int group = i / Words::WORDS, word = i % Words::WORDS, first = group * Words::HEADS;
      float value;
      if (word >= Words::ENDS) {
        value = ends[2 * first + word - Words::ENDS];
      } else {
        const float* const at = outputs + first * DIM + word * Words::TOGETHER;
        value = at[0];
        if constexpr (Words::PAIRED) {
          const float total = ends[2 * (first + word * 2 / DIM) + 1],
                      by = total > 0.0f ? 1.0f / total : 0.0f;
          u16 half[2];
          for (int e = 0; e < 2; ++e)
            store_element<Type::FP16>(reinterpret_cast<u8*>(half + e), at[e] * by);
          value = bits_as<float>(u32(half[0]) | u32(half[1]) << 16);
        }
      }
      publish(b, out, item * GROUPS * Words::WORDS + i, value);
    }
    b.core.barrier();
  }
};

template <class Stage>
__device__ __forceinline__ bool attend_compressed(Block& b, int index, const Stage& stage) {
  if constexpr (Compressed::ANY) {
    constexpr int HEADS = Compressed::HEADS, DIM = Compressed::HEAD_DIM;
    const Span items = b.plan.owned_of(stage.items, b.block);
    const Output out = output_of(b, stage);
    const int position = position_of(b), splits = b.plan.splits,
              count = stage.ratio ? (position + 1) / stage.ratio : 0, wide = stage.overlap * DIM;
    float *const queries = b.scratch, *const fresh = queries + HEADS * DIM,
                 *const made = fresh + DIM + 2 * wide, *const outputs = made + DIM,
                 *const ends = outputs + HEADS * DIM, *const scores = ends + 2 * HEADS;
    const bool any = items.lo < items.hi,
               chooses = b.plan.stages_at(index - 1).kind == int(StageKind::INDEX);
    if (any) {
      b.core.barrier();  // the stage before may still read the scratch
      const int first = stage.first_read, latents = stage.reads - 1 - chooses;
      if (!gather_spans(b, index, b.plan.reads_at(first), queries)) return false;
      // of one stage, or of two: what becomes entries behind the key of the position
      for (int i = 1; i <= latents; ++i)
        if (!gather_spans(b, index, b.plan.reads_at(first + i), fresh + (i > 1 ? DIM : 0)))
          return false;
      if (chooses && !gather_spans(b, index, b.plan.reads_at(first + latents + 1), scores))
        return false;
    }
    begin(b, index, stage);
    if (!any) return true;
    for (int h = 0; h < HEADS; ++h) {
      float* const head = queries + h * DIM;
      const float by = factor_of(b, head, DIM) / square_root(float(DIM));
      TWIN_EACH(d, DIM) head[d] *= by;
    }
    b.core.barrier();
    turn(b, stage, queries, HEADS, DIM, position, 1.0f);
    const auto mine = [&](int at) {
      const int split = at % splits;
      return split >= items.lo && split < items.hi;
    };
    u8* const window = b.memory.kv + long(stage.cached) * facts::STATE_ALIGNED;
    const auto near = [&](int at) {
      return window + long(at % Compressed::WINDOW) * DIM * type_bytes(KV);
    };
    if (mine(position)) {
      const float by = factor_of(b, fresh, DIM);
      const float* const weight = constants(b, stage.k_norm);
      TWIN_EACH(d, DIM) fresh[d] *= by * weight[d];
      b.core.barrier();
      turn(b, stage, fresh, 1, DIM, position, 1.0f);
      TWIN_EACH(d, DIM) store_element<KV>(near(position) + d * type_bytes(KV), fresh[d]);
      b.core.barrier();
    }
    const long before = whole_units(long(Compressed::WINDOW) * DIM * type_bytes(KV));
    const EntryCache own = entries_of(b, stage, before, DIM);
    if (stage.ratio)
      compress(b, stage, own, position, fresh + DIM, fresh + DIM + wide, made, mine);
    const Chosen chosen = choose_entries(b, chooses ? scores : nullptr, count);
    const Attended attended = {outputs, ends};
    const float* const sinks = constants(b, stage.sinks);
    const int oldest = position + 1 > Compressed::WINDOW ? position + 1 - Compressed::WINDOW : 0;
    b.core.cleared();
    for (int item = items.lo; item < items.hi; ++item) {
      attended.start(b, item == 0 ? sinks : nullptr);
      for (int at = oldest + (item + splits - oldest % splits) % splits; at <= position;
           at += splits)
        attended.take(b, queries, near(at));
      for (int entry = item; entry < count; entry += splits)
        if (chosen.has(entry)) attended.take(b, queries, own.of(entry));
      attended.put(b, out, item);
    }
    return true;
  }
  return false;
}

// The heads of a group, their splits together, turned back: what the group's own rows multiply.
template <class Stage>
__device__ __forceinline__ bool head_out(Block& b, int index, const Stage& stage) {
  if constexpr (Compressed::ANY) {
    using Words = PartialWords;
    constexpr int HEADS = Words::HEADS, DIM = Words::DIM;
    const Work work = work_of(b, stage, 1);
    const int each = stage.rows / Compressed::GROUPS, first = work.own.lo / each,
              groups = work.own.lo < work.own.hi ? (work.own.hi - 1) / each + 1 - first : 0,
              splits = b.plan.splits, cols = stage.cols;
    b.core.barrier();
    if (!gather_spans(b, index, b.plan.reads_at(stage.first_read), b.scratch)) return false;
    begin(b, index, stage);
    TWIN_EACH(i, groups * HEADS) {  // of each split: the groups that the block needs
      const auto words_of = [&](int split) {
        return b.scratch + (long(split) * groups + i / HEADS) * Words::WORDS;
      };
      const int head = i % HEADS;
      float* const to = b.input + long(i) * DIM;
      float most = LOWEST, total = 0.0f;
      for (int s = 0; s < splits; ++s) {
        const float top = words_of(s)[Words::ENDS + 2 * head];
        most = top > most ? top : most;
      }
      for (int d = 0; d < DIM; ++d) to[d] = 0.0f;
      for (int s = 0; s < splits; ++s) {
        const float* const words = words_of(s);
        const float by = softmax_weight(words[Words::ENDS + 2 * head], most),
                    count = words[Words::ENDS + 2 * head + 1],
                    weight = Words::PAIRED ? by * count : by;
        total += by * count;
        for (int d = 0; d < DIM; ++d) {
          const float word = words[(head * DIM + d) / Words::TOGETHER];
          const u16 half = u16(bits_as<u32>(word) >> 16 * (d % Words::TOGETHER));
          const float element =
              Words::PAIRED ? load_element<Type::FP16>(reinterpret_cast<const u8*>(&half)) : word;
          to[d] += weight * element;
        }
      }
      for (int d = 0; d < DIM; ++d) to[d] /= total;
    }
    b.core.barrier();
    turn(b, stage, b.input, groups * HEADS, DIM, position_of(b), -1.0f);
    return multiply_groups(
        b, stage, work, each, [&](int group) { return b.input + long(group - first) * cols; },
        [&](int row, float sum) { publish(b, work.out, row, sum); });
  }
  return false;
}

}  // namespace twin
