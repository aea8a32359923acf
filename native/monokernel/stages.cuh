// The stages of a decode step. Each reads as: wait, reset, compute, publish.
#pragma once

#include "biases.cuh"
#include "compressed.cuh"
#include "delta.cuh"
#include "logits.cuh"
#include "sampling.cuh"
#include "scores.cuh"

namespace twin {

// Does this step's LM head count? While a prompt is read, only its last position requests a token.
__device__ __forceinline__ bool head_needed(const Request& wanted, int step) {
  return wanted.every_position || step >= wanted.forced - 1;
}

// RMSNorm's factor of a vector, from its sum of squares.
__device__ __forceinline__ float norm_factor(const Block& b, float squares) {
  return inverse_root(squares / float(b.plan.hidden) + b.plan.norm_eps);
}

// The weights of the norm of what a module adds to the residual: requested before that is there.
template <class Stage>
__device__ __forceinline__ auto added_weight(Block& b, const Stage& stage) {
  if constexpr (Family::NORMS_AFTER) {
    return Core::Hidden::factors(b.core, constants(b, stage.post_norm));
  } else {
    return 0;
  }
}

template <class Weight>
__device__ __forceinline__ void norm_vector(Block& b, Core::Hidden& x, const Weight& weight) {
  const auto squares = x.begin_squares(b.core);
  b.core.barrier();
  x.scaled(b.core, x, norm_factor(b, Core::Hidden::end_squares(b.core, squares)), weight);
}

// That norm.
template <class Weight>
__device__ __forceinline__ void norm_added(Block& b, Core::Hidden& sum, const Weight& weight) {
  if constexpr (Family::NORMS_AFTER) norm_vector(b, sum, weight);
}

// The factor of the whole residual, of a stage that brings the end of a layer.
template <class Stage>
__device__ __forceinline__ float layer_scalar(const Block& b, const Stage& stage) {
  if constexpr (Family::LAYER_SCALAR)
    if (stage.layer_scalar >= 0) return b.memory.constants[stage.layer_scalar];
  return 1.0f;
}

// residual += norm(norm(a dense MLP's output) + norm(that of the experts next to it)). The first is
// there earlier. Weights are requested where few vectors are in registers, but before a wait.
template <class Stage>
__device__ __forceinline__ bool read_parallel(Block& b, int index, const Stage& stage,
                                              Core::Hidden& sum) {
  const int behind = (b.plan.hidden + 31) / 32 * 32;
  Core::Hidden dense = Core::Hidden::in(b.input + behind, b.plan.hidden);
  {
    const auto weight = Core::Hidden::factors(b.core, constants(b, stage.shared_post_norm));
    if (!gather_vector(b, index, b.plan.reads_at(stage.first_read), dense)) return false;
    norm_vector(b, dense, weight);
  }
  const auto weight = Core::Hidden::factors(b.core, constants(b, stage.experts_post_norm));
  const float whole = layer_scalar(b, stage);
  if (!gather_vector(b, index, b.plan.reads_at(stage.first_read + 1), sum)) return false;
  const auto added = added_weight(b, stage);
  norm_vector(b, sum, weight);
  sum.add(b.core, 1.0f, dense, 1.0f);
  norm_added(b, sum, added);
  auto residual = b.residual.open(b.core);
  residual.add(b.core, whole, sum, whole);
  b.residual.close(b.core, residual);
  return true;
}

// residual += reads, each the sum of its parts in rank order. The last read comes first: delayed
// parts have long been there. Where lanes' residuals meet before the norm, their sum takes the
// residual's place. `sum` is for what is read.
__device__ __forceinline__ bool read_residual(Block& b, int index, const Stage& stage,
                                              Core::Hidden& sum) {
  if constexpr (NonRouted::PARALLEL)
    if (stage.reads > 1) return read_parallel(b, index, stage, sum);
  if constexpr (Hyper::ANY)
    if (collapses(b, index, stage)) return collapse(b, index, stage);
  const auto weight = added_weight(b, stage);
  const float whole = layer_scalar(b, stage);
  TWIN_ONCE
  for (int i = stage.first_read + stage.reads - 1; i >= stage.first_read; --i) {
    const Read& read = b.plan.reads_at(i);
    if (skipped(b, read.previous_step)) continue;
    if (!gather_vector(b, index, read, sum)) return false;
    norm_added(b, sum, weight);
    auto residual = b.residual.open(b.core);
    residual.add(b.core, b.plan.ranks == 1 || read.residual ? whole : 0.0f, sum,
                 read.scale * whole);
    b.residual.close(b.core, residual);
  }
  return true;
}

// What an LM head publishes that is not computed.
__device__ __forceinline__ bool publish_zeros(Block& b, const Output& out) {
  b.core.barrier();
  if (b.core.gave_up()) return false;
  b.core.cleared();
  const Span own = b.plan.owned_of(out.value->owned, b.block);
  TWIN_EACH(i, own.hi - own.lo) publish(b, out, own.lo + i, 0.0f);
  return true;
}

// What a full sampler's block makes of its logits. Whoever sees it finds the block's buffer filled.
__device__ TWIN_LARGE bool publish_summary(Block& b, int index, const Stage& stage,
                                           const Work& work, int first) {
  b.core.barrier();  // the logits are there, and the sums' room is free
  float* const logit = head_logits(b);
  const int rows = work.own.hi - work.own.lo;
  if constexpr (Request::DRAWS)
    if (b.launch.request.bias_rows && !add_bias(b, index, logit, rows, first + work.own.lo))
      return false;
  const Pack<SUMMARY> said = summarize(b, logit, rows, first + work.own.lo);
  if (b.core.thread() != 0) return true;
  if constexpr (!Core::SCHEDULER) publish_fence(stage.pushes);
  order_logits(b.launch.request);
  const int at = b.plan.owned_of(work.out.value->owned, b.block).lo;
  TWIN_UNROLL
  for (int i = 0; i < SUMMARY; ++i) publish(b, work.out, at + i, said.at[i]);
  return true;
}

// Lanes of one device begin a step one after the other: the stream then pauses for some of them,
// not for all.
__device__ __forceinline__ void stagger(Block& b) {
  if (b.plan.stagger_ns == 0) return;
  const u64 start =
      now_ns() + u64(b.rank % b.plan.ranks_per_gpu % b.plan.staggered * b.plan.stagger_ns);
  while (now_ns() < start) b.core.relax(1);
}

// ---- the layer ----------------------------------------------------------------------------------

__device__ __forceinline__ bool embed(Block& b, int index, const Stage& stage) {
  const Request& wanted = b.launch.request;
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i)
    if (!gather_spans(b, index, b.plan.reads_at(i), b.scratch)) return false;
  begin(b, index, stage);
  const bool forced = b.at.step < wanted.forced, sampled = stage.reads > 0;
  const int token = forced ? TWIN_GLOBAL(wanted.prompt)[b.at.step]
                           : (sampled ? int(b.scratch[0]) : b.at.token);
  int stop = 0;
  for (int i = 0; i < wanted.stop_count && !forced; ++i)
    stop |= int(TWIN_GLOBAL(wanted.stop)[i] == token);
  auto residual = b.residual.open(b.core);
  residual.load_row(b.core,
                    b.memory.embedding + u64(token) * u64(b.plan.hidden) * type_bytes(WEIGHT));
  if constexpr (Family::EMBEDDING != 1.0f)
    residual.each(b.core, [](int, float& value) { value = embedded(value); });
  b.residual.close(b.core, residual);
  begin_residuals(b);
  b.core.barrier();
  if (b.core.thread() == 0) {
    b.at.token = token;
    b.at.stop = stop;
  }
  b.core.barrier();
  stagger(b);
  return true;
}

