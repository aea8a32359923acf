// Rounds that are handed on: products, of the residual and those that add to it.
#pragma once

namespace twin {

// Inputs in slices as tiles of weights have them. Of each slice a warp has every CONSUMER_WARPSth
// 32 columns. Thread l has eight of these, from 8 * (l % 4) on, of token l / 4 and of row l / 4:
// which columns meet in one step of a product is free.
struct Inputs {
  static constexpr int TILE = Plan::hidden_tile > 0 ? Plan::hidden_tile : 1, EACH = 32,
                       PITCH = EACH * CONSUMER_WARPS, STEPS = (TILE + PITCH - 1) / PITCH;
  static constexpr int HIDDEN_SLICES = (Plan::hidden_cols + TILE - 1) / TILE;
  static constexpr bool FULL = TILE % PITCH == 0 && Plan::hidden_cols % TILE == 0 &&
                               Plan::heads_cols % TILE == 0 && Plan::ffn_cols % TILE == 0;
  using Slice = u32[STEPS][4];

  const u8* x;
  int cols, warp, lane;

  __device__ __forceinline__ Inputs(Block& b, const u8* x, int cols)
      : x(x), cols(cols), warp(b.core.warp()), lane(b.core.warp_thread()) {}
  __device__ __forceinline__ int slices() const { return (cols + TILE - 1) / TILE; }
  __device__ __forceinline__ int width(int slice) const {
    return FULL || (slice + 1) * TILE <= cols ? TILE : cols - slice * TILE;
  }
  __device__ __forceinline__ bool has(int slice, int j) const {
    return FULL || (j * CONSUMER_WARPS + warp) * EACH < width(slice);
  }
  __device__ __forceinline__ int column() const { return warp * EACH + lane % 4 * 8; }
  // A slice's inputs, of token l / 4: requested where `mask` has step j.
  __device__ __forceinline__ void ask(int slice, u32 mask, Slice& to) const {
    const u8* const from = x + (lane / 4 * cols + slice * TILE + column()) * 2;
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
      load_words_if(has(slice, j) && (mask >> j & 1u), from + j * PITCH * 2, to[j]);
  }
  __device__ __forceinline__ static u32 late(const Slice& at) {
    u32 mask = 0;
#pragma unroll
    for (int j = 0; j < STEPS; ++j) mask |= u32(half_missing(at[j])) << j;
    return mask;
  }
  // sum += row `row` of a tile at `from` times these. The tile may be left behind it, which an arrival
  // does not wait for: without the fence copies of another tile came before loads of a row, a few in
  // a thousand rounds.
  __device__ __forceinline__ void dot(u32 from, int row, int slice, const Slice& x,
                                      float (&sum)[2][4]) const {
    const u32 at = from + u32(row * width(slice) + column()) * 2;
    u32 a[STEPS][4];
#pragma unroll
    for (int j = 0; j < STEPS; ++j)
      if (has(slice, j)) load_units(a[j], at + u32(j * PITCH * 2));
#pragma unroll
    for (int j = 0; j < STEPS; ++j) {
      if (!has(slice, j)) continue;
      multiply_add(sum[j % 2], a[j][0], 0u, a[j][1], 0u, x[j][0], x[j][1]);
      multiply_add(sum[j % 2], a[j][2], 0u, a[j][3], 0u, x[j][2], x[j][3]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) hold_sums(sum[k]);
    leave_to_copies();
  }
};

struct HandedProducts : HandedBlock {
  using HandedBlock::HandedBlock;

  // ---- the residual

  // A row's new number of the thread's token: the residual's, and times the next norm's weight.
  __device__ __forceinline__ void put_row(int row, float value, float weight, float& squares) {
    store_shared(HandedAt::residual(b.memory, turn) + row * MOST_FEW + token(),
                 unlike_sentinel(value));
    squares += value * value;
    store_half(HandedAt::inputs(b.memory, turn) + (token() * Plan::hidden + row) * 2,
               bfloat_bits(value * weight));
  }
  // The sum over the block's rows, by all threads.
  __device__ __forceinline__ void put_squares(float mine) {
    mine += Core::shuffle_xor(mine, 8);
    mine += Core::shuffle_xor(mine, 16);
    const int lane = b.core.warp_thread();
    if (lane < MOST_FEW) squares()[b.core.warp() * MOST_FEW + lane] = mine;
    b.core.barrier();
    if (b.core.thread() >= pass.tokens) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; ++w) sum += squares()[w * MOST_FEW + b.core.thread()];
    store_shared(HandedAt::squares(b.memory, turn) + b.block * MOST_FEW + b.core.thread(),
                 unlike_sentinel(sum));
  }
  __device__ __forceinline__ const float* norm_of(const Stage& stage) const {
    return b.memory.constants + stage.norm;
  }
  __device__ __forceinline__ static float weight_of(const float* norm, int row) {
    return norm[Core::Hidden::norm_place(row / 4 * 4) + row % 4];
  }

