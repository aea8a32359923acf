// One block on NVIDIA: what its consumers, loaders and scheduler warp tell each other, and what
// consumers ask of it.
#pragma once

namespace twin {

constexpr int MOST_ROWS = 1 << 20;  // of a tile
constexpr int MOST_RESETS = 32;  // spans of a stage that the scheduler warp looks up in advance

struct Words {  // of exchange memory
  float* at;
  int count;
};

// What warps of a block tell each other, in shared memory.
struct Signals {
  Words resets[MOST_RESETS];  // the scheduler warp's own
  u64 go;                     // consumers -> scheduler warp: the stage's reads have succeeded
  u64 done;                   // scheduler warp -> consumers: its resets are visible; lies behind `go`
  // one value of each warp; the two take turns, so that one barrier a sum is enough
  u64 met[2][CONSUMER_WARPS];
  u64 left;       // consumers -> side warps: they are done, and what they wrote may be read
  u16 lost;       // a wait was given up
  u16 stop;       // the host wants the generation to end
  int delivered;  // the scheduler warp's own
  u32 scanned;    // consumers -> loaders: stages of attention that have appended
};

template <bool FIRST, class A, class B>
struct EitherOf {
  using Type = A;
};
template <class A, class B>
struct EitherOf<false, A, B> {
  using Type = B;
};
template <bool FIRST, class A, class B>
using Either = typename EitherOf<FIRST, A, B>::Type;

template <class A, class B>
constexpr bool SAME = false;
template <class A>
constexpr bool SAME<A, A> = true;

// Only what a residual reads comes from other GPUs; that of lanes also from this one.
constexpr bool LANES =
    (Plan::kinds >> int(StageKind::LANE_MEAN) | Plan::kinds >> int(StageKind::REDUCE)) & 1;
constexpr Reach RESIDUAL_READS = !PEERS ? Reach::NEAR : LANES ? Reach::EITHER : Reach::FAR;

constexpr bool EXPERTS = Plan::kinds >> int(StageKind::ROUTED_UP) & 1;

// Experts' matrices are multiplied a few rows at a time by code that is there once: a layer's code
// must fit the instruction cache. Without experts it does, and more rows at once are faster. Eight
// rows are where rows have no gates: layers of Nemotron 3 Nano have a mixer or experts, and its step
// takes an H200 1.0 % less time.
template <Code C, class Vector>
constexpr bool ROLLED = EXPERTS && C != Code::PLAIN && Vector::AHEAD_GROUPS == 0;
template <Code C, class Vector>
using Rolled =
    Coding<C, (Coding<C>::PAIR == 1 ? (Family::GATED ? 4 : 8) : Vector::PORTIONS > 1 ? 2 : 8)>;

// The layout of an input by its sizes in the plan.
#define TWIN_LAYOUT(name, each)                                                                  \
  TeamLayout<Plan::name##_cols, Plan::name##_tile, Plan::name##_vector, Plan::name##_team,       \
             Plan::name##_ahead_chunks, Plan::name##_ahead_groups, each>

// How a block looks at cached rows of heads of a shape.
template <class S>
struct CachedRows {
  using Piece = CachedPiece<S>;
  static constexpr int POSITIONS = Piece::WORDS <= 4 ? 4 : Piece::WORDS <= 8 ? 2 : 1;
  static constexpr int SCAN_HEADS = S::OTHER ? Plan::other_scan_heads : Plan::scan_heads;
  static constexpr int POSITION_THREADS = Piece::THREADS;
  // positions of a tile of the ring
  static constexpr int CACHE_TILE = S::OTHER ? Plan::other_cache_tile : Plan::cache_tile;
  // they are looked at by TileScan
  static constexpr bool TENSOR_SCAN = S::OTHER ? Plan::other_tensor_scan : Plan::tensor_scan;
  using TileScan = twin::TileScan<S, (SCAN_HEADS > facts::TENSOR_HEADS)>;

  template <class Core>
  __device__ static float subwarp_sum(const Core&, float v) {
#pragma unroll
    for (int mask = POSITION_THREADS / 2; mask; mask /= 2) v += Core::shuffle_xor(v, mask);
    return v;
  }
  template <int N>
  __device__ static float piece_dot(const float (&a)[N], const float (&b)[N]) {
    float sum = 0;
#pragma unroll
    for (int d = 0; d < N; ++d) sum += a[d] * b[d];
    return sum;
  }
};

struct Core {
  using HiddenTeams = TWIN_LAYOUT(hidden, Plan::hidden_cols);
  using FfnTeams = TWIN_LAYOUT(ffn, EXPERTS ? Experts::WIDTH : Plan::ffn_cols);
  template <class Layout>
  using Near = Activation<Layout, InRegisters<Reach::NEAR>>;

