// The stages of a decode step. Each reads as: wait, reset, compute, publish.
#pragma once

#include "attention.cuh"
#include "sampling.cuh"

namespace twin {

__device__ __forceinline__ int position_of(const Block& b) { return b.plan.probe ? b.plan.context - 1 : b.at.step; }

// Does this step's LM head count? While a prompt is read, only its last position asks for a token.
__device__ __forceinline__ bool head_needed(const Request& wanted, int step) {
  return wanted.every_position || step >= wanted.forced - 1;
}

// All reads have succeeded: from here on the block owes nothing to others' pace.
__device__ inline void begin(Block& b, int index, const Stage& stage) {
  if constexpr (TRACE) mark(b, index, 0);
  reset(b, stage);
  if (stage.resets) publish_fence();  // nobody may see what this block publishes next before the resets
}

__device__ inline const float* constants(const Block& b, int at) { return at < 0 ? nullptr : b.memory.constants + at; }

// residual += reads, each read's parts in rank order. Other reads replace the stage's input.
__device__ inline bool read_stream(Block& b, int index, const Stage& stage) {
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i) {
    const Read& read = b.plan.reads_at(i);
    if (!gather_spans(b, index, read, read.residual ? b.residual : b.input)) return false;
  }
  return true;
}

// input = RMSNorm(x) * weight, or x itself when the stage norms nothing.
__device__ inline void norm(Block& b, const float* x, const float* weight) {
  const int n = b.plan.hidden;
  const float scale = weight ? 1.0f / square_root(b.core.dot(x, x, n) / float(n) + b.plan.norm_eps) : 1.0f;
  TWIN_EACH(i, n) b.input[i] = weight ? x[i] * scale * weight[i] : x[i];
  b.core.barrier();
}

// ---- the layer ---------------------------------------------------------------------------------------------

__device__ inline bool embed(Block& b, int index, const Stage& stage) {
  const Request& wanted = b.launch.request;
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i)
    if (!gather_spans(b, index, b.plan.reads_at(i), b.scratch)) return false;
  begin(b, index, stage);
  const bool forced = b.at.step < wanted.forced, sampled = stage.reads > 0;
  const int token = forced ? wanted.prompt[b.at.step] : (sampled ? int(b.scratch[0]) : b.at.token);
  bool stop = false;
  for (int i = 0; i < wanted.stop_count && !forced; ++i) stop |= wanted.stop[i] == token;
  const u8* row = b.memory.embedding + u64(token) * u64(b.plan.hidden) * type_bytes(WEIGHT);
  TWIN_EACH(i, b.plan.hidden) b.residual[i] = load_element<WEIGHT>(row + i * type_bytes(WEIGHT));
  b.core.barrier();
  if (b.core.thread() == 0) {
    b.at.token = token;
    b.at.stop = stop;
  }
  b.core.barrier();
  return true;
}

__device__ inline bool qkv(Block& b, int index, const Stage& stage) {
  if (!read_stream(b, index, stage)) return false;
  begin(b, index, stage);
  norm(b, b.residual, constants(b, stage.norm));
  const float* bias = constants(b, stage.bias);
  const Output out = output_of(b, stage);
  multiply(b, stage, [&](int row, float sum, float) { publish(b, out, row, bias ? sum + bias[row] : sum); });
  return true;
}

__device__ inline bool attention(Block& b, int index, const Stage& stage) {
  float* rows = b.scratch;                                 // [warps][PARTIAL]
  float* heads = rows + (16 * PARTIAL + 15) / 16 * 16;     // q heads, k heads, v heads of the block's items
  const Span items = b.plan.owned_at(stage.items + b.block);
  const int position = position_of(b), splits = b.plan.splits;
  int first = 0, kv_heads = 1;  // of the block's items
  if (stage.reads) {
    if (items.lo < items.hi) {
      if (!gather_spans(b, index, b.plan.reads_at(stage.first_read), heads)) return false;
      first = items.lo / splits;
      kv_heads = (items.hi - 1) / splits + 1 - first;
    }
  } else {
    TWIN_EACH(i, (GROUP + 2) * HEAD_DIM) heads[i] = 1.0f / HEAD_DIM;
    b.core.barrier();
  }
  begin(b, index, stage);
  float* k = heads + kv_heads * GROUP * HEAD_DIM;
  float* v = k + kv_heads * HEAD_DIM;
  if (stage.reads && items.lo < items.hi) {
    const float scale = 1.0f / square_root(float(HEAD_DIM));
    for (int h = b.core.warp(); h < kv_heads * (GROUP + 1); h += b.core.warps()) {
      const bool query = h < kv_heads * GROUP;
      norm_head(b, heads + h * HEAD_DIM, constants(b, query ? stage.q_norm : stage.k_norm));
      rotate_head(b, heads + h * HEAD_DIM, position, query ? scale : 1.0f);
    }
    b.core.barrier();
  }
  for (int i = items.lo; i < items.hi; ++i) {
    const Item item = item_at(b, stage, i);
    const int page = position / b.plan.page;
    if (stage.reads && page % splits == item.split) {
      const int slot = page / splits * b.plan.page + position % b.plan.page;
      append(b, item, slot, k + (item.head - first) * HEAD_DIM, v + (item.head - first) * HEAD_DIM);
      b.core.barrier();
    }
    const int from = stage.window && position + 1 > stage.window ? held(b.plan, position + 1 - stage.window, item.split) : 0;
    const int to = held(b.plan, position + 1, item.split);
    const float* queries = heads + (stage.reads ? (item.head - first) * GROUP * HEAD_DIM : 0);
    if (stage.publishes >= 0) {
      const Output out = output_of(b, stage);
      attend(b, item, queries, from, to, rows, [&](int h, int d, float value) { publish(b, out, (i * GROUP + h) * PARTIAL + d, value); });
    } else {
      float sum = 0;
      attend(b, item, queries, from, to, rows, [&](int, int d, float value) { sum += d == HEAD_DIM ? 0.0f : value; });
      if (b.core.thread() == 0) b.at.checksum += sum;
    }
  }
  return true;
}

