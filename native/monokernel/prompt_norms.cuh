// A prompt pass's residual and norms: whole tokens by one block each.
#pragma once

namespace twin {

constexpr int NORM_PACK = 8;  // neighbours of a token that a thread sums at once
static_assert(NORM_PACK == Chunk::PACK, "activations are stored as many at a time");

// x += scale * each of the read's parts, in rank order; RAW: without its scale.
template <bool RAW = false>
__device__ __forceinline__ void add_read(const Block& b, const Read& read, int token, int at,
                                         Pack<NORM_PACK>& x) {
  // their loads are under way together; more cost registers that a step needs
  constexpr int AT_ONCE = 2;
  const Value& value = b.plan.values_at(read.value);
  const bool own = read.pass_parts == int(Parts::OWN),
             others = read.pass_parts == int(Parts::OTHERS);
  const int count = own ? 1 : b.plan.ranks - others, first = own ? b.rank : 0;
  TWIN_ONCE
  for (int p = 0; p < count; p += AT_ONCE) {
    Pack<NORM_PACK> got[AT_ONCE];
    TWIN_UNROLL
    for (int j = 0; j < AT_ONCE; ++j) {
      const int rank = first + p + j + (others && p + j >= b.rank);
      if (p + j < count)
        got[j] = load_pack<NORM_PACK, 16>(
            pass_row(b.launch.ranks[rank], value, token, b.plan.hidden) + at, true);
    }
    TWIN_UNROLL
    for (int j = 0; j < AT_ONCE; ++j)
      TWIN_UNROLL
      for (int i = 0; i < NORM_PACK; ++i)
        if (p + j < count) x.at[i] += (RAW ? 1.0f : read.scale) * got[j].at[i];
  }
}

// NORM_PACK neighbours times a norm's weights, which lie as steps load them.
__device__ __forceinline__ void weigh(Pack<NORM_PACK>& x, float by, const float* weight, int at) {
  TWIN_UNROLL
  for (int j = 0; j < NORM_PACK; ++j)
    x.at[j] *= by * weight[Core::Hidden::norm_place(at + j / 4 * 4) + j % 4];
}

// What a module adds to the residual, where that is normed. `begin`: by all threads of the block,
// of a token's columns start, start + step, .. below `end`; `group` warps share the token, behind
// `warps_before` others; `sums` has room for one of each warp.
template <class S>
struct NormedRead {
  const S& stage;
  float by = 1.0f;

  __device__ __forceinline__ void begin(Block& b, int token, int start, int end, int step,
                                        int warps_before, int group, float* sums) {
    float squares = 0;
    TWIN_ONCE
    for (int i = start; i < end && stage.reads > 0; i += step) {
      const Pack<NORM_PACK> x = raw(b, token, i);
      TWIN_UNROLL
      for (int j = 0; j < NORM_PACK; ++j) squares += x.at[j] * x.at[j];
    }
    squares = b.core.warp_sum(squares);
    if (b.core.warp_thread() == 0) sums[b.core.warp()] = squares;
    b.core.barrier();
    float total = 0;
    for (int w = 0; w < group && end; ++w) total += sums[warps_before + w];
    by = 1.0f / square_root(total / float(b.plan.hidden) + b.plan.norm_eps);
  }
  // residual += scale * what was read, normed
  __device__ __forceinline__ void add(const Block& b, int token, int at,
                                      Pack<NORM_PACK>& residual) const {
    if (stage.reads == 0) return;
    const float scale = b.plan.reads_at(stage.first_read).scale;
    Pack<NORM_PACK> x = raw(b, token, at);
    weigh(x, scale * by, b.memory.constants + stage.post_norm, at);
    TWIN_UNROLL
    for (int j = 0; j < NORM_PACK; ++j) residual.at[j] += x.at[j];
  }