  // the residual as stages multiply it, normed, and as threads hold it
  using Normed = Activation<HiddenTeams, InRegisters<RESIDUAL_READS>>;
  using Hidden = Either<
      Plan::residual_by_fours,
      Activation<FoursLayout<HiddenTeams, Plan::hidden_cols>, InRegisters<RESIDUAL_READS>>, Normed>;
  using Residual = BetweenStages<Hidden, Plan::residual_shared>;
  using FirstOutputs = Near<TWIN_LAYOUT(heads, Plan::heads_cols)>;
  using OtherOutputs =
      Either<OtherShape::ANY, Near<TWIN_LAYOUT(other, Plan::other_cols)>, FirstOutputs>;
  template <class S>  // the outputs of heads of a shape
  using Heads = Either<S::OTHER, OtherOutputs, FirstOutputs>;
  using States = Either<(Plan::states_cols > 0), Near<TWIN_LAYOUT(states, Plan::states_cols)>,
                        FirstOutputs>;
  using Ffn = Either<
      Plan::wide_ffn, Activation<FfnTeams, Quantised<only_code(FFN_CODES)>>,
      Either<(Plan::ffn_at_once < FfnTeams::PORTIONS),
             Activation<FfnTeams, Split<Plan::ffn_in_registers, Plan::ffn_at_once>>,
             Near<FfnTeams>>>;
  using Shared = Either<NonRouted::SHARED, Near<TWIN_LAYOUT(shared, Plan::shared_cols)>, Ffn>;
  using Dense = Either<NonRouted::DENSE, Near<TWIN_LAYOUT(dense, Plan::dense_cols)>, Ffn>;
  template <class S>
  using Cached = CachedRows<S>;

  Ring ring;
  Signals& signals;
  u32 go;     // the address of that signal
  int me;     // the thread
  u32 phase;  // twice the stages begun so far, and whose turn it is of `met`
#ifdef TWIN_NAPS  // a build of the tests', with the number of a GPU
  bool naps = false;  // its warps stop for a while at random, behind what a stage reads
#endif

  static constexpr int HEADS = 1;  // query heads that share one read of a key in a prompt pass
  static constexpr int SPLITS = facts::SPLITS_AT_ONCE;  // of a head, looked at together
  static constexpr bool SCHEDULER = true;      // a warp of its own makes the resets
  // Neighbouring threads publish four words in one store. Within a GPU that took Qwen3-0.6B 3 %
  // longer, and lanes are no faster by it.
  static constexpr bool FOURS = PEERS && Plan::ranks_per_gpu == 1;
  static constexpr bool CACHE_IN_RING = true;  // loaders bring cached keys and values
  static constexpr bool EXPERTS_IN_RING = true;
  static constexpr bool OWN_GPUS = PEERS;  // ranks have GPUs of their own

  // Where a block's scratch begins, behind its ring; a probe's behind its input as well. Models
  // keep vectors in registers.
  static constexpr int SCRATCH = Plan::ring_slots * Plan::slot_bytes +
                                 (Plan::probe ? up16(4 * Plan::input_floats) : 0);

  // What is computed from it in one stage is not kept in registers for the next ones.
  __device__ __forceinline__ void forget() { asm volatile("" : "+r"(me)); }

  __device__ int thread() const { return me; }
  __device__ static constexpr int threads() { return CONSUMERS; }
  __device__ int warp() const { return me / 32; }
  __device__ static constexpr int warps() { return CONSUMER_WARPS; }
  __device__ int warp_thread() const { return me % 32; }
  __device__ static constexpr int warp_threads() { return 32; }
  __device__ static void barrier() {
    asm volatile("bar.sync %0, %1;" ::"n"(CONSUMER_BARRIER), "n"(CONSUMERS) : "memory");
  }
  // a barrier that tells every thread whether one of them said yes
  __device__ static bool any(bool mine) {
    u32 yes;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; bar.red.or.pred q, %2, %3, p; selp.u32 %0, 1, "
        "0, q; }"
        : "=r"(yes)
        : "r"(u32(mine)), "n"(CONSUMER_BARRIER), "n"(CONSUMERS)
        : "memory");
    return yes;
  }
  __device__ static void warp_sync() { __syncwarp(); }
  __device__ static void settle() {}

  // ---- the scheduler warp -----------------------------------------------------------------------

  // It is never more than a stage behind: a parity tells no more.
  __device__ __forceinline__ void begin() {
#ifdef TWIN_NAPS
    const u32 drawn = (u32(clock64()) + u32(warp())) * 2654435769u;
    if (naps && drawn >> 29 == 0) __nanosleep(drawn >> 13 & 0x7FFFu);
#endif
    if (phase > 1) cleared();
    phase += 2;
    __syncwarp();
    if (warp_thread() == 0) barrier_arrive(go);
  }
  __device__ __forceinline__ void cleared() const {
    barrier_wait(go + u32(sizeof(u64)), (phase >> 1 & 1u) ^ 1u);
  }
  __device__ __forceinline__ bool agree(bool good) {
    if (!good) *const_cast<volatile u16*>(&signals.lost) = 1;
    return true;
  }
  __device__ __forceinline__ bool gave_up() const {
    return *const_cast<volatile u16*>(&signals.lost);
  }
  __device__ __forceinline__ bool abort_requested(const int*) const {
    return *const_cast<volatile u16*>(&signals.stop);
  }

