// Gated DeltaNet or Mamba-2 of a prompt pass on the tensor cores, 64 tokens at once. Of a state S
// before them, with keys k, queries q, values v, write strengths w, and the logarithm g of the decay
// from there to a token, itself included, what tokens write, u, solves
//
//   u_i + sum over j < i of w_i exp(g_i - g_j) (k_i.k_j) u_j = w_i v_i - w_i exp(g_i) S^T k_i
//
// a triangular system that is solved for both terms of its right side before S is known: u = U - W S.
// Any block does that, for the 64 tokens of a key head (Solving). Then who has the columns of a
// state carries it on (Carrying):
//
//   out_i = exp(g_i) S^T q_i + sum over j <= i of exp(g_i - g_j) (q_i.k_j) u_j
//   S = exp(g_last) S + sum over j of exp(g_last - g_j) k_j u_j^T
//
// Of Mamba-2, whose B are keys, C queries and x values, with time steps t and a factor D of the
// head, there is nothing to solve for:
//
//   out_i = exp(g_i) S^T q_i + sum over j <= i of exp(g_i - g_j) (q_i.k_j) t_j x_j + D x_i
//   S = exp(g_last) S + sum over j of exp(g_last - g_j) k_j (t_j x_j)^T
//
// Products are of TF32 and added up in FP32; a state, and what is solved for, stay FP32. Every
// exponent is at most zero. tests/native/delta.cpp stands in for the machine on a CPU.
#pragma once

#include "time_steps.h"

namespace twin {

// d += a * b for 16 rows, 8 columns and 8 elements in TF32.
#ifndef TWIN_OWN_PRODUCTS
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// As products take it.
__device__ __forceinline__ float tf32(float value) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits_as<float>(bits);
}
#endif

struct PassStates {
  static constexpr int TOKENS = facts::STATE_TOKENS, ROWS = facts::STATE_ROWS,
                       WARPS = CONSUMER_WARPS, SETS = TOKENS / ROWS;  // of a chunk's tokens
  static constexpr int KEYS = Delta::KEY_DIM, VALUES = Delta::VALUE_DIM, COLUMNS = Delta::COLUMNS,
                       HEADS = Delta::VALUE_HEADS, KEY_HEADS = Delta::KEY_HEADS,
                       PER_KEY = HEADS / KEY_HEADS, SPLITS = VALUES / COLUMNS,
                       PAST = Delta::CONV - 1, CHANNELS = 2 * KEYS + COLUMNS;  // of an item
  static constexpr int QUERIES = KEY_HEADS * KEYS, ALL = 2 * QUERIES + HEADS * VALUES;
  static constexpr int STATE = KEYS * COLUMNS, FLOATS = STATE + PAST * CHANNELS;  // of an item
  static constexpr float LEAST_SQUARE = 1e-6f;  // Recurrent's
  static constexpr bool FITS = Delta::ANY && Plan::prompt_chunk >= TOKENS && KEYS % ROWS == 0 &&
                               COLUMNS % 8 == 0;
  // rows of shared memory begin in other banks: as matrices are loaded, or their columns
  static constexpr int PITCH = KEYS + 4, TURNED = KEYS + 8, SQUARE = TOKENS + 4,
                       DIAGONAL = ROWS + 4, SIDE = COLUMNS + 8,
                       SOLVED = (VALUES + KEYS + 31) / 32 * 32 + 8;
  // where a block has what, in floats
  // First numbers that steer the tokens, while it solves two of each head of a key, then of one head;
  // rows of keys and queries.
  static constexpr int STEERING = 2 * PER_KEY * TOKENS, STEERING_ONE = 2 * TOKENS,
                       ROWS_OF_KEYS = TOKENS * PITCH;
  static constexpr int SYSTEM = STEERING + 2 * ROWS_OF_KEYS, INVERSE = SYSTEM + TOKENS * SQUARE,
                       SIDES = INVERSE + TOKENS * DIAGONAL,
                       // Mamba-2 has nothing to solve for
                       SOLVING = Delta::MAMBA ? SYSTEM : SIDES + TOKENS * SOLVED;
  static constexpr int TURNED_KEYS = STEERING_ONE + 2 * ROWS_OF_KEYS,
                       SCORES = TURNED_KEYS + TOKENS * TURNED, HELD = SCORES + TOKENS * SQUARE,
                       WRITTEN = HELD + KEYS * SIDE, DECAYED = WRITTEN + TOKENS * SIDE,
                       GIVEN = DECAYED + TOKENS * SIDE, CARRYING = GIVEN + TOKENS * SIDE;
  static_assert(!FITS || (4 * SOLVING <= Plan::prompt_bytes && 4 * CARRYING <= Plan::prompt_bytes &&
                          KEYS <= WARPS * ROWS && SETS * 2 == WARPS),
                "_states_bytes in twin/schedule/pass_memory.py counts the same");