// input = the heads' outputs, their splits weighed by maxima and sums in split order.
__device__ inline bool combine(Block& b, int index, const Stage& stage) {
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const int splits = b.plan.splits, width = splits * GROUP * PARTIAL;  // of one kv head
  for (int first = 0; first < b.plan.kv_heads; first += b.plan.combine_heads) {
    const int heads = least(b.plan.combine_heads, b.plan.kv_heads - first);
    if (!gather(b, index, read, source, first * width, (first + heads) * width, b.scratch)) return false;
    for (int h = b.core.warp(); h < heads * GROUP; h += b.core.warps()) {
      const float* from = b.scratch + h / GROUP * width + h % GROUP * PARTIAL;  // [split] at a distance of GROUP * PARTIAL
      float top = -infinity(), total = 0;
      for (int s = 0; s < splits; ++s) top = from[s * GROUP * PARTIAL + HEAD_DIM] > top ? from[s * GROUP * PARTIAL + HEAD_DIM] : top;
      float* out = b.input + (first * GROUP + h) * HEAD_DIM;
      for (int s = 0; s < splits; ++s) {
        const float* part = from + s * GROUP * PARTIAL;
        const float weight = exp32(part[HEAD_DIM] - top);
        total += weight * part[HEAD_DIM + 1];
        for (int d = b.core.lane(); d < HEAD_DIM; d += b.core.lanes()) out[d] = (s ? out[d] : 0.0f) + weight * part[d];
      }
      for (int d = b.core.lane(); d < HEAD_DIM; d += b.core.lanes()) out[d] /= total;
    }
    b.core.barrier();
  }
  return true;
}

__device__ inline bool o_proj(Block& b, int index, const Stage& stage) {
  if (!combine(b, index, stage)) return false;
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  multiply(b, stage, [&](int row, float sum, float) { publish(b, out, row, sum); });
  return true;
}

__device__ inline bool gate_up(Block& b, int index, const Stage& stage) {
  if (!read_stream(b, index, stage)) return false;
  begin(b, index, stage);
  norm(b, b.residual, constants(b, stage.norm));
  const Output out = output_of(b, stage);
  multiply(b, stage, [&](int i, float gate, float up) { publish(b, out, i, gate / (1.0f + exp32(-gate)) * up); });
  return true;
}

__device__ inline bool down(Block& b, int index, const Stage& stage) {
  if (!read_stream(b, index, stage)) return false;
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  multiply(b, stage, [&](int row, float sum, float) { publish(b, out, row, sum); });
  return true;
}

// Between kernels only: hands this rank's part to all ranks, as a library's all-gather would.
__device__ inline bool collective(Block& b, int index, const Stage& stage) {
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_at(out.value->owned + b.block);
  for (int lo = own.lo; lo < own.hi; lo += b.plan.input_floats) {
    const int count = least(b.plan.input_floats, own.hi - lo);
    if (!gather(b, index, read, source, lo, lo + count, b.input)) return false;
    TWIN_EACH(i, count) publish(b, out, lo + i, b.input[i]);
    b.core.barrier();
  }
  begin(b, index, stage);
  return true;
}

// ---- the end of the step -----------------------------------------------------------------------------------

__device__ inline bool lane_mean(Block& b, int index, const Stage& stage) {
  if (!read_stream(b, index, stage)) return false;
  begin(b, index, stage);
  norm(b, b.residual, constants(b, stage.norm));
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_at(out.value->owned + b.block);
  TWIN_EACH(i, own.hi - own.lo) publish(b, out, own.lo + i, b.input[own.lo + i]);
  return true;
}