  // ---- sums -------------------------------------------------------------------------------------

  template <class T>
  __device__ static T shuffle_xor(T v, int mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, v, mask);
  }
  // What this thread and the next three have, to the first of each four.
  __device__ static Pack<4> of_four(float value) {
    const u32 mask = 0xFu << (thread_of_warp() & 28u);
    Pack<4> four = {value};
#pragma unroll
    for (int i = 1; i < 4; ++i) four.at[i] = __shfl_xor_sync(mask, value, i);
    return four;
  }
  template <class T>
  // butterfly: the same order, so the same bits, in every thread
  __device__ static T warp_sum(T v) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) v += shuffle_xor(v, mask);
    return v;
  }

  template <class T>
  __device__ __forceinline__ T sum(T v) {
    const T* met = begin_sum(v);
    barrier();
    return end_sum(met);
  }
  // The same in two halves, with a barrier of the caller's between them.
  template <class T>
  __device__ __forceinline__ const T* begin_sum(T v) {
    T* met = reinterpret_cast<T*>(signals.met[phase & 1u]);
    phase ^= 1;
    v = warp_sum(v);
    if (warp_thread() == 0) met[warp()] = v;
    return met;
  }
  template <class T>
  __device__ __forceinline__ static T end_sum(const T* met) {
    T total = met[0];
#pragma unroll
    for (int w = 1; w < CONSUMER_WARPS; ++w) total += met[w];
    return total;
  }

  template <class Wins>
  __device__ __forceinline__ Candidate best(Candidate mine, Wins wins) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) {
      const Candidate other = {shuffle_xor(mine.logit, mask), shuffle_xor(mine.index, mask)};
      if (wins(other, mine)) mine = other;
    }
    Candidate* met = reinterpret_cast<Candidate*>(signals.met[phase & 1u]);
    phase ^= 1;
    if (warp_thread() == 0) met[warp()] = mine;
    barrier();
