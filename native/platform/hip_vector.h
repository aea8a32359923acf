// Vectors of an AMD block: the residual in registers, an input that local memory does not hold in
// FP32. Included by hip.h.
#pragma once

namespace twin {

// The residual between stages: thread t keeps elements t, t + THREADS, ...
struct RegisterResidual {
  static constexpr int EACH = Plan::hidden ? (Plan::hidden + THREADS - 1) / THREADS : 1;

  float at[EACH];

  template <class Core>
  __device__ RegisterResidual open(Core&) const {
    return *this;
  }
  template <class Core>
  __device__ void close(Core&, const RegisterResidual& changed) {
    *this = changed;
  }

  // f(place, index) of this thread's elements
  template <class Core, class Each>
  __device__ static __forceinline__ void own(const Core& core, Each f) {
#pragma unroll
    for (int k = 0; k < EACH; ++k)
      if (core.thread() + k * THREADS < Plan::hidden) f(k, core.thread() + k * THREADS);
  }
  template <class Core>
  __device__ void add(Core& core, float keep, const MemoryVector& x, float scale) {
    own(core, [&](int k, int i) { at[k] = keep * at[k] + scale * x.at[i]; });
    core.barrier();  // x is free
  }
  template <class Core>
  __device__ float begin_squares(Core& core) const {
    float part = 0;
    own(core, [&](int k, int) { part += at[k] * at[k]; });
    return core.sum(part);
  }
  template <class Core>
  __device__ void scale_to(Core& core, MemoryVector& to, float by,
                           MemoryVector::Factors factor) const {
    own(core, [&](int k, int i) {
      to.at[i] = factor ? at[k] * by * TWIN_GLOBAL(factor)[i] : at[k];
    });
  }
  template <class Core>
  __device__ void load_row(Core& core, const u8* row) {
    own(core, [&](int k, int i) {
      at[k] = load_element<WEIGHT>(TWIN_GLOBAL(row) + i * type_bytes(WEIGHT));
    });
  }
  template <class Core, class Each>
  __device__ void each(Core& core, Each f) {
    own(core, [&](int k, int i) { f(i, at[k]); });
  }
};

// The upper 24 bits of FP32: an element is off by at most 1 in 131,072 of itself. For the input of
// DOWN, which is only gathered and multiplied.
struct NarrowVector {
  u16* high;
  u8* low;
  int count;

  __device__ static NarrowVector in(float* memory, int count) {
    u16* const first = reinterpret_cast<u16*>(memory);
    return {first, reinterpret_cast<u8*>(first + (count + 7) / 8 * 8), count};
  }
  __device__ void set(int i, float value) const {
    const u32 bits = bits_as<u32>(value) + 0x80u;  // to the nearest
    high[i] = u16(bits >> 16);
    low[i] = u8(bits >> 8);
  }
  __device__ float get(int i) const { return bits_as<float>(u32(high[i]) << 16 | u32(low[i]) << 8); }
  // Each element times by(index / WIDTH).
  template <int WIDTH, class Core, class By>
  __device__ void times(Core& core, By by) const {
    for (int i = core.thread(); i < count; i += core.threads()) set(i, get(i) * by(i / WIDTH));
    core.barrier();
  }
  template <class Core, class Stall>
  __device__ bool gather(Core& core, const Source& source, Stall stall) const {
    return core.gather_each(source, 0, count, [&](int i, float sum) { set(i, sum); }, stall);
  }
  __device__ static int parts(const Stage& stage) { return MemoryVector::parts(stage); }
  __device__ float total(const Stage& stage, const float* sums, int batch) const {
    return MemoryVector{}.total(stage, sums, batch);
  }
};

__device__ __forceinline__ Elements elements(const NarrowVector& x, bool holds, int col,
                                           const float*) {
  u32 words[STEP / 2], bytes[STEP / 4];
  const int from = holds ? col : 0;
#pragma unroll
  for (int i = 0; i < STEP / 2; i += 2) {
    const pair_words two = *reinterpret_cast<const pair_words*>(x.high + from + 2 * i);
    words[i] = two[0], words[i + 1] = two[1];
  }
  if constexpr (STEP == 8) {
    const pair_words two = *reinterpret_cast<const pair_words*>(x.low + from);
    bytes[0] = two[0], bytes[STEP / 4 - 1] = two[1];
  } else {
    bytes[0] = *reinterpret_cast<const u32*>(x.low + from);
  }
  Elements made;
#pragma unroll
  for (int i = 0; i < STEP; ++i) {
    const u32 bits = (words[i / 2] >> 16 * (i % 2) & 0xFFFFu) << 16 |
                     (bytes[i / 4] >> 8 * (i % 4) & 0xFFu) << 8;
    made.at[i] = holds ? bits_as<float>(bits) : 0.0f;
  }
  return made;
}

// Does a block's local memory hold what its stages compute with in FP32? Low-bit weights and
// experts are multiplied one by one, from FP32.
constexpr int ROOM_FLOATS = (SHARED_BYTES - TWIN_STATUS_BYTES) / 4 - Plan::scratch_floats;
constexpr bool NARROW =
    !CODED && !Experts::ANY && !Plan::probe && Plan::input_floats > ROOM_FLOATS;
constexpr int most(int a, int b) { return a > b ? a : b; }
constexpr int INPUT_FLOATS =
    NARROW ? most(most(Plan::hidden, Plan::heads_floats), (3 * Plan::input_floats + 3) / 4)
           : Plan::input_floats;

template <bool IS>
struct InputOf {
  using Type = MemoryVector;
};
template <>
struct InputOf<true> {
  using Type = NarrowVector;
};

}  // namespace twin
