// Activations of a block's consumer warps: in which layout threads have a vector's elements, and
// how they are computed with in registers.
#pragma once

namespace twin {

constexpr int ROWS_AT_ONCE = facts::ROWS_AT_ONCE;  // of a tile: their loads are under way together
constexpr int FOLDED_ROWS = facts::FOLDED_ROWS;    // the same of a tile that is taken in folds

template <bool IS>
struct Constant {  // known where it is compiled
  static constexpr bool value = IS;
};

// Whose words a vector gathers: those of this GPU, those that other GPUs write, or now these and
// now those. The code for either is there twice, which costs registers.
enum class Reach { NEAR, FAR, EITHER };

// The sum of a source's parts at elements first..first+N-1, polled where the protocol requests it.
// The loads of several parts are under way before the first is looked at.
// Whoever reads so reads few words, or other GPUs' (probes): one scope serves all of them.
template <int N, class Stall>
__device__ __forceinline__ bool source_sum(const Source& source, int first, Pack<N>& sum,
                                           Stall stall) {
  // models on several GPUs read a part at a time here
  constexpr int AT_ONCE = PEERS && !Plan::probe ? 1 : Plan::ranks < 4 ? Plan::ranks : 4;
  for (int p = 0; p < source.parts; p += AT_ONCE) {
    Pack<N> got[AT_ONCE];
    for (;;) {
      int late = -1;
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (p + j < source.parts)
          got[j] = load_pack<N, 4 * N>(source.at(p + j) + first, true);
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        if (p + j < source.parts && missing(got[j])) late = p + j;
      if (late < 0 || !source.polled) break;
      if (!stall(source.part(late), first)) return false;
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j)
      if (p + j < source.parts)
#pragma unroll
        for (int i = 0; i < N; ++i) sum.at[i] = p + j ? sum.at[i] + got[j].at[i] : got[j].at[i];
  }
  return true;
}

// N neighbouring elements for each thread, where the next threads need the next ones. TOGETHER,
// THREADS threads load each of their packs side by side, a piece a thread, so that no load takes a
// sector of memory for less than all of its bytes; all of them load, or none. `settle` then gives
// every thread its own pack; all threads of the warp take part in it.
template <int N, int ALIGNED, bool TOGETHER>
struct Side {
  static constexpr int THREADS = TOGETHER ? N * 4 / ALIGNED : 1, PIECE = N / THREADS;
  static_assert(THREADS * PIECE == N && (THREADS & (THREADS - 1)) == 0,
                "pieces of a pack go to a power of two threads");

  Pack<PIECE> piece[THREADS];

  // `from`: this thread's pack
  __device__ __forceinline__ void load(int thread, const float* from, bool far) {
    from -= thread % THREADS * (N - PIECE);
#pragma unroll
    for (int i = 0; i < THREADS; ++i) piece[i] = load_pack<PIECE, ALIGNED>(from + i * N, far);
  }
  __device__ __forceinline__ bool late() const {  // is one not there yet?
    bool any = false;
#pragma unroll
    for (int i = 0; i < THREADS; ++i) any |= missing(piece[i]);
    return any;
  }
  __device__ __forceinline__ Pack<N> settle(int thread) {
    // Two threads, whose numbers differ by `mask`, hold a row each of a matrix of 2 x 2 elements,
    // and leave with a column each. As a function of its own this made other machine code.
#pragma unroll
    for (int mask = 1; mask < THREADS; mask *= 2) {
      const bool upper = thread & mask;
#pragma unroll
      for (int i = 0; i < THREADS; ++i) {
        if (i & mask) continue;
#pragma unroll
        for (int e = 0; e < PIECE; ++e) {
          const float keep = upper ? piece[i + mask].at[e] : piece[i].at[e];
          const float other =
              __shfl_xor_sync(0xFFFFFFFFu, upper ? piece[i].at[e] : piece[i + mask].at[e], mask);
          piece[i].at[e] = upper ? other : keep;
          piece[i + mask].at[e] = upper ? keep : other;
        }
      }
    }
    Pack<N> pack;
#pragma unroll
    for (int i = 0; i < THREADS; ++i)
#pragma unroll
      for (int e = 0; e < PIECE; ++e) pack.at[i * PIECE + e] = piece[i].at[e];
    return pack;
  }
};

// N stored weights in one or two wide loads.
template <int N>
struct Packed {
  static constexpr int WORDS = N * type_bytes(WEIGHT) / 4;
  static_assert(WORDS == 2 || WORDS % 4 == 0, "8- or 16-byte loads");
  u32 word[WORDS];