#pragma unroll
    for (int w = 0; w < CONSUMER_WARPS; ++w)
      if (wins(met[w], mine)) mine = met[w];
    return mine;
  }

  // Adds to a word that the block's threads share in shared memory; what it held.
  __device__ __forceinline__ static u32 count(u32* at, u32 by) {
    u32 held;
    asm volatile("atom.relaxed.cta.shared.add.u32 %0, [%1], %2;"
                 : "=r"(held)
                 : "r"(u32(__cvta_generic_to_shared(at))), "r"(by)
                 : "memory");
    return held;
  }
  // Words of this rank's memory that the block wrote: read back past the first-level cache, they
  // lie where all blocks look. As the scheduler warp does with resets.
  __device__ __forceinline__ void confirm(const float* words, int count) const {
    constexpr int AT_ONCE = 4;
    for (int i = 4 * thread(); i < count; i += 4 * CONSUMERS * AT_ONCE) {
      float4 seen[AT_ONCE];
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const int at = i + 4 * CONSUMERS * j;
        seen[j] = load_quad(words + (at < count ? at : i), PEERS);
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j)
        await_word(bits_as<u32>(seen[j].x) | bits_as<u32>(seen[j].y) | bits_as<u32>(seen[j].z) |
                   bits_as<u32>(seen[j].w));
    }
  }

  // Numbers that blocks add up in memory: the order does not matter.
  __device__ static __forceinline__ void add_sum(float* at, u64 part) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(at), "l"(part) : "memory");
  }
  // Two numbers of the weight type.
  __device__ static __forceinline__ void halves(u32 word, float& low, float& high) {
    unpack<WEIGHT>(word, low, high);
  }
  __device__ static __forceinline__ u64 load_sum(const float* at) {
    u64 sum;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(sum) : "l"(at) : "memory");
    return sum;
  }

  // polls take the stream's place on the way to the second-level cache
  __device__ static void relax(u32) { __nanosleep(100); }
  __device__ static void published() {}

  // ---- tiles ------------------------------------------------------------------------------------

  // Where a warp stands in a batch of a stage's rows: its team's tiles, ROWS_AT_ONCE rows of each
  // at a time.
  template <class Vector, int AT_ONCE = ROWS_AT_ONCE>
  struct Walk {
    int tile_rows, groups, count, group, row;

    __device__ __forceinline__ Walk(const Stage& stage, int rows, int me)
        : tile_rows(stage.tile_rows),
          groups(Vector::row_group(me) < Vector::GROUPS ? groups_of(stage, rows) : 0),
          count(rows),
          group(Vector::row_group(me)),
          row(0) {}
    __device__ static __forceinline__ int groups_of(const Stage& stage, int rows) {
      return (rows + stage.tile_rows - 1) * stage.tile_inverse >> 16;
    }
    __device__ __forceinline__ bool more() const { return group < groups; }
    // from the batch's first
    __device__ __forceinline__ u32 tile(int slice) const {
      return u32(group * Vector::SLICES + slice);
    }
    __device__ __forceinline__ int first() const { return group * tile_rows + row; }
    __device__ __forceinline__ int left() const {  // rows of the tile, from here on
      const int rows = count - group * tile_rows;
      return (rows < tile_rows ? rows : tile_rows) - row;
    }
    __device__ __forceinline__ int here() const { return left() < AT_ONCE ? left() : AT_ONCE; }
    // of the tile's pieces
    __device__ __forceinline__ bool last() const { return left() <= AT_ONCE; }
    // a second piece only where there is a single column slice
    __device__ __forceinline__ void next() {
      row = last() ? 0 : row + AT_ONCE;
      if (row == 0) group += Vector::GROUPS;
    }
  };

  template <class Vector>
  __device__ __forceinline__ auto prefetch(const Stage& stage, Span own, bool wanted) {
    if constexpr (CODED) {
      Begun<Vector> begun = {};
      with_coding<codes_by<Vector>()>(
          stage, [&](auto coding) { take_coded(coding, stage, own, wanted, begun); });
      return begun;
    } else {
      return take_plain<Vector>(stage, own, wanted);
    }
  }
  template <class Vector>
  __device__ __forceinline__ Ahead<Vector> take_plain(const Stage& stage, Span own, bool wanted) {
    // of a group; no groups where there are none
    constexpr int PORTIONS = Ahead<Vector>::PORTIONS ? Ahead<Vector>::PORTIONS : 1;
    Ahead<Vector> ahead = {};
    Walk<Vector> at(stage, own.hi - own.lo < stage.batch ? own.hi - own.lo : stage.batch, me);
    bool there = wanted;
#pragma unroll
    for (int g = 0; g < Ahead<Vector>::GROUPS; ++g) {
      u32 left[PORTIONS];  // barriers of the tiles that are used up; 0: not yet
#pragma unroll
      for (int c = 0; c < PORTIONS; ++c) {
        const int slice = Vector::slice(me, c);
        const u32 tile = ring.tile + at.tile(slice);
        there = there && at.more() && !Vector::beyond(me, c);
        // else what the slot holds is loaded and not used: a condition would cost registers
        if (there) ring.acquire(tile);
        Vector::load(me, c, ring.slot(tile) + u32(at.row * Vector::stride(me, c)),
                     there ? at.here() : 1, ahead.words[g][c]);
        left[c] = there && at.last() ? ring.empty_of(tile) : 0;
        ahead.held += there;
      }
      // once a row group; whoever was not there has loaded, too, and what it leaves later is given
      // back
      leave_to_copies();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < PORTIONS; ++c)
        if (left[c]) Ring::leave(left[c], CONSUMER_WARPS / Vector::TEAM);
      if (there) at.next();
    }
    return ahead;
  }

  // A piece of at most ROWS_AT_ONCE rows; `taken(c)`: its weights of portion c are in `ahead`
  // already.
  template <class Vector, class Taken>
  __device__ __forceinline__ void dot_piece(const Vector& x, const Walk<Vector>& at, u32 base,
                                            Packed<Vector::VECTOR> (*ahead)[ROWS_AT_ONCE],
                                            Taken taken, float* to) {
    float sum[ROWS_AT_ONCE] = {};
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      const int slice = Vector::slice(me, c);
      if (Vector::beyond(me, c)) break;
      Packed<Vector::VECTOR> fresh[ROWS_AT_ONCE];
      auto& words = c < Ahead<Vector>::PORTIONS ? ahead[c] : fresh;
      const u32 tile = base + at.tile(slice);
      const bool here = taken(c);
      if (!here)
        Vector::load(me, c, ring.acquire(tile) + u32(at.row * Vector::stride(me, c)), at.here(),
                     words);
      x.multiply(c, words, sum);
      if (!here && at.last()) ring.release(tile, CONSUMER_WARPS / Vector::TEAM);
    }
    store_sums(sum, at.here(), to + at.first());
  }

  // The same of tiles that are wider than a team of one warp holds at once: it takes FOLDED_ROWS of
  // their rows in folds, and sums all of a row. Warps share a tile that has rows for both.
  template <class Vector>
  __device__ __forceinline__ void dot_folded(const Stage& stage, const Vector& x, int rows,
                                             float* sums) {
    constexpr int PIECES = ROWS_AT_ONCE / FOLDED_ROWS;  // of a tile
    static_assert(Vector::TEAM == 1 && PIECES == 2, "a slot is left by one warp or by two");
    const int pieces = PIECES * Walk<Vector>::groups_of(stage, rows);
    const u32 base = ring.tile;
    ring.tile += u32(pieces / PIECES);
#pragma unroll 1
    for (int piece = warp(); piece < pieces; piece += CONSUMER_WARPS) {
      const int tile = piece / PIECES, row = piece % PIECES * FOLDED_ROWS,
                left = rows - tile * ROWS_AT_ONCE;
      if (row >= left) break;
      const u32 from =
          ring.acquire(base + u32(tile)) + u32(row * Vector::WIDTH * type_bytes(WEIGHT));
      float sum[FOLDED_ROWS] = {};
#pragma unroll
      for (int c = 0; c < Vector::PORTIONS; ++c) {
        Packed<Vector::VECTOR> words[FOLDED_ROWS];
        Vector::load(me, c, from, FOLDED_ROWS, words);  // the slot has as many
        x.multiply(c, words, sum);
      }
      ring.release(base + u32(tile), CONSUMER_WARPS / (left > FOLDED_ROWS ? PIECES : 1));
      store_sums(sum, left - row, sums + tile * ROWS_AT_ONCE + row);
    }
  }

  // Rows lo..hi-1 of a stage's matrix times x: [Vector::PARTS][batch] sums. Each team takes its
  // tiles in turn. Pieces of one portion that were prefetched have code of their own; of more,
  // what a layer runs would not fit the instruction cache then.
  template <class Vector>
  __device__ __forceinline__ void dot_tiles(const Stage& stage, const Vector& x, int lo, int hi,
                                            float* sums, int batch, Ahead<Vector>& ahead) {
    if constexpr (Vector::FOLDED) return dot_folded(stage, x, hi - lo, sums);
    Walk<Vector> at(stage, hi - lo, me);
    const u32 base = ring.tile;
    ring.tile += u32(Walk<Vector>::groups_of(stage, hi - lo) * Vector::SLICES);
    float* const to = sums + Vector::part(me) * batch;
    if constexpr (Vector::PORTIONS == 1) {
#pragma unroll
      for (int g = 0; g < Ahead<Vector>::GROUPS; ++g) {
        if (g >= ahead.held) break;
        dot_piece(x, at, base, ahead.words[g], [](int) { return true; }, to);
        at.next();
      }
      ahead.held = 0;
    }
#pragma unroll 1
    for (; at.more(); at.next()) {
      dot_piece(
          x, at, base, ahead.words[0],
          [&](int c) { return c < Ahead<Vector>::PORTIONS && c < ahead.held; }, to);
      ahead.held = 0;
    }
  }

  // ---- tiles of low-bit weights, and of the plan's weight type next to them: each step as above

  // The codes of matrices that multiply such a vector; inputs of the same shape are of one type.
  template <class Vector>
  __device__ static constexpr u32 codes_by() {
    return (SAME<Vector, Normed> ? HIDDEN_CODES : 0u) |
           (SAME<Vector, FirstOutputs> ? HEADS_CODES : 0u) |
           (OtherShape::ANY && SAME<Vector, OtherOutputs> ? OTHER_CODES : 0u) |
           (Plan::states_cols > 0 && SAME<Vector, States> ? STATES_CODES : 0u) |
           (SAME<Vector, Ffn> ? FFN_CODES : 0u) |
           (NonRouted::SHARED && SAME<Vector, Shared> ? SHARED_CODES : 0u) |
           (NonRouted::DENSE && SAME<Vector, Dense> ? DENSE_CODES : 0u);
  }

  template <class Coding, class Vector>
  __device__ __forceinline__ void take_coded(Coding, const Stage& stage, Span own, bool wanted,
                                             Begun<Vector>& begun) {
    Walk<Vector, Coding::ROWS> at(
        stage, own.hi - own.lo < stage.batch ? own.hi - own.lo : stage.batch, me);
    bool there = wanted;
#pragma unroll
    for (int g = 0; g < Begun<Vector>::GROUPS; ++g) {
      u32 left[Begun<Vector>::PORTIONS ? Begun<Vector>::PORTIONS : 1];
#pragma unroll
      for (int c = 0; c < Begun<Vector>::PORTIONS; ++c) {
        const int slice = Vector::slice(me, c);
        const u32 tile = ring.tile + at.tile(slice);
        there = there && at.more() && !Vector::beyond(me, c);
        if (there) ring.acquire(tile);
        const int row = there ? at.row : 0;
        load_coded<Coding, Vector>(begun.taken[g][c], c, ring.slot(tile), row,
                                   there ? at.row + at.left() : Coding::ROWS);
        left[c] = there && at.last() ? ring.empty_of(tile) : 0;
        begun.held += there;
      }
      leave_to_copies();
      __syncwarp();
#pragma unroll
      for (int c = 0; c < Begun<Vector>::PORTIONS; ++c)
        if (left[c]) Ring::leave(left[c], CONSUMER_WARPS / Vector::TEAM);
      if (there) at.next();
    }
  }
  template <class Coding, class Vector>
  __device__ __forceinline__ void load_coded(CodedPiece<Coding::AT_ONCE>& piece, int c, u32 from,
                                             int first, int rows) const {
    piece.template load<Coding, Vector>(me, c, from,
                                        u32(Vector::row_bytes(me, c, Coding::CODE)), first, rows);
  }

  template <class Coding, class Vector, class Taken>
  __device__ __forceinline__ void dot_coded_piece(const Vector& x,
                                                  const Walk<Vector, Coding::ROWS>& at, u32 base,
                                                  const Whole<Vector>& whole, CodedPiece<>* taken,
                                                  Taken is_taken, float* to) {
    float sum[Coding::ROWS] = {};
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      const int slice = Vector::slice(me, c);
      if (Vector::beyond(me, c)) break;
      CodedPiece<> fresh;
      CodedPiece<>& piece = c < Begun<Vector>::PORTIONS ? taken[c] : fresh;
      const u32 tile = base + at.tile(slice);
      const bool here = is_taken(c);
      if (!here)
        load_coded<Coding, Vector>(piece, c, ring.acquire(tile), at.row, at.row + at.left());
      piece.template multiply<Coding>(c, x, whole, sum);
      if (!here && at.last()) ring.release(tile, CONSUMER_WARPS / Vector::TEAM);
    }
    store_sums(sum, at.here(), to + at.first());
  }

  // The tiles of a row group, a few rows at a time. The sums of a team's later slices are added to
  // those of its first by the threads that stored these.
  template <class Coding, class Vector, class At>
  __device__ __forceinline__ void dot_rolled(const Vector& x, const At& at, u32 base,
                                             const Whole<Vector>& whole, float* to) {
    using Step = Rolled<Coding::CODE, Vector>;
    const int rows = at.left();
#pragma unroll
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      if (Vector::beyond(me, c)) break;
      const u32 tile = base + at.tile(Vector::slice(me, c)), from = ring.acquire(tile);
#pragma unroll 1
      for (int first = 0; first < rows; first += Step::ROWS) {
        CodedPiece<Step::AT_ONCE> piece;
        load_coded<Step, Vector>(piece, c, from, first, rows);
        float sum[Step::ROWS] = {};
        piece.template multiply<Step>(c, x, whole, sum);
        store_sums(sum, rows - first, to + at.first() + first, c > 0);
      }
      ring.release(tile, CONSUMER_WARPS / Vector::TEAM);
    }
  }

  // The same of an input in shared memory, whose tiles have no more rows than are multiplied at
  // once (`teams_of` in teams.py refuses others).
  template <class Vector, class At>
  __device__ __forceinline__ void dot_wide(const At& at, u32 base, float* to) {
    using As = typename Vector::As;
    float sum[As::ROWS] = {};
#pragma unroll 1
    for (int c = 0; c < Vector::PORTIONS; ++c) {
      if (Vector::beyond(me, c)) break;
      const typename Vector::Taken taken(whole(), me, c);
      const u32 tile = base + at.tile(Vector::slice(me, c));
      CodedPiece<As::AT_ONCE> piece;
      load_coded<As, Vector>(piece, c, ring.acquire(tile), 0, at.left());
      taken.multiply(piece, sum);
      ring.release(tile, CONSUMER_WARPS / Vector::TEAM);
    }
    store_sums(sum, at.left(), to + at.first());
  }

  template <class Vector>
  __device__ __forceinline__ void dot_tiles(const Stage& stage, const Vector& x, int lo, int hi,
                                            float* sums, int batch, Begun<Vector>& begun) {
    with_coding<codes_by<Vector>()>(stage, [&](auto coding) {
      if constexpr (decltype(coding)::TENSOR)
        dot_fragments<decltype(coding), Vector>(stage, hi - lo, sums, batch);
      else
        dot_coded_tiles(coding, stage, x, hi - lo, sums, batch, begun);
    });
  }
  // The input is quantised before its first batch: in the loop over batches it would lie
  // next to them, to be requested again, and the loop be there twice.
  template <class Vector, class Ahead>
  __device__ __forceinline__ void quantise(const Stage& stage, const Vector& x,
                                               Ahead& begun) const {
    if constexpr (CODED)
      with_coding<codes_by<Vector>()>(stage, [&](auto coding) {
        if constexpr (decltype(coding)::WHOLE && !Vector::WIDE)
          begun.whole.template set<decltype(coding)::ELEMENT>(x);
        // The stage before has used its own up behind a barrier.
        if constexpr (decltype(coding)::TENSOR) {
          if constexpr (!Vector::WIDE) Fragments<Vector>::set(x, me, whole());
          Fragments<Vector>::clear(me, whole());
          barrier();
        } else if constexpr (gathered_by_fours<Vector>()) {
          barrier();
        }
      });
  }
  // Did other threads quantise what a thread multiplies?
  template <class Vector>
  __device__ static constexpr bool gathered_by_fours() {
    if constexpr (Vector::WIDE) return Vector::BY_FOURS;
    return false;
  }
  // Where the input of codes lies that tensor cores multiply.
  __device__ __forceinline__ u32 whole() const { return scratch() + 4u * u32(Plan::whole); }
  // Where the residual lies, in such plans.
  __device__ __forceinline__ u32 held() const { return scratch() + 4u * u32(Plan::held); }
  __device__ __forceinline__ u32 scratch() const { return ring.slots + u32(SCRATCH); }
  // Where threads hand each other what they multiply: behind the sums of rows.
  __device__ __forceinline__ u32 fours() const {
    return scratch() + 4u * u32(2 * Plan::half_floats);
  }
  // A normed residual as the block's rows are multiplied with it.
  __device__ __forceinline__ const Normed& normed(const Normed& x, Span) { return x; }
  template <class Vector>
  __device__ __forceinline__ Normed normed(const Vector& x, Span rows) {
    return x.spread(*this, rows.lo < rows.hi);
  }
  template <class Coding, class Vector>
  __device__ __forceinline__ void dot_fragments(const Stage& stage, int rows, float* sums,
                                                int batch) {
    using Its = Fragments<Vector>;
    Walk<Vector, Coding::ROWS> at(stage, rows, me);
    const u32 base = ring.tile;
    ring.tile += u32(at.groups_of(stage, rows) * Vector::SLICES);
    if (!at.more()) return;
    float* const to = sums + Vector::part(me) * batch;
    const typename Its::Lane lane(me, whole());
    int c = 0, slice = Vector::slice(me, 0);
    Place now = ring.place(base + at.tile(slice));
    float sum[2] = {};
    for (bool more = true; more;) {
      barrier_wait(now.full, now.parity);
      const u32 slot = now.slot, empty = now.empty;
      const int row = at.row, left = at.left(), first = at.first();
      const bool leaves = at.last(), ends = c + 1 == Vector::PORTIONS || Vector::beyond(me, c + 1);
      const u32 pitch = u32(Vector::row_bytes_of(slice, Coding::CODE)),
                begin = u32(Vector::begin(slice) / Vector::VECTOR);
      // where the next tile is, while this one's loads are under way
      if (ends) at.next();
      c = ends ? 0 : c + 1, slice = Vector::slice(me, c), more = !ends || at.more();
      now = ring.place(base + at.tile(slice));
      Its::template dot<Coding>(lane, slot, pitch, row, row + left, begin, sum);
      __syncwarp();
      if (leaves) Ring::leave(empty, CONSUMER_WARPS / Vector::TEAM);
      if (!ends) continue;
      Its::store(lane, sum, left < Coding::ROWS ? left : Coding::ROWS, to + first);
      sum[0] = sum[1] = 0;
    }
  }

  template <class Coding, class Vector>
  __device__ __forceinline__ void dot_coded_tiles(Coding, const Stage& stage, const Vector& x,
                                                  int rows, float* sums, int batch,
                                                  Begun<Vector>& begun) {
    constexpr bool SMALL = ROLLED<Coding::CODE, Vector> || Vector::WIDE;
    using At = Walk<Vector, SMALL ? MOST_ROWS : Coding::ROWS>;
    At at(stage, rows, me);
    const u32 base = ring.tile;
    ring.tile += u32(At::groups_of(stage, rows) * Vector::SLICES);
    float* const to = sums + Vector::part(me) * batch;
    if constexpr (Vector::WIDE) {
#pragma unroll 1
      for (; at.more(); at.next()) dot_wide<Vector>(at, base, to);
    } else if constexpr (SMALL) {
#pragma unroll 1
      for (; at.more(); at.next()) dot_rolled<Coding>(x, at, base, begun.whole, to);
    } else {
      dot_pieces<Coding>(x, at, base, begun, to);
    }
  }
  template <class Coding, class Vector>
  __device__ __forceinline__ void dot_pieces(const Vector& x, Walk<Vector, Coding::ROWS>& at,
                                             u32 base, Begun<Vector>& begun, float* to) {
    if constexpr (Vector::PORTIONS == 1) {
#pragma unroll
      for (int g = 0; g < Begun<Vector>::GROUPS; ++g) {
        if (g >= begun.held) break;
        dot_coded_piece<Coding>(
            x, at, base, begun.whole, begun.taken[g], [](int) { return true; }, to);
        at.next();
      }
      begun.held = 0;
    }
#pragma unroll 1
    for (; at.more(); at.next()) {
      dot_coded_piece<Coding>(
          x, at, base, begun.whole, begun.taken[0],
          [&](int c) { return c < Begun<Vector>::PORTIONS && c < begun.held; }, to);
      begun.held = 0;
    }
  }

  // The threads' sums of eight rows, each row's in one thread: halves are exchanged, so that 9
  // shuffles do for 8 rows, 16 for 16.
  // `more`: they are added to those that the same threads have stored.
  template <int ROWS>
  __device__ __forceinline__ void store_sums(float (&sum)[ROWS], int rows, float* to,
                                             bool more = false) {
    constexpr int THREADS = 32 / ROWS;  // that hold the same row's sum
    static_assert(ROWS * THREADS == 32, "halvings");
    const int number = warp_thread();
    // The compiler unrolls three of these and no more.
    if constexpr (ROWS == 16) {
      const bool upper = number & 16;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float keep = upper ? sum[i + 8] : sum[i], give = upper ? sum[i] : sum[i + 8];
        sum[i] = keep + shuffle_xor(give, 16);
      }
    }
    constexpr int LEFT = ROWS == 16 ? 8 : ROWS, FROM = ROWS == 16 ? 8 : 16;
