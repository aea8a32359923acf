// Gated DeltaNet or Mamba-2 of one token: each block convolves what its items see, and updates their recurrent
// states, which nobody else reads or writes. Of a state S, [KEY_DIM][COLUMNS], a key k, a query q
// and a value v, with a decay d and a write strength w:
//
//   S = d S;  S += k (w (v - S^T k))^T;  out = S^T q
//
// Both products are made in one pass over the state, since (S + k u^T)^T q = S^T q + (k.q) u. The
// norm over a head's outputs is applied by who multiplies them: an item publishes its columns,
// gated and scaled, and the sum of their squares before that.
//
// Mamba-2 has neither write strength nor delta: of B as the key, C as the query, x as the value, a
// time step t and a factor D of the head
//
//   S = d S + B (t x)^T;  out = S^T C + D x
//
// and its squares are those of gated outputs, of all heads that share B and C.
#pragma once

#include "../platform/time_steps.h"
#include "convolution.cuh"

namespace twin {

// What an item is, and where it lies.
struct Recurrent {
  static constexpr int KEYS = Delta::KEY_DIM, COLUMNS = Delta::COLUMNS,
                       SPLITS = Delta::VALUE_DIM / COLUMNS, ITEMS = Delta::VALUE_HEADS * SPLITS,
                       PER_KEY = Delta::VALUE_HEADS / Delta::KEY_HEADS,
                       CHANNELS = 2 * KEYS + COLUMNS,  // that it sees
                       PAST = Delta::CONV - 1,         // positions of its history
                       JOINT = Delta::NORMED / COLUMNS;  // items whose outputs are normed together
  static constexpr int FLOATS = KEYS * COLUMNS + PAST * CHANNELS;
  static constexpr int WORDS = COLUMNS + 4;  // that it publishes: outputs, squares, three zeros
  // channels of a rank: queries, keys, values
  static constexpr int QUERIES = Delta::KEY_HEADS * KEYS,
                       ALL = 2 * QUERIES + Delta::VALUE_HEADS * Delta::VALUE_DIM;
  // is added to the squared length of a key and of a query
  static constexpr float LEAST_SQUARE = 1e-6f;
  static_assert(COLUMNS % 4 == 0 && COLUMNS * SPLITS == Delta::VALUE_DIM, "items of whole loads");
  static_assert(JOINT % SPLITS == 0, "whole heads are normed together");

  __device__ static __forceinline__ int key_head(int head) { return head / PER_KEY; }

  // [KEYS][COLUMNS], then [PAST][CHANNELS]: position p of the history at p % PAST.
  template <class Stage>
  __device__ static __forceinline__ float* state(const Block& b, const Stage& stage, int item) {
    return first_state(b) + (u64(stage.kv) * ITEMS + item) * FLOATS;
  }
};

// Where a block gathers what its items use: queries and keys of their key heads, columns of values
// and of gates, write strengths (DeltaNet's) and time steps of their value heads. Spans come in this
// order.
struct Gathered {
  int first_head, first_key, keys, values, gates, strengths, decays, end;

  __device__ __forceinline__ explicit Gathered(Span items) {
    first_head = items.lo / Recurrent::SPLITS;
    const int last = (items.hi - 1) / Recurrent::SPLITS, heads = last + 1 - first_head;
    first_key = Recurrent::key_head(first_head);
    keys = (Recurrent::key_head(last) + 1 - first_key) * Recurrent::KEYS;
    values = 2 * keys;
    gates = values + (items.hi - items.lo) * Recurrent::COLUMNS;
    strengths = gates + (items.hi - items.lo) * Recurrent::COLUMNS;
    decays = strengths + (Delta::MAMBA ? 0 : heads);
    end = (decays + heads + 15) / 16 * 16;
  }
};

// A thread's elements of a state, where all threads of a block hold all of it: those of a column
// and of every so manyth part of the keys.
struct StatePart {
  static constexpr int COLUMNS = Recurrent::COLUMNS, THREADS = Core::threads();
  static constexpr bool HELD = THREADS >= COLUMNS && THREADS > 1;
  static constexpr int PARTS = HELD ? (THREADS / COLUMNS < Recurrent::KEYS ? THREADS / COLUMNS
                                                                           : Recurrent::KEYS)
                                    : 1,
                       EACH = (Recurrent::KEYS + PARTS - 1) / PARTS;