__device__ inline bool lm_head(Block& b, int index, const Stage& stage) {
  if (!read_stream(b, index, stage)) return false;
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_at(out.value->owned + b.block);
  if (!head_needed(b.launch.request, b.at.step)) {
    TWIN_EACH(i, own.hi - own.lo) publish(b, out, own.lo + i, 0.0f);
    return true;
  }
  const bool meeting = !b.plan.reads_at(stage.first_read).residual;  // lanes met: the input is their sum
  norm(b, meeting ? b.input : b.residual, constants(b, stage.norm));
  if (meeting && b.plan.mean_of > 1) {
    TWIN_EACH(i, b.plan.hidden) b.input[i] /= float(b.plan.mean_of);
    b.core.barrier();
  }
  const int first = b.rank * b.plan.shard_vocab;
  float* kept = b.launch.request.logits ? b.launch.request.logits + u64(b.at.step) * u64(b.plan.vocab) : nullptr;
  Candidate mine = {-infinity(), first + b.plan.owned_at(stage.owned + b.block).lo};
  multiply(b, stage, [&](int row, float sum, float) {
    const Candidate other = {first + row < b.plan.vocab ? sum : -infinity(), first + row};
    if (kept && other.index < b.plan.vocab) kept[other.index] = other.logit;
    if (b.plan.full) {
      publish(b, out, row, other.logit);
    } else if (wins(other, mine)) {
      mine = other;
    }
  });
  if (b.plan.full) return true;
  const Candidate best = b.core.best(mine, wins);
  if (b.core.thread() == 0) {
    publish(b, out, own.lo, best.logit);
    publish(b, out, own.lo + 1, float(best.index));
  }
  return true;
}

// The parts of a read one after the other: [parts][elements].
__device__ inline bool gather_parts(Block& b, int index, const Read& read, float* out) {
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const int elements = b.plan.values_at(read.value).elements;
  for (int part = 0; part < source.parts; ++part) {
    Source one = source;
    one.first = source.part(part);
    one.parts = 1;
    one.hole = MAX_RANKS;
    if (!gather(b, index, read, one, 0, elements, out + part * elements)) return false;
  }
  return true;
}

// Tokens leave through memory that the host reads while the kernel runs.
__device__ inline void deliver(Block& b, int token) {
  const Request& wanted = b.launch.request;
  Control& c = *b.control;
  wanted.stamps[b.at.step] = now_ns();
  const int generated = b.at.step - (wanted.forced - 1);
  if (generated < 0 || wanted.every_position) return;
  wanted.tokens[generated] = token;
  store_host(&c.emitted, generated + 1);
  for (int i = 0; i < wanted.stop_count; ++i)
    if (wanted.stop[i] == token) claim(&c.status, int(Status::RUNNING), int(Status::STOP));
}

__device__ inline bool sample(Block& b, int index, const Stage& stage) {
  const Request& wanted = b.launch.request;
  const Read& read = b.plan.reads_at(stage.first_read);
  const int elements = b.plan.values_at(read.value).elements;
  const bool chooses = !b.plan.full || b.block == 0, counts = b.plan.probe || head_needed(wanted, b.at.step);
  float* seen = b.plan.full ? b.memory.probabilities : b.scratch;
  if (chooses && !gather_parts(b, index, read, seen)) return false;
  begin(b, index, stage);
  if (!chooses) return true;
  int token = b.at.step + 1 < wanted.forced ? wanted.prompt[b.at.step + 1] : 0;
  if (counts && b.plan.full) {
    token = draw(b, elements * b.plan.ranks, u64(b.plan.probe ? b.at.step : b.at.step - (wanted.forced - 1)));
  } else if (counts) {
    Candidate best = {seen[0], int(seen[1])};
    for (int i = 1; i < elements * b.plan.ranks / 2; ++i) {
      const Candidate other = {seen[2 * i], int(seen[2 * i + 1])};
      if (wins(other, best)) best = other;
    }
    token = finite(best.logit) ? best.index : -1;
  }
  b.core.barrier();
  if (b.core.thread() != 0) return token >= 0;
  if (token < 0) {
    claim(&b.control->status, int(Status::RUNNING), int(Status::NO_TOKEN));
    leave_all(b);
    return false;
  }
  b.at.token = token;
  if (stage.publishes >= 0) publish(b, output_of(b, stage), 0, float(token));
  if (b.rank == 0 && b.block == 0 && !b.plan.probe) deliver(b, token);
  return true;
}

// ---- probes ------------------------------------------------------------------------------------------------

__device__ inline bool stream(Block& b, int index, const Stage& stage) {
  begin(b, index, stage);
  TWIN_EACH(i, stage.cols) b.input[i] = 1.0f;
  b.core.barrier();
  float sum = 0;
  multiply(b, stage, [&](int, float total, float) { sum += total; });
  if (b.core.thread() == 0) b.at.checksum += sum;
  return true;
}

// Publishes numbers that depend on everything gathered, and that do not grow.
__device__ inline bool exchange(Block& b, int index, const Stage& stage) {
  float* to = b.input;
  int n = 0;
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i) {
    if (!gather_spans(b, index, b.plan.reads_at(i), to + n)) return false;
    n += b.plan.values_at(b.plan.reads_at(i).value).elements;
  }
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_at(out.value->owned + b.block);
  TWIN_EACH(i, own.hi - own.lo) {
    const int e = own.lo + i, next = e + 1 < n ? e + 1 : 0;
    publish(b, out, e, 0.5f * (n ? b.input[next] : 0.0f) + float((u32(e) * 2654435761u) >> 8) * 0x1p-24f);
  }
  return true;
}

}  // namespace twin