// Stages that are one piece of code go one way: called from two places, it was there twice, 26 KiB
// of a layer of GPT-OSS.
__device__ __forceinline__ StageKind way_of(int kind) {
  if constexpr (Delta::ANY) {
    switch (StageKind(kind)) {
      case StageKind::DELTA_IN:
      case StageKind::DELTA_GATES: return StageKind::QKV;
      default: break;
    }
  }
  if constexpr (Convolution::ANY) {
    switch (StageKind(kind)) {
      case StageKind::CONV_IN: return StageKind::QKV;
      default: break;
    }
  }
  if constexpr (Compressed::ANY) {
    switch (StageKind(kind)) {
      case StageKind::LATENT:
      case StageKind::COMPRESS: return StageKind::QKV;
      default: break;
    }
  }
  if constexpr (NonRouted::SHARED) {
    switch (StageKind(kind)) {
      case StageKind::SHARED_UP: return StageKind::QKV;
      default: break;
    }
  }
  if constexpr (Experts::ANY) {
    switch (StageKind(kind)) {
      case StageKind::ROUTER: return Scores::ANY ? StageKind::ROUTER : StageKind::QKV;
      case StageKind::ROUTED_UP: return StageKind::QKV;
      default: break;
    }
  }
  return StageKind(kind);
}