  float at[HELD ? EACH : 1];

  __device__ static __forceinline__ int column(int thread) { return thread % COLUMNS; }
  __device__ static __forceinline__ int part(int thread) { return thread / COLUMNS; }
  __device__ static __forceinline__ int key(int thread, int j) { return part(thread) * EACH + j; }
  __device__ static __forceinline__ bool here(int thread, int j) {
    const bool whole = THREADS % COLUMNS == 0 && Recurrent::KEYS % PARTS == 0 &&
                       THREADS / COLUMNS == PARTS;
    return whole || (part(thread) < PARTS && key(thread, j) < Recurrent::KEYS);
  }

  // Of a sequence's first token all of it is zero.
  __device__ __forceinline__ void load(const float* state, int thread, bool first) {
    TWIN_UNROLL
    for (int j = 0; HELD && j < EACH; ++j)
      at[j] = here(thread, j) && !first ? state[key(thread, j) * COLUMNS + column(thread)] : 0.0f;
  }
  // Its parts of S^T k (of DeltaNet) and S^T q, [2][PARTS][COLUMNS].
  __device__ __forceinline__ void multiply(const float* query, const float* by_key, int thread,
                                           float* sums) const {
    float with_key = 0, with_query = 0;
    TWIN_UNROLL
    for (int j = 0; j < EACH; ++j) {
      if (!here(thread, j)) continue;
      if constexpr (!Delta::MAMBA) with_key += at[j] * by_key[key(thread, j)];
      with_query += at[j] * query[key(thread, j)];
    }
    if (part(thread) >= PARTS) return;
    float* const to = sums + part(thread) * COLUMNS + column(thread);
    if constexpr (!Delta::MAMBA) to[0] = with_key;
    to[PARTS * COLUMNS] = with_query;
  }
  __device__ __forceinline__ void update(float* state, const float* by_key, float decay, float by,
                                         int thread) const {
    TWIN_UNROLL
    for (int j = 0; j < EACH; ++j)
      if (here(thread, j))
        state[key(thread, j) * COLUMNS + column(thread)] =
            decay * at[j] + by * by_key[key(thread, j)];
  }
};

__device__ __forceinline__ float silu(float x) { return x / (1.0f + exp32(-x)); }

// Of an item's token.
struct Rule {
  float decay, strength;  // of Mamba-2 the time step
  float by_key, by_query;  // factors of the convolved key and query
  float both;              // their product
};

// A channel of an item: where its newest element is gathered, and what the convolution asks memory
// for. Nothing of it depends on the stage's inputs.
struct Channel {
  static constexpr int KEYS = Recurrent::KEYS, PAST = Recurrent::PAST;

  float tap[PAST + 1], past[PAST], added;

  __device__ static __forceinline__ int gathered_at(const Gathered& at, Span items, int item,
                                                    int channel) {
    const int key = Recurrent::key_head(item / Recurrent::SPLITS), second = channel >= KEYS;
    if (channel >= 2 * KEYS)
      return at.values + (item - items.lo) * Recurrent::COLUMNS + channel - 2 * KEYS;
    return second * at.keys + (key - at.first_key) * KEYS + channel - second * KEYS;
  }
  template <class Stage>
  __device__ __forceinline__ void load(const Block& b, const Stage& stage, int item, int channel,
                                       int position, const float* history) {
    const int key = Recurrent::key_head(item / Recurrent::SPLITS), second = channel >= KEYS,
              number = channel < 2 * KEYS
                           ? second * Recurrent::QUERIES + key * KEYS + channel - second * KEYS
                           : 2 * Recurrent::QUERIES + item * Recurrent::COLUMNS + channel - 2 * KEYS;
    const float* const taps = b.memory.constants + stage.taps + number;
    TWIN_UNROLL
    for (int m = 0; m <= PAST; ++m) tap[m] = taps[m * Recurrent::ALL];
    added = Delta::BIASED ? taps[(PAST + 1) * Recurrent::ALL] : 0.0f;
    TWIN_UNROLL
    for (int m = 0; m < PAST; ++m) {
      const int seen = position - PAST + m;
      past[m] = seen >= 0 ? history[seen % PAST * Recurrent::CHANNELS + channel] : 0.0f;
    }
  }
  // Behind the convolution and SiLU; the newest element joins the history.
  __device__ __forceinline__ float convolved(float newest, int channel, int position,
                                             float* history) const {
    float sum = newest * tap[PAST];
    TWIN_UNROLL
    for (int m = 0; m < PAST; ++m) sum += past[m] * tap[m];
    history[position % PAST * Recurrent::CHANNELS + channel] = newest;
    if constexpr (Delta::BIASED) sum += added;
    return silu(sum);
  }
};

// What of an item lies in memory but its inputs. Where threads hold a state they ask for all of it
// before the stage's inputs are there: nothing behind the last poll waits for memory then.
struct Steering {
  static constexpr int ROUNDS =
      StatePart::HELD ? (Recurrent::CHANNELS + Core::threads() - 1) / Core::threads() : 1;

