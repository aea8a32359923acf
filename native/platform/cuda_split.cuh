// A feed-forward's input, or that of experts' columns side by side, that is too wide for registers
// before weights that are not low-bit. It is gathered a few slices at a time (`ffn_at_once` in
// teams.py). The first slices stay in registers, and those for which there are none
// (`ffn_in_registers`) lie in the block's shared memory as they are.
#pragma once

namespace twin {

// Of which the first IN_REGISTERS portions of a thread are in registers.
// In shared memory from `whole` on: [further portions][fours of a portion][CONSUMERS][16 bytes].
template <class Layout, int IN_REGISTERS, int AT_ONCE>
struct Activation<Layout, Split<IN_REGISTERS, AT_ONCE>>
    : Activation<Layout, InRegisters<Reach::NEAR>> {
  using Near = Activation<Layout, InRegisters<Reach::NEAR>>;
  using Near::VECTOR, Near::PORTIONS, Near::at;
  static_assert(Near::AHEAD_GROUPS == 0, "a tile is taken when its part of the input is");

  u32 further;  // where the thread has its first four of portion IN_REGISTERS

  __device__ static Activation in(float*, int) { return {}; }

  // A few portions at a time, those in registers too: with all of them under way steps spilled.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall) {
    if constexpr (IN_REGISTERS < PORTIONS)
      further = core.whole() + u32(core.thread()) * u32(UNIT_BYTES);
    bool good = true;
#pragma unroll
    for (int c = 0; c < IN_REGISTERS; c += AT_ONCE) {
      float sum[AT_ONCE][VECTOR];
      good = gather_portions<Layout>(core, source, stall, c, sum) && good;
#pragma unroll
      for (int j = 0; j < AT_ONCE && c + j < IN_REGISTERS; ++j)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) at[c + j][i] = sum[j][i];
    }
#pragma unroll 1
    for (int c = IN_REGISTERS; c < PORTIONS; c += AT_ONCE) {
      float sum[AT_ONCE][VECTOR];
      good = gather_portions<Layout>(core, source, stall, c, sum) && good;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (c + j < PORTIONS) put(c + j, sum[j]);
    }
    return good;
  }

  // Each element times by(index / WIDTH).
  template <int WIDTH, class Core, class By>
  __device__ __forceinline__ void times(Core& core, By by) {
#pragma unroll
    for (int c = 0; c < IN_REGISTERS; ++c) Near::template times_portion<WIDTH>(core, c, at[c], by);
#pragma unroll 1
    for (int c = IN_REGISTERS; c < PORTIONS; ++c) {
      float x[VECTOR];
      get(c, x);
      Near::template times_portion<WIDTH>(core, c, x, by);
      put(c, x);
    }
  }

  // sum[r] += this thread's part of row r.
  __device__ __forceinline__ void multiply(int c, const Packed<VECTOR> (&words)[ROWS_AT_ONCE],
                                           float (&sum)[ROWS_AT_ONCE]) const {
    if (c < IN_REGISTERS) return Near::multiply(c, words, sum);
    float x[VECTOR];
    get(c, x);
    Near::multiply_portion(x, words, sum);
  }

 private:
  __device__ __forceinline__ u32 place(int c, int i) const {
    return further + u32(((c - IN_REGISTERS) * VECTOR + i) / 4 * CONSUMERS * UNIT_BYTES);
  }
  __device__ __forceinline__ void get(int c, float (&x)[VECTOR]) const {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) load_floats(place(c, i), x + i);
  }
  __device__ __forceinline__ void put(int c, const float (&x)[VECTOR]) const {
#pragma unroll
    for (int i = 0; i < VECTOR; i += 4) store_floats(place(c, i), x + i);
  }
};

}  // namespace twin