  // Where a pass has everything; FP32.
  struct Memory {
    const float *rows, *steering;  // [tokens] queries, keys and values; strengths and decays
    int width, steering_width;     // of a token
    const float *taps, *decays;    // [PAST + 1][ALL], biases behind them; [2 or 3][HEADS]
    float* states;                 // [items][FLOATS]
    float* outputs;                // [tokens][HEADS][VALUES]: U, of Mamba-2 x, then outputs
    // [tokens][KEY_HEADS][KEYS] normed; [tokens][HEADS][KEYS] W; [tokens][HEADS][TOKENS] products of
    // queries and keys, decayed, of Mamba-2 times t; [HEADS][capacity] g, and t
    float *queries, *keys, *weights, *scores, *decayed, *steps;
    int first, tokens, capacity;  // position of the pass's first token; of tokens

    __device__ __forceinline__ void solved(float* from, int room) {
      capacity = room;
      constexpr int SOLVED_FOR = Delta::MAMBA ? 0 : HEADS * KEYS;
      queries = from, keys = queries + long(room) * QUERIES, weights = keys + long(room) * QUERIES;
      scores = weights + long(room) * SOLVED_FOR, decayed = scores + long(room) * HEADS * TOKENS;
      steps = decayed + long(room) * HEADS;  // of Mamba-2
    }
    __device__ __forceinline__ int chunks() const { return (tokens + TOKENS - 1) / TOKENS; }
    __device__ __forceinline__ float* history(int item, int token) const {
      return states + long(item) * FLOATS + STATE + (first + token) % PAST * CHANNELS;
    }
  };

