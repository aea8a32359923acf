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
      word[i / 2] = pair(u32(nearest(x.at[0][i] * by)), u32(nearest(x.at[0][i + 1] * by)));
  }
  __device__ __forceinline__ static u32 pair(u32 first, u32 second) {
    return bytes_of(first + u32(RAISED), second + u32(RAISED), 0x5410);
  }
  __device__ __forceinline__ void get(Portion& x) const {
#pragma unroll
    for (int i = 0; i < Portion::VECTOR; i += 2) {
      x.at[0][i] = lowered(bytes_of(word[i / 2], bits_as<u32>(MAGIC), 0x7410));
      x.at[0][i + 1] = lowered(bytes_of(word[i / 2], bits_as<u32>(MAGIC), 0x7432));
    }
  }

 private:
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
  // Next to experts on one GPU threads gather neighbouring fours of all columns at once, and
  // quantise what they gathered for whoever multiplies it. By portions, 12,672 columns were three
  // round trips of 1.2 us, and exchanges among threads for each of them: 5 us from the last
  // publication on.
  static constexpr bool BY_FOURS =
      Experts::ANY && Plan::ranks == 1 && (As::TENSOR || As::ELEMENT == Element::E4M3);
  static constexpr int FOUR = 4, FOURS = (Layout::ELEMENTS / FOUR + CONSUMERS - 1) / CONSUMERS;
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
    if constexpr (BY_FOURS) return gather_fours(core, source, stall);
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

  // The first column of a thread's four number k, and whether there is one.
  __device__ __forceinline__ static int four_of(int me, int k) {
    return FOUR * (me + k * CONSUMERS);
  }
  __device__ __forceinline__ static bool has_four(int me, int k) {
    return FOUR * (k + 1) * CONSUMERS <= Layout::ELEMENTS || four_of(me, k) < Layout::ELEMENTS;
  }

  // Only those that are not there yet are requested again: all blocks request the same lines.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather_fours(Core& core, const Source& source, Stall stall) {
    const int me = core.thread();
    float got[FOURS][FOUR] = {};
    u32 late = 0;  // a bit for each of them
#pragma unroll
    for (int k = 0; k < FOURS; ++k) late |= has_four(me, k) ? 1u << k : 0u;
    bool good = true;
    for (;;) {
#pragma unroll
      for (int k = 0; k < FOURS; ++k)
        load_quad_if(late >> k & 1u, source.at(0) + four_of(me, k), got[k]);
      if (!source.polled) break;
      late = 0;
#pragma unroll
      for (int k = 0; k < FOURS; ++k)
        if (missing(got[k][0]) || missing(got[k][1]) || missing(got[k][2]) || missing(got[k][3]))
          late |= 1u << k;
      if (late == 0) break;
      good = stall(source.part(0), four_of(me, __ffs(int(late)) - 1));
      if (!good) break;
    }
    core.warp_sync();
#pragma unroll
    for (int k = 0; k < FOURS; ++k) put_four(got[k], core.whole(), four_of(me, k), has_four(me, k));
    clear_others(core.whole(), me);
    return good;
  }

  // A thread's parts of slices of which it has no columns.
  __device__ __forceinline__ static void clear_others(u32 whole, int me) {
    if constexpr (As::TENSOR) return;
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
      if (!valid(me, c)) store_float(scale_at(whole, me, c), 0.0f);
  }

  // Where the scale of a column's group lies.
  __device__ __forceinline__ static u32 scale_of(u32 whole, int column) {
    if constexpr (As::TENSOR) return Fragments<Layout>::scales(whole) + 4 * u32(column / VECTOR);
    const auto at = Layout::held(u32(column));
    return scale_at(whole, int(at.thread), int(at.portion));
  }

  // Four neighbours from `column` on, of a group whose others the next threads have. All threads of
  // a warp take part.
  __device__ __forceinline__ static void put_four(const float (&x)[FOUR], u32 whole, int column,
                                                  bool has) {
    constexpr int GROUP = As::TENSOR ? Fragments<Layout>::GROUP : VECTOR;
    u32 bits = 0;  // as integers, numbers that are none are larger than all others
#pragma unroll
    for (int i = 0; i < FOUR; ++i) {
      const u32 magnitude = bits_as<u32>(x[i]) & 0x7FFFFFFFu;
      bits = has && magnitude > bits ? magnitude : bits;
    }
#pragma unroll
    for (u32 mask = 1; mask < u32(GROUP / FOUR); mask *= 2) {
      const u32 other = of_thread(bits, thread_of_warp() ^ mask);
      bits = other > bits ? other : bits;
    }
    if (!has) return;
    const float most = bits_as<float>(bits);
    const bool nothing = most <= LEAST_WHOLE;
    const float by = nothing ? 0.0f : MOST_WHOLE * about_reciprocal(most),
                scale = nothing ? 0.0f : most * ((As::TENSOR ? 0.5f : 1.0f) / MOST_WHOLE);
    u32 v[FOUR];
#pragma unroll
    for (int i = 0; i < FOUR; ++i) v[i] = u32(nearest(x[i] * by));
    const bool first = column % VECTOR == 0;
    if constexpr (As::TENSOR) {
      u32 high, low;
      split_bytes(v, high, low);
      const u32 at = whole + u32(column) / VECTOR * (2 * VECTOR) + u32(column) % VECTOR;
      store_float(at, bits_as<float>(high));
      store_float(at + VECTOR, bits_as<float>(low));
      if (first) store_float(scale_of(whole, column), scale);
    } else {
      const auto held = Layout::held(u32(column));
      const int thread = int(held.thread), portion = int(held.portion);
      const u32 at =
          place(whole, thread, portion) + held.element / 8 * QUADS + held.element % 8 * 2;
      store_float(at, bits_as<float>(WholePairs::pair(v[0], v[1])));
      store_float(at + 4, bits_as<float>(WholePairs::pair(v[2], v[3])));
      if (first) store_float(scale_at(whole, thread, portion), scale);
    }
  }

  // Each element times by(index / WIDTH_): a portion is of one of them.
  template <int WIDTH_, class Core, class By>
  __device__ __forceinline__ void times(Core& core, By by) {
    static_assert(WIDTH_ % VECTOR == 0, "a thread's neighbours are of one expert");
    if constexpr (BY_FOURS) {  // whoever stored a scale
      const int me = core.thread();
#pragma unroll 1
      for (int k = 0; k < FOURS && me % (VECTOR / FOUR) == 0; ++k) {
        if (!has_four(me, k)) continue;
        const u32 at = scale_of(core.whole(), four_of(me, k));
        store_float(at, load_float(at) * by(four_of(me, k) / WIDTH_));
      }
      return;
    }
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
