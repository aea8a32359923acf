// EAGLE-3: a layer of its own drafts tokens from three of the model's residuals. All blocks work on
// it together; what one stage makes of it the next one finds behind a barrier of all blocks. Its
// weights and numbers lie in the rank's memory for prompts, rows of a matrix as they follow here:
// two rows that are needed together are neighbours.
#pragma once

namespace twin {

// Floats of a head's gains before its norms' weights.
constexpr int HEAD_FIRST = facts::HEAD_FIRST;
constexpr int HEAD_STATES = 3;    // of the model's residuals
constexpr int HEAD_MOST = 256;    // elements of an attention head
constexpr int HEAD_ROWS = 8;      // of a matrix, that a warp multiplies together

__device__ __forceinline__ bool has_draft_head(const Block& b) {
  return b.plan.drafts && b.plan.draft_vocab;
}

// Behind the stage at `index`, whose norm has left the residual of this block's tokens: is it one of
// those that the head wants?
__device__ TWIN_LARGE void keep_states(Block& b, int index, const Pass& pass) {
  const int which = index == b.plan.draft_taken0   ? 0
                    : index == b.plan.draft_taken1 ? 1
                    : index == b.plan.draft_taken2 ? 2
                                                   : -1;
  if (which < 0) return;
  const int hidden = b.plan.hidden;
  b.core.barrier();
  TWIN_ONCE
  for (int token = b.block; token < pass.tokens; token += b.plan.blocks) {
    const float* const from = b.memory.prompt + b.plan.prompt_residual + long(token) * hidden;
    float* const to =
        b.memory.prompt + b.plan.draft_states + (long(token) * HEAD_STATES + which) * hidden;
    TWIN_EACH(i, hidden) store_shared(to + i, load_shared(from + i));
  }
}

struct DraftHead {
  Block& b;
  Pass& pass;

  __device__ __forceinline__ float* at(int offset) const { return b.memory.prompt + offset; }
  __device__ __forceinline__ bool wait() { return meet(b, b.plan.round_stages - 1, pass); }
  // What this block alone makes of an input: an embedding and a state, or a state.
  __device__ __forceinline__ float* own() const {
    return at(b.plan.draft_own) + long(b.block) * 2 * b.plan.hidden;
  }
  __device__ __forceinline__ const float* gain(int which) const {
    return at(b.plan.draft_gains) + HEAD_FIRST + long(which) * b.plan.hidden;
  }

  // emit(token, first of two rows, its sum, the next one's), of this block's rows.
  template <class Emit>
  __device__ __forceinline__ void multiply(int weights, int first, int rows, int cols,
                                           const float* x, long pitch, int tokens, Emit emit) {
    const u8* const from =
        reinterpret_cast<const u8*>(at(weights)) + long(first) * cols * type_bytes(WEIGHT);
    float* const sums = b.scratch + b.core.warp() * HEAD_ROWS;
    const int groups = (rows + HEAD_ROWS - 1) / HEAD_ROWS, step = b.plan.blocks * b.core.warps();
    TWIN_ONCE
    for (int group = b.block * b.core.warps() + b.core.warp(); group < groups; group += step) {
      const int row = group * HEAD_ROWS, count = least(HEAD_ROWS, rows - row);
      TWIN_ONCE
      for (int token = 0; token < tokens; ++token) {
        dot_draft_rows(b, from + long(row) * cols * type_bytes(WEIGHT), count, cols,
                       x + token * pitch, sums);
        b.core.warp_sync();
        for (int i = 0; i < count && b.core.warp_thread() == 0; i += 2)
          emit(token, row + i, sums[i], sums[i + 1]);
        b.core.warp_sync();
      }
    }
  }