  Channel channel[ROUNDS];
  float decay, offset, skip, scale;  // of the item's head; of the thread's column

  template <class Stage>
  __device__ __forceinline__ void load(const Block& b, const Stage& stage, int item, int position,
                                       const float* history) {
    const float* const decays =
        b.memory.constants + stage.decays + item / Recurrent::SPLITS;
    decay = decays[0], offset = decays[Delta::VALUE_HEADS];
    skip = Delta::MAMBA ? decays[2 * Delta::VALUE_HEADS] : 0.0f;
    if constexpr (StatePart::HELD) {
      const int thread = b.core.thread();
      scale = scales(b, stage, item)[StatePart::column(thread)];
      TWIN_UNROLL
      for (int r = 0; r < ROUNDS; ++r) {
        const int c = thread + r * b.core.threads();
        if (c < Recurrent::CHANNELS) channel[r].load(b, stage, item, c, position, history);
      }
    }
  }
  template <class Stage>
  __device__ static __forceinline__ const float* scales(const Block& b, const Stage& stage,
                                                        int item) {
    const int columns = Delta::MAMBA ? item : item % Recurrent::SPLITS;
    return b.memory.constants + stage.gated_norm + columns * Recurrent::COLUMNS;
  }
};

__device__ __forceinline__ Rule rule_of(Block& b, const Steering& steering, const Gathered& at,
                                        const float* gathered, int head, const float* convolved) {
  float query = 0, key = 0, both = 0;
  for (int d = b.core.warp_thread(); d < Recurrent::KEYS; d += b.core.warp_threads()) {
    const float q = convolved[d], k = convolved[Recurrent::KEYS + d];
    query += q * q, key += k * k, both += q * k;
  }
  const int number = head - at.first_head;
  if constexpr (Delta::MAMBA) {
    const float step = clamped_step(gathered[at.decays + number] + steering.offset);
    return {exp32(steering.decay * step), step, 1.0f, 1.0f, b.core.warp_sum(both)};
  }
  const float by_query = inverse_root(b.core.warp_sum(query) + Recurrent::LEAST_SQUARE) /
                         square_root(float(Recurrent::KEYS)),
              by_key = inverse_root(b.core.warp_sum(key) + Recurrent::LEAST_SQUARE);
  return {exp32(steering.decay * time_step(gathered[at.decays + number] + steering.offset)),
          1.0f / (1.0f + exp32(-gathered[at.strengths + number])), by_key, by_query,
          b.core.warp_sum(both) * by_key * by_query};
}

// What becomes of a column: the output, and what the key is written with.
struct Column {
  float out, written;

  // `skip`: of the value itself, in Mamba-2's output
  __device__ __forceinline__ Column(const Rule& rule, const float* sums, int column, float value,
                                    float skip) {
    float with_key = 0, with_query = 0;
    TWIN_UNROLL
    for (int p = 0; p < StatePart::PARTS; ++p) {
      if constexpr (!Delta::MAMBA) with_key += sums[p * Recurrent::COLUMNS + column];
      with_query += sums[(StatePart::PARTS + p) * Recurrent::COLUMNS + column];
    }
    if constexpr (Delta::MAMBA) {
      written = value * rule.strength;
      out = rule.decay * with_query + rule.both * written + skip * value;
    } else {
      written = (value - rule.decay * rule.by_key * with_key) * rule.strength;
      out = rule.decay * rule.by_query * with_query + rule.both * written;
    }
  }
};

// What a step makes of an item's outputs.
struct PublishedOutputs {
  static constexpr bool GATED = Delta::MAMBA;  // before they are squared
  Block& b;
  Output out;
  const float* gates;
  int item;