// Do a stage's rows make what a down projection multiplies?
__device__ __forceinline__ bool feeds_down(int kind) {
  return kind == int(StageKind::GATE_UP) || (Experts::ANY && kind == int(StageKind::ROUTED_UP)) ||
         (NonRouted::SHARED && kind == int(StageKind::SHARED_UP));
}

// Do they come in pairs, of a gate and of what passes it?
__device__ __forceinline__ bool makes_pairs(int kind) { return Family::GATED && feeds_down(kind); }

// The stages that norm the residual and multiply it: QKV, GATE_UP and LM_HEAD, a router and
// experts, are one piece of code on a device.
__device__ __forceinline__ bool from_residual(Block& b, int index, const Stage& stage) {
  const bool head = stage.kind == int(StageKind::LM_HEAD), gated = makes_pairs(stage.kind);
  // lanes met: the input is their sum, normed before
  const bool meeting = b.plan.mean_of > 1 && head;
  const Work work = work_of(b, stage, gated ? 2 : 1);
  const Output& out = work.out;
  const bool needed = !head || head_needed(b.launch.request, b.at.step);
  auto ahead = b.core.prefetch<Core::Normed>(stage, work.own, needed);
  // behind it: its fence would wait for them
  const auto weight = Core::Hidden::factors(b.core, constants(b, stage.norm));
  const Bias bias(b, stage, work.own);
  const FirstBias own(b, stage, work.own);
  Taps taps;
  taps.ahead(b, stage, work.own);
  Core::Hidden x = Core::Hidden::in(b.input, b.plan.hidden);
  if (meeting ? !gather_vector(b, index, b.plan.reads_at(stage.first_read), x)
              : !read_residual(b, index, stage, x))
    return false;
  begin(b, index, stage);
  if (!needed) return publish_zeros(b, out);
  const auto residual = b.residual.open(b.core);
  if (meeting) {
    x.each(b.core, [&](int, float& value) { value /= float(b.plan.mean_of); });
  } else {
    x.scaled(b.core, residual, 1.0f, weight);
  }
  const int first = b.rank * b.plan.shard_vocab;
  float* kept = head && b.launch.request.logits
                    ? b.launch.request.logits +
                          u64(logit_row(b.launch.request, b.at.step)) * u64(b.plan.vocab)
                    : nullptr;
  Candidate mine = {-infinity(), first + work.own.lo};
  // such families have no lanes to meet
  const bool layer = !head, &unnormed = Family::NORMS_BEFORE ? meeting : layer;
  const auto& normed = b.core.normed(x, work.own);
  // known to all warps when their sums are: the norm's factor comes last
  const auto squares = residual.begin_squares(b.core);
  const auto factor = [&] {
    return unnormed ? 1.0f
                    : kept_factor(b, norm_factor(b, Core::Hidden::end_squares(b.core, squares)));
  };
  const auto put = [&](int row, float sum, float up) {
    if (head) {
      sum = capped_logit(sum);
      const Candidate other = {first + row < b.plan.vocab ? sum : -infinity(), first + row};
      if (kept && other.index < b.plan.vocab) TWIN_GLOBAL(kept)[other.index] = other.logit;
      if (b.plan.full) {
        head_logits(b)[row - work.own.lo] = other.logit;
      } else if (wins(other, mine)) {
        mine = other;
      }
      return;
    } else if (convolves(stage)) {
      channel_rows(b)[row - work.own.lo] = sum;
      return;
    } else if (gated) {
      own.add(b, stage, work.own, row, sum, up);
      sum = through_gate(sum, up);
    } else if (!Family::GATED && feeds_down(stage.kind)) {
      sum = activated(sum);
    } else if (Additions::EXPERT_BIAS) {
      sum = own.added(b, stage, work.own, row, sum);
    } else if (b.plan.biased) {
      sum += bias.of(row);
    }
    publish_row(b, stage, work, row, sum);
  };
  const bool done = multiply(b, stage, work, normed, ahead, factor, put);
  if (done && convolves(stage)) convolve(b, stage, out, work.own, taps);
  if (!done || !head) return done;
  if (b.plan.full) return publish_summary(b, index, stage, work, first);
  const Candidate best = b.core.best(mine, wins);
  if (b.core.thread() == 0) {
    const int at = b.plan.owned_of(out.value->owned, b.block).lo;
    publish(b, out, at, best.logit);
    publish(b, out, at + 1, float(best.index));
  }
  return true;
}