  // ---- fragments of products
  // 16 rows and 8 columns at `at`, rows of `pitch` floats.
  __device__ __forceinline__ static void left(u32 (&to)[4], u32 at, int pitch, int lane) {
    load_matrices(to, at + u32((lane % 16 * pitch + lane / 16 * 4) * 4));
  }
  // The same of their transpose: rows are columns.
  __device__ __forceinline__ static void left_turned(u32 (&to)[4], const float* at, int pitch,
                                                     int lane) {
    const float* const from = at + lane % 4 * pitch + lane / 4;
    to[0] = bits_as<u32>(from[0]), to[1] = bits_as<u32>(from[8]);
    to[2] = bits_as<u32>(from[4 * pitch]), to[3] = bits_as<u32>(from[4 * pitch + 8]);
  }
  // d[n] += a times 8 rows of columns n * 8 .. n * 8 + 7 at `at`.
  template <int N>
  __device__ __forceinline__ static void add_products(float (&d)[N][4], const u32 (&a)[4],
                                                      const float* at, int pitch, int lane) {
    const float* const from = at + lane % 4 * pitch + lane / 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
      multiply_tf32(d[n], a, bits_as<u32>(from[8 * n]), bits_as<u32>(from[4 * pitch + 8 * n]));
  }
  // each(row, column, two neighbours) of a thread's sums, rows lane / 4 and 8 more.
  template <int N, class Each>
  __device__ __forceinline__ static void each_pair(float (&d)[N][4], int lane, Each each) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        each(lane / 4 + 8 * h, 8 * n + lane % 4 * 2, d[n][2 * h], d[n][2 * h + 1]);
  }
  __device__ __forceinline__ static void put(float* at, float one, float next) {
    *reinterpret_cast<float2*>(at) = float2{one, next};
  }

  // ---- convolutions
  // put(token of the chunk, Pack<4>) of four neighbouring channels of `run` tokens from `begin` on,
  // behind the convolution and SiLU; zeros behind the last token. `channel` is among all; `item` and
  // `of_item` say where its history is.
  static constexpr int RUN = 8;
  template <class Put>
  __device__ __forceinline__ static void convolve(const Memory& of, int first, int begin,
                                                  int channel, int item, int of_item, Put put) {
    Pack<4> tap[PAST + 1], seen[PAST + RUN], added = {};
#pragma unroll
    for (int m = 0; m <= PAST; ++m) tap[m] = load_pack<4, 16>(of.taps + m * ALL + channel);
    if constexpr (Delta::BIASED)
      added = load_pack<4, 16>(of.taps + (PAST + 1) * ALL + channel);
#pragma unroll
    for (int i = 0; i < PAST + RUN; ++i) {
      const int token = first + begin + i - PAST;
      seen[i] = Pack<4>{};
      if (token >= of.tokens || of.first + token < 0) continue;
      seen[i] = load_pack<4, 16>(token >= 0 ? of.rows + long(token) * of.width + channel
                                            : of.history(item, token) + of_item);
    }
#pragma unroll
    for (int i = 0; i < RUN; ++i) {
      Pack<4> made = {};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float sum = 0;
#pragma unroll
        for (int m = 0; m <= PAST; ++m) sum += seen[i + m].at[c] * tap[m].at[c];
        if constexpr (Delta::BIASED) sum += added.at[c];
        made.at[c] = first + begin + i < of.tokens ? sum / (1.0f + exp32(-sum)) : 0.0f;
      }
      put(begin + i, made);
    }
  }
};

// The tokens of a chunk of one key head after the other: what its value heads' tokens write, but for
// the state.
template <class Core>
struct Solving : PassStates {
  static constexpr int FIRST = STEERING, SECOND = FIRST + ROWS_OF_KEYS;

  Core& core;
  const Memory& of;
  float* chip;

  __device__ __forceinline__ Solving(Core& core, const Memory& of, float* chip)
      : core(core), of(of), chip(chip) {}
  __device__ __forceinline__ float* decay(int h) const { return chip + h * 2 * TOKENS; }
  __device__ __forceinline__ float* strength(int h) const { return decay(h) + TOKENS; }

