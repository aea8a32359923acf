// Experts in a prompt pass. The block that norms a token sums its router logits in FP32 and chooses
// its experts. Then each block takes some rows of an expert at a time, one expert after the other,
// for the tokens that chose it: entries (token, place of the choice), sorted by expert. What each
// entry's down projection makes is added up for its token at the end, in the order of the choice,
// so that a prompt gives the same bits every time.
#pragma once

#include "experts.cuh"

namespace twin {

// What a block needs in shared memory while it chooses, for a token of each warp at once;
// routing_floats in twin/kernel/prompt.py counts the same.
struct Routing {
  float* rows;     // [warps][hidden] normed, FP32
  float* logits;   // [warps][LOGITS]
  float* choices;  // [warps][experts, weights][EACH]
  float* keys;     // [warps][COUNT] what the choice is by, where that is not logits

  // behind the sums of squares of as many warps
  __device__ Routing(const Plan& plan, int warps, float* chip)
      : rows(chip + facts::LINE_FLOATS),
        logits(rows + long(warps) * plan.hidden),
        choices(logits + warps * Entries::LOGITS),
        keys(choices + warps * 2 * Entries::EACH) {}
  __device__ Choice of(int token) const {
    float* const at = choices + token * 2 * Entries::EACH;
    return {reinterpret_cast<int*>(at), at + Entries::EACH, nullptr};
  }
};

// Where a token's choice lies in the memory of a pass, [CHOICE].
__device__ __forceinline__ float* pass_choice(const Block& b, int token) {
  return b.memory.prompt + b.plan.prompt_choices + long(token) * Entries::CHOICE;
}

// ---- the choice ---------------------------------------------------------------------------------

// A router's rows of a rank, [rows][hidden] of the weight type: each block has put its own there,
// since in the stream they lie among its other weights.
__device__ __forceinline__ u8* pass_router(const Block& b, const RankMemory& of, int row) {
  return reinterpret_cast<u8*>(of.prompt + b.plan.prompt_router) +
         long(row) * b.plan.hidden * type_bytes(WEIGHT);
}

// Whose row an expert's is, and its number there: ranks that push their logits have a part each.
struct Scored {
  const RankMemory& of;
  int row;