template <class S>
__device__ __forceinline__ bool attention(Block& b, int index, const Stage& stage) {
  using Scan = twin::Scan<S>;
  using Outputs = twin::Outputs<S>;
  constexpr int HEAD_DIM = S::HEAD_DIM, GROUP = S::GROUP, ROW = S::ROW, PARTIAL = twin::PARTIAL<S>;
  float* merged = b.scratch;  // [PARTIALS][PARTIAL]
  // queries of the block's items
  float* heads = merged + (Scan::PARTIALS * PARTIAL + 15) / 16 * 16;
  const Span items = b.plan.owned_of(stage.items, b.block);
  const int position = position_of(b), splits = S::splits(b.plan);
  // a probe has no queries, and publishes nothing
  const bool any = items.lo < items.hi, probe = b.plan.probe;
  const int first = probe ? 0 : items.lo / splits;  // kv head of the block's items
  const int kv_heads = !probe && any ? (items.hi - 1) / splits + 1 - first : 1;
  // [kv_heads][k, v][HEAD_DIM] as they are cached
  u8* fresh = reinterpret_cast<u8*>(heads + kv_heads * GROUP * HEAD_DIM);
  // behind them the sinks of their queries, of which a thread has its first before it waits
  float* const sinks = heads + kv_heads * (GROUP * HEAD_DIM + 2 * ROW / int(sizeof(float)));
  const Sinks added(b, stage, probe ? 0 : first * GROUP,
                                      any && !probe ? kv_heads * GROUP : 0);
  Scan scan;
  if (any) {
    if constexpr (!Core::CACHE_IN_RING) {  // older positions need no hand-off
      scan.open(b, stage, items.lo, position);
      scan.prefetch(b);
    }
    b.core.barrier();  // the stage before may still read the scratch
    if (!probe && !prepare_heads<S>(b, index, stage, kv_heads, position, heads, fresh)) return false;
    added.put(b, sinks);
  }
  if (probe)
    TWIN_EACH(i, GROUP * HEAD_DIM)
      put_query<S>(b.core, heads, i / HEAD_DIM, i % HEAD_DIM, 1.0f / HEAD_DIM);
  begin(b, index, stage);
  // blocks without items, too: what they have in its place would be kept
  if (Core::CACHE_IN_RING) scan.open(b, stage, items.lo, position);
  if (any) b.core.barrier();
  if (any && b.core.gave_up()) return false;
  for (int i = items.lo; i < items.hi; ++i) {
    const int head = i / splits - first;
    if (i > items.lo) scan.open(b, stage, i, position);
    if constexpr (CACHE_SCALED) scan.of_values = cache_scales(b, stage, i / splits).of_value;
    if (!probe) scan.fresh = fresh + head * 2 * HEAD_DIM * type_bytes(KV);
    if (Additions::SINKS && !probe && i % splits == 0) scan.sinks = sinks + head * GROUP;
    const float* queries = heads + (probe ? 0 : head * GROUP * HEAD_DIM);
    if (!probe) {
      Output out = output_of(b, stage);
      if constexpr (Core::OWN_GPUS) out.others = 0;  // code of pushes spilled registers here
      scan.attend(b, queries, i == items.lo, merged,
                  [&](int at, float value) { publish(b, out, i * Outputs::WORDS + at, value); });
    } else {
      float sum = 0;
      scan.attend(b, queries, i == items.lo, merged, [&](int at, float value) {
        sum += at < Outputs::ENDS ? Outputs::element(value, 0) : 0.0f;
      });
      if (b.core.thread() == 0) b.at.checksum += sum;
    }
  }
  if (any) b.core.scanned();
  return true;
}

__device__ __forceinline__ bool attention(Block& b, int index, const Stage& stage) {
  if constexpr (Compressed::ANY) return attend_compressed(b, index, stage);
  return by_heads(stage, [&](auto heads) { return attention<decltype(heads)>(b, index, stage); });
}

