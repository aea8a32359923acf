// Prompt passes: the weights of all layers once for up to `prompt_chunk` tokens, to fill the
// key-value cache. The prompt's last token is an ordinary step. All blocks of all ranks meet after
// every stage, so nothing is polled or reset.
#pragma once

#include "biases.cuh"

namespace twin {

struct Pass {
  int number;
  int first;  // position of the chunk's first token
  int tokens;
  u32 arrivals;  // at the barrier, that this block has waited for
  bool verifies;  // drafts: through all stages and the LM head
};

// Rounds of drafts are kernels of their own on a GPU: `pass.verifies` is known there.
__device__ __forceinline__ bool verifies(const Block& b, const Pass& pass) {
  return b.plan.drafts && pass.verifies;
}

// What a pass keeps of a value on this rank: rows of tokens.
__device__ __forceinline__ float* pass_row(const RankMemory& memory, const Value& value, int token,
                                           int columns) {
  return memory.prompt + value.prompt + long(token) * columns;
}

}  // namespace twin

#include "prompt_experts.cuh"

namespace twin {

// A full barrier of all ranks: one counter a GPU, in the memory of its first rank. The arrival
// releases what all threads wrote before the block barrier, and the last poll acquires it.
__device__ __forceinline__ bool meet(Block& b, int index, Pass& pass) {
  pass.arrivals += u32(b.plan.blocks) * u32(b.plan.ranks);
  const int counter = verifies(b, pass) ? b.plan.round_counter : b.plan.prompt_counter;
  bool good = true;
  b.core.barrier();
  if (b.core.thread() == 0) {
    for (int rank = 0; rank < b.plan.ranks; rank += b.plan.ranks_per_gpu)
      arrive(counter_of(b.launch.ranks[rank], counter));
    b.core.published();
    const RankMemory& near = b.launch.ranks[b.rank / b.plan.ranks_per_gpu * b.plan.ranks_per_gpu];
    good = wait_counter(b, counter_of(near, counter), pass.arrivals,
                        {index, facts::PASS_BARRIER, pass.number, -1});
  }
  return !b.core.any(!good);
}

}  // namespace twin

#include "drafts.cuh"
#include "draft_head.cuh"
#include "prompt_norms.cuh"
#include "prompt_attention.cuh"
#include "prompt_states.cuh"