  __device__ __forceinline__ void embed() {
    ++turn;
    if (b.core.phase > 1) b.core.cleared();
    const Span rows = b.plan.owned_of(b.plan.stages_at(LAST_DOWN).owned, b.block);
    const float* const norm = norm_of(b.plan.stages_at(1));
    float squares = 0.0f;
    if (token() < pass.tokens) {
      int id = token_of(b, pass, token());
      Patience patience;
      while (u32(id) == SENTINEL && b.core.agree(keep_waiting(b, patience, {0, -1, 1, 0})) &&
             !b.core.gave_up())
        id = token_of(b, pass, token());
      const u8* const from = b.memory.embedding + u64(id) * u64(Plan::hidden) * type_bytes(WEIGHT);
      TWIN_ONCE
      for (int row = rows.lo + b.core.thread() / MOST_FEW; row < rows.hi;
           row += CONSUMERS / MOST_FEW)
        put_row(row, embedded(load_element<WEIGHT>(from + row * type_bytes(WEIGHT))),
                weight_of(norm, row), squares);
    }
    put_squares(squares);
  }

  // ---- stages that multiply the residual

  // QKV, GATE_UP and the LM head are one piece of code: a layer's has to fit the instruction cache.
  __device__ __forceinline__ bool from_residual(int index, const Stage& stage) {
    constexpr int EACH = (Plan::blocks + CONSUMERS / MOST_FEW - 1) / (CONSUMERS / MOST_FEW),
                  SLICES = Inputs::HIDDEN_SLICES;
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const bool head = stage.kind == int(StageKind::LM_HEAD),
               feeds = stage.kind == int(StageKind::GATE_UP), kept = head && draws(b);
    const int shift = Family::GATED && feeds ? 1 : 0;
    const float* const bias =
        !head && !feeds && stage.bias >= 0 ? b.memory.constants + stage.bias : nullptr;
    float* out = head ? b.memory.prompt + Plan::round_logits + token() * logits_pitch(stage)
                      : HandedAt::heads(b.memory) + token() * stage.rows;
    u8* const fed = HandedAt::fed(b.memory) + token() * Plan::ffn_cols * 2;
    TWIN_KEEP(out);  // looked up here: the end of a batch waits for no table
    const int first_row = b.rank * Plan::shard_vocab;
    Candidate mine = {-infinity(), first_row + own.lo};
    const Inputs in(b, HandedAt::inputs(b.memory, turn), Plan::hidden_cols);
    const int warp = in.warp, lane = in.lane;
    u32 x[SLICES][Inputs::STEPS][4] = {};
    {
      const float* const words = HandedAt::squares(b.memory, turn) + token();
      const bool here = lane / 4 < pass.tokens, counts = token() < pass.tokens;
      float got[EACH];
      Patience patience;
      u32 wanted[SLICES];
#pragma unroll
      for (int s = 0; s < SLICES; ++s) wanted[s] = here ? ~0u : 0u;
#pragma unroll
      for (int i = 0; i < EACH; ++i) got[i] = 0.0f;
      for (;;) {
#pragma unroll
        for (int s = 0; s < SLICES; ++s) in.ask(s, wanted[s], x[s]);
        bool late = false;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
          const int block = b.core.thread() / MOST_FEW + i * (CONSUMERS / MOST_FEW);
          if (counts && block < Plan::blocks) got[i] = load_shared(words + block * MOST_FEW);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) late |= missing(got[i]);
#pragma unroll
        for (int s = 0; s < SLICES; ++s) late |= (wanted[s] = Inputs::late(x[s])) != 0;
        if (!late) break;
        if (!b.core.agree(keep_waiting(b, patience, {index, -1, 0, 0})) || b.core.gave_up()) break;
      }
      __syncwarp();
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < EACH; ++i) sum += got[i];
      sum += Core::shuffle_xor(sum, 8);
      sum += Core::shuffle_xor(sum, 16);
      if (lane < MOST_FEW) norms()[warp * MOST_FEW + lane] = sum;
    }
    begin(index);
    float factor = 0.0f;
    const int rows = own.hi - own.lo;
    TWIN_ONCE
    for (int lo = 0; lo < rows; lo += Few::BATCH_ROWS) {
      const int count = least(Few::BATCH_ROWS, rows - lo);
      float* const parts = sums();
      TWIN_ONCE
      for (int r = 0; r < count; r += 8) {
        const int row = least(lane / 4, count - r - 1);
        float sum[2][4] = {};
#pragma unroll
        for (int s = 0; s < SLICES; ++s) {
          const u32 tile = b.core.ring.tile++, from = b.core.ring.acquire(tile);
          in.dot(from, row, s, x[s], sum);
          b.core.ring.release(tile, 1);
        }
        *reinterpret_cast<float2*>(parts + ((warp * Few::BATCH_ROWS + r + lane / 4) * MOST_FEW +
                                            lane % 4 * 2)) =
            float2{sum[0][0] + sum[1][0], sum[0][1] + sum[1][1]};
      }
      b.core.barrier();
      b.half ^= 1;
      if (b.core.gave_up()) return false;
      if (lo == 0) {
        float all = 0.0f;
#pragma unroll
        for (int w = 0; w < CONSUMER_WARPS; ++w) all += norms()[w * MOST_FEW + token()];
        factor = norm_factor(b, all);
      }
      TWIN_ONCE
      for (int i = b.core.thread() / MOST_FEW; i < count >> shift; i += CONSUMERS / MOST_FEW) {
        const float* const at = parts + (i << shift) * MOST_FEW + token();
        float sum = 0.0f, last = 0.0f;
#pragma unroll
        for (int w = 0; w < CONSUMER_WARPS; ++w) {
          sum += at[w * Few::BATCH_ROWS * MOST_FEW];
          if (Family::GATED) last += at[w * Few::BATCH_ROWS * MOST_FEW + shift * MOST_FEW];
        }
        if (token() >= pass.tokens) continue;
        const int element = ((own.lo + lo) >> shift) + i;
        sum *= factor;
        if (feeds) {
          const float made =
              Family::GATED ? through_gate(sum, factor * last) : activated(sum);
          store_half(fed + element * 2, bfloat_bits(made));
        } else if (head) {
          if (kept) store_shared(out + element, sum);
          const Candidate other = {
              first_row + element < Plan::vocab ? capped_logit(sum) : -infinity(),
              first_row + element};
          if (wins(other, mine)) mine = other;
        } else {
          store_shared(out + element, unlike_sentinel(bias ? sum + bias[element] : sum));
        }
      }
    }
    if (head && !kept) put_best(mine);
    return true;
  }

  // The best of the block's logits of each token.
  __device__ __forceinline__ void put_best(Candidate mine) {
#pragma unroll
    for (int mask = MOST_FEW; mask < 32; mask *= 2) {
      const Candidate other = {Core::shuffle_xor(mine.logit, mask),
                               Core::shuffle_xor(mine.index, mask)};
      if (wins(other, mine)) mine = other;
    }
    const int lane = b.core.warp_thread(), thread = b.core.thread();
    if (lane < MOST_FEW) best()[b.core.warp() * MOST_FEW + lane] = mine;
    b.core.barrier();
    if (thread >= pass.tokens) return;
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; ++w) {
      const Candidate other = best()[w * MOST_FEW + thread];
      if (wins(other, mine)) mine = other;
    }
    float* const to = best_at(b, b.rank, thread, b.block);
    store_shared(to, mine.logit), twin::store_word(to + 1, mine.index);
  }

  // ---- stages that add to the residual

  __device__ __forceinline__ bool to_residual(int index, const Stage& stage) {
    constexpr int GROUPS = Few::OWN_GROUPS, AHEAD = 4, BATCH = Few::BATCH_ROWS / 8;
    const Span own = b.plan.owned_of(stage.owned, b.block);
    const bool down = stage.kind == int(StageKind::DOWN);
    const Inputs in(b, down ? HandedAt::fed(b.memory) : HandedAt::outputs(b.memory),
                    down ? Plan::ffn_cols : Plan::heads_cols);
    const int warp = in.warp, lane = in.lane, rows = own.hi - own.lo, groups = (rows + 7) / 8,
              slices = in.slices();
    const u32 all = lane / 4 < pass.tokens ? ~0u : 0u;
    u32 x[AHEAD][Inputs::STEPS][4] = {};
#pragma unroll
    for (int p = 0; p < AHEAD; ++p) in.ask(p, p < slices ? all : 0u, x[p]);
    const Stage& next = b.plan.stages_at(index + 1);
    const float* norm = norm_of(next);
    TWIN_KEEP(norm);  // looked up here: the end of a stage waits for no table
    int scale_bits = bits_as<int>(b.plan.reads_at(next.first_read).scale);
    TWIN_KEEP(scale_bits);
    const float scale = bits_as<float>(scale_bits);
    // of its first row
    const int mine = own.lo + b.core.thread() / MOST_FEW;
    const float weight = mine < own.hi ? weight_of(norm, mine) : 0.0f;
    const float* const residual = HandedAt::residual(b.memory, turn) + token();
    const bool adds = token() < pass.tokens;
    float before = mine < own.hi && adds ? load_shared(residual + mine * MOST_FEW) : 0.0f;
    float sum[GROUPS][2][4] = {};
    TWIN_ONCE
    for (int first = 0; first < slices; first += AHEAD) {
      Patience patience;
      for (;;) {  // the last one was requested as long ago as a slice takes
        u32 late = 0;
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) late |= Inputs::late(x[p]) << (p * Inputs::STEPS);
        if (!late) break;
        if (!b.core.agree(keep_waiting(b, patience, {index, -1, 0, first})) || b.core.gave_up())
          break;
#pragma unroll
        for (int p = 0; p < AHEAD; ++p) in.ask(first + p, late >> (p * Inputs::STEPS), x[p]);
      }
      __syncwarp();
#pragma unroll
      for (int p = 0; p < AHEAD; ++p) {
        const int slice = first + p;
        if (slice >= slices) break;
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
          if (g >= groups) break;
          const u32 tile = b.core.ring.tile++, at = b.core.ring.acquire(tile);
          in.dot(at, least(lane / 4, rows - 8 * g - 1), slice, x[p], sum[g]);
          b.core.ring.release(tile, 1);
        }
        in.ask(slice + AHEAD, slice + AHEAD < slices ? all : 0u, x[p]);
      }
    }
    ++turn;
    float squares = 0.0f;
