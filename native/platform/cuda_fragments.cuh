// FP4 on the tensor cores: 16 rows of a tile times a warp's columns, as whole numbers (IMMA,
// m16n8k32). An input is two signed bytes an element, high and low. Of the eight columns of a
// product's right side, two hold these of one group of columns and zeros elsewhere: so a product
// keeps four groups apart, whose sums are scaled when all four are complete. That is a chain: one
// product of 64 columns where a group has 16, two where it has 32.
//
// Thread l of a warp loads columns of two neighbouring rows, those of pair l / 4; a product's sums
// come to thread l as those of the same two rows, of group l % 4.
#pragma once

namespace twin {

// Twice the value of an FP4 code, as two signed bytes whose sum it is: less its magnitude, and
// twice its magnitude or, where its sign is set, nothing. Tensor cores add them. A look-up takes the
// code's lower three bits; where the fourth is set, it gives the sign of what it found. The lower
// halves of the tables are registers that the compiler cannot know to be constants; it moved
// constants from uniform registers for each look-up, 12 of 77 instructions for 16 bytes.
constexpr u32 LESS_LOW = 0xFDFEFF00u, LESS_HIGH = 0xF4F8FAFCu, MORE_LOW = 0x06040200u,
              MORE_HIGH = 0x18100C08u;

struct Tables {
  u32 less, more;

  __device__ __forceinline__ void set() {
    const u32 none = thread_of_warp() >> 5;
    less = LESS_LOW | none, more = MORE_LOW | none;
  }
  // of the lower four codes
  __device__ __forceinline__ u32 less_of(u32 magnitudes) const {
    return bytes_of(less, LESS_HIGH, magnitudes);
  }
  __device__ __forceinline__ u32 more_of(u32 codes) const {
    return bytes_of(more, MORE_HIGH, codes);
  }
};

// Of a vector's thread: what it has of the right sides of its warp's products. Needs all threads of
// the warp.
template <class Vector>
struct Fragments {
  // columns that share a scale of the input; those of a thread
  static constexpr int GROUP = uses(Code::NVFP4) ? 16 : 32, UNIT = 16;
  static constexpr int UNITS = GROUP / UNIT, STEPS = UNITS;  // of a group; products of a chain
  static constexpr int CHAINS = Vector::LANES / (4 * UNITS);
  static constexpr int WORDS = UNIT / 4;

  u32 input[Vector::PORTIONS][CHAINS][WORDS];  // of the step that this thread has elements of
  float scale[Vector::PORTIONS];               // of the thread's own columns
  Tables tables;

  // Which of a chain's four groups, and which byte of it: those of the thread's column of a right
  // side. Of its rows a thread has those of unit 4 * step + thread % 4.
  __device__ __forceinline__ static u32 group() { return thread_of_warp() / 8; }
  __device__ __forceinline__ static bool is_low() { return thread_of_warp() / 4 % 2; }
  __device__ __forceinline__ static u32 step() { return group() * u32(UNITS) / 4; }
  __device__ __forceinline__ static u32 unit() { return 4 * step() + thread_of_warp() % 4; }

  // x as numbers of 16 bits times a scale, that of a group by its largest element.
  __device__ __forceinline__ void set(const Vector& x) {
    tables.set();
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      float most = 0, strange = 0;  // NaN where an element is no number
#pragma unroll
      for (int i = 0; i < UNIT; ++i) {
        most = fmaxf(most, fabsf(x.at[c][i]));
        strange += x.at[c][i] * 0.0f;
      }
      if constexpr (UNITS == 2) {
        most = fmaxf(most, thread_beside(most));
        strange += thread_beside(strange);
      }
      const float by = most > LEAST_WHOLE ? MOST_WHOLE / most : 0.0f;
      // weights are doubled
      scale[c] = (most > LEAST_WHOLE ? most * (0.5f / MOST_WHOLE) : 0.0f) + strange;
      u32 high[WORDS], low[WORDS];
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        u32 v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = u32(nearest(x.at[c][4 * w + i] * by));
        split_bytes(v, high[w], low[w]);
      }
      deal(high, low, input[c]);
    }
  }

  // Of group thread % 4 of a chain.
  __device__ __forceinline__ float scale_of(int c, int chain) const {
    return of_thread(scale[c], u32(UNITS) * (u32(4 * chain) + thread_of_warp() % 4));
  }

  // Gives each thread, of each chain, what another one holds. Of two chains at once: the threads of
  // one show their high bytes while those of the other show their low ones.
  __device__ __forceinline__ static void deal(const u32 (&high)[WORDS], const u32 (&low)[WORDS],
                                              u32 (&to)[CHAINS][WORDS]) {
    constexpr u32 EACH = 4 * UNITS;  // threads of a chain
    const bool second = thread_of_warp() / EACH % 2, is_low = Fragments::is_low(),
               mine = unit() / u32(UNITS) == group();
#pragma unroll
    for (int k = 0; k < CHAINS; k += 2) {
      const u32 from = u32(k) * EACH + unit();
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        const u32 one = of_thread(second ? low[w] : high[w], is_low ? from + EACH : from),
                  other = of_thread(second ? high[w] : low[w], is_low ? from : from + EACH);
        to[k][w] = mine ? is_low ? other : one : 0u;
        if (k + 1 < CHAINS) to[k + 1][w] = mine ? is_low ? one : other : 0u;
      }
    }
  }
};