  __device__ __forceinline__ void load_shared_at(u32 at) {
    if constexpr (WORDS == 2) {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(at));
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(word[i]), "=r"(word[i + 1]), "=r"(word[i + 2]), "=r"(word[i + 3])
                     : "r"(at + 4 * u32(i)));
    }
  }
  __device__ __forceinline__ void load_global_at(const u8* at) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(at + 4 * i);
      word[i] = two.x, word[i + 1] = two.y;
    }
  }
  __device__ __forceinline__ float value(int i) const {
    if constexpr (WEIGHT == Type::FP32) return bits_as<float>(word[i]);
    float low, high;
    unpack<WEIGHT>(word[i / 2], low, high);
    return i % 2 ? high : low;
  }
};

// A narrow residual of COLS elements, four to a thread. Several threads of a block hold the same
// columns of it, or some hold none, while they multiply; `Team` is the layout of that. So each
// thread gathers, adds and norms four neighbours that no other has, and all take what they multiply
// from shared memory. When each requested all that it multiplies, all blocks waited longer for the
// few lines that every one of them polls: 7 % of a step of Qwen3-0.6B on an H200.
template <class Team, int COLS>
struct FoursLayout {
  static constexpr int VECTOR = 4, PITCH = VECTOR * CONSUMERS,
                       PORTIONS = (COLS + PITCH - 1) / PITCH;
  static_assert(COLS % VECTOR == 0, "tiles have eights of columns");
  static_assert(Team::PORTIONS == 1 || Team::FOLDED,
                "all that a thread multiplies is taken behind one barrier");

  __device__ static int norm_place(int column) { return column; }
  __device__ static int norm_place(int me, int c, int) { return column(me, c); }
  __device__ static int column(int me, int c) { return VECTOR * me + PITCH * c; }
  __device__ static bool valid(int me, int c) { return COLS % PITCH == 0 || column(me, c) < COLS; }
  __device__ static constexpr int row_group(int) { return 0; }

  // Where a column lies in shared memory. Of threads that multiply eights all first fours lie side
  // by side, then their second ones, fold after fold, so that loads and stores meet no bank twice.
  // Where some threads have no columns, three of three models took an H200 0 to 1.6 % longer so.
  __device__ static int shared_place(int column) {
    if constexpr (Team::VECTOR == VECTOR || !(Team::FOLDED || Team::FULL)) return column;
    constexpr int FOLD = Team::FOLDED ? Team::FOLD : COLS,
                  PLANE = (FOLD / 2 + facts::BANKS - 1) / facts::BANKS * facts::BANKS +
                          facts::SKEW_FLOATS;
    if constexpr (!Team::FOLDED) return column / VECTOR % 2 * PLANE + column / Team::VECTOR * VECTOR;
    return (column / FOLD * 2 + column / VECTOR % 2) * PLANE + column % FOLD / Team::VECTOR * VECTOR;
  }
};

// A vector of a block's consumers: the Layout says which elements a thread has, the Home where they
// lie.
template <class Layout, class Home>
struct Activation;

// Homes. In registers; REACH: whose words are gathered.
template <Reach REACH>
struct InRegisters {};
// The first COUNT portions of a thread in registers, the others in shared memory (cuda_split.cuh).
template <int COUNT, int AT_ONCE>
struct Split {};
// In shared memory, quantised, before weights of one low-bit format (cuda_quantised.cuh).
template <Code CODE>
struct Quantised {};