 private:
  __device__ __forceinline__ Pack<NORM_PACK> raw(const Block& b, int token, int at) const {
    Pack<NORM_PACK> x = {};
    TWIN_ONCE
    for (int r = stage.first_read; r < stage.first_read + stage.reads; ++r)
      add_read<true>(b, b.plan.reads_at(r), token, at, x);
    return x;
  }
};

// The residual of this block's tokens after the stage's reads, and its norm as the stage's input.
// The block's warps divide its tokens among them; `sums` in shared memory holds a sum of squares of
// each warp. A router's stage also chooses their experts, by the stage `route`.
__device__ __forceinline__ void norm_chunk(Block& b, const Stage& stage, const Stage& route,
                                           const Pass& pass, float* sums) {
  const int hidden = b.plan.hidden, warps = b.core.warps(),
            tokens = (pass.tokens - b.block + b.plan.blocks - 1) / b.plan.blocks;
  const float* weight = b.memory.constants + stage.norm;
  // where steps add logits up, ROUTE reads the residual first
  const bool summed = Scores::ANY && stage.kind == int(StageKind::ROUTER);
  const Stage& reader = summed ? route : stage;
  const int reads = summed ? 1 : stage.reads;
  // tokens at once, warps of each
  const int together = least(warps, tokens), group = together > 0 ? warps / together : 1;
  const int team = b.core.warp() / group, step = group * b.core.warp_threads() * NORM_PACK;
  const int start =
      (b.core.warp() % group * b.core.warp_threads() + b.core.warp_thread()) * NORM_PACK;
  TWIN_ONCE
  for (int done = 0; done < tokens; done += together) {
    const int token = b.block + (done + team) * b.plan.blocks;
    const int end = team < together && token < pass.tokens ? hidden : 0;  // of this warp's columns
    float* residual = b.memory.prompt + b.plan.prompt_residual + long(token) * hidden;
    const int id = end ? token_of(b, pass, token) : 0;
    const u8* row = b.memory.embedding + u64(id) * u64(hidden) * type_bytes(WEIGHT);
    NormedRead<Stage> read = {stage};
    if constexpr (Family::NORMS_AFTER)
      read.begin(b, token, start, end, step, team * group, group, sums + warps);
    float squares = 0;
    TWIN_ONCE
    for (int i = start; i < end; i += step) {
      Pack<NORM_PACK> x;
      if (reads == 0) {
        TWIN_UNROLL
        for (int j = 0; j < NORM_PACK; ++j)
          x.at[j] = embedded(load_element<WEIGHT>(row + (i + j) * type_bytes(WEIGHT)));
      } else {
        x = load_pack<NORM_PACK, 16>(residual + i);
      }
      if constexpr (Family::NORMS_AFTER) {
        read.add(b, token, i, x);
      } else {
        TWIN_ONCE
        for (int r = reader.first_read; r < reader.first_read + reads; ++r)
          add_read(b, b.plan.reads_at(r), token, i, x);
      }
      TWIN_UNROLL
      for (int j = 0; j < NORM_PACK; ++j) {
        squares += x.at[j] * x.at[j];
        store_shared(residual + i + j, x.at[j]);
      }
    }
    squares = b.core.warp_sum(squares);
    if (b.core.warp_thread() == 0) sums[b.core.warp()] = squares;
    b.core.barrier();
    float total = 0;
    for (int w = 0; w < group && end; ++w) total += sums[team * group + w];
    const float scale = 1.0f / square_root(total / float(hidden) + b.plan.norm_eps);
    TWIN_ONCE
    for (int i = start; i < end; i += step) {
      Pack<NORM_PACK> x = load_pack<NORM_PACK, 16>(residual + i);
      if (Family::NORMS_BEFORE || (b.plan.drafts && stage.kind == int(StageKind::LM_HEAD)))
        weigh(x, scale, weight, i);
      if constexpr (Experts::ANY)
        if (stage.kind == int(StageKind::ROUTER)) {
          float* const row = Routing(b.plan, warps, sums).rows + long(team) * hidden + i;
          TWIN_UNROLL
          for (int j = 0; j < NORM_PACK; ++j) row[j] = x.at[j];
        }
      Chunk::store_pack(b.memory.prompt + b.plan.prompt_normed, hidden, token, i, x);
    }
    b.core.barrier();
    if constexpr (Experts::ANY)
      if (stage.kind == int(StageKind::ROUTER))
        choose_experts(b, stage, route, pass.tokens, done, together,
                       Routing(b.plan, warps, sums));
  }
}

}  // namespace twin