// Does a stage follow one that carries a state, or channels, on? Then it reads what that made.
__device__ __forceinline__ bool follows_states(const Block& b, int index) {
  const auto& before = b.plan.stages_at(index - 1);
  return (Delta::ANY && before.kind == int(StageKind::DELTA)) || convolves(before) ||
         Compressed::ANY;
}

// The input of an output projection: that,
template <class Vector>
__device__ __forceinline__ bool take_carried(Block& b, int index, const Stage& stage, Vector& x) {
  if constexpr (Convolution::ANY || Compressed::ANY)
    if (Compressed::ANY || convolves(b.plan.stages_at(index - 1)))
      return gather_vector(b, index, b.plan.reads_at(stage.first_read), x);
  if constexpr (Delta::ANY) return take_states(b, index, stage, x);
  return false;
}

// or what attention made.
template <class S, class Vector>
__device__ __forceinline__ bool take_heads(Block& b, int index, const Stage& stage, Vector& x) {
  if (!combine<S>(b, index, stage, x)) return false;
  if constexpr (Outgoing::GATED) return gate_heads(b, index, stage, x);
  return true;
}

// take(x): is the input there?
template <class Vector, class Take>
__device__ __forceinline__ bool o_proj_of(Block& b, int index, const Stage& stage, Take take) {
  Vector x = Vector::in(b.input, stage.cols);
  const Work work = work_of(b, stage, 1);
  auto ahead = b.core.template prefetch<Vector>(stage, work.own, true);
  const OutputBias<Additions::OUTPUT_BIAS> bias(b, stage, work.own);
  OwnScores<Scores::ANY> scores(b, index, work.own);
  if (!take(x)) return false;
  begin(b, index, stage);
  const bool done = multiply(b, stage, work, x, ahead, unscaled, [&](int row, float sum, float) {
    const float made = bias.added(row, sum);
    publish_row(b, stage, work, row, made);
    scores.put(row, made);
  });
  return scores.add(b, index, done);
}

// Where states and heads make as many outputs, one piece of code takes both.
__device__ __forceinline__ bool o_proj(Block& b, int index, const Stage& stage) {
  constexpr bool SEPARATE = Plan::states_cols > 0;
  const auto carried = [&](auto& x) { return take_carried(b, index, stage, x); };
  if constexpr (SEPARATE)
    if (follows_states(b, index)) return o_proj_of<Core::States>(b, index, stage, carried);
  return by_heads(stage, [&](auto heads) {
    using S = decltype(heads);
    return o_proj_of<Core::Heads<S>>(b, index, stage, [&](auto& x) {
      if (!SEPARATE && follows_states(b, index)) return carried(x);
      return take_heads<S>(b, index, stage, x);
    });
  });
}

__device__ __forceinline__ bool down(Block& b, int index, const Stage& stage) {
  Core::Dense x = Core::Dense::in(b.input, stage.cols);
  auto ahead = b.core.prefetch<Core::Dense>(stage, b.plan.owned_of(stage.owned, b.block), true);
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i)
    if (!gather_vector(b, index, b.plan.reads_at(i), x)) return false;
  begin(b, index, stage);
  // not before: the vector takes the registers
  const Work work = {b.plan.owned_of(stage.owned, b.block), 1, output_of(b, stage)};
  return multiply(b, stage, work, x, ahead, unscaled,
                  [&](int row, float sum, float) { publish_row(b, stage, work, row, sum); });
}

// Between kernels only: hands this rank's part to all ranks, as a library's all-gather would.
__device__ __forceinline__ bool collective(Block& b, int index, const Stage& stage) {
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_of(out.value->owned, b.block);
  for (int lo = own.lo; lo < own.hi; lo += b.plan.input_floats) {
    const int count = least(b.plan.input_floats, own.hi - lo);
    if (!gather(b, index, read, source, lo, lo + count, b.input)) return false;
    TWIN_EACH(i, count) publish(b, out, lo + i, b.input[i]);
    b.core.barrier();
  }
  begin(b, index, stage);
  return true;
}

// The other ranks' parts of what this block owns of a module's output, for all blocks of the rank.
// Consumers come here only where no scheduler warp makes such sums (`scheduler_sums`).
__device__ __forceinline__ bool sum_late_parts(Block& b, int index, const Stage& stage) {
  if (!gather_spans(b, index, b.plan.reads_at(stage.first_read), b.scratch)) return false;
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_of(out.value->owned, b.block);
  b.core.cleared();
  TWIN_EACH(i, own.hi - own.lo) publish(b, out, own.lo + i, b.scratch[i]);
  b.core.barrier();  // the next stage may use the scratch
  return true;
}