// Portions of elements in registers.
template <class Layout_>
struct Elements : Layout_ {
  using Layout = Layout_;
  using Layout::VECTOR, Layout::PORTIONS;
  using Layout::column, Layout::norm_place, Layout::row_group, Layout::valid;

  alignas(16) float at[PORTIONS][VECTOR];

  template <class Core>
  // ones where there are none
  __device__ static __forceinline__ Elements factors(Core& core, const float* from) {
    Elements x;
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < VECTOR; i += 4) {
        const float4 v = from && valid(core.thread(), c)
                             ? load_once(from + norm_place(core.thread(), c, i))
                             : float4{1, 1, 1, 1};
        x.at[c][i] = v.x, x.at[c][i + 1] = v.y, x.at[c][i + 2] = v.z, x.at[c][i + 3] = v.w;
      }
    return x;
  }

  // this = keep * this + scale * x
  template <class Core>
  __device__ __forceinline__ void add(Core&, float keep, const Elements& x, float scale) {
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) at[c][i] = keep * at[c][i] + scale * x.at[c][i];
  }

  // The sum of squares over the block, in two halves with a barrier of the caller's between them.
  template <class Core>
  __device__ __forceinline__ const float* begin_squares(Core& core) const {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
      if (valid(core.thread(), c) && row_group(core.thread()) == 0)
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) sum += at[c][i] * at[c][i];
    return core.begin_sum(sum);
  }
  template <class Core>
  __device__ static __forceinline__ float end_squares(Core& core, const float* begun) {
    return core.end_sum(begun);
  }

  template <class Core>
  __device__ __forceinline__ void scaled(Core& core, const Elements& x, float by,
                                         const Elements& factor) {
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        at[c][i] = valid(core.thread(), c) ? x.at[c][i] * by * factor.at[c][i] : 0.0f;
  }

  template <class Core>
  __device__ __forceinline__ void load_row(Core& core, const u8* row) {
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c) {
      if (!valid(core.thread(), c)) continue;
      Packed<VECTOR> words;
      words.load_global_at(row + u64(column(core.thread(), c)) * type_bytes(WEIGHT));
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) at[c][i] = words.value(i);
    }
  }

  // each(index, element), by one of the threads that hold it.
  template <class Core, class Each>
  __device__ __forceinline__ void each(Core& core, Each each) {
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i)
        if (valid(core.thread(), c)) each(column(core.thread(), c) + i, at[c][i]);
  }
};

template <class Layout_, Reach REACH>
struct Activation<Layout_, InRegisters<REACH>> : Elements<Layout_> {
  using Layout = Layout_;
  using Layout::VECTOR, Layout::PORTIONS, Layout::PACK, Layout::column, Layout::valid;
  using Elements<Layout>::at;
  using Factors = Elements<Layout>;

  __device__ static Activation in(float*, int) { return {}; }