  // Queries and keys of a key head, convolved.
  __device__ __forceinline__ void convolve_keys(int first, int key) const {
    constexpr int QUADS = KEYS / 4, RUNS = TOKENS / RUN;
#pragma unroll 1
    for (int i = core.thread(); i < 2 * QUADS * RUNS; i += CONSUMERS) {
      const int quad = i % QUADS, second = i / QUADS % 2, begin = i / QUADS / 2 * RUN;
      float* const to = chip + (second ? SECOND : FIRST) + 4 * quad;
      convolve(of, first, begin, second * QUERIES + key * KEYS + 4 * quad,
               key * PER_KEY * SPLITS, second * KEYS + 4 * quad,
               [&](int token, const Pack<4>& made) {
                 *reinterpret_cast<float4*>(to + token * PITCH) =
                     float4{made.at[0], made.at[1], made.at[2], made.at[3]};
               });
    }
  }
  // Normed, but for Mamba-2's, as products take them, here and where states are carried on.
  __device__ __forceinline__ void norm_keys(int first, int key) const {
    constexpr int EACH = (KEYS + 31) / 32;
    const int lane = core.warp_thread();
#pragma unroll 1
    for (int token = core.warp(); token < TOKENS; token += WARPS) {
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        float* const row = chip + (second ? SECOND : FIRST) + token * PITCH;
        float x[EACH], squares = 0;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          x[j] = lane + 32 * j < KEYS ? row[lane + 32 * j] : 0.0f;
          squares += x[j] * x[j];
        }
        float by = 1.0f;
        if constexpr (!Delta::MAMBA) {
          by = inverse_root(core.warp_sum(squares) + LEAST_SQUARE);
          if (!second) by /= square_root(float(KEYS));
        }
        float* const to = (second ? of.keys : of.queries) + long(first + token) * QUERIES + key * KEYS;
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const int d = lane + 32 * j;
          if (d >= KEYS) continue;
          row[d] = tf32(x[j] * by);
          if (first + token < of.tokens) store_shared(to + d, row[d]);
        }
      }
    }
  }
  // Write strengths, of Mamba-2 time steps, and logarithms of decays since the chunk's begin, of the
  // key head's value heads.
  __device__ __forceinline__ void steer(int first, int key) const {
    const int lane = core.warp_thread();
#pragma unroll 1
    for (int h = core.warp(); h < PER_KEY; h += WARPS) {
      const int head = key * PER_KEY + h;
      const float factor = of.decays[head], offset = of.decays[HEADS + head];
      float log[2], by[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int token = first + 2 * lane + i;
        const bool there = token < of.tokens;
        const float* const row = of.steering + long(there ? token : first) * of.steering_width;
        if constexpr (Delta::MAMBA) {
          by[i] = there ? clamped_step(load_shared(row + head) + offset) : 0.0f;
          log[i] = factor * by[i];
        } else {
          const float write = load_shared(row + head),
                      step = load_shared(row + HEADS + head) + offset;
          by[i] = there ? 1.0f / (1.0f + exp32(-write)) : 0.0f;
          log[i] = there ? factor * time_step(step) : 0.0f;
        }
      }
      log[1] += log[0];
      float before = log[1];  // of this thread's tokens and those of threads before it
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const float other = of_thread(before, u32(lane - d) & 31u);
        if (lane >= d) before += other;
      }
      before -= log[1];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        decay(h)[2 * lane + i] = before + log[i], strength(h)[2 * lane + i] = by[i];
        const long at = long(head) * of.capacity + first + 2 * lane + i;
        store_shared(of.decayed + at, before + log[i]);
        if constexpr (Delta::MAMBA) store_shared(of.steps + at, by[i]);
      }
    }
  }
  // Products of 16 tokens' queries, or keys, with the keys of all tokens that are not behind them.
  __device__ __forceinline__ void compare(float (&sum)[TOKENS / 8][4]) const {
    const int lane = core.warp_thread(), set = core.warp() % SETS;
    const u32 rows = shared_address(chip + (core.warp() < SETS ? SECOND : FIRST) + set * ROWS * PITCH),
              keys = shared_address(chip + SECOND);
#pragma unroll 2
    for (int d = 0; d < KEYS; d += 8) {
      u32 a[4];
      left(a, rows + 4 * d, PITCH, lane);
#pragma unroll
      for (int n = 0; n < TOKENS / 16; ++n) {
        if (n > set) break;
        u32 b[4];
        load_matrices(b, keys + u32(((16 * n + lane / 16 * 8 + lane % 8) * PITCH + d +
                                     lane / 8 % 2 * 4) * 4));
        multiply_tf32(sum[2 * n], a, b[0], b[1]);
        multiply_tf32(sum[2 * n + 1], a, b[2], b[3]);
      }
    }
  }
  // Of one value head: the system, less its diagonal, with the other sign; and scores, of Mamba-2
  // alone.
  __device__ __forceinline__ void weigh(float (&sum)[TOKENS / 8][4], int first, int head, int h) const {
    const int set = core.warp() % SETS;
    const bool system = core.warp() < SETS;
    each_pair(sum, core.warp_thread(), [&](int row, int column, float one, float next) {
      if (column / ROWS > set) return;
      row += set * ROWS;
      const float* const g = decay(h);
      if constexpr (Delta::MAMBA) {
        const float* const by = strength(h);
        one *= by[column], next *= by[column + 1];
      }
      if (system && !Delta::MAMBA) {
        const float by = -strength(h)[row];
        put(chip + SYSTEM + row * SQUARE + column,
            column < row ? tf32(by * exp32(g[row] - g[column]) * one) : 0.0f,
            column + 1 < row ? tf32(by * exp32(g[row] - g[column + 1]) * next) : 0.0f);
      } else if (first + row < of.tokens) {
        float* const to =
            of.scores + (long(first + row) * HEADS + head) * TOKENS + column;
        store_pair(to, column <= row ? tf32(exp32(g[row] - g[column]) * one) : 0.0f,
                   column + 1 <= row ? tf32(exp32(g[row] - g[column + 1]) * next) : 0.0f);
      }
    });
  }
  __device__ __forceinline__ static void store_pair(float* at, float one, float next) {
    store_shared(at, one), store_shared(at + 1, next);
  }
  // Mamba-2: x of all value heads of a key.
  __device__ __forceinline__ void find_values(int first, int key) const {
    constexpr int QUADS = PER_KEY * VALUES / 4, RUNS = TOKENS / RUN;
    const int channel = key * PER_KEY * VALUES;
    float* const to = of.outputs + channel;
#pragma unroll 1
    for (int i = core.thread(); i < QUADS * RUNS; i += CONSUMERS) {
      const int column = i % QUADS * 4, begin = i / QUADS * RUN;
      convolve(of, first, begin, 2 * QUERIES + channel + column, (channel + column) / COLUMNS,
               2 * KEYS + column % COLUMNS, [&](int token, const Pack<4>& made) {
                 if (first + token >= of.tokens) return;
                 float* const at = to + long(first + token) * HEADS * VALUES + column;
                 store_pair(at, made.at[0], made.at[1]), store_pair(at + 2, made.at[2], made.at[3]);
               });
    }
  }
  // Both right sides.
  __device__ __forceinline__ void fill(int first, int head, int h) const {
    constexpr int QUADS = VALUES / 4, RUNS = TOKENS / RUN;
    float* const sides = chip + SIDES;
    const float *const g = decay(h), *const by = strength(h);
#pragma unroll 1
    for (int i = core.thread(); i < QUADS * RUNS; i += CONSUMERS) {
      const int column = i % QUADS * 4, begin = i / QUADS * RUN;
      convolve(of, first, begin, 2 * QUERIES + head * VALUES + column,
               head * SPLITS + column / COLUMNS, 2 * KEYS + column % COLUMNS,
               [&](int token, const Pack<4>& made) {
                 const float w = by[token];
                 *reinterpret_cast<float4*>(sides + token * SOLVED + column) =
                     float4{w * made.at[0], w * made.at[1], w * made.at[2], w * made.at[3]};
               });
    }
#pragma unroll 4
    for (int i = core.thread(); i < TOKENS * KEYS; i += CONSUMERS) {
      const int token = i / KEYS, d = i % KEYS;
      sides[token * SOLVED + VALUES + d] =
          by[token] * exp32(g[token]) * chip[SECOND + token * PITCH + d];
    }
  }
  // The inverse of the 16 rows of a warp of the first half that lie on the diagonal, a column by a
  // thread.
  __device__ __forceinline__ void invert() const {
    const int lane = core.warp_thread(), set = core.warp();
    if (set >= SETS) return;
    const float* const rows = chip + SYSTEM + set * ROWS * (SQUARE + 1);
    float x[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      x[r] = r == lane ? 1.0f : 0.0f;
#pragma unroll
      for (int j = 0; j < r; ++j) x[r] += rows[r * SQUARE + j] * x[j];
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      if (lane < ROWS) chip[INVERSE + (set * ROWS + r) * DIAGONAL + lane] = tf32(x[r]);
  }
  // Solves for a warp's columns of both right sides, 16 tokens after the other. Nobody else reads
  // these columns.
  __device__ __forceinline__ void solve(int first, int head) const {
    constexpr int TILES = (VALUES + KEYS) / 8, MOST = (TILES + WARPS - 1) / WARPS;
    const int lane = core.warp_thread(), begin = core.warp() * MOST;
    const u32 system = shared_address(chip + SYSTEM), inverse = shared_address(chip + INVERSE);
    if (begin >= TILES) return;
    float* const sides = chip + SIDES + 8 * begin;
#pragma unroll 1
    for (int set = 0; set < SETS; ++set) {
      float* const rows = sides + set * ROWS * SOLVED;
      float sum[MOST][4], made[MOST][4] = {};
      each_pair(sum, lane, [&](int row, int column, float& one, float& next) {
        one = rows[row * SOLVED + column], next = rows[row * SOLVED + column + 1];
      });
#pragma unroll 1
      for (int k = 0; k < set * ROWS; k += 8) {
        u32 a[4];
        left(a, system + u32((set * ROWS * SQUARE + k) * 4), SQUARE, lane);
        add_products(sum, a, sides + k * SOLVED, SOLVED, lane);
      }
      each_pair(sum, lane, [&](int row, int column, float& one, float& next) {
        put(rows + row * SOLVED + column, tf32(one), tf32(next));
      });
      core.warp_sync();
#pragma unroll
      for (int k = 0; k < ROWS; k += 8) {
        u32 a[4];
        left(a, inverse + u32((set * ROWS * DIAGONAL + k) * 4), DIAGONAL, lane);
        add_products(made, a, rows + k * SOLVED, SOLVED, lane);
      }
      core.warp_sync();  // all have what they multiply
      each_pair(made, lane, [&](int row, int column, float& one, float& next) {
        put(rows + row * SOLVED + column, tf32(one), tf32(next));
        const int token = first + set * ROWS + row, at = 8 * begin + column;
        if (token >= of.tokens || at >= VALUES + KEYS) return;
        if (at < VALUES) {
          store_pair(of.outputs + (long(token) * HEADS + head) * VALUES + at, one, next);
        } else {
          store_pair(of.weights + (long(token) * HEADS + head) * KEYS + at - VALUES, tf32(one),
                     tf32(next));
        }
      });
      core.warp_sync();
    }
  }

  __device__ __forceinline__ void run(int chunk, int key) const {
    const int first = chunk * TOKENS;
    core.barrier();  // who used the memory before has left it
    convolve_keys(first, key);
    steer(first, key);
    core.barrier();
    norm_keys(first, key);
    core.barrier();
    float sum[TOKENS / 8][4] = {};
    if constexpr (Delta::MAMBA) {
      if (core.warp() >= SETS) {
        compare(sum);
#pragma unroll 1
        for (int h = 0; h < PER_KEY; ++h) weigh(sum, first, key * PER_KEY + h, h);
      }
      find_values(first, key);
    } else {
      compare(sum);
#pragma unroll 1
      for (int h = 0; h < PER_KEY; ++h) {
        const int head = key * PER_KEY + h;
        weigh(sum, first, head, h);
        fill(first, head, h);
        core.barrier();
        invert();
        core.barrier();
        solve(first, head);
        core.barrier();
      }
    }
  }
};

