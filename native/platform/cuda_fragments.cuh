// FP4 on the tensor cores: 16 rows of a tile times some of its columns, as integers (IMMA,
// m16n8k32). An input is two signed bytes an element, high and low, in the block's shared memory.
// Of the eight columns of a product's right side, two hold these of one group of the tile's columns
// and zeros elsewhere: so a product keeps four groups separate, whose sums are scaled when all four
// are complete. That is a chain: one product of 64 columns where a group has 16, two where it has
// 32.
//
// Thread l of a warp loads columns of two neighbouring rows, those of pair l / 4; a product's sums
// come to thread l as those of the same two rows, of group l % 4.
//
// Up to four chains of a tile are written out: a chain alone is as long as its loads, look-ups and
// products take one after the other. The rest is small on purpose. With inputs in registers as well a
// layer of GPT-OSS was 184 KiB of code, and an H200 no faster than without tensor cores.
#pragma once

namespace twin {

// Twice the value of an FP4 code, as two signed bytes whose sum it is: less its magnitude, and
// twice its magnitude or, where its sign is set, nothing. Tensor cores add them. A look-up takes
// the code's lower three bits; where the fourth is set, it gives the sign of what it found. The
// tables' lower halves are added to a word of zeros from the chip, which the assembler cannot know:
// constants it moved from uniform registers for each look-up.
constexpr u32 LESS_LOW = 0xFDFEFF00u, LESS_HIGH = 0xF4F8FAFCu, MORE_LOW = 0x06040200u,
              MORE_HIGH = 0x18100C08u;

// A stage's input in shared memory: [units][high, low][16 bytes], [units] scales, a load of zeros.
template <class Vector>
struct Fragments {
  // columns that share a scale of the input; those of a unit, which is what a thread has
  static constexpr int GROUP = uses(Code::NVFP4) ? 16 : 32, UNIT = 16;
  static constexpr int UNITS = GROUP / UNIT, STEPS = UNITS;  // of a group; products of a chain
  static constexpr int CHAIN = 4 * UNITS;                    // units of a chain

  __device__ __forceinline__ static u32 scales(u32 whole) {
    return whole + u32(Plan::whole_units) * 2 * UNIT;
  }
  __device__ __forceinline__ static u32 zeros(u32 whole) {
    // whole_floats in twin/schedule/memory.py
    static_assert(4 * Plan::whole + Plan::whole_units * (2 * UNIT + 4) + UNIT <= 4 * Plan::scratch_floats,
                  "the input and its zeros fit the scratch");
    static_assert(Plan::whole_units % 4 == 0, "zeros are loaded sixteen bytes at a time");
    return scales(whole) + u32(Plan::whole_units) * 4;
  }

  // Chains of a slice that a warp has, at most, in rounds of as many as are under way together: what a
  // round multiplies is written out, so that products of one chain do not wait for those of another.
  static constexpr int WIDE = Vector::TEAM * CHAIN * UNIT, PER = (Vector::WIDTH + WIDE - 1) / WIDE,
                       ROUNDS = (PER + 3) / 4, AT_ONCE = (PER + ROUNDS - 1) / ROUNDS;
  // the first so many of them are never beyond a slice's columns
  static constexpr int SURE = Vector::EQUAL ? Vector::WIDTH / WIDE : 0;

  // x as numbers of 16 bits times a scale, that of a group by its largest element. A barrier is the
  // caller's.
  __device__ __forceinline__ static void set(const Vector& x, int me, u32 whole) {
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) put(x.at[c], me, c, whole);
  }
  // The same of thread `me`'s elements of slice c.
  __device__ __forceinline__ static void put(const float (&x)[UNIT], int me, int c, u32 whole) {
    float most = 0, strange = 0;  // NaN where an element is no number
#pragma unroll
    for (int i = 0; i < UNIT; ++i) {
      most = fmaxf(most, fabsf(x[i]));
      strange += x[i] * 0.0f;
    }
    if constexpr (UNITS == 2) {
      most = fmaxf(most, of_neighbour(most));
      strange += of_neighbour(strange);
    }
    const float by = most > LEAST_WHOLE ? MOST_WHOLE / most : 0.0f;
    u32 high[4], low[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      u32 v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = u32(nearest(x[4 * w + i] * by));
      split_bytes(v, high[w], low[w]);
    }
    if (!Vector::valid(me, c)) return;
    const u32 unit = u32(Vector::column(me, c)) / u32(UNIT);
    store_four(whole + unit * 2 * UNIT, high);
    store_four(whole + unit * 2 * UNIT + UNIT, low);
    // weights are doubled
    store_float(scales(whole) + 4 * unit,
                (most > LEAST_WHOLE ? most * (0.5f / MOST_WHOLE) : 0.0f) + strange);
  }
  __device__ __forceinline__ static void clear(int me, u32 whole) {
    const u32 none[4] = {};
    if (me == 0) store_four(zeros(whole), none);
  }

