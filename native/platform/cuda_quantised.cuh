// A stage's input before low-bit weights that is too wide for registers (`wide_ffn` in teams.py): a
// feed-forward's, or that of experts' columns side by side. It is gathered a few slices at a time
// and lies in the block's shared memory as integers of 16 bits. A thread takes its part of a
// slice from there when it multiplies the slice's tile, so that the products' code is there once,
// however many slices a team has: with elements in registers, of 18,000 columns on steps spilled,
// and a layer was larger than the instruction cache. Tensor cores find theirs where they always do
// (cuda_fragments.cuh).
#pragma once

namespace twin {

// A thread's part of one slice.
struct Portion {
  static constexpr int VECTOR = CODED_PACK ? CODED_PACK : 16, PORTIONS = 1;
  float at[PORTIONS][VECTOR];
};

// Elements that are multiplied as FP32: integers of 16 bits, two to a word, and 2^15 more.
struct WholePairs {
  static constexpr float RAISED = 32768.0f, MAGIC = 0x1p23f;  // MAGIC + n has n in its last bits
  u32 word[Portion::VECTOR / 2];
  float scale;

  __device__ __forceinline__ void set(const Portion& x) {
    float most = 0, strange = 0;  // NaN where an element is no number
#pragma unroll
    for (int i = 0; i < Portion::VECTOR; ++i) {
      most = fmaxf(most, fabsf(x.at[0][i]));
      strange += x.at[0][i] * 0.0f;
    }
    const float by = most > LEAST_WHOLE ? MOST_WHOLE / most : 0.0f;
    scale = (most > LEAST_WHOLE ? most * (1.0f / MOST_WHOLE) : 0.0f) + strange;
#pragma unroll
    for (int i = 0; i < Portion::VECTOR; i += 2)
      word[i / 2] = bytes_of(raised(x.at[0][i] * by), raised(x.at[0][i + 1] * by), 0x5410);
  }
  __device__ __forceinline__ void get(Portion& x) const {
#pragma unroll
    for (int i = 0; i < Portion::VECTOR; i += 2) {
      x.at[0][i] = lowered(bytes_of(word[i / 2], bits_as<u32>(MAGIC), 0x7410));
      x.at[0][i + 1] = lowered(bytes_of(word[i / 2], bits_as<u32>(MAGIC), 0x7432));
    }
  }

 private:
  __device__ __forceinline__ static u32 raised(float x) { return u32(nearest(x)) + u32(RAISED); }
  __device__ __forceinline__ static float lowered(u32 bits) {
    return bits_as<float>(bits) - (MAGIC + RAISED);
  }
};

// The elements of a thread of COUNT portions from `from` on, the sum of all parts, zero where it
// has none. The loads of a part are under way together.
template <class Layout, int COUNT, int VECTOR, class Core, class Stall>
__device__ __forceinline__ bool gather_portions(Core& core, const Source& source, Stall stall,
                                                int from, float (&sum)[COUNT][VECTOR]) {
  const int me = core.thread(), parts = Plan::ranks == 1 ? 1 : source.parts;
  const auto has = [&](int j) {
    return from + j < Layout::PORTIONS && Layout::valid(me, from + j);
  };
  bool good = true;
#pragma unroll 1
  for (int p = 0; p < parts; ++p) {
    Side<VECTOR, 16, Layout::alike(VECTOR / 4)> got[COUNT];
    for (; good;) {
      int late = -1;
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
        if (has(j))
          got[j].load(core.warp_thread(), source.at(p) + Layout::column(me, from + j), false);
#pragma unroll
      for (int j = 0; j < COUNT; ++j)
        if (has(j) && got[j].late()) late = Layout::column(me, from + j);
      if (late < 0 || !source.polled) break;
      good = stall(source.part(p), late);
    }
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const Pack<VECTOR> pack = got[j].settle(core.warp_thread());
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum[j][i] = p ? sum[j][i] + pack.at[i] : pack.at[i];
    }
  }
#pragma unroll
  for (int j = 0; j < COUNT; ++j)
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) sum[j][i] = has(j) ? sum[j][i] : 0.0f;
  return good;
}

// In shared memory from `whole` on: [PORTIONS][words 0 to 3, words 4 to 7, scales,
// sums][CONSUMERS].
template <class Layout, Code CODE>
struct Activation<Layout, Quantised<CODE>> : Layout {
  using Layout::VECTOR, Layout::PORTIONS, Layout::column, Layout::valid;
  static constexpr bool WIDE = true;
  using As = Coding<CODE>;
  static constexpr int AT_ONCE = facts::WIDE_AT_ONCE;  // portions that are gathered together
  static constexpr u32 QUADS = 4 * UNIT_BYTES * CONSUMERS / 4, LAST = 4 * CONSUMERS,
                       BYTES = 2 * QUADS + 2 * LAST;  // of a portion
  static_assert(VECTOR == Portion::VECTOR && VECTOR == 16, "eight words of an input's portion");
  static_assert(Layout::AHEAD_GROUPS == 0, "a tile is taken when its part of the input is");