// The pair of a tile's 16 rows whose weights a thread loads. Where eight pairs of rows would meet
// the same banks of shared memory, neighbours take pairs that do not.
template <class Vector>
__device__ __forceinline__ u32 pair_of_thread() {
  constexpr u32 APART = u32(Vector::WIDTH) % 128u;  // bytes of a pair
  const u32 pair = thread_of_warp() / 4;
  return APART % 64u == 32u ? (pair & 4u) | (pair & 1u) << 1 | (pair >> 1 & 1u) : pair;
}

// What a thread has of 16 rows of a tile at once: chains FROM to FROM + COUNT - 1 of its warp.
struct FragmentPiece {
  template <class Coding, class Vector, int FROM = 0, int COUNT = Fragments<Vector>::CHAINS,
            class Piece>
  __device__ __forceinline__ static void load(Piece& piece, int me, u32 from, u32 apart, int first,
                                              int rows) {
    using Its = Fragments<Vector>;
    constexpr int BLOCK = code_block(Coding::CODE);
    const u32 lane = thread_of_warp(), pair = pair_of_thread<Vector>();
    const u32 unit = u32(Vector::local(me)) / u32(Its::UNIT) - lane;  // the warp's first
    const u32 at = from + (u32(first) + 2 * pair) * apart + (unit + lane % 4) * u32(UNIT_BYTES);
#pragma unroll
    for (int s = 0; s < COUNT * Its::STEPS; ++s)
      load_four(at + u32(4 * (s + FROM * Its::STEPS) * UNIT_BYTES), piece.word[s]);
    // Beyond a slice's columns inputs are zero, and any scale will do that is a number.
    const u32 cols = 2 * apart, last = (cols - 1) / u32(BLOCK);
    const u32 high = u32(scaled_rows(rows)), row = u32(first) + 2 * pair;
    const u32 behind = from + u32(whole_rows(Coding::CODE, rows)) * apart;
    const u32 skipped = code_outer(Coding::CODE) ? 4u * high : 0u;
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      const u32 block = (unit * u32(Its::UNIT) + (u32(4 * (FROM + k)) + lane % 4) * u32(Its::GROUP)) /
                        u32(BLOCK);
      load_half(behind + skipped + (block < last ? block : last) * high + row, piece.inner + k);
    }
    if constexpr (code_outer(Coding::CODE)) {
      u32 outer[2];
      load_two(behind + 4u * row, outer);
      piece.scale[0] = bits_as<float>(outer[0]), piece.scale[1] = bits_as<float>(outer[1]);
    }
  }

  // sum[r] += this thread's part of row r of its pair.
  template <class Coding, class Vector, int FROM = 0, int COUNT = Fragments<Vector>::CHAINS,
            class Piece>
  __device__ __forceinline__ static void multiply(const Piece& piece, int c,
                                                  const Fragments<Vector>& x, float (&sum)[2]) {
    using Its = Fragments<Vector>;
    const u32 step = Its::step();
    float total[2] = {};
#pragma unroll
    for (int k = 0; k < COUNT; ++k) {
      int d[4] = {};
#pragma unroll
      for (int s = 0; s < Its::STEPS; ++s)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const u32 one = piece.word[k * Its::STEPS + s][h],
                    two = piece.word[k * Its::STEPS + s][2 + h];
          const u32 one_less = one & 0x77777777u, two_less = two & 0x77777777u;
          const bool here = Its::STEPS == 1 || step == u32(s);
          const u32 b0 = here ? x.input[c][FROM + k][2 * h] : 0u,
                    b1 = here ? x.input[c][FROM + k][2 * h + 1] : 0u;
          const Tables& of = x.tables;
          multiply_bytes(d, of.less_of(one_less), of.less_of(two_less), of.less_of(one_less >> 16),
                         of.less_of(two_less >> 16), b0, b1);
          multiply_bytes(d, of.more_of(one), of.more_of(two), of.more_of(one >> 16),
                         of.more_of(two >> 16), b0, b1);
        }
      float by[2];
      if constexpr (code_scale(Coding::CODE) == Scale::E8M0) {  // 2^-127 is taken for zero
        by[0] = bits_as<float>(piece.inner[k] << 23 & 0x7F800000u);
        by[1] = bits_as<float>(piece.inner[k] << 15 & 0x7F800000u);
      } else {
        two_e4m3(piece.inner[k], by);
      }
      const float unit = x.scale_of(c, FROM + k);
#pragma unroll
      for (int r = 0; r < 2; ++r)
        total[r] += float(d[2 * r] * 256 + d[2 * r + 1]) * (by[r] * unit);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r)
      sum[r] += code_outer(Coding::CODE) ? total[r] * piece.scale[r] : total[r];
  }

  // The sums of a piece's 16 rows over a warp's columns.
  template <class Vector>
  __device__ __forceinline__ static void store(const float (&sum)[2], int rows, float* to) {
    const u32 lane = thread_of_warp();
    const bool odd = lane & 1u;
    // of two neighbours one has the first row's sum, the other the second one's
    float total = (odd ? sum[1] : sum[0]) + thread_beside(odd ? sum[0] : sum[1]);
    total += of_thread(total, lane ^ 2u);
    const int row = int(2 * pair_of_thread<Vector>() + (lane & 1u));
    if (lane % 4 < 2 && row < rows) to[row] = total;
  }
};

}  // namespace twin