  // What a thread has to know of its place in a product, made once a stage.
  struct Lane {
    u32 quarter, row;        // the group of its sums; its first row of 16
    u32 first, unit;         // of a tile its first chain's first unit; its own unit of a chain
    u32 input, ahead, zeros; // where its half of right sides begins; its own columns; zeros
    u32 scales;              // of the input
    u32 less, more;          // the tables' lower halves
    u32 none;                // zero, see the tables
    bool holds[STEPS];       // has it elements of that step's right side?

    __device__ __forceinline__ Lane(int me, u32 whole) {
      const u32 lane = thread_of_warp(), group = lane / 8, step = group * u32(UNITS) / 4;
      quarter = lane % 4, row = 2 * pair_of(lane);
      first = u32(me) / 32 % u32(Vector::TEAM) * u32(CHAIN), unit = 4 * step + quarter;
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
        holds[s] = unit / u32(UNITS) == group && (STEPS == 1 || step == u32(s));
      input = whole + lane / 4 % 2 * UNIT, ahead = (first + unit) * 2 * UNIT;
      zeros = Fragments::zeros(whole);
      scales = Fragments::scales(whole);
      load_one(zeros, &none);
      less = LESS_LOW + none, more = MORE_LOW + none;
    }
    __device__ __forceinline__ u32 inputs(u32 unit) const { return input + unit * 2 * UNIT; }
  };