// ---- the end of the step ------------------------------------------------------------------------

__device__ __forceinline__ bool lane_mean(Block& b, int index, const Stage& stage) {
  const auto weight = Core::Hidden::factors(b.core, constants(b, stage.norm));
  Core::Hidden x = Core::Hidden::in(b.input, b.plan.hidden);
  if (!read_residual(b, index, stage, x)) return false;
  begin(b, index, stage);
  const auto residual = b.residual.open(b.core);
  const auto squares = residual.begin_squares(b.core);
  b.core.barrier();
  x.scaled(b.core, residual,
           stage.norm >= 0 ? norm_factor(b, Core::Hidden::end_squares(b.core, squares)) : 1.0f,
           weight);
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_of(out.value->owned, b.block);
  x.each(b.core, [&](int i, float& value) {
    if (i >= own.lo && i < own.hi) b.scratch[i - own.lo] = value;
  });
  b.core.barrier();
  if (b.core.gave_up()) return false;
  b.core.cleared();
  TWIN_EACH(i, own.hi - own.lo) publish(b, out, own.lo + i, b.scratch[i]);
  b.core.barrier();  // the next stage may use the scratch
  return true;
}

// The parts of a read one after the other: [parts][elements].
__device__ __forceinline__ bool gather_parts(Block& b, int index, const Read& read, float* out) {
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
__device__ __forceinline__ void deliver(const Launch& launch, int step, int token) {
  const Request& wanted = launch.request;
  Control& c = *launch.control;
  TWIN_GLOBAL(wanted.stamps)[step] = now_ns();
  const int generated = step - (wanted.forced - 1);
  if (generated < 0 || wanted.every_position) return;
  TWIN_GLOBAL(wanted.tokens)[generated] = token;
  store_host(&c.emitted, generated + 1);
  for (int i = 0; i < wanted.stop_count; ++i)
    if (TWIN_GLOBAL(wanted.stop)[i] == token) claim(&c.status, int(Status::RUNNING), int(Status::STOP));
}

__device__ __forceinline__ bool delivers(const Plan& plan, int rank, int block) {
  return rank == 0 && block == 0 && !plan.probe;
}

// The best of all blocks' candidates, two words each.
__device__ __forceinline__ bool best_candidate(Block& b, int index, const Read& read,
                                               Candidate& best) {
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const int each = b.plan.values_at(read.value).elements / 2;
  Candidate mine = {-infinity(), 0x7FFFFFFF};
  Patience patience;
  bool good = true;
  for (int i = b.core.thread(); i < each * source.parts && good; i += b.core.threads()) {
    const float* at = source.at(i / each) + i % each * 2;
    Pack<2> seen = load_pack<2, 8>(at, source.pushed);
    while (good && source.polled && missing(seen)) {
      good = keep_waiting(b, patience, {index, read.value, source.part(i / each), i % each * 2});
      seen = load_pack<2, 8>(at, source.pushed);
    }
    const Candidate other = {seen.at[0], int(seen.at[1])};
    if (wins(other, mine)) mine = other;
  }
  if (!b.core.agree(good)) return false;
  best = b.core.best(mine, wins);
  return !b.core.gave_up();
}

// The summaries of all blocks: items of the block that draws, and the best of their candidates.
__device__ TWIN_LARGE bool gather_summaries(Block& b, int index, const Read& read,
                                                 Drawing& drawing, Candidate& best) {
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  Candidate mine = {-infinity(), 0x7FFFFFFF};
  Patience patience;
  bool good = true;
  for (int i = b.core.thread(); i < drawing.count && good; i += b.core.threads()) {
    const int part = i / b.plan.blocks, word = i % b.plan.blocks * SUMMARY;
    Pack<SUMMARY> seen = load_pack<SUMMARY, 16>(source.at(part) + word, source.pushed);
    while (good && source.polled && missing(seen)) {
      good = keep_waiting(b, patience, {index, read.value, source.part(part), word});
      seen = load_pack<SUMMARY, 16>(source.at(part) + word, source.pushed);
    }
    const Candidate other = {seen.at[0], int(seen.at[1])};
    if (wins(other, mine)) mine = other;
    drawing.put(i, seen);
  }
  if (!b.core.agree(good)) return false;
  best = b.core.best(mine, wins);
  return !b.core.gave_up();
}

// A probe's block publishes its logits itself: it makes of them what blocks make of a head's.
__device__ TWIN_LARGE bool gather_logits(Block& b, int index, const Read& read,
                                              Drawing& drawing, Candidate& best) {
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const int rows = b.plan.values_at(read.value).elements;
  float* const logits = const_cast<float*>(drawing.logits(0)) + b.plan.block_logits;
  if (!gather(b, index, read, source, 0, rows, logits)) return false;
  const Pack<SUMMARY> said = summarize(b, logits, rows, 0);
  if (b.core.thread() == 0) drawing.put(0, said);
  b.core.barrier();
  best = {said.at[0], int(said.at[1])};
  return true;
}

__device__ __forceinline__ bool sample(Block& b, int index, const Stage& stage) {
  const Request& wanted = b.launch.request;
  const Read& read = b.plan.reads_at(stage.first_read);
  const bool chooses = !b.plan.full || b.block == 0,
             counts = b.plan.probe || head_needed(wanted, b.at.step);
  if constexpr (Request::DRAWS)
    if (chooses && !row_is_free(b, index)) return false;
  Candidate best = {};
  Drawing drawing(b);
  if (chooses && !(!b.plan.full    ? best_candidate(b, index, read, best)
                   : b.plan.probe ? gather_logits(b, index, read, drawing, best)
                                  : gather_summaries(b, index, read, drawing, best)))
    return false;
  if constexpr (Request::DRAWS)
    if (chooses) order_logits(wanted);
  begin(b, index, stage);
  if (!chooses) return true;
  int token = b.at.step + 1 < wanted.forced ? TWIN_GLOBAL(wanted.prompt)[b.at.step + 1] : 0;
  if (counts && b.plan.full) {
    token = drawing.token(
        best, u64(b.plan.probe ? b.at.step : b.at.step - (wanted.forced - 1)));
  } else if (counts) {
    token = finite(best.logit) ? best.index : -1;
  }
  b.core.barrier();
  b.core.cleared();
  if (b.core.thread() != 0) return token >= 0;
  if (token < 0) {
    claim(&b.control->status, int(Status::RUNNING), int(Status::NO_TOKEN));
    leave_all(b.launch);
    return false;
  }
  b.at.token = b.at.chosen = token;
  if (stage.publishes >= 0) publish(b, output_of(b, stage), 0, float(token));
  // the scheduler warp delivers while the next step has begun
  const bool later = Core::SCHEDULER && b.plan.resident;
  if (!later && delivers(b.plan, b.rank, b.block)) deliver(b.launch, b.at.step, token);
  return true;
}

// ---- probes -------------------------------------------------------------------------------------

__device__ __forceinline__ bool stream(Block& b, int index, const Stage& stage) {
  begin(b, index, stage);
  Core::Normed x = Core::Normed::in(b.input, stage.cols);
  x.each(b.core, [](int, float& value) { value = 1.0f; });
  float sum = 0;
  const Work work = {b.plan.owned_of(stage.owned, b.block), 1, {}};
  auto ahead = b.core.prefetch<Core::Normed>(stage, work.own, true);
  const bool done =
      multiply(b, stage, work, x, ahead, unscaled, [&](int, float total, float) { sum += total; });
  if (b.core.thread() == 0) b.at.checksum += sum;
  return done;
}

// Publishes numbers that depend on everything gathered, and that do not grow.
__device__ __forceinline__ bool exchange(Block& b, int index, const Stage& stage) {
  float* const from = b.input + b.half * (b.plan.input_floats / 2);
  b.half ^= 1;  // a slow thread may still publish from the other half
  int n = 0;
  for (int i = stage.first_read; i < stage.first_read + stage.reads; ++i) {
    if (!gather_spans(b, index, b.plan.reads_at(i), from + n)) return false;
    n += b.plan.values_at(b.plan.reads_at(i).value).elements;
  }
  begin(b, index, stage);
  const Output out = output_of(b, stage);
  const Span own = b.plan.owned_of(out.value->owned, b.block);
  b.core.cleared();
  TWIN_EACH(i, own.hi - own.lo) {
    const int e = own.lo + i, next = e + 1 < n ? e + 1 : 0;
    publish(b, out, e,
            0.5f * (n ? from[next] : 0.0f) + float((u32(e) * 2654435761u) >> 8) * 0x1p-24f);
  }
  return true;
}

}  // namespace twin