  // Where thread `me` has its first words of portion c.
  __device__ __forceinline__ static u32 place(u32 whole, int me, int c) {
    return whole + u32(c) * BYTES + u32(me) * u32(UNIT_BYTES);
  }
  __device__ __forceinline__ static u32 scale_at(u32 whole, int me, int c) {
    return whole + u32(c) * BYTES + 2 * QUADS + 4 * u32(me);
  }

  __device__ static Activation in(float*, int) { return {}; }

  // They are quantised when they are there.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall) {
    bool good = true;
#pragma unroll 1
    for (int c = 0; c < PORTIONS; c += AT_ONCE) {
      float sum[AT_ONCE][VECTOR];
      good = gather_portions<Layout>(core, source, stall, c, sum) && good;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (c + j < PORTIONS) put(sum[j], core.whole(), core.thread(), c + j);
    }
    return good;
  }

  // Each element times by(index / WIDTH_): a portion is of one of them.
  template <int WIDTH_, class Core, class By>
  __device__ __forceinline__ void times(Core& core, By by) {
    static_assert(WIDTH_ % VECTOR == 0, "a thread's neighbours are of one expert");
#pragma unroll 1
    for (int c = 0; c < PORTIONS; ++c) {
      if (!valid(core.thread(), c)) continue;
      const u32 at = As::TENSOR ? Fragments<Layout>::scales(core.whole()) +
                                      4 * u32(column(core.thread(), c) / VECTOR)
                                : scale_at(core.whole(), core.thread(), c);
      store_float(at, load_float(at) * by(column(core.thread(), c) / WIDTH_));
    }
  }

  // A thread's part of a slice, for the tile that is multiplied next.
  struct Taken {
    Portion x;
    Whole<Portion> numbers;
    float scale;

    __device__ __forceinline__ Taken(u32 whole, int me, int c) {
      u32 word[8];
      load_four(place(whole, me, c), word);
      load_four(place(whole, me, c) + QUADS, word + 4);
      scale = load_float(scale_at(whole, me, c));
      if constexpr (As::WHOLE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) numbers.high[0][i] = word[i], numbers.low[0][i] = word[4 + i];
        numbers.scale[0] = scale;
        numbers.sum[0] = bits_as<int>(load_float(scale_at(whole, me, c) + LAST));
      } else {
        WholePairs pairs;
#pragma unroll
        for (int i = 0; i < 8; ++i) pairs.word[i] = word[i];
        pairs.get(x);
      }
    }
    // sum[r] += its products with row r of a piece of the tile.
    __device__ __forceinline__ void multiply(CodedPiece<As::AT_ONCE>& piece,
                                             float (&sum)[As::ROWS]) const {
      if constexpr (!As::WHOLE) {
#pragma unroll
        for (int r = 0; r < As::ROWS; ++r) piece.scale[r] *= scale;
      }
      piece.template multiply<As>(0, x, numbers, sum);
    }
  };

  // A thread's part of slice c is quantised, where it looks for them.
  __device__ __forceinline__ static void put(const float (&of)[VECTOR], u32 whole, int me, int c) {
    Portion x;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) x.at[0][i] = of[i];
    if constexpr (As::TENSOR) {
      Fragments<Layout>::put(x.at[0], me, c, whole);
    } else if constexpr (As::WHOLE) {
      Whole<Portion> made;
      made.template set<As::ELEMENT>(x);
      store_four(place(whole, me, c), made.high[0]);
      store_four(place(whole, me, c) + QUADS, made.low[0]);
      store_float(scale_at(whole, me, c), made.scale[0]);
      store_float(scale_at(whole, me, c) + LAST, bits_as<float>(made.sum[0]));
    } else {
      WholePairs made;
      made.set(x);
      const u32(&w)[8] = made.word;
      store_four(place(whole, me, c), {w[0], w[1], w[2], w[3]});
      store_four(place(whole, me, c) + QUADS, {w[4], w[5], w[6], w[7]});
      store_float(scale_at(whole, me, c), made.scale);
    }
  }
};

// Of codes with a bit each: the only one, else PLAIN.
__host__ __device__ constexpr Code only_code(u32 codes, int number = facts::CODE_KINDS) {
  return number == 0 || codes == 1u << number ? Code(number) : only_code(codes, number - 1);
}

}  // namespace twin