  // to[i] = x(i) normed, times a gain; by all threads of the block.
  template <class X>
  __device__ __forceinline__ void norm(float* to, const float* gain, X x) {
    const int hidden = b.plan.hidden;
    float squares = 0.0f;
    TWIN_ONCE
    TWIN_EACH(i, hidden) {
      const float v = x(i);
      squares += v * v;
    }
    squares = b.core.warp_sum(squares);
    float* const sums = b.scratch;
    if (b.core.warp_thread() == 0) sums[b.core.warp()] = squares;
    b.core.barrier();
    float total = 0.0f;
    for (int w = 0; w < b.core.warps(); ++w) total += sums[w];
    const float scale =
        1.0f / square_root(total / float(hidden) + *at(b.plan.draft_gains));
    TWIN_ONCE
    TWIN_EACH(i, hidden) store_shared(to + i, x(i) * scale * gain[i]);
    b.core.barrier();
  }

  // A token's embedding and a state, side by side.
  __device__ TWIN_LARGE void put_input(float* to, int token, const float* state) {
    const int hidden = b.plan.hidden;
    const u8* const table = b.plan.draft_embed >= 0
                                ? reinterpret_cast<const u8*>(at(b.plan.draft_embed))
                                : b.memory.embedding;
    const u8* const row = table + u64(token) * u64(hidden) * type_bytes(WEIGHT);
    norm(to, gain(0), [&](int i) { return load_element<WEIGHT>(row + i * type_bytes(WEIGHT)); });
    norm(to + hidden, gain(1), [&](int i) { return load_shared(state + i, true); });
  }

  // Keys and values of inputs x, from a position on; of the last one also queries.
  __device__ TWIN_LARGE void put_keys(const float* x, int tokens, int first, bool asks) {
    const int half = b.plan.draft_dim / 2, keys = b.plan.draft_kv_heads * b.plan.draft_dim,
              cols = 2 * b.plan.hidden;
    const float* const turns = at(b.plan.draft_turns);
    float* const cache = at(b.plan.draft_cache);
    // neighbours are elements i and i + half of a head
    auto turn = [&](float* to, int position, int row, float one, float other) {
      const int head = row / 2 / half, i = row / 2 % half;
      const float* const by = turns + (long(position) * half + i) * 2;
      store_shared(to + head * 2 * half + i, one * by[0] - other * by[1]);
      store_shared(to + head * 2 * half + i + half, other * by[0] + one * by[1]);
    };
    multiply(b.plan.draft_qkv, 0, 2 * keys, cols, x, cols, tokens,
             [&](int token, int row, float one, float other) {
               float* const to = cache + long(first + token) * 2 * keys;
               if (row < keys) return turn(to, first + token, row, one, other);
               store_shared(to + row, one), store_shared(to + row + 1, other);
             });
    if (!asks) return;
    const int last = tokens - 1;
    multiply(b.plan.draft_qkv, 2 * keys, b.plan.draft_heads * b.plan.draft_dim, cols,
             x + long(last) * cols, 0, 1, [&](int, int row, float one, float other) {
               turn(at(b.plan.draft_query), first + last, row, one, other);
             });
  }

  // Tokens whose states the pass has left: keys and values of all; what the layer makes of the
  // last, if somebody asks. next(token): the one behind.
  template <class Next>
  __device__ TWIN_LARGE bool read(int tokens, int first, bool asks, Next next) {
    const int hidden = b.plan.hidden;
    float *const state = at(b.plan.draft_state), *const input = at(b.plan.draft_input);
    multiply(b.plan.draft_fc, 0, hidden, HEAD_STATES * hidden, at(b.plan.draft_states),
             HEAD_STATES * hidden, tokens, [&](int token, int row, float one, float other) {
               float* const to = state + long(token) * hidden + row;
               store_shared(to, one), store_shared(to + 1, other);
             });
    if (!wait()) return false;
    TWIN_ONCE
    for (int token = b.block; token < tokens; token += b.plan.blocks)
      put_input(input + long(token) * 2 * hidden, next(token), state + long(token) * hidden);
    if (!wait()) return false;
    put_keys(input, tokens, first, asks);
    return wait();
  }