  // sum[r] += the products of row r of this thread's pair, from row `first` on of a tile of `rows`
  // rows of `pitch` bytes at `from`, whose columns begin at unit `begin` of the input: of every
  // TEAM-th chain.
  template <class Coding>
  __device__ __forceinline__ static void dot(const Lane& lane, u32 from, u32 pitch, int first,
                                             int rows, u32 begin, float (&sum)[2]) {
    constexpr u32 BLOCK = u32(code_block(Coding::CODE)), NEXT = u32(Vector::TEAM * CHAIN);
    static_assert(NEXT * u32(UNIT) % BLOCK == 0, "a chain's step is of whole blocks");
    const u32 units = 2 * pitch / u32(UNIT_BYTES), last = (2 * pitch - 1) / BLOCK;
    const u32 high = u32(scaled_rows(rows)), row = u32(first) + lane.row;
    const u32 behind = from + u32(whole_rows(Coding::CODE, rows)) * pitch;
    const u32 inner = behind + (code_outer(Coding::CODE) ? 4u * high : 0u) + row;
    u32 at = from + row * pitch + (lane.quarter + lane.first) * u32(UNIT_BYTES),
        scaling = lane.scales + 4 * (begin + lane.first + lane.quarter * u32(UNITS)),
        inner_at = inner + (lane.first / u32(UNITS) + lane.quarter) * u32(GROUP) / BLOCK * high;
    // Beyond a tile's columns inputs are zero, and any scales will do that are numbers: the last
    // ones.
    const u32 inputs_end = lane.inputs(begin + units),
              scales_end = lane.scales + 4 * (begin + units - 1), inner_end = inner + last * high;
    u32 input[STEPS], next[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      input[s] = lane.holds[s] ? lane.inputs(begin) + lane.ahead : lane.zeros;
      next[s] = lane.holds[s] ? NEXT * 2 * UNIT : 0u;
    }
    float total[2] = {};
    u32 outer[2] = {};  // of rows, in front of other loads: what is given back has answered
    if constexpr (code_outer(Coding::CODE)) load_two(behind + 4u * row, outer);
    // A loop even of one round: behind it all loads have answered, and the slot may be left.
    int rounds = ROUNDS;
    TWIN_KEEP(rounds);
#pragma unroll 1
    for (int round = 0; round < rounds; ++round) {
      u32 word[AT_ONCE][STEPS][4], right[AT_ONCE][STEPS][4], scale[AT_ONCE];
      float by_unit[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const bool sure = ROUNDS == 1 ? j < SURE : SURE >= ROUNDS * AT_ONCE;
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
          load_four(at + u32(4 * s * UNIT_BYTES), word[j][s]);
          load_four(sure || !lane.holds[s] || input[s] < inputs_end ? input[s] : lane.zeros,
                    right[j][s]);
          input[s] += next[s];
        }
        load_half(sure || inner_at < inner_end ? inner_at : inner_end, &scale[j]);
        by_unit[j] = load_float(sure || scaling < scales_end ? scaling : scales_end);
        at += NEXT * u32(UNIT_BYTES), scaling += NEXT * 4, inner_at += NEXT * u32(UNIT) / BLOCK * high;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        int less[4] = {}, more[4] = {};
#pragma unroll
        for (int s = 0; s < STEPS; ++s)
#pragma unroll
          for (int h = 0; h < 2; ++h)
            multiply_codes(lane, word[j][s][h], word[j][s][2 + h], right[j][s][2 * h],
                           right[j][s][2 * h + 1], less, more);
        float by[2];
        if constexpr (code_scale(Coding::CODE) == Scale::E8M0) {  // 2^-127 is taken for zero
          by[0] = bits_as<float>(scale[j] << 23 & 0x7F800000u);
          by[1] = bits_as<float>(scale[j] << 15 & 0x7F800000u);
        } else {
          two_e4m3(scale[j], by);
        }
#pragma unroll
        for (int r = 0; r < 2; ++r)
          total[r] +=
              float((less[2 * r] + more[2 * r]) * 256 + less[2 * r + 1] + more[2 * r + 1]) *
              (by[r] * by_unit[j]);
      }
    }
    if constexpr (code_outer(Coding::CODE)) {
      sum[0] += total[0] * bits_as<float>(outer[0]), sum[1] += total[1] * bits_as<float>(outer[1]);
    } else {
      sum[0] += total[0], sum[1] += total[1];
    }
  }

  // Eight codes of either row times the elements of their columns.
  __device__ __forceinline__ static void multiply_codes(const Lane& lane, u32 one, u32 two, u32 b0,
                                                        u32 b1, int (&less)[4], int (&more)[4]) {
    const u32 one_less = one & 0x77777777u, two_less = two & 0x77777777u;
    const auto less_of = [&](u32 four) { return bytes_of(lane.less, LESS_HIGH, four); };
    const auto more_of = [&](u32 four) { return bytes_of(lane.more, MORE_HIGH, four); };
    multiply_bytes(less, less_of(one_less), less_of(two_less), less_of(upper_half(one_less, lane.none)),
                   less_of(upper_half(two_less, lane.none)), b0, b1);
    multiply_bytes(more, more_of(one), more_of(two), more_of(one >> 16), more_of(two >> 16), b0,
                   b1);
  }

  // The pair of a tile's 16 rows whose weights a thread loads. Where eight pairs of rows would meet
  // the same banks of shared memory, neighbours take pairs that do not.
  __device__ __forceinline__ static u32 pair_of(u32 lane) {
    constexpr u32 PITCH = u32(Vector::WIDTH) % 128u;  // bytes of a pair
    const u32 pair = lane / 4;
    return PITCH % 64u == 32u ? (pair & 4u) | (pair & 1u) << 1 | (pair >> 1 & 1u) : pair;
  }

  // The sums of 16 rows over a warp's columns.
  __device__ __forceinline__ static void store(const Lane& its, const float (&sum)[2], int rows,
                                               float* to) {
    const u32 lane = thread_of_warp();
    const bool odd = lane & 1u;
    // of two neighbours one has the first row's sum, the other the second one's
    float total = (odd ? sum[1] : sum[0]) + of_neighbour(odd ? sum[0] : sum[1]);
    total += of_thread(total, lane ^ 2u);
    const int row = int(its.row + (lane & 1u));
    if (its.quarter < 2 && row < rows) to[row] = total;
  }
};

}  // namespace twin