  // The scope is chosen once, not at each load.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall) {
    if constexpr (REACH == Reach::EITHER)
      if (source.pushed) return gather(core, source, stall, Constant<true>{});
    return gather(core, source, stall, Constant<REACH == Reach::FAR>{});
  }
  template <class Core, class Stall, class Far>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall, Far) {
    if constexpr (REACH == Reach::FAR && Plan::parts_together > 1)
      return gather_some(core, source, stall);
    // without lanes a residual's read is of all ranks
    constexpr bool ALL = Plan::ranks == 1 || REACH == Reach::FAR;
    const int me = core.thread(), parts = ALL ? Plan::ranks : source.parts;
    bool good = true;
    // One part after the other: who waits for two requests twice as many words again and again.
#pragma unroll 1
    for (int p = 0; p < parts && good; ++p) {
      // all under way before the first is looked at
      Side<VECTOR, 16, Layout::alike(VECTOR / 4)> got[PORTIONS];
      for (;;) {
        int late = -1;  // the column
#pragma unroll
        for (int c = 0; c < PORTIONS; ++c)
          if (valid(me, c))
            got[c].load(core.warp_thread(), source.at(p) + column(me, c), Far::value);
#pragma unroll
        for (int c = 0; c < PORTIONS; ++c)
          if (valid(me, c) && got[c].late()) late = column(me, c);
        if (late < 0 || !source.polled) break;
        good = stall(source.part(p), late);
        if (!good) break;
      }
      // Threads that found their words earlier would run what follows by themselves. Of several
      // parts, one that gave up has left.
      if constexpr (Plan::ranks == 1) __syncwarp();
#pragma unroll
      for (int c = 0; c < PORTIONS; ++c) {
        const Pack<VECTOR> pack = got[c].settle(core.warp_thread());
#pragma unroll
        for (int i = 0; i < VECTOR; ++i)
          if (CODED && Plan::ranks == 1)  // what was there before need not be kept
            at[c][i] = valid(me, c) ? pack.at[i] : 0.0f;
          else if (valid(me, c))
            at[c][i] = p ? at[c][i] + pack.at[i] : pack.at[i];
      }
    }
    return good;
  }

  // The same of many GPUs: behind the first part the others are there, mostly, and some are looked
  // at together. Not of two: with one part at a time this code spilled 656 bytes where the loop
  // above spills 96 (Qwen3-14B in INT8).
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather_some(Core& core, const Source& source, Stall stall) {
    constexpr int AT_ONCE = Plan::parts_together;
    const int me = core.thread();
    bool good = true;
#pragma unroll 1
    for (int p = 0, end = 1; p < Plan::ranks && good; p = end, end += AT_ONCE) {
      Side<VECTOR, 16, Layout::alike(VECTOR / 4)> got[AT_ONCE][PORTIONS];
      const auto wanted = [&](int j) { return p + j < end && p + j < Plan::ranks; };
      for (;;) {
        int late = -1, place = 0;
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
          for (int c = 0; c < PORTIONS; ++c)
            if (wanted(j) && valid(me, c))
              got[j][c].load(core.warp_thread(), source.at(p + j) + column(me, c), true);
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
          for (int c = 0; c < PORTIONS; ++c)
            if (wanted(j) && valid(me, c) && got[j][c].late()) late = p + j, place = column(me, c);
        if (late < 0 || !source.polled) break;
        good = stall(source.part(late), place);
        if (!good) break;
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
#pragma unroll
        for (int c = 0; c < PORTIONS; ++c) {
          const Pack<VECTOR> pack = got[j][c].settle(core.warp_thread());
#pragma unroll
          for (int i = 0; i < VECTOR; ++i)
            if (wanted(j) && valid(me, c))
              at[c][i] = p + j ? at[c][i] + pack.at[i] : pack.at[i];
        }
    }
    return good;
  }

  // Each element times by(index / WIDTH), which is requested once where a thread's neighbours share
  // it: a weight for each took as many registers as the vector.
  template <int WIDTH, class Core, class By>
  __device__ __forceinline__ void times(Core& core, By by) {
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c) times_portion<WIDTH>(core, c, at[c], by);
  }
  template <int WIDTH, class Core, class By>
  __device__ __forceinline__ static void times_portion(Core& core, int c, float (&x)[VECTOR],
                                                       By& by) {
    constexpr int ALIKE = WIDTH % VECTOR == 0 ? VECTOR : 1;
    if (!valid(core.thread(), c)) return;
#pragma unroll
    for (int i = 0; i < VECTOR; i += ALIKE) {
      const float factor = by((column(core.thread(), c) + i) / WIDTH);
#pragma unroll
      for (int j = 0; j < ALIKE; ++j) x[i + j] *= factor;
    }
  }

  // make(first columns, which of them to look at, where they go) of all packs of a thread; next to
  // low-bit weights those of one portion after the other: with all of them under way steps spilled
  // up to 1,260 bytes. Of wide vectors those of a few portions: with 16 under way Gemma-4-31B's
  // steps spilled 3,736 bytes, with four 104, with two 152.
  template <class Core, class Make>
  __device__ __forceinline__ bool packs(Core& core, Make make) {
    constexpr bool WIDE_HEADS = PORTIONS * VECTOR > 32 && PORTIONS % 4 == 0;
    constexpr int ROUND = CODED ? 1 : WIDE_HEADS ? 4 : PORTIONS;
    bool good = true;
#pragma unroll
    for (int c = 0; c < PORTIONS; c += ROUND) {
      if constexpr (CODED) {
        good = good && packs_of<ROUND>(core, c, make);
      } else {  // all threads of a warp make all of them: they meet
        good = packs_of<ROUND>(core, c, make) && good;
      }
    }
    return good;
  }
  template <int ROUND, class Core, class Make>
  __device__ __forceinline__ bool packs_of(Core& core, int from, Make& make) {
    constexpr int PACKS = VECTOR / PACK, COUNT = ROUND * PACKS;
    int first[COUNT];
    bool here[COUNT];
    float* out[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int c = from + i / PACKS;
      first[i] = (Layout::ALL_LOOK ? Layout::nearest(core.thread(), c)
                                     : column(core.thread(), c)) +
                 i % PACKS * PACK;
      here[i] = Layout::ALL_LOOK ? Layout::looks(core.thread(), c) : valid(core.thread(), c);
      out[i] = &at[c][i % PACKS * PACK];
    }
    const bool good = make(first, here, out);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (valid(core.thread(), from + i / PACKS)) continue;
#pragma unroll
      for (int d = 0; d < PACK; ++d) out[i][d] = 0.0f;
    }
    return good;
  }

  // This thread's weights of rows 0..rows-1 of the tile at shared address `from`. Beyond them:
  // whatever lies there, where it surely is the block's, because choosing rows costs more code than
  // loading them; else the last row again.
  template <int MOST>
  __device__ static __forceinline__ void load(int me, int c, u32 from, int rows,
                                              Packed<VECTOR> (&words)[MOST]) {
    constexpr bool INSIDE = Plan::pieces_inside;
    const u32 pitch = u32(Layout::stride(me, c)),
              at_thread = from + u32((valid(me, c) ? Layout::local(me, c) : 0) * type_bytes(WEIGHT));
#pragma unroll
    for (int r = 0; r < MOST; ++r)
      words[r].load_shared_at(at_thread + u32(INSIDE || r < rows ? r : rows - 1) * pitch);
  }

  // sum[r] += this thread's part of row r.
  template <int ROWS>
  __device__ __forceinline__ void multiply(int c, const Packed<VECTOR> (&words)[ROWS],
                                           float (&sum)[ROWS]) const {
    multiply_portion(at[c], words, sum);
  }
  template <int ROWS>
  __device__ __forceinline__ static void multiply_portion(const float (&x)[VECTOR],
                                                          const Packed<VECTOR> (&words)[ROWS],
                                                          float (&sum)[ROWS]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) sum[r] += words[r].value(i) * x[i];
  }
};