  // Attention of the query at a position, of this block's heads.
  __device__ TWIN_LARGE void attend(int position) {
    constexpr int THREADS = Core::warp_threads(), EACH = HEAD_MOST / THREADS;
    const int dim = b.plan.draft_dim, pitch = 2 * b.plan.draft_kv_heads * dim,
              group = b.plan.draft_heads / b.plan.draft_kv_heads, lane = b.core.warp_thread(),
              warps = b.core.warps();
    const float scale = 1.0f / square_root(float(dim));
    TWIN_ONCE
    for (int head = b.block; head < b.plan.draft_heads; head += b.plan.blocks) {
      const float* const keys = at(b.plan.draft_cache) + head / group * dim;
      const float* const values = keys + pitch / 2;
      float query[EACH], out[EACH] = {}, most = -infinity(), sum = 0.0f;
      for (int k = 0; k < EACH; ++k) {
        const int i = lane + k * THREADS;
        query[k] = i < dim ? load_shared(at(b.plan.draft_query) + head * dim + i, true) : 0.0f;
      }
      TWIN_ONCE
      for (int p = b.core.warp(); p <= position; p += warps) {
        float score = 0.0f;
        for (int k = 0; k < EACH && lane + k * THREADS < dim; ++k)
          score += query[k] * load_shared(keys + long(p) * pitch + lane + k * THREADS, true);
        score = b.core.warp_sum(score) * scale;
        const float higher = score > most ? score : most, kept = exp32(most - higher),
                    mine = exp32(score - higher);
        sum = sum * kept + mine, most = higher;
        for (int k = 0; k < EACH && lane + k * THREADS < dim; ++k)
          out[k] = out[k] * kept +
                   mine * load_shared(values + long(p) * pitch + lane + k * THREADS, true);
      }
      float* const parts = b.scratch;  // [warps][dim, most, sum]
      float* const part = parts + b.core.warp() * (dim + 2);
      b.core.barrier();
      for (int k = 0; k < EACH && lane + k * THREADS < dim; ++k) part[lane + k * THREADS] = out[k];
      if (lane == 0) part[dim] = most, part[dim + 1] = sum;
      b.core.barrier();
      TWIN_EACH(i, dim) {
        float highest = -infinity(), total = 0.0f, made = 0.0f;
        for (int w = 0; w < warps; ++w) {
          const float one = parts[w * (dim + 2) + dim];
          highest = one > highest ? one : highest;
        }
        for (int w = 0; w < warps; ++w) {
          const float* const one = parts + w * (dim + 2);
          if (one[dim + 1] == 0.0f) continue;  // a warp without positions
          const float by = exp32(one[dim] - highest);
          total += by * one[dim + 1], made += by * one[i];
        }
        store_shared(at(b.plan.draft_out) + head * dim + i, made / total);
      }
    }
  }

  // The token that the layer drafts behind a position, from the query there and the state before;
  // its own output lies in `draft_last`. False: the generation is over.
  __device__ TWIN_LARGE bool draft(int position, const float* state, int& token) {
    const int hidden = b.plan.hidden;
    float *const sum = at(b.plan.draft_sum), *const last = at(b.plan.draft_last),
                *const gated = at(b.plan.draft_gated);
    attend(position);
    if (!wait()) return false;
    multiply(b.plan.draft_o, 0, hidden, b.plan.draft_heads * b.plan.draft_dim,
             at(b.plan.draft_out), 0, 1, [&](int, int row, float one, float other) {
               store_shared(sum + row, load_shared(state + row, true) + one);
               store_shared(sum + row + 1, load_shared(state + row + 1, true) + other);
             });
    if (!wait()) return false;
    norm(own(), gain(2), [&](int i) { return load_shared(sum + i, true); });
    multiply(b.plan.draft_gate_up, 0, 2 * b.plan.draft_ffn, hidden, own(), 0, 1,
             [&](int, int row, float gate, float up) {
               store_shared(gated + row / 2, gate / (1.0f + exp32(-gate)) * up);
             });
    if (!wait()) return false;
    multiply(b.plan.draft_down, 0, hidden, b.plan.draft_ffn, gated, 0, 1,
             [&](int, int row, float one, float other) {
               store_shared(last + row, load_shared(sum + row, true) + one);
               store_shared(last + row + 1, load_shared(sum + row + 1, true) + other);
             });
    if (!wait()) return false;
    norm(own(), gain(3), [&](int i) { return load_shared(last + i, true); });
    Candidate mine = {-infinity(), 0x7FFFFFFF};
    multiply(b.plan.draft_lm, 0, (b.plan.draft_vocab + 1) / 2 * 2, hidden, own(), 0, 1,
             [&](int, int row, float one, float other) {
               const Candidate first = {one, row}, second = {other, row + 1};
               if (wins(first, mine)) mine = first;
               if (row + 1 < b.plan.draft_vocab && wins(second, mine)) mine = second;
             });
    put_own(mine);
    if (!wait()) return false;
    token = chosen();
    return true;
  }