// A state's columns, carried on by the tokens of the pass.
template <class Core>
struct Carrying : PassStates {
  static constexpr int TILES = COLUMNS / 8;
  static constexpr int FIRST = STEERING_ONE, SECOND = FIRST + ROWS_OF_KEYS, THIRD = TURNED_KEYS;

  Core& core;
  const Memory& of;
  float* chip;
  int item, head;

  __device__ __forceinline__ Carrying(Core& core, const Memory& of, float* chip, int item)
      : core(core), of(of), chip(chip), item(item), head(item / SPLITS) {}

  // Rows of `floats` of a chunk's tokens on their way, zeros behind the last token.
  template <int WIDTH, int PITCH_TO>
  __device__ __forceinline__ void ask(int to, const float* from, long pitch, int first) const {
    constexpr int UNITS = WIDTH / 4;
    const u32 at = shared_address(chip + to);
#pragma unroll 4
    for (int i = core.thread(); i < TOKENS * UNITS; i += CONSUMERS) {
      const int token = i / UNITS, unit = i % UNITS;
      const bool there = first + token < of.tokens;
      copy_activations(at + u32((token * PITCH_TO + 4 * unit) * 4),
                       reinterpret_cast<const u8*>(from + (there ? first + token : 0) * pitch +
                                                   4 * unit),
                       there);
    }
  }
  // What is needed with the state, and then.
  __device__ __forceinline__ void ask_first(int first) const {
    if constexpr (!Delta::MAMBA)
      ask<KEYS, PITCH>(FIRST, of.weights + head * KEYS, HEADS * KEYS, first);
    ask<KEYS, PITCH>(SECOND, of.queries + head / PER_KEY * KEYS, QUERIES, first);
    ask<COLUMNS, SIDE>(GIVEN, of.outputs + item * COLUMNS, HEADS * VALUES, first);
    ask_numbers(0, of.decayed, first);
    if constexpr (Delta::MAMBA) ask_numbers(TOKENS, of.steps, first);
    copies_sent();
  }
  // One of each token of the head's.
  __device__ __forceinline__ void ask_numbers(int to, const float* from, int first) const {
    if (core.thread() < TOKENS / 4)
      copy_activations(shared_address(chip + to + 4 * core.thread()),
                       reinterpret_cast<const u8*>(from + long(head) * of.capacity + first +
                                                   4 * core.thread()),
                       true);
  }
  __device__ __forceinline__ void ask_second(int first) const {
    ask<KEYS, TURNED>(THIRD, of.keys + head / PER_KEY * KEYS, QUERIES, first);
    ask<TOKENS, SQUARE>(SCORES, of.scores + head * TOKENS, HEADS * TOKENS, first);
    copies_sent();
  }