  __device__ Scored(const Block& b, const Stage& stage, int expert)
      : of(stage.rows < Entries::LOGITS ? b.launch.ranks[expert / stage.rows] : b.memory),
        row(stage.rows < Entries::LOGITS ? expert % stage.rows : expert) {}
};

// Logits and choices of `together` tokens whose normed rows lie in shared memory: the block's from
// number `done` on. `route`: the stage that chooses in a step.
__device__ __forceinline__ void choose_experts(Block& b, const Stage& stage, const Stage& route,
                                               int tokens, int done, int together,
                                               const Routing& chip) {
  Chunk::score(b, chip.rows, together, chip.logits, [&](int expert) {
    const Scored scored(b, stage, expert);
    return static_cast<const u8*>(pass_router(b, scored.of, scored.row));
  });
  b.core.barrier();
  if (stage.bias >= 0) {
    TWIN_ONCE
    TWIN_EACH(i, together * Experts::COUNT) {
      const Scored scored(b, stage, i % Experts::COUNT);
      chip.logits[i / Experts::COUNT * Entries::LOGITS + i % Experts::COUNT] +=
          scored.of.constants[stage.bias + scored.row];
    }
    b.core.barrier();
  }
  const float* by = chip.logits;
  int pitch = Entries::LOGITS;
  if constexpr (ChosenBy::BIASED) {
    const float* const biases = constants(b, route.choice_bias);
    TWIN_ONCE
    TWIN_EACH(i, together * Experts::COUNT) {
      const int token = i / Experts::COUNT, expert = i % Experts::COUNT;
      const float* const logits = chip.logits + token * Entries::LOGITS;
      chip.keys[i] = Shares(logits).of(logits[expert]) + biases[expert];
    }
    by = chip.keys, pitch = Experts::COUNT;
    b.core.barrier();
  }
  TWIN_ONCE
  TWIN_EACH(i, together * Experts::COUNT) {
    const int token = i / Experts::COUNT, expert = i % Experts::COUNT;
    const int place = place_of(by + token * pitch, expert);
    if (place < Experts::TOP_K) chip.of(token).expert[place] = expert;
  }
  b.core.barrier();
  TWIN_ONCE
  TWIN_EACH(i, together * Entries::EACH) {
    const int of = i / Entries::EACH, place = i % Entries::EACH,
              token = b.block + (done + of) * b.plan.blocks;
    if (token >= tokens) continue;
    const Choice choice = chip.of(of);
    const float* const logits = chip.logits + of * Entries::LOGITS;
    const bool chosen = Entries::EACH == Experts::TOP_K || place < Experts::TOP_K;
    float* const to = pass_choice(b, token);
    store_shared(to + place, bits_as<float>(chosen ? choice.expert[place]
                                                   : Experts::COUNT + place - Experts::TOP_K));
    store_shared(to + Entries::EACH + place,
                 chosen ? weight_of(logits, choice, place) : shared_gate(logits));
    if constexpr (NonRouted::SHARED)
      if (place == 0) store_shared(to + 2 * Entries::EACH, shared_gate(logits));
  }
  b.core.barrier();
}

// ---- the stages ---------------------------------------------------------------------------------

// What rows without gates hand to a down projection: one element, or BOTH neighbours from an even
// one on.
__device__ __forceinline__ void store_activated(float* x, int columns, int token, int element,
                                                float sum, float next, bool both) {
  if (both) return Chunk::store_pair(x, columns, token, element, activated(sum), activated(next));
  Chunk::store(x, columns, token, element, activated(sum));
}

// The stage ROUTED_UP: what each entry hands to its down projection.
template <class Stage>
__device__ __forceinline__ void routed_up_chunk(Block& b, Chunk& chunk, const Stage& stage,
                                                const Pass& pass) {
  float* const out = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  const float* const x = b.memory.prompt + b.plan.prompt_normed;
  chunk.sort(b, pass_choice(b, 0), pass.tokens);
  if constexpr (Family::GATED) {
    multiply_experts<2, false>(b, chunk, stage, x, [&](int entry, int i, float gate, float up) {
      Chunk::store(out, Experts::WIDTH, entry, i, through_gate(gate, up));
    });
  } else {
    multiply_experts<1, false>(
        b, chunk, stage, x, [&](int entry, int i, float sum, float next, bool both = false) {
          store_activated(out, Experts::WIDTH, entry, i, sum, next, both);
        });
  }
}

// The stage ROUTED_DOWN: rows of each entry, then of each token, whole tokens by one block each, and
// what shared experts made.
template <class Stage, class Ready>
__device__ __forceinline__ bool routed_down_chunk(Block& b, Chunk& chunk, const Stage& stage,
                                                  const Pass& pass, Ready ready) {
  constexpr int PACK = 8;
  static_assert(PACK == Chunk::PACK, "a matrix has whole packs of columns");
  const int hidden = b.plan.hidden;
  const Value& from = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  float* const rows = b.memory.prompt + b.plan.prompt_entries;
  multiply_experts<1, true>(b, chunk, stage, b.memory.prompt + from.prompt,
                      [&](int entry, int row, float sum, float next, bool both = false) {
                        float* const to = rows + long(entry) * hidden + row;
                        both ? Chunk::store_two(to, sum, next) : store_shared(to, sum);
                      });
  if (!ready()) return false;
  float* const out = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  TWIN_ONCE
  for (int token = b.block; token < pass.tokens; token += b.plan.blocks) {
    const float* const weights = pass_choice(b, token) + Entries::EACH;
    TWIN_ONCE
    TWIN_EACH(i, hidden / PACK) {
      Pack<PACK> sum = {};
#pragma unroll 4  // whose loads are under way together
      for (int k = 0; k < Entries::EACH; ++k) {
        const float weight = load_shared(weights + k);
        const Pack<PACK> got = load_pack<PACK, 16>(
            rows + (long(token) * Entries::EACH + k) * hidden + i * PACK);
        TWIN_UNROLL
        for (int j = 0; j < PACK; ++j) sum.at[j] += weight * got.at[j];
      }
      if constexpr (NonRouted::SHARED) {
        const float by = load_shared(weights + Entries::EACH);
        const Pack<PACK> got = load_pack<PACK, 16>(b.memory.prompt + b.plan.prompt_shared +
                                                   long(token) * hidden + i * PACK);
        TWIN_UNROLL
        for (int j = 0; j < PACK; ++j) sum.at[j] += by * got.at[j];
      }
      TWIN_UNROLL
      for (int j = 0; j < PACK; ++j)
        store_shared(out + long(token) * hidden + i * PACK + j, sum.at[j]);
    }
  }
  return true;
}

}  // namespace twin