 private:
  __device__ __forceinline__ void put_own(const Candidate& mine) {
    const Candidate best = b.core.best(mine, wins);
    if (b.core.thread() != 0) return;
    float* const to = at(b.plan.draft_best) + b.block * CANDIDATE;
    store_shared(to, best.logit), store_word(to + 1, best.index);
  }
  // The model's number of the best of all blocks; every block looks.
  __device__ __forceinline__ int chosen() {
    Candidate mine = {-infinity(), 0x7FFFFFFF};
    TWIN_EACH(i, b.plan.blocks) {
      const float* const from = at(b.plan.draft_best) + i * CANDIDATE;
      const Candidate other = {load_shared(from, true), load_word(from + 1)};
      if (wins(other, mine)) mine = other;
    }
    const int index = b.core.best(mine, wins).index;
    // no logit is a number: any token will do, the model rejects it
    return load_word(at(b.plan.draft_ids) + (index < b.plan.draft_vocab ? index : 0));
  }
};

// What the block that decides leaves for the head: is the generation over, the last token's
// position, tokens of the round that count, drafts that are wanted.
struct Wanted {
  int over, position, count, drafts;
};

__device__ __forceinline__ Wanted load_wanted(const Block& b) {
  const float* const from = b.memory.prompt + b.plan.draft_wanted;
  return {load_word(from), load_word(from + 1), load_word(from + 2), load_word(from + 3)};
}

// The next round's drafts, by all blocks; one of them, `decides`, writes the round. False: the
// generation is over.
__device__ TWIN_LARGE bool make_drafts(Block& b, Pass& pass, bool decides, const float* history) {
  DraftHead head = {b, pass};
  const Wanted wanted = load_wanted(b);
  float* const round = round_at(b, 0);
  const int first = wanted.position - wanted.count;
  const bool asks = !wanted.over && wanted.drafts > 0;
  if (!wanted.over && !head.read(wanted.count, first, asks, [&](int token) {
        return load_word(history + first + token + 1);
      }))
    return false;
  const float* state = head.at(b.plan.draft_state) + long(wanted.count - 1) * b.plan.hidden;
  for (int i = 0; asks && i < wanted.drafts; ++i) {
    int token = 0;
    const int position = wanted.position - 1 + i;
    if (!head.draft(position, state, token)) return false;
    if (decides && b.core.thread() == 0) store_word(round + ROUND_FIRST + 1 + i, token);
    if (i + 1 == wanted.drafts) break;
    state = head.at(b.plan.draft_last);
    head.put_input(head.own(), token, state);
    head.put_keys(head.own(), 1, position + 1, true);
    if (!head.wait()) return false;
  }
  if (decides && b.core.thread() == 0) {
    store_word(round, wanted.over ? 0 : 1 + (asks ? wanted.drafts : 0));
    store_word(round + 1, wanted.position);
    store_word(round + ROUND_FIRST, load_word(history + wanted.position));
  }
  return true;
}

}  // namespace twin