#pragma unroll
    for (int begin = 0; begin < GROUPS; begin += BATCH) {
      float* const parts = sums();
#pragma unroll
      for (int g = begin; g < begin + BATCH && g < GROUPS; ++g)
        *reinterpret_cast<float2*>(parts + ((warp * Few::BATCH_ROWS + (g - begin) * 8 + lane / 4) *
                                                MOST_FEW +
                                            lane % 4 * 2)) =
            float2{sum[g][0][0] + sum[g][1][0], sum[g][0][1] + sum[g][1][1]};
      b.core.barrier();
      b.half ^= 1;
      if (b.core.gave_up()) return false;
      if (begin == 0) b.core.cleared();
      TWIN_ONCE
      for (int i = b.core.thread() / MOST_FEW;
           i < Few::BATCH_ROWS && begin * 8 + i < rows && adds; i += CONSUMERS / MOST_FEW) {
        const int row = own.lo + begin * 8 + i;
        if (row != mine) before = load_shared(residual + row * MOST_FEW);
        Patience patience;
        while (missing(before) && b.core.agree(keep_waiting(b, patience, {index, -1, 2, row})) &&
               !b.core.gave_up())
          before = load_shared(residual + row * MOST_FEW);
        float total = 0.0f;
#pragma unroll
        for (int w = 0; w < CONSUMER_WARPS; ++w)
          total += parts[(w * Few::BATCH_ROWS + i) * MOST_FEW + token()];
        put_row(row, before + scale * total, row == mine ? weight : weight_of(norm, row), squares);
      }
    }
    put_squares(squares);
    return true;
  }
};

}  // namespace twin