  // The warp's 16 keys of the state, from memory or to it, and for products.
  __device__ __forceinline__ void load(float (&state)[TILES][4]) const {
    const float* const from = of.states + long(item) * FLOATS + core.warp() * ROWS * COLUMNS;
    const bool there = core.warp() * ROWS < KEYS && of.first > 0;
    each_pair(state, core.warp_thread(), [&](int row, int column, float& one, float& next) {
      one = there ? load_shared(from + row * COLUMNS + column) : 0.0f;
      next = there ? load_shared(from + row * COLUMNS + column + 1) : 0.0f;
    });
  }
  __device__ __forceinline__ void store(float (&state)[TILES][4]) const {
    float* const to = of.states + long(item) * FLOATS + core.warp() * ROWS * COLUMNS;
    if (core.warp() * ROWS >= KEYS) return;
    each_pair(state, core.warp_thread(), [&](int row, int column, float one, float next) {
      store_shared(to + row * COLUMNS + column, one);
      store_shared(to + row * COLUMNS + column + 1, next);
    });
  }
  __device__ __forceinline__ void show(float (&state)[TILES][4]) const {
    if (core.warp() * ROWS >= KEYS) return;
    each_pair(state, core.warp_thread(), [&](int row, int column, float one, float next) {
      put(chip + HELD + (core.warp() * ROWS + row) * SIDE + column, tf32(one), tf32(next));
    });
  }

