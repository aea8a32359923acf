// Experts in a prompt pass. A token's router logits are summed in FP32 by the block that norms it,
// which also chooses its experts. Then each block takes some rows of an expert at a time, one
// expert after the other, for the tokens that chose it: entries (token, place of the choice),
// sorted by expert. What each entry's down projection makes is added up for its token at the end,
// in the order of the choice, so that a prompt gives the same bits every time.
#pragma once

#include "biases.cuh"

namespace twin {

// What a block needs on the chip while it chooses, for WARPS tokens at once; routing_floats in
// twin/kernel/prompt.py counts the same.
struct Routing {
  float* rows;     // [warps][hidden] normed, FP32
  float* logits;   // [warps][COUNT]
  float* choices;  // [warps][experts, weights][TOP_K]

  // behind the sums of squares of as many warps
  __device__ Routing(const Plan& plan, int warps, float* chip)
      : rows(chip + facts::LINE_FLOATS),
        logits(rows + long(warps) * plan.hidden),
        choices(logits + warps * Experts::COUNT) {}
  __device__ Choice of(int token) const {
    float* const at = choices + token * 2 * Experts::TOP_K;
    return {reinterpret_cast<int*>(at), at + Experts::TOP_K, nullptr};
  }
};

// Where a token's choice lies in the memory of a pass: [experts, weights][TOP_K].
__device__ __forceinline__ float* pass_choice(const Block& b, int token) {
  return b.memory.prompt + b.plan.prompt_choices + token * 2 * Experts::TOP_K;
}

// Logits and choices of `together` tokens whose normed rows lie on the chip: the block's from
// number `done` on. `stage`: ROUTE, whose constants are the router's weights, [COUNT][hidden], and
// its biases.
__device__ __forceinline__ void choose_experts(Block& b, const Stage& stage, int tokens, int done,
                                               int together, const Routing& chip) {
  constexpr int AT_ONCE = 2, TOKENS = Chunk::ROUTED_TOKENS;  // experts, tokens of a warp
  const int hidden = b.plan.hidden;
  const float* const router = b.memory.constants + stage.bias;
  TWIN_ONCE
  for (int first = b.core.warp() * AT_ONCE; first < Experts::COUNT;
       first += b.core.warps() * AT_ONCE) {
    TWIN_ONCE
    for (int begin = 0; begin < together; begin += TOKENS) {
      float sum[AT_ONCE][TOKENS] = {};
      TWIN_ONCE
      for (int i = b.core.warp_thread(); i < hidden; i += b.core.warp_threads()) {
        float weight[AT_ONCE];
        TWIN_UNROLL
        for (int e = 0; e < AT_ONCE; ++e)
          weight[e] = router[long(least(first + e, Experts::COUNT - 1)) * hidden + i];
        TWIN_UNROLL
        for (int t = 0; t < TOKENS; ++t) {
          const float x = chip.rows[long(least(begin + t, together - 1)) * hidden + i];
          TWIN_UNROLL
          for (int e = 0; e < AT_ONCE; ++e) sum[e][t] += weight[e] * x;
        }
      }
      TWIN_UNROLL
      for (int e = 0; e < AT_ONCE; ++e)
        TWIN_UNROLL
        for (int t = 0; t < TOKENS; ++t) {
          const float all = b.core.warp_sum(sum[e][t]);
          if (b.core.warp_thread() == 0 && first + e < Experts::COUNT && begin + t < together)
            chip.logits[(begin + t) * Experts::COUNT + first + e] =
                all + router[long(Experts::COUNT) * hidden + first + e];
        }
    }
  }
  b.core.barrier();
  TWIN_ONCE
  TWIN_EACH(i, together * Experts::COUNT) {
    const int token = i / Experts::COUNT, expert = i % Experts::COUNT;
    const int place = place_of(chip.logits + token * Experts::COUNT, expert);
    if (place < Experts::TOP_K) chip.of(token).expert[place] = expert;
  }
  b.core.barrier();
  TWIN_ONCE
  TWIN_EACH(i, together * Experts::TOP_K) {
    const int of = i / Experts::TOP_K, place = i % Experts::TOP_K,
              token = b.block + (done + of) * b.plan.blocks;
    if (token >= tokens) continue;
    const Choice choice = chip.of(of);
    float* const to = pass_choice(b, token);
    store_shared(to + place, bits_as<float>(choice.expert[place]));
    store_shared(to + Experts::TOP_K + place,
                 weight_of(chip.logits + of * Experts::COUNT, choice, place));
  }
  b.core.barrier();
}

// ---- products -----------------------------------------------------------------------------------

// Rows of an expert that a block multiplies together.
struct Portion {
  int owner, owners;  // blocks whose rows they are, in few-bit weights; 0: they share row groups
  int lo, hi;
};

// Do tiles of an expert's few-bit weights begin with each block's first row?
template <class Stage>
__device__ __forceinline__ constexpr bool owned_tiles(const Stage& stage) {
  return CODED && stage.kind == int(StageKind::ROUTED_DOWN);
}

// Portions of an expert, of about `most` rows, a multiple of the height of a tile.
template <class Stage>
__device__ __forceinline__ int portions(const Block& b, const Stage& stage, int most) {
  return owned_tiles(stage) ? (b.plan.blocks + b.plan.prompt_owners - 1) / b.plan.prompt_owners
                            : (stage.expert_rows + most - 1) / most;
}

template <class Stage>
__device__ __forceinline__ Portion portion(const Block& b, const Stage& stage, int most,
                                           int number) {
  if (!owned_tiles(stage))
    return {0, 0, number * most, least(number * most + most, stage.expert_rows)};
  const int first = number * b.plan.prompt_owners,
            end = least(first + b.plan.prompt_owners, b.plan.blocks);
  return {first, end - first, b.plan.owned_of(stage.owned, first).lo,
          b.plan.owned_of(stage.owned, end - 1).hi};
}

// use(first row, rows, place) for each row group of few-bit weights; place(slice) is where its tile
// lies, in units from the expert's first.
template <class Stage, class Use>
__device__ __forceinline__ void each_group(const Block& b, const Stage& stage,
                                           const Portion& portion, Use use) {
  const int high = stage.tile_rows, owners = portion.owners ? portion.owners : 1;
  TWIN_ONCE
  for (int o = 0; o < owners; ++o) {
    const int owner = portion.owner + o;
    const Span own = portion.owners ? b.plan.owned_of(stage.owned, owner)
                                    : Span{portion.lo, portion.hi};
    TWIN_ONCE
    for (int row = own.lo; row < own.hi; row += high) {
      const int rows = least(high, own.hi - row);
      use(row, rows, [&](int slice) {
        return coded_place(stage, owner, own.lo, row, rows, slice);
      });
    }
  }
}

// emit(expert, entry, element, sum of its first row, sum of its last row) for each entry and each
// element of the experts' rows, by one block each: blocks take portions in turn.
template <int UNIT, class Stage, class Emit>
__device__ __forceinline__ void multiply_experts(Block& b, Chunk& chunk, const Stage& stage,
                                                 const float* x, Emit emit) {
  const int most = Chunk::routed_rows(stage), count = portions(b, stage, most);
  const u8* const experts = b.memory.stream + u64(stage.expert_page) * PAGE_BYTES;
  int number = b.block;
  TWIN_ONCE
  for (int expert = 0; expert < Experts::COUNT; ++expert) {
    if (chunk.entries_of(b, expert) == 0) continue;
    TWIN_ONCE
    for (; number < count; number += b.plan.blocks) {
      const Portion rows = portion(b, stage, most, number);
      if (rows.lo < rows.hi)
        chunk.template multiply_entries<UNIT>(
            b, stage, x, expert, rows,
            experts + u64(expert) * u64(stage.expert_units) * UNIT_BYTES,
            [&](int entry, int element, float first, float last) {
              emit(expert, entry, element, first, last);
            });
    }
    number -= count;
  }
}

// The stage ROUTED_UP: what each entry hands to its down projection.
template <class Stage>
__device__ __forceinline__ void routed_up_chunk(Block& b, Chunk& chunk, const Stage& stage,
                                                const Pass& pass) {
  float* const out = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  const float* const biases = Additions::EXPERT_BIAS && stage.bias >= 0
                                  ? b.memory.constants + stage.bias
                                  : nullptr;
  chunk.sort(b, pass_choice(b, 0), pass.tokens);
  multiply_experts<2>(
      b, chunk, stage, b.memory.prompt + b.plan.prompt_normed,
      [&](int expert, int entry, int i, float gate, float up) {
        if constexpr (Additions::EXPERT_BIAS) {
          const float* const pair = biases + 2 * (long(expert) * Experts::WIDTH + i);
          if (biases) gate += pair[0], up += pair[1];
        }
        const float made =
            CLAMPED ? through_gate(gate, up)
                    : gate / (1.0f + exp32(Family::GELU ? gelu_exponent(gate) : -gate)) * up;
        Chunk::store(out, Experts::WIDTH, entry, i, made);
      });
}

// The stage ROUTED_DOWN: rows of each entry, then of each token, whole tokens by one block each.
template <class Stage, class Ready>
__device__ __forceinline__ bool routed_down_chunk(Block& b, Chunk& chunk, const Stage& stage,
                                                  const Pass& pass, Ready ready) {
  constexpr int PACK = 8;
  const int hidden = b.plan.hidden;
  const Value& from = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
  float* const rows = b.memory.prompt + b.plan.prompt_entries;
  multiply_experts<1>(b, chunk, stage, b.memory.prompt + from.prompt,
                      [&](int, int entry, int row, float sum, float) {
                        store_shared(rows + long(entry) * hidden + row, sum);
                      });
  if (!ready()) return false;
  const Value& value = b.plan.values_at(stage.publishes);
  const float* const biases = Additions::EXPERT_BIAS && stage.bias >= 0
                                  ? b.memory.constants + stage.bias
                                  : nullptr;
  TWIN_ONCE
  for (int token = b.block; token < pass.tokens; token += b.plan.blocks) {
    const float* const choice = pass_choice(b, token);
    float* const out = pass_row(b.memory, value, token, hidden);
    TWIN_ONCE
    TWIN_EACH(i, hidden / PACK) {
      Pack<PACK> sum = {};
      TWIN_ONCE
      for (int k = 0; k < Experts::TOP_K; ++k) {
        const float weight = load_shared(choice + Experts::TOP_K + k);
        Pack<PACK> got = load_pack<PACK, 16>(
            rows + (long(token) * Experts::TOP_K + k) * hidden + i * PACK);
        if constexpr (Additions::EXPERT_BIAS) {
          const float* const bias =
              biases + long(bits_as<int>(load_shared(choice + k))) * hidden + i * PACK;
          TWIN_UNROLL
          for (int j = 0; j < PACK; ++j)
            if (biases) got.at[j] += bias[j];
        }
        TWIN_UNROLL
        for (int j = 0; j < PACK; ++j) sum.at[j] += weight * got.at[j];
      }
      TWIN_UNROLL
      for (int j = 0; j < PACK; ++j) store_shared(out + i * PACK + j, sum.at[j]);
    }
  }
  return true;
}

}  // namespace twin
