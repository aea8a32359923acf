// A gated short convolution of one token: out = c * conv(b * x), each channel by the block that
// multiplies its rows of b, c and x, which follow each other. It carries on the channel's history,
// b * x at the positions before, which nobody else reads or writes: no hand-off lies between.
#pragma once

#include "attention.cuh"

namespace twin {

// Where states lie that are no caches: behind the cached keys and values.
__device__ __forceinline__ float* first_state(const Block& b) {
  constexpr u64 ALIGNED = facts::STATE_ALIGNED;
  const u64 cached = u64(b.plan.kv_stages) * u64(b.plan.kv_items) * 2 *
                     u64(b.plan.item_positions) * ROW;
  return reinterpret_cast<float*>(b.memory.kv + (cached + ALIGNED - 1) / ALIGNED * ALIGNED);
}

__device__ __forceinline__ bool convolves(const Stage& stage) {
  return Convolution::ANY && stage.kind == int(StageKind::CONV_IN);
}

// What a channel's convolution asks memory for. Of its first channel a thread has it before the
// stage's inputs are there.
struct Taps {
  static constexpr int PAST = Convolution::CONV - 1, CHANNELS = Convolution::CHANNELS,
                       UNIT = facts::CONV_UNIT;

  float tap[PAST + 1], past[PAST];

  // [PAST][CHANNELS]: position p at p % PAST
  template <class Stage>
  __device__ static __forceinline__ float* history(const Block& b, const Stage& stage) {
    return first_state(b) + u64(stage.kv) * u64(PAST * CHANNELS);
  }
  __device__ static __forceinline__ Span channels(Span rows) {
    return {rows.lo / UNIT, rows.hi / UNIT};
  }
  template <class Stage>
  __device__ __forceinline__ void load(const Block& b, const Stage& stage, int channel,
                                       int position) {
    if constexpr (Convolution::ANY) {
      const float* const taps = b.memory.constants + stage.taps + channel;
      const float* const seen = history(b, stage) + channel;
      TWIN_UNROLL
      for (int m = 0; m <= PAST; ++m) tap[m] = taps[m * CHANNELS];
      TWIN_UNROLL
      for (int m = 0; m < PAST; ++m) {
        const int at = position - PAST + m;
        past[m] = at >= 0 ? seen[at % PAST * CHANNELS] : 0.0f;
      }
    }
  }
  template <class Stage>
  __device__ __forceinline__ void ahead(const Block& b, const Stage& stage, Span rows) {
    if (!convolves(stage)) return;
    const int mine = channels(rows).lo + b.core.thread();
    if (mine < channels(rows).hi) load(b, stage, mine, position_of(b));
  }
  // The newest element joins the history.
  template <class Stage>
  __device__ __forceinline__ float convolved(const Block& b, const Stage& stage, int channel,
                                             int position, float newest) const {
    float sum = newest * tap[PAST];
    TWIN_UNROLL
    for (int m = 0; m < PAST; ++m) sum += past[m] * tap[m];
    history(b, stage)[position % PAST * CHANNELS + channel] = newest;
    return sum;
  }
};

// Where a block's rows of b, c and x meet.
__device__ __forceinline__ float* channel_rows(const Block& b) {
  if constexpr (Convolution::ANY) return b.scratch + b.plan.channels;
  return b.scratch;
}

// Behind the products of all of the block's rows. No barrier at the end: whoever writes these rows
// next stands behind many.
template <class Stage>
__device__ __forceinline__ void convolve(Block& b, const Stage& stage, const Output& out, Span own,
                                         const Taps& ahead) {
  if constexpr (Convolution::ANY) {
    b.core.barrier();
    const float* const rows = channel_rows(b);
    const Span mine = Taps::channels(own);
    const int position = position_of(b);
    TWIN_EACH(i, mine.hi - mine.lo) {
      const int channel = mine.lo + i;
      const float* const row = rows + i * Taps::UNIT;
      Taps taps = ahead;
      if (i != b.core.thread()) taps.load(b, stage, channel, position);
      const float made = taps.convolved(b, stage, channel, position, row[0] * row[2]);
      publish(b, out, channel, row[1] * made);
    }
  }
}

}  // namespace twin