  // With the state before the chunk: what tokens write, by the first half of the warps; outputs of
  // the other half. What Mamba-2's write does not depend on it.
  __device__ __forceinline__ void look(float (&sum)[TILES][4], float last) const {
    const int lane = core.warp_thread(), set = core.warp() % SETS;
    const bool writes = core.warp() < SETS;
    const u32 rows = shared_address(chip + (writes ? FIRST : SECOND) + set * ROWS * PITCH);
    const float skip = Delta::MAMBA ? of.decays[2 * HEADS + head] : 0.0f;
#pragma unroll 2
    for (int d = 0; d < (Delta::MAMBA && writes ? 0 : KEYS); d += 8) {
      u32 a[4];
      left(a, rows + 4 * d, PITCH, lane);
      add_products(sum, a, chip + HELD + d * SIDE, SIDE, lane);
    }
    each_pair(sum, lane, [&](int row, int column, float& one, float& next) {
      const int token = set * ROWS + row;
      const float g = chip[token];
      const float* const given = chip + GIVEN + token * SIDE + column;
      if (!writes) {
        one *= exp32(g), next *= exp32(g);
        if constexpr (Delta::MAMBA) one += skip * given[0], next += skip * given[1];
        return;
      }
      const float by = exp32(last - g) * (Delta::MAMBA ? chip[TOKENS + token] : 1.0f),
                  u = given[0] - one, v = given[1] - next;
      put(chip + WRITTEN + token * SIDE + column, tf32(u), tf32(v));
      put(chip + DECAYED + token * SIDE + column, tf32(by * u), tf32(by * v));
    });
  }
  // Outputs, by the other half of the warps.
  __device__ __forceinline__ void finish(float (&sum)[TILES][4], int first) const {
    const int lane = core.warp_thread(), set = core.warp() % SETS;
    if (core.warp() < SETS) return;
    const u32 rows = shared_address(chip + SCORES + set * ROWS * SQUARE);
#pragma unroll 1
    for (int k = 0; k < (set + 1) * ROWS; k += 8) {
      u32 a[4];
      left(a, rows + 4 * k, SQUARE, lane);
      add_products(sum, a, chip + WRITTEN + k * SIDE, SIDE, lane);
    }
    each_pair(sum, lane, [&](int row, int column, float one, float next) {
      const int token = first + set * ROWS + row;
      if (token >= of.tokens) return;
      float* const to = of.outputs + long(token) * HEADS * VALUES + item * COLUMNS + column;
      store_shared(to, one), store_shared(to + 1, next);
    });
  }
  __device__ __forceinline__ void update(float (&state)[TILES][4], float last) const {
    const int lane = core.warp_thread();
    if (core.warp() * ROWS >= KEYS) return;
    const float by = exp32(last);
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[n][i] *= by;
#pragma unroll 2
    for (int k = 0; k < TOKENS; k += 8) {
      u32 a[4];
      left_turned(a, chip + THIRD + k * TURNED + core.warp() * ROWS, TURNED, lane);
      add_products(state, a, chip + DECAYED + k * SIDE, SIDE, lane);
    }
  }
  // The newest tokens of the item's channels.
  __device__ __forceinline__ void keep() const {
    for (int token = of.tokens > PAST ? of.tokens - PAST : 0; token < of.tokens; ++token)
      for (int c = core.thread(); c < CHANNELS; c += CONSUMERS) {
        const int key = head / PER_KEY * KEYS,
                  channel = c < KEYS       ? key + c
                            : c < 2 * KEYS ? QUERIES + key + c - KEYS
                                           : 2 * QUERIES + item * COLUMNS + c - 2 * KEYS;
        store_shared(of.history(item, token) + c,
                     load_shared(of.rows + long(token) * of.width + channel));
      }
  }

  __device__ __forceinline__ void run() const {
    float state[TILES][4];
    core.barrier();  // who used the memory before has left it
    ask_first(0);
    load(state);
    show(state);
#pragma unroll 1
    for (int first = 0; first < of.tokens; first += TOKENS) {
      copies_arrived<0>();
      core.barrier();
      ask_second(first);
      const float last = chip[TOKENS - 1];
      float sum[TILES][4] = {};
      look(sum, last);
      copies_arrived<0>();
      core.barrier();
      if (first + TOKENS < of.tokens) ask_first(first + TOKENS);
      finish(sum, first);
      update(state, last);
      show(state);
    }
    store(state);
    keep();
  }
};

}  // namespace twin
