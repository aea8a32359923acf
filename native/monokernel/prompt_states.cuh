// Mixers that carry a state through a prompt pass: gated short convolutions, gated DeltaNet and
// Mamba-2, these token by token or, on tensor cores, many tokens at once (cuda_delta.cuh).
#pragma once

#include "experts.cuh"

namespace twin {

// ---- short convolutions -------------------------------------------------------------------------

// Neighbouring channels of neighbouring tokens, by one thread. All blocks have multiplied their rows
// of b, c and x. Who has a channel's first tokens reads what is kept of those before, then replaces
// it.
template <class S>
struct Convolving {
  static constexpr int PAST = Taps::PAST, CHANNELS = Taps::CHANNELS, UNIT = Taps::UNIT,
                       PACK = Chunk::PACK, PACKS = (CHANNELS + PACK - 1) / PACK,
                       RUN = 8;  // tokens
  static_assert(!Convolution::ANY || CHANNELS % PACK == 0, "whole packs of channels");
  static_assert(UNIT == 3, "rows of b, c and x");

  const Block& b;
  const S& stage;
  const Pass& pass;
  int channel;  // the first
  float tap[PAST + 1][PACK], past[PAST + 1][PACK];

  __device__ __forceinline__ Convolving(const Block& b, const S& stage, const Pass& pass,
                                        int channel)
      : b(b), stage(stage), pass(pass), channel(channel) {
    const float* const taps = b.memory.constants + stage.taps + channel;
    TWIN_UNROLL
    for (int m = 0; m <= PAST; ++m)
      TWIN_UNROLL
      for (int i = 0; i < PACK; ++i) tap[m][i] = taps[m * CHANNELS + i];
  }
  __device__ __forceinline__ float* history(int token) const {
    return Taps::history(b, stage) + (pass.first + token) % PAST * CHANNELS + channel;
  }
  // b * x of a token, and its c.
  __device__ __forceinline__ void find(int token, float (&product)[PACK],
                                       float (&gate)[PACK]) const {
    const float* const row = b.memory.prompt + b.plan.prompt_mixed +
                             long(token) * UNIT * CHANNELS + channel * UNIT;
    float all[UNIT * PACK];
    TWIN_UNROLL
    for (int i = 0; i < UNIT; ++i) {
      const Pack<PACK> got = load_pack<PACK, 16>(row + i * PACK);
      TWIN_UNROLL
      for (int j = 0; j < PACK; ++j) all[i * PACK + j] = got.at[j];
    }
    TWIN_UNROLL
    for (int i = 0; i < PACK; ++i)
      product[i] = all[UNIT * i] * all[UNIT * i + 2], gate[i] = all[UNIT * i + 1];
  }
  // What comes before token `first` of the pass.
  __device__ __forceinline__ void look_back(int first) {
    float unused[PACK];
    TWIN_UNROLL
    for (int m = 0; m < PAST; ++m) {
      const int token = first - PAST + m;
      if (token >= 0) {
        find(token, past[m], unused);
        continue;
      }
      const float* const seen = history(pass.first + token >= 0 ? token : 0);
      TWIN_UNROLL
      for (int i = 0; i < PACK; ++i) past[m][i] = pass.first + token >= 0 ? seen[i] : 0.0f;
    }
  }
  __device__ __forceinline__ void convolve(int token, float* out) {
    float gate[PACK];
    Pack<PACK> made = {};
    find(token, past[PAST], gate);
    TWIN_UNROLL
    for (int i = 0; i < PACK; ++i) {
      float sum = 0;
      TWIN_UNROLL
      for (int m = 0; m <= PAST; ++m) sum += past[m][i] * tap[m][i];
      made.at[i] = gate[i] * sum;
      TWIN_UNROLL
      for (int m = 0; m < PAST; ++m) past[m][i] = past[m + 1][i];
    }
    Chunk::store_pack(out, CHANNELS, token, channel, made);
  }
  __device__ __forceinline__ void keep() const {
    float newest[PACK], unused[PACK];
    for (int token = pass.tokens > PAST ? pass.tokens - PAST : 0; token < pass.tokens; ++token) {
      find(token, newest, unused);
      TWIN_UNROLL
      for (int i = 0; i < PACK; ++i) history(token)[i] = newest[i];
    }
  }
};

template <class S>
__device__ __forceinline__ void convolve_chunk(Block& b, const S& stage, const Pass& pass) {
  using Of = Convolving<S>;
  float* const out = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  const int runs = (pass.tokens + Of::RUN - 1) / Of::RUN, all = runs * Of::PACKS;
  TWIN_ONCE
  for (int i = b.block * b.core.threads() + b.core.thread(); i < all;
       i += b.plan.blocks * b.core.threads()) {
    const int first = i / Of::PACKS * Of::RUN;
    Of of(b, stage, pass, i % Of::PACKS * Of::PACK);
    of.look_back(first);
    const int end = least(pass.tokens, first + Of::RUN);
    TWIN_ONCE
    for (int token = first; token < end; ++token) of.convolve(token, out);
    if (first == 0) of.keep();
  }
}

// ---- gated DeltaNet, Mamba-2 --------------------------------------------------------------------

// Outputs of states before gates and norm, FP32 [tokens][value heads][VALUE_DIM].
__device__ __forceinline__ float* state_outputs(const Block& b, int token) {
  return b.memory.prompt + b.plan.prompt_mixed +
         long(token) * Delta::VALUE_HEADS * Delta::VALUE_DIM;
}

// What a pass makes of an item's outputs: its columns of a token's, `to`.
struct KeptOutputs {
  static constexpr bool GATED = false;
  float* to;

