// The residual of a narrow model. Several threads of a block hold the same columns of it, or some
// hold none, while they multiply. So each thread gathers, adds and norms four neighbours that no
// other has, and all take what they multiply from the chip. When each asked for all that it
// multiplies, all blocks waited longer for the few lines that every one of them polls: 7 % of a step
// of Qwen3-0.6B on an H200.
#pragma once

namespace twin {

// COLS elements, four to a thread; `Team`: as they are multiplied.
template <class Team, int COLS>
struct QuadVector {
  static constexpr int QUAD = 4, APART = QUAD * CONSUMERS, QUADS = (COLS + APART - 1) / APART;
  static_assert(COLS % QUAD == 0, "tiles have eights of columns");
  static_assert(Team::PORTIONS == 1 || Team::FOLDED,
                "all that a thread multiplies is taken behind one barrier");

  float at[QUADS][QUAD];

  __device__ static QuadVector in(float*, int) { return {}; }
  __device__ static int norm_place(int column) { return column; }
  __device__ static int column(int me, int q) { return QUAD * me + APART * q; }
  __device__ static bool valid(int me, int q) { return COLS % APART == 0 || column(me, q) < COLS; }

  using Factors = QuadVector;
  template <class Core>
  // ones where there are none
  __device__ static __forceinline__ Factors factors(Core& core, const float* from) {
    QuadVector x;
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      const float4 v = from && valid(core.thread(), q) ? load_once(from + column(core.thread(), q))
                                                       : float4{1, 1, 1, 1};
      x.at[q][0] = v.x, x.at[q][1] = v.y, x.at[q][2] = v.z, x.at[q][3] = v.w;
    }
    return x;
  }

  // Of one part: such models run on one GPU.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall) {
    static_assert(Plan::ranks == 1, "other GPUs' parts are not added up here");
    const int me = core.thread();
    bool good = true;
    Pack<QUAD> got[QUADS];
    for (;;) {  // all under way before the first is looked at
      int late = -1;
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        if (valid(me, q)) got[q] = load_pack<QUAD, 4 * QUAD>(source.at(0) + column(me, q));
#pragma unroll
      for (int q = 0; q < QUADS; ++q)
        if (valid(me, q) && missing(got[q])) late = column(me, q);
      if (late < 0 || !source.polled) break;
      good = stall(source.part(0), late);
      if (!good) break;
    }
    core.barrier();  // threads that were apart go on together
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
#pragma unroll
      for (int i = 0; i < QUAD; ++i) at[q][i] = valid(me, q) ? got[q].at[i] : 0.0f;
    return good;
  }

  // this = keep * this + scale * x
  template <class Core>
  __device__ __forceinline__ void add(Core&, float keep, const QuadVector& x, float scale) {
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
#pragma unroll
      for (int i = 0; i < QUAD; ++i) at[q][i] = keep * at[q][i] + scale * x.at[q][i];
  }

  // The sum of squares over the block, in two halves with a barrier of the caller's between them.
  template <class Core>
  __device__ __forceinline__ const float* begin_squares(Core& core) const {
    float sum = 0;
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
#pragma unroll
      for (int i = 0; i < QUAD; ++i) sum += valid(core.thread(), q) ? at[q][i] * at[q][i] : 0.0f;
    return core.begin_sum(sum);
  }
  template <class Core>
  __device__ static __forceinline__ float end_squares(Core& core, const float* begun) {
    return core.end_sum(begun);
  }

  template <class Core>
  __device__ __forceinline__ void scaled(Core&, const QuadVector& x, float by,
                                         const Factors& factor) {
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
#pragma unroll
      for (int i = 0; i < QUAD; ++i) at[q][i] = x.at[q][i] * by * factor.at[q][i];
  }

  template <class Core>
  __device__ __forceinline__ void load_row(Core& core, const u8* row) {
#pragma unroll
    for (int q = 0; q < QUADS; ++q) {
      if (!valid(core.thread(), q)) continue;
      Packed<QUAD> words;
      words.load_global_at(row + u64(column(core.thread(), q)) * type_bytes(WEIGHT));
#pragma unroll
      for (int i = 0; i < QUAD; ++i) at[q][i] = words.value(i);
    }
  }

  // each(index, element), by the thread that holds it.
  template <class Core, class Each>
  __device__ __forceinline__ void each(Core& core, Each each) {
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
#pragma unroll
      for (int i = 0; i < QUAD; ++i)
        if (valid(core.thread(), q)) each(column(core.thread(), q) + i, at[q][i]);
  }

  // Where a column lies on the chip. Of threads that multiply eights all first fours lie side by
  // side, then their second ones, fold after fold, so that loads and stores meet no bank twice. Where
  // some threads have no columns, three of three models took an H200 0 to 1.6 % longer so.
  __device__ static int chip_place(int column) {
    if constexpr (Team::VECTOR == QUAD || !(Team::FOLDED || Team::FULL)) return column;
    constexpr int FOLD = Team::FOLDED ? Team::FOLD : COLS,
                  PLANE = (FOLD / 2 + facts::BANKS - 1) / facts::BANKS * facts::BANKS +
                          facts::SKEW_FLOATS;
    if constexpr (!Team::FOLDED) return column / QUAD % 2 * PLANE + column / Team::VECTOR * QUAD;
    return (column / FOLD * 2 + column / QUAD % 2) * PLANE + column % FOLD / Team::VECTOR * QUAD;
  }

  // What each thread multiplies, by way of the chip. Between two such ways lies a barrier behind the
  // first one's loads: that of a block's products, or one of its own where it has no rows.
  template <class Core>
  __device__ __forceinline__ Team spread(Core& core, bool rows) const {
    const int me = core.thread();
#pragma unroll
    for (int q = 0; q < QUADS; ++q)
      if (valid(me, q))
        store_four(core.quads() + 4u * u32(chip_place(column(me, q))),
                   {bits_as<u32>(at[q][0]), bits_as<u32>(at[q][1]), bits_as<u32>(at[q][2]),
                    bits_as<u32>(at[q][3])});
    core.barrier();
    Team team;
#pragma unroll
    for (int c = 0; c < Team::PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < Team::VECTOR; i += QUAD) {
        u32 bits[QUAD] = {};
        if (Team::valid(me, c))
          load_four(core.quads() + 4u * u32(chip_place(Team::column(me, c) + i)), bits);
#pragma unroll
        for (int j = 0; j < QUAD; ++j) team.at[c][i + j] = bits_as<float>(bits[j]);
      }
    if (!rows) core.barrier();
    return team;
  }
};

}  // namespace twin