#pragma unroll
    for (int half = LEFT / 2, mask = FROM; half; half /= 2, mask /= 2) {
      const bool upper = number & mask;
#pragma unroll
      // of two rows the lower thread gets the first one's sum, the upper the second one's
      for (int i = 0; i < half; ++i) {
        const float keep = upper ? sum[i + half] : sum[i], give = upper ? sum[i] : sum[i + half];
        sum[i] = keep + shuffle_xor(give, mask);
      }
    }
#pragma unroll
    for (int mask = THREADS / 2; mask; mask /= 2) sum[0] += shuffle_xor(sum[0], mask);
    // The thread's highest bits. Of eight rows `number / THREADS` made other machine code.
    const int row = ROWS == 8 ? (number >> 4 & 1) * 4 + (number >> 3 & 1) * 2 + (number >> 2 & 1)
                              : number / THREADS;
    if (number % THREADS == 0 && row < rows) to[row] = more ? to[row] + sum[0] : sum[0];
  }

  // ---- cached keys and values -------------------------------------------------------------------

  // The next tile is theirs. Each warp requests it once, and leaves it.
  __device__ __forceinline__ const u8* cache_tile() const {
    return reinterpret_cast<const u8*>(__cvta_shared_to_generic(ring.acquire(ring.tile)));
  }
  // Without a fence: products or sums have used all that was loaded from it.
  __device__ __forceinline__ void leave_cache_tile() {
    ring.release(ring.tile++, 1);
  }
  __device__ __forceinline__ static void appended() { leave_cache_to_copies(); }
  // The block has appended what it owes the cache in this stage: what follows in the next step may
  // be copied.
  __device__ __forceinline__ void scanned() const {
    if (me == 0)
      asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(shared_address(&signals.scanned))
                   : "memory");
  }

  // The block has chosen experts: `made` counts.
  __device__ __forceinline__ void chosen(u32* made) const {
    if (me == 0)
      asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(shared_address(made))
                   : "memory");
  }

  // ---- exchange ---------------------------------------------------------------------------------

  // Elements lo..hi-1 into memory of the block. Threads from `skip` quads on take neighbouring
  // quads; the loads of all parts are under way before the first is looked at.
  template <class Stall>
  __device__ __forceinline__ bool gather(const Source& source, int lo, int hi, float* out,
                                         Stall stall, int skip = 0) {
    const bool aligned = lo % 4 == 0 && (u64(out) & 15u) == 0;
    const int quads = aligned ? (hi - lo) / 4 : 0,
              mine = (thread() + CONSUMERS - skip / 4 % CONSUMERS) % CONSUMERS;
    bool good = true;
    for (int q = mine; q < quads && good; q += CONSUMERS) {
      Pack<4> sum;
      good = source_sum(source, lo + 4 * q, sum, stall);
      *reinterpret_cast<float4*>(out + 4 * q) = float4{sum.at[0], sum.at[1], sum.at[2], sum.at[3]};
    }
    for (int i = lo + 4 * quads + mine; i < hi && good; i += CONSUMERS) {
      Pack<1> sum;
      good = source_sum(source, i, sum, stall);
      out[i - lo] = sum.at[0];
    }
    return good;
  }

  __device__ void fill(float* at, int count, u32 bits) {
    for (int i = thread(); i < count; i += CONSUMERS)
      store_shared(at + i, bits_as<float>(bits), true);
  }
};

}  // namespace twin