  template <class Stage>
  __device__ __forceinline__ PublishedOutputs(Block& b, const Stage& stage, int item, const float* gates,
                                       float*)
      : b(b), out(output_of(b, stage)), gates(gates), item(item) {
    if constexpr (Core::OWN_GPUS) out.others = 0;
  }
  __device__ __forceinline__ void begin() { b.core.cleared(); }
  __device__ __forceinline__ void column(int column, float made, float scale) {
    publish(b, out, item * Recurrent::WORDS + column,
            Delta::MAMBA ? made * scale : made * scale * silu(gates[column]));
  }
  __device__ __forceinline__ void end(float squares) {
    TWIN_EACH(i, 4)
      publish(b, out, item * Recurrent::WORDS + Recurrent::COLUMNS + i, i ? 0.0f : squares);
  }
};

// One item, whose state `part` holds where threads hold one. Its outputs go to an Emit, in a prompt
// pass to `to`.
template <class Emit, class Stage>
__device__ __forceinline__ void update_item(Block& b, const Stage& stage, const Gathered& at,
                                            const float* gathered, float* work, Span items,
                                            int item, int position, Steering& steering,
                                            const StatePart& part, float* to = nullptr) {
  constexpr int KEYS = Recurrent::KEYS, COLUMNS = Recurrent::COLUMNS,
                CHANNELS = Recurrent::CHANNELS;
  const int head = item / Recurrent::SPLITS, thread = b.core.thread();
  float* const state = Recurrent::state(b, stage, item);
  float* const history = state + KEYS * COLUMNS;
  float* const convolved = work;                        // [CHANNELS]
  float* const sums = work + (CHANNELS + 15) / 16 * 16;  // [2][PARTS][COLUMNS]
  const auto convolve = [&](const Channel& channel, int c) {
    convolved[c] = channel.convolved(gathered[Channel::gathered_at(at, items, item, c)], c,
                                     position, history);
  };
  if constexpr (StatePart::HELD) {
    TWIN_UNROLL
    for (int r = 0; r < Steering::ROUNDS; ++r)
      if (const int c = thread + r * b.core.threads(); c < CHANNELS) convolve(steering.channel[r], c);
  } else {
    TWIN_EACH(c, CHANNELS) {
      steering.channel[0].load(b, stage, item, c, position, history);
      convolve(steering.channel[0], c);
    }
  }
  b.core.barrier();
  const Rule rule = rule_of(b, steering, at, gathered, head, convolved);
  const float* const key = convolved + KEYS;
  const float* const values = convolved + 2 * KEYS;
  const float* const gates = gathered + at.gates + (item - items.lo) * COLUMNS;
  Emit emit(b, stage, item, gates, to);
  const auto squared = [&](int column, float made) {
    return Emit::GATED ? made * silu(gates[column]) : made;
  };
  if constexpr (StatePart::HELD) {
    part.multiply(convolved, key, thread, sums);
    b.core.barrier();
    const int column = StatePart::column(thread);
    const Column made(rule, sums, column, values[column], steering.skip);
    const bool first = StatePart::part(thread) == 0;
    const float output = squared(column, made.out);
    const float squares = b.core.sum(first ? output * output : 0.0f);
    emit.begin();
    if (first) emit.column(column, output, steering.scale);
    emit.end(squares);
    part.update(state, key, rule.decay, rule.by_key * made.written, thread);
  } else {
    const bool first = position == 0;
    TWIN_EACH(c, COLUMNS) sums[c] = sums[COLUMNS + c] = 0.0f;
    for (int k = 0; k < KEYS; ++k)
      TWIN_EACH(c, COLUMNS) {
        const float held = first ? 0.0f : state[k * COLUMNS + c];
        if constexpr (!Delta::MAMBA) sums[c] += held * key[k];
        sums[COLUMNS + c] += held * convolved[k];
      }
    float mine = 0;
    TWIN_EACH(c, COLUMNS) {
      const Column made(rule, sums, c, values[c], steering.skip);
      const float output = squared(c, made.out);
      sums[c] = rule.by_key * made.written, sums[COLUMNS + c] = output;
      mine += output * output;
    }
    const float squares = b.core.sum(mine);
    emit.begin();
    const float* const scales = Steering::scales(b, stage, item);
    TWIN_EACH(c, COLUMNS) emit.column(c, sums[COLUMNS + c], scales[c]);
    emit.end(squares);
    for (int k = 0; k < KEYS; ++k)
      TWIN_EACH(c, COLUMNS)
        state[k * COLUMNS + c] =
            rule.decay * (first ? 0.0f : state[k * COLUMNS + c]) + key[k] * sums[c];
  }
  b.core.barrier();  // the next item, and the next stage, use the scratch
}

// What the items of a block see, which blocks without any do not wait for. What steers the states
// may be a value of its own.
template <class Stage>
__device__ __forceinline__ bool gather_states(Block& b, int index, const Stage& stage,
                                              const Gathered& at) {
  b.core.barrier();  // the stage before may still read the scratch
  bool good = true;
  int warp = 0;
  for (int i = 0; i < stage.reads; ++i)
    if (!poll_spans(b, index, b.plan.reads_at(stage.first_read + i),
                    b.scratch + (i ? at.strengths : 0), warp, good))
      return false;
  return !b.core.any(!good);
}

// A block's states are requested before its stage's inputs are there.
template <class Stage>
__device__ __forceinline__ bool delta(Block& b, int index, const Stage& stage) {
  if constexpr (Delta::ANY) {
    const Span items = b.plan.owned_of(stage.items, b.block);
    const int position = position_of(b);
    const Gathered at(items);
    if (items.lo == items.hi) begin(b, index, stage);
    TWIN_ONCE
    for (int item = items.lo; item < items.hi; ++item) {
      const float* const state = Recurrent::state(b, stage, item);
      StatePart part;
      Steering steering;
      part.load(state, b.core.thread(), position == 0);
      steering.load(b, stage, item, position, state + Recurrent::KEYS * Recurrent::COLUMNS);
      if (item == items.lo) {
        if (!gather_states(b, index, stage, at)) return false;
        begin(b, index, stage);
      }
      update_item<PublishedOutputs>(b, stage, at, b.scratch, b.scratch + at.end, items, item, position,
                             steering, part);
    }
    return true;
  }
  return false;
}

// ---- who reads it -------------------------------------------------------------------------------

// The sum of squares of outputs that are normed together, those of a head or of several. Of threads
// side by side that have some of these each requests some of their items, and they add up what they
// found: all blocks poll these few words, and waited for them where each thread requested all. Of
// few items the exchanges take longer, 0.6 us of 5,120 columns. Where one norm is over all outputs,
// every warp requests each item once: Granite 4's threads requested 96 items for each of their
// packs, and spilled 2,236 bytes.
template <class Vector>
struct Squares {
  static constexpr int SPLITS = Recurrent::JOINT, PITCH = Vector::SIDE_BY_SIDE;
  // such threads, of a warp
  static constexpr int ALL_NEIGHBOURS =
      PITCH > 0 && Delta::NORMED % PITCH == 0 ? Delta::NORMED / PITCH : 1;
  static constexpr int NEIGHBOURS =
      ALL_NEIGHBOURS % Core::warp_threads() == 0 ? Core::warp_threads() : ALL_NEIGHBOURS;
  static constexpr bool ADJACENT = SPLITS > 4 && NEIGHBOURS > 1 && (NEIGHBOURS & (NEIGHBOURS - 1)) == 0 &&
                                 Core::warp_threads() % NEIGHBOURS == 0 &&
                                 Vector::SIDE_WIDTH % Delta::NORMED == 0;
  static constexpr bool OF_ALL = !ADJACENT && SPLITS > 4 && PITCH > 0 && SPLITS == Recurrent::ITEMS;
  static constexpr bool TOGETHER = ADJACENT || OF_ALL;
  static constexpr int THREADS = OF_ALL ? Core::warp_threads() : ADJACENT ? NEIGHBOURS : 1,
                       EACH = (SPLITS + THREADS - 1) / THREADS;