namespace twin {

// Both halves of a pass's attention; false: the generation is over.
template <class C, class Ready>
__device__ __forceinline__ bool pass_attention(Block& b, C& chunk, const Stage& stage,
                                               const Pass& pass, bool last, Ready ready) {
  if constexpr (C::TENSOR_PASS) {
    prepare_chunk(b, stage, pass, last);
    if (last) return true;
    if (!ready()) return false;
    float* const out = b.memory.prompt + b.plan.values_at(stage.publishes).prompt;
    if (!verifies(b, pass)) {
      attend_rows(b, chunk, stage, pass, out);
      return true;
    }
    attend_splits(b, chunk, stage, pass);
    if (!ready()) return false;
    combine_splits<C>(b, stage, pass, out);
  } else {
    attend_chunk(b, stage, pass, last, chunk.memory(b));
  }
  return true;
}

// Does a stage's pass begin with the norm of what it multiplies?
__device__ __forceinline__ bool norms(const Block& b, StageKind kind) {
  return (b.plan.drafts && kind == StageKind::LM_HEAD) || kind == StageKind::QKV || kind == StageKind::GATE_UP ||
         (Delta::ANY && kind == StageKind::DELTA_IN) ||
         (Convolution::ANY && kind == StageKind::CONV_IN) ||
         (Experts::ANY && kind == StageKind::ROUTER);
}

// Does it multiply what another stage's norm has left?
__device__ __forceinline__ constexpr bool finds_normed(StageKind kind) {
  return (Delta::ANY && kind == StageKind::DELTA_GATES) ||
         (NonRouted::SHARED && kind == StageKind::SHARED_UP);
}

// Where the rows of a stage go that are no activations yet.
__device__ __forceinline__ float* rows_of(const Block& b, const Stage& stage, StageKind kind,
                                          int& width) {
  if (b.plan.drafts && kind == StageKind::LM_HEAD) {
    width = logits_pitch(stage);
    return b.memory.prompt + b.plan.round_logits;
  }
  if (Convolution::ANY && kind == StageKind::CONV_IN) {
    width = stage.rows;
    return b.memory.prompt + b.plan.prompt_mixed;
  }
  if (NonRouted::SHARED && kind == StageKind::SHARED_DOWN) {
    width = stage.rows;
    return b.memory.prompt + b.plan.prompt_shared;
  }
  const Value& value = b.plan.values_at(stage.publishes);
  width = value.elements;
  return pass_row(b.memory, value, 0, 0);
}

// `ready` waits until the stage's input is there; false ends the pass.
template <class Ready>
__device__ __forceinline__ bool multiply_chunk(Block& b, Chunk& chunk, const Stage& stage,
                                               const Pass& pass, Ready ready) {
  const StageKind kind = StageKind(stage.kind);
  const bool normed = norms(b, kind) || finds_normed(kind);
  const bool feeds =
      kind == StageKind::GATE_UP || (NonRouted::SHARED && kind == StageKind::SHARED_UP);
  const bool biased =
      kind == StageKind::QKV || (Additions::OUTPUT_BIAS && kind == StageKind::O_PROJ);
  const float* x =
      b.memory.prompt + (normed ? b.plan.prompt_normed
                                : b.plan.values_at(b.plan.reads_at(stage.first_read).value).prompt);
  // looked up here: an emitted sum must not wait for a table
  int width = 0;
  float* const out = rows_of(b, stage, kind, width);
  if constexpr (Family::GATED) {
    if (feeds)
      return chunk.multiply<2>(
          b, stage, x, pass.tokens, ready, [&](int token, int i, float gate, float up) {
            Chunk::store(out, width, token, i, through_gate(gate, up));
          });
  }
  const float* bias = biased && stage.bias >= 0 ? b.memory.constants + stage.bias : nullptr;
  return chunk.multiply<1>(
      b, stage, x, pass.tokens, ready,
      [&](int token, int row, float sum, float next, bool both = false) {
        if (!Family::GATED && feeds)
          return store_activated(out, width, token, row, sum, next, both);
        float* const to = out + long(token) * width + row;
        if (bias) sum += bias[row];
        if (!both) return store_shared(to, sum);
        Chunk::store_two(to, sum, bias ? next + bias[row + 1] : next);
      });
}

// The stage that chooses experts by the logits of the router at `index`.
__device__ __forceinline__ const Stage& route_of(const Block& b, int index) {
  if constexpr (Experts::CHOICE_BIASED || Scores::ANY)
    while (StageKind(b.plan.stages_at(index).kind) != StageKind::ROUTE) ++index;
  return b.plan.stages_at(index);
}

// Each stage meets all blocks before it reads what they made.
__device__ __forceinline__ bool read_chunk(Block& b, Chunk& chunk, Pass& pass) {
  const bool whole = verifies(b, pass);
  const int stages = whole ? b.plan.round_stages : b.plan.prompt_stages;
  chunk.open(b, pass.tokens);
  for (int index = 0; index < stages; ++index) {
    const Stage& stage = b.plan.stages_at(index);
    const StageKind kind = StageKind(stage.kind);
    const bool last = !whole && index + 1 == stages;
    b.core.forget();  // and nothing computed from these is kept from stage to stage
    TWIN_KEEP(pass.first);
    TWIN_KEEP(pass.tokens);
    auto ready = [&] { return meet(b, index, pass); };
    // parts are read where they lie
    if (kind == StageKind::EMBED || kind == StageKind::COLLECTIVE || kind == StageKind::REDUCE)
      continue;
    bool router = false;
    if constexpr (Experts::ANY) {
      if (kind == StageKind::ROUTE) continue;  // the router's stage chose
      if (kind == StageKind::ROUTED_UP || kind == StageKind::ROUTED_DOWN) {
        if (!ready()) return false;
        if (kind == StageKind::ROUTED_UP) {
          routed_up_chunk(b, chunk, stage, pass);
        } else if (!routed_down_chunk(b, chunk, stage, pass, ready)) {
          return false;
        }
        continue;
      }
      router = kind == StageKind::ROUTER;
      if (router)
        chunk.put_rows(b, stage,
                       pass_router(b, b.memory, b.plan.owned_of(stage.owned, b.block).lo));
    }
    if constexpr (Delta::ANY) {
      if (kind == StageKind::DELTA) {
        if (!last) chunk.prefetch(b, b.plan.stages_at(index + 1));
        if (!ready()) return false;
        if (!pass_states(b, chunk, stage, pass, ready)) return false;
        continue;
      }
    }
    if (kind == StageKind::ATTENTION) {
      if (!last) chunk.prefetch(b, b.plan.stages_at(index + 1));
      if (!ready()) return false;
      if (!pass_attention(b, chunk, stage, pass, last, ready)) return false;
      continue;
    }
    if (norms(b, kind)) {
      if (!router) {
        chunk.prefetch(b, stage);
        chunk.decode(b, stage);
      }
      if (!ready()) return false;
      norm_chunk(b, stage, router ? route_of(b, index) : stage, pass, chunk.memory(b));
      if (has_draft_head(b)) keep_states(b, index, pass);
      if (router) continue;
    } else {
      if (finds_normed(kind)) chunk.prefetch(b, stage);
      chunk.decode(b, stage);
    }
    if (!multiply_chunk(b, chunk, stage, pass, ready)) return false;
    if constexpr (Convolution::ANY) {
      if (kind == StageKind::CONV_IN) {
        if (!ready()) return false;
        convolve_chunk(b, stage, pass);
      }
    }
  }
  return true;
}

// All passes of the request. False: the generation is over.
__device__ __forceinline__ bool read_prompt(Block& b) {
  const Request& wanted = b.launch.request;
  Chunk chunk(b);
  Pass pass = {};
  pass.first = wanted.kept;
  for (; pass.first < wanted.read; pass.first += b.plan.prompt_chunk, ++pass.number) {
    pass.tokens = least(b.plan.prompt_chunk, wanted.read - pass.first);
    if (!read_chunk(b, chunk, pass)) return false;
    b.core.ring.rewind();
    if (has_draft_head(b) && wanted.drafts) {
      DraftHead head = {b, pass};
      if (!head.read(pass.tokens, pass.first, false, [&](int token) {
            return TWIN_GLOBAL(wanted.chunks)[pass.first + token + 1];
          }))
        return false;
    }
    if (b.rank == 0 && b.block == 0 && b.core.thread() == 0)
      wanted.pass_stamps[pass.number] = now_ns();
    // barriers are too short to look there
    if (b.core.any(b.core.thread() == 0 && load_host(wanted.abort))) return false;
  }
  if (!meet(b, b.plan.prompt_stages - 1, pass)) return false;  // keys and values are there
  b.core.forget();
  return true;
}

// Draws the tokens of a round, up to the first one that was not drafted.
__device__ __forceinline__ bool draw_round(Block& b, const Stage& head, Drafts& drafts,
                                           Pass& pass) {
  TWIN_ONCE
  for (int token = 0; token < pass.tokens; ++token) {
    put_summary(b, head, pass, token);
    if (!meet(b, b.plan.round_stages - 1, pass)) return false;
    if (drafts.mine()) drafts.draw(token, pass);
    if (!meet(b, b.plan.round_stages - 1, pass)) return false;
    if (!load_word(drafts.going(b.rank))) break;
  }
  return true;
}

// Rounds of a generation whose prompt has been read but for its last token: each is a pass over that
// token, or the last one made, and the drafts behind it. All of a session's rounds sum a row in one
// order, whatever their number of tokens, so drafts change no token.
__device__ __forceinline__ void run_rounds(Block& b) {
  const Request& wanted = b.launch.request;
  const Stage& head = b.plan.stages_at(b.plan.round_stages - 1);
  Chunk chunk(b);
  Pass pass = {};
  pass.verifies = true;
  if (b.plan.prompt_chunk > 1)
    pass.number = (wanted.read - wanted.kept + b.plan.prompt_chunk - 1) / b.plan.prompt_chunk;
  Drafts drafts(b);
  if (drafts.mine()) drafts.begin();
  for (; meet(b, b.plan.round_stages - 1, pass) && open_round(b, pass); ++pass.number) {
    if (!read_chunk(b, chunk, pass)) return;
    b.core.ring.rewind();
    if (!draws(b)) {
      put_best(b, head, pass.tokens);
      if (!meet(b, b.plan.round_stages - 1, pass)) return;
    } else if (!draw_round(b, head, drafts, pass)) {
      return;
    }
    if (drafts.mine() && !drafts.settle(pass)) return;
    if (!has_draft_head(b)) continue;
    if (!meet(b, b.plan.round_stages - 1, pass)) return;
    if (!make_drafts(b, pass, drafts.mine(), drafts.history())) return;
  }
}

}  // namespace twin