template <class Team, int COLS, Reach REACH>
struct Activation<FoursLayout<Team, COLS>, InRegisters<REACH>> : Elements<FoursLayout<Team, COLS>> {
  using Layout = FoursLayout<Team, COLS>;
  using Layout::VECTOR, Layout::PORTIONS, Layout::column, Layout::shared_place, Layout::valid;
  using Elements<Layout>::at;
  using Factors = Elements<Layout>;
  using Multiplied = Activation<Team, InRegisters<REACH>>;

  __device__ static Activation in(float*, int) { return {}; }

  // Of one part: such models run on one GPU.
  template <class Core, class Stall>
  __device__ __forceinline__ bool gather(Core& core, const Source& source, Stall stall) {
    static_assert(Plan::ranks == 1, "other GPUs' parts are not added up here");
    const int me = core.thread();
    bool good = true;
    Pack<VECTOR> got[PORTIONS];
    for (;;) {  // all under way before the first is looked at
      int late = -1;
#pragma unroll
      for (int c = 0; c < PORTIONS; ++c)
        if (valid(me, c)) got[c] = load_pack<VECTOR, 4 * VECTOR>(source.at(0) + column(me, c));
#pragma unroll
      for (int c = 0; c < PORTIONS; ++c)
        if (valid(me, c) && missing(got[c])) late = column(me, c);
      if (late < 0 || !source.polled) break;
      good = stall(source.part(0), late);
      if (!good) break;
    }
    core.barrier();  // threads that have diverged go on together
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < VECTOR; ++i) at[c][i] = valid(me, c) ? got[c].at[i] : 0.0f;
    return good;
  }

  // What each thread multiplies, by way of shared memory. Between two such ways lies a barrier
  // behind the first one's loads: that of a block's products, or one of its own where it has no
  // rows.
  template <class Core>
  __device__ __forceinline__ Multiplied spread(Core& core, bool rows) const {
    const auto place = [&](int column) { return core.fours() + 4u * u32(shared_place(column)); };
    const int me = core.thread();
#pragma unroll
    for (int c = 0; c < PORTIONS; ++c)
      if (valid(me, c)) store_floats(place(column(me, c)), at[c]);
    core.barrier();
    Multiplied made;
#pragma unroll
    for (int c = 0; c < Team::PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < Team::VECTOR; i += VECTOR) {
        u32 bits[VECTOR] = {};
        if (Team::valid(me, c)) load_four(place(Team::column(me, c) + i), bits);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) made.at[c][i + j] = bits_as<float>(bits[j]);
      }
    if (!rows) core.barrier();
    return made;
  }
};