  Pack<1> item[EACH];

  // `element`: the thread's first of them
  __device__ __forceinline__ void load(const float* head, int element, int thread) {
    const int adjacent = element % Delta::NORMED / (PITCH > 0 ? PITCH : 1);
    const int mine = TOGETHER ? (OF_ALL ? thread : adjacent) % THREADS : 0;
    TWIN_UNROLL
    for (int j = 0; j < EACH; ++j) {
      const int split = mine + j * THREADS;
      item[j].at[0] = 0.0f;
      if (SPLITS % THREADS == 0 || split < SPLITS)
        item[j] = load_pack<1, 4>(head + split * Recurrent::WORDS + Recurrent::COLUMNS);
    }
  }
  __device__ __forceinline__ bool late() const {
    bool any = false;
    TWIN_UNROLL
    for (int j = 0; j < EACH; ++j) any |= missing(item[j]);
    return any;
  }
  // all threads of the warp take part
  __device__ __forceinline__ float sum(Core& core, bool has) const {
    float total = 0;
    TWIN_UNROLL
    for (int j = 0; j < EACH; ++j) total += has ? item[j].at[0] : 0.0f;
    TWIN_UNROLL
    for (int mask = 1; mask < THREADS; mask *= 2) total += core.shuffle_xor(total, mask);
    return total;
  }
};

// What the first of several threads with the same columns has made, to the others.
template <class Vector, int PACKS, int PACK, class Out>
__device__ __forceinline__ void hand_on(Block& b, const Out& out) {
  constexpr int PITCH = Vector::SHARING_THREADS;
  const int me = b.core.thread(), number = Vector::row_group(me);
  float* const room = b.scratch + Vector::sharing_thread(me);
  TWIN_HOLDS(PACKS * PACK * PITCH <= b.plan.scratch_floats);
  TWIN_UNROLL
  for (int i = 0; i < PACKS * PACK; ++i)
    if (number == 0) room[i * PITCH] = out[i / PACK][i % PACK];
  b.core.barrier();
  TWIN_UNROLL
  for (int i = 0; i < PACKS * PACK; ++i)
    if (number > 0) out[i / PACK][i % PACK] = room[i * PITCH];
  b.core.barrier();
}

// x = the items' outputs, those that are normed together divided by their length. The loads of a thread's outputs, and
// of sums of squares, are under way before the first is looked at. Of threads that hold the same
// columns one requests them.
template <class Vector>
__device__ __forceinline__ bool take_states(Block& b, int index, const Stage& stage, Vector& x) {
  const Read& read = b.plan.reads_at(stage.first_read);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const float* const base = source.at(0);  // a value of one part
  constexpr int COLUMNS = Recurrent::COLUMNS, JOINT = Recurrent::JOINT, WORDS = Recurrent::WORDS,
                QUADS = Vector::PACK / 4;
  // of a pack: neighbours are normed together, or each quad is looked up
  constexpr int HEADS = Delta::NORMED % Vector::PACK == 0 ? 1 : QUADS, PITCH = QUADS / HEADS;
  static_assert(Vector::PACK % 4 == 0, "quads of an item");
  static_assert(HEADS == 1 || !Squares<Vector>::TOGETHER, "threads side by side have whole packs");
  constexpr bool OF_ALL = Squares<Vector>::OF_ALL;  // all threads of a warp have the same sum
  bool asks = true;
  if constexpr (Vector::SHARERS > 1) {
    b.core.barrier();  // the stage before may still add up its sums where threads meet
    asks = Vector::row_group(b.core.thread()) == 0;
  }
  Patience patience;
  return b.core.agree(x.packs(b.core, [&](const auto& first, const auto& valid, const auto& out) {
    constexpr int PACKS = int(sizeof(first) / sizeof(int));
    const auto head_of = [&](int r, int h) {  // of all: also of a thread without columns
      const int head = OF_ALL ? 0 : (first[r] + 4 * PITCH * h) / Delta::NORMED;
      return base + head * (JOINT * WORDS);
    };
    Pack<4> part[PACKS][QUADS];
    constexpr int SUMS = OF_ALL ? 1 : PACKS;
    Squares<Vector> squares[SUMS][HEADS];
    bool good = true;
    while (good && asks && (OF_ALL || valid[0])) {  // a thread without a first pack has none
      bool late = false;
      TWIN_UNROLL
      for (int r = 0; r < PACKS; ++r) {
        TWIN_UNROLL
        for (int h = 0; h < HEADS; ++h)
          if (r < SUMS && (r == 0 || valid[r]))
            squares[r][h].load(head_of(r, h), first[r], b.core.thread());
        if ((OF_ALL || r > 0) && !valid[r]) continue;
        TWIN_UNROLL
        for (int e = 0; e < QUADS; ++e) {
          const int element = first[r] + 4 * e;
          part[r][e] = load_pack<4, 16>(base + element / COLUMNS * WORDS + element % COLUMNS);
        }
      }
      TWIN_UNROLL
      for (int r = 0; r < PACKS; ++r) {
        TWIN_UNROLL
        for (int h = 0; h < HEADS; ++h)
          if (r < SUMS && (r == 0 || valid[r])) late |= squares[r][h].late();
        if ((OF_ALL || r > 0) && !valid[r]) continue;
        TWIN_UNROLL
        for (int e = 0; e < QUADS; ++e) late |= missing(part[r][e]);
      }
      if (!late || !source.polled) break;
      good = keep_waiting(b, patience, {index, read.value, 0, first[0] / COLUMNS * WORDS});
    }
    float by = 0;
    TWIN_UNROLL
    for (int r = 0; r < PACKS; ++r)
      TWIN_UNROLL
      for (int h = 0; h < HEADS; ++h) {
        if (r < SUMS) {
          const bool has = asks && (OF_ALL || (valid[0] && (r == 0 || valid[r])));
          const float squared = squares[r][h].sum(b.core, has);
          by = inverse_root(squared / float(Delta::NORMED) + b.plan.norm_eps);
        }
        TWIN_UNROLL
        for (int d = 0; d < 4 * PITCH; ++d) {
          const int e = h * PITCH + d / 4;
          out[r][4 * e + d % 4] = part[r][e].at[d % 4] * by;
        }
      }
    if constexpr (Vector::SHARERS > 1) hand_on<Vector, PACKS, Vector::PACK>(b, out);
    return good;
  }));
}

// Each output of attention times the sigmoid of its gate, which lie together in the stage's second
// read.
template <class Vector>
__device__ __forceinline__ bool gate_heads(Block& b, int index, const Stage& stage, Vector& x) {
  const Read& read = b.plan.reads_at(stage.first_read + 1);
  const Source source = source_of(b, index, read);
  if (source.lost) return false;
  const SpanRow row = b.plan.rows_at(read.spans + b.block);
  const float* const gates = source.at(0) + b.plan.spans_at(row.first).lo;
  constexpr int PACK = Vector::PACK;
  Patience patience;
  return b.core.agree(x.packs(b.core, [&](const auto& first, const auto& valid, const auto& out) {
    constexpr int PACKS = int(sizeof(first) / sizeof(int));
    Pack<PACK> gate[PACKS];
    bool good = true;
    while (good && valid[0]) {
      bool late = false;
      TWIN_UNROLL
      for (int r = 0; r < PACKS; ++r)
        if (valid[r]) gate[r] = load_pack<PACK, 16>(gates + first[r]);
      TWIN_UNROLL
      for (int r = 0; r < PACKS; ++r) late |= valid[r] && missing(gate[r]);
      if (!late || !source.polled) break;
      good = keep_waiting(b, patience, {index, read.value, 0, first[0]});
    }
    TWIN_UNROLL
    for (int r = 0; r < PACKS; ++r)
      TWIN_UNROLL
      for (int d = 0; d < PACK; ++d)
        if (valid[r]) out[r][d] *= 1.0f / (1.0f + exp32(-gate[r].at[d]));
    return good;
  }));
}

}  // namespace twin