  template <class Stage>
  __device__ __forceinline__ KeptOutputs(Block&, const Stage&, int item, const float*, float* outputs)
      : to(outputs + item * Recurrent::COLUMNS) {}
  __device__ __forceinline__ void begin() {}
  __device__ __forceinline__ void column(int column, float made, float) {
    store_shared(to + column, made);
  }
  __device__ __forceinline__ void end(float) {}
};

// Where a pass has the rows of a stage DELTA_IN, of DELTA_GATES where these are separate.
template <class S>
struct DeltaRows {
  static constexpr int QUERIES = Recurrent::QUERIES, VALUES = Delta::VALUE_HEADS * Delta::VALUE_DIM;

  const float *rows, *steering;
  int width, steering_width;

  __device__ __forceinline__ DeltaRows(const Block& b, const S& stage) {
    const Value& made = b.plan.values_at(b.plan.reads_at(stage.first_read).value);
    rows = pass_row(b.memory, made, 0, 0), width = made.elements;
    steering = rows + 2 * QUERIES + 2 * VALUES, steering_width = width;
    if (stage.reads > 1) {
      const Value& own = b.plan.values_at(b.plan.reads_at(stage.first_read + 1).value);
      steering = pass_row(b.memory, own, 0, 0), steering_width = own.elements;
    }
  }
  // Of a token: queries, keys and values, behind each other.
  __device__ __forceinline__ const float* channels(int token) const {
    return rows + long(token) * width;
  }
  // [value heads][VALUE_DIM]
  __device__ __forceinline__ const float* gates(int token) const {
    return channels(token) + 2 * QUERIES + VALUES;
  }
  __device__ __forceinline__ float strength(int token, int head) const {
    return load_shared(steering + long(token) * steering_width + head);
  }
  __device__ __forceinline__ float decay(int token, int head) const {
    constexpr int BEFORE = Delta::MAMBA ? 0 : Delta::VALUE_HEADS;  // write strengths
    return load_shared(steering + long(token) * steering_width + BEFORE + head);
  }
};

// The block's items token by token, by the code of a step.
template <class S>
__device__ __forceinline__ void carry_states(Block& b, const S& stage, const Pass& pass) {
  constexpr int KEYS = Recurrent::KEYS, COLUMNS = Recurrent::COLUMNS;
  const Span own = b.plan.owned_of(stage.items, b.block);
  const DeltaRows<S> from(b, stage);
  TWIN_ONCE
  for (int item = own.lo; item < own.hi; ++item) {
    const Span alone = {item, item + 1};
    const Gathered at(alone);
    const int head = item / Recurrent::SPLITS, key = Recurrent::key_head(head) * KEYS;
    float* const state = Recurrent::state(b, stage, item);
    TWIN_ONCE
    for (int token = 0; token < pass.tokens; ++token) {
      const int position = pass.first + token;
      const float* const row = from.channels(token);
      StatePart part;
      Steering steering;
      part.load(state, b.core.thread(), position == 0);
      steering.load(b, stage, item, position, state + KEYS * COLUMNS);
      TWIN_EACH(i, KEYS) {
        b.scratch[i] = load_shared(row + key + i);
        b.scratch[at.keys + i] = load_shared(row + Recurrent::QUERIES + key + i);
      }
      TWIN_EACH(i, COLUMNS)
        b.scratch[at.values + i] = load_shared(row + 2 * Recurrent::QUERIES + item * COLUMNS + i);
      if (b.core.thread() == 0) {
        if constexpr (!Delta::MAMBA) b.scratch[at.strengths] = from.strength(token, head);
        b.scratch[at.decays] = from.decay(token, head);
      }
      b.core.barrier();
      update_item<KeptOutputs>(b, stage, at, b.scratch, b.scratch + at.end, alone, item, position,
                        steering, part, state_outputs(b, token));
    }
  }
}

// outputs of a thread that one norm is over, which it keeps; Nemotron 3 has 16, Granite 4 96 to 256
constexpr int MOST_NORMED = 32;

// The same where threads look twice at what one norm is over.
template <class S>
__device__ __forceinline__ void norm_long_states(Block& b, const S& stage, const Pass& pass) {
  constexpr int ALL = Delta::VALUE_HEADS * Delta::VALUE_DIM, DIM = Delta::NORMED, NORMS = ALL / DIM,
                WARP = Core::warp_threads(), TOGETHER = 8;
  const DeltaRows<S> from(b, stage);
  const float* const scales = b.memory.constants + stage.gated_norm;
  float* const to = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  const int step = b.plan.blocks * b.core.warps();
  TWIN_ONCE
  for (int at = b.block * b.core.warps() + b.core.warp(); at < pass.tokens * NORMS; at += step) {
    const int token = at / NORMS, begin = at % NORMS * DIM;
    const float *const outputs = state_outputs(b, token) + begin,
                *const gates = from.gates(token) + begin;
    const auto each = [&](auto use) {  // use(column, output, what opens it)
      TWIN_ONCE
      for (int first = b.core.warp_thread(); first < DIM; first += TOGETHER * WARP) {
        float made[TOGETHER], open[TOGETHER];
        TWIN_UNROLL
        for (int j = 0; j < TOGETHER; ++j) {
          const int d = first + j * WARP;
          made[j] = d < DIM ? load_shared(outputs + d) : 0.0f;
          open[j] = d < DIM ? load_shared(gates + d) : 0.0f;
        }
        TWIN_UNROLL
        for (int j = 0; j < TOGETHER; ++j)
          if (first + j * WARP < DIM) use(first + j * WARP, made[j], silu(open[j]));
      }
    };
    float squares = 0;
    each([&](int, float made, float open) {
      const float seen = Delta::MAMBA ? made * open : made;
      squares += seen * seen;
    });
    const float by = inverse_root(b.core.warp_sum(squares) / float(DIM) + b.plan.norm_eps);
    each([&](int d, float made, float open) {
      const int column = begin + d;
      Chunk::store(to, ALL, token, column,
                   made * open * by * scales[Delta::MAMBA ? column : d]);
    });
  }
}

// Outputs normed and gated, or of Mamba-2 gated and normed, as the output projection multiplies
// them: those of a token that one norm is over by a warp, several under way together.
template <class S>
__device__ __forceinline__ void norm_states(Block& b, const S& stage, const Pass& pass) {
  constexpr int ALL = Delta::VALUE_HEADS * Delta::VALUE_DIM, DIM = Delta::NORMED, NORMS = ALL / DIM,
                EACH = (DIM + Core::warp_threads() - 1) / Core::warp_threads(),
                AT_ONCE = EACH <= 4 ? 4 : EACH <= 8 ? 2 : 1;
  if constexpr (EACH > MOST_NORMED) {
    norm_long_states(b, stage, pass);
    return;
  }
  const DeltaRows<S> from(b, stage);
  const float* const scales = b.memory.constants + stage.gated_norm;
  float* const to = pass_row(b.memory, b.plan.values_at(stage.publishes), 0, 0);
  const int all = pass.tokens * NORMS, step = b.plan.blocks * b.core.warps();
  TWIN_ONCE
  for (int first = b.block * b.core.warps() + b.core.warp(); first < all; first += step * AT_ONCE) {
    float made[AT_ONCE][EACH], gate[AT_ONCE][EACH];
    TWIN_UNROLL
    for (int k = 0; k < AT_ONCE; ++k) {
      const int at = first + k * step < all ? first + k * step : first;
      const float* const outputs = state_outputs(b, at / NORMS) + at % NORMS * DIM;
      const float* const gates = from.gates(at / NORMS) + at % NORMS * DIM;
      TWIN_UNROLL
      for (int j = 0; j < EACH; ++j) {
        const int d = b.core.warp_thread() + j * b.core.warp_threads();
        made[k][j] = d < DIM ? load_shared(outputs + d) : 0.0f;
        gate[k][j] = d < DIM ? load_shared(gates + d) : 0.0f;
        if constexpr (Delta::MAMBA) made[k][j] *= silu(gate[k][j]);
      }
    }
    TWIN_UNROLL
    for (int k = 0; k < AT_ONCE; ++k) {
      float squares = 0;
      TWIN_UNROLL
      for (int j = 0; j < EACH; ++j) squares += made[k][j] * made[k][j];
      const float by = inverse_root(b.core.warp_sum(squares) / float(DIM) + b.plan.norm_eps);
      const int at = first + k * step;
      if (at >= all) continue;
      TWIN_UNROLL
      for (int j = 0; j < EACH; ++j) {
        const int d = b.core.warp_thread() + j * b.core.warp_threads();
        if (d >= DIM) continue;
        const int column = at % NORMS * DIM + d;
        const float open = Delta::MAMBA ? 1.0f : silu(gate[k][j]);
        Chunk::store(to, ALL, at / NORMS, column,
                     made[k][j] * by * scales[Delta::MAMBA ? column : d] * open);
      }
    }
  }
}

// Where tensor cores find a stage's states, and what they are carried on by.
template <class States, class S>
__device__ __forceinline__ typename States::Memory states_memory(const Block& b, const S& stage,
                                                                 const Pass& pass) {
  static_assert(States::FLOATS == Recurrent::FLOATS && States::ALL == Recurrent::ALL &&
                    States::LEAST_SQUARE == Recurrent::LEAST_SQUARE,
                "states lie as steps have them");
  const DeltaRows<S> from(b, stage);
  typename States::Memory of = {};
  of.rows = from.rows, of.width = from.width;
  of.steering = from.steering, of.steering_width = from.steering_width;
  of.taps = b.memory.constants + stage.taps, of.decays = b.memory.constants + stage.decays;
  of.states = Recurrent::state(b, stage, 0), of.outputs = state_outputs(b, 0);
  of.first = pass.first, of.tokens = pass.tokens;
  of.solved(b.memory.prompt + b.plan.prompt_solved, b.plan.prompt_chunk);
  return of;
}

// The stage DELTA; false: the generation is over.
template <class C, class S, class Ready>
__device__ __forceinline__ bool pass_states(Block& b, C& chunk, const S& stage, const Pass& pass,
                                            Ready ready) {
  if constexpr (C::TENSOR_STATES) {
    const auto of = states_memory<typename C::States>(b, stage, pass);
    const int heads = Delta::KEY_HEADS, all = of.chunks() * heads;
    TWIN_ONCE
    for (int i = b.block; i < all; i += b.plan.blocks)
      typename C::template Solving<Core>(b.core, of, chunk.memory(b)).run(i / heads, i % heads);
    if (!ready()) return false;
    const Span own = b.plan.owned_of(stage.items, b.block);
    TWIN_ONCE
    for (int item = own.lo; item < own.hi; ++item)
      typename C::template Carrying<Core>(b.core, of, chunk.memory(b), item).run();
  } else {
    carry_states(b, stage, pass);
  }
  if (!ready()) return false;
  norm_states(b, stage, pass);
  return true;
}

}  // namespace twin