// Weights of a warp's first rows of a stage, taken from the ring while the stage's inputs are not
// there yet: the ring then has room for what comes after them. PORTIONS of a row group, of
// ROWS_AT_ONCE rows each; several groups where each is one portion.
template <class Vector>
struct Ahead {
  static constexpr int PORTIONS = Vector::AHEAD_PORTIONS, GROUPS = Vector::AHEAD_GROUPS;

  Packed<Vector::VECTOR> words[GROUPS ? GROUPS : 1][PORTIONS ? PORTIONS : 1][ROWS_AT_ONCE];
  int held;  // pieces, in the order in which they are multiplied
};

// A vector between the stages that use it: in registers, too. In shared memory it costs a slot of
// the ring. There it lies where low-bit weights leave it no registers (`Home.SHARED` in homes.py).
template <class Vector, bool SHARED>
struct BetweenStages {
  Vector vector;

  template <class Core>
  __device__ __forceinline__ const Vector& open(Core&) const {
    return vector;
  }
  template <class Core>
  __device__ __forceinline__ void close(Core&, const Vector& x) {
    vector = x;
  }
};
template <class Vector>
struct BetweenStages<Vector, true> {
  static constexpr int FOUR = 4;

  template <class Core>
  __device__ __forceinline__ Vector open(Core& core) const {
    Vector x;
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < Vector::VECTOR; i += FOUR) load_floats(place(core, c, i), x.at[c] + i);
    return x;
  }
  template <class Core>
  __device__ __forceinline__ void close(Core& core, const Vector& x) {
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c)
#pragma unroll
      for (int i = 0; i < Vector::VECTOR; i += FOUR)
        store_floats(place(core, c, i), x.at[c] + i);
  }

 private:
  // [PORTIONS][fours of a portion][thread]
  template <class Core>
  __device__ __forceinline__ static u32 place(Core& core, int c, int i) {
    const int four = (c * Vector::VECTOR + i) / FOUR;
    return core.held() + 4u * u32(FOUR * (four * core.threads() + core.thread()));
  }
};

}  // namespace twin
