// How a block's warps divide the columns of a vector among their threads. tests/native/layout.cpp
// asks it for every column.
#pragma once

namespace twin {

// A vector of COLS elements for tiles of TILE columns, as threads multiply it. Warps form teams of
// TEAM_; a team takes the tiles of some column slices, and each thread has the VECTOR elements of
// its columns in each of them. With fewer slices than teams, several teams hold the same slice and
// take different rows. No slice has columns of two matrices of EACH columns: the last one of each
// may be narrower.
template <int COLS, int TILE, int VECTOR_, int TEAM_, int AHEAD_PORTIONS_, int AHEAD_GROUPS_,
          int EACH>
struct TeamLayout {
  // of weights taken before a stage's inputs are there
  static constexpr int AHEAD_PORTIONS = AHEAD_PORTIONS_, AHEAD_GROUPS = AHEAD_GROUPS_;
  static constexpr int VECTOR = VECTOR_, TEAM = TEAM_, TEAMS = CONSUMER_WARPS / TEAM;
  static constexpr bool UNEVEN = EACH != COLS && EACH % TILE != 0;
  static constexpr int EACH_SLICES = (EACH + TILE - 1) / TILE;
  static constexpr int SLICES = UNEVEN ? COLS / EACH * EACH_SLICES
                                       : COLS ? (COLS + TILE - 1) / TILE : 1;
  // A tile wider than its team holds at once is taken in folds, one after the other.
  static constexpr int FOLD = 32 * VECTOR * TEAM, FOLDS = (TILE + FOLD - 1) / FOLD;
  static constexpr bool FOLDED = FOLDS > 1;
  static constexpr int PORTIONS = FOLDED ? FOLDS : (SLICES + TEAMS - 1) / TEAMS;
  static constexpr int GROUPS = SLICES < TEAMS ? TEAMS / SLICES : 1;
  // warps that have a share of a row
  static constexpr int PARTS = (SLICES < TEAMS ? SLICES : TEAMS) * TEAM;
  static constexpr int ELEMENTS = COLS;
  // the last portion is not of all teams
  static constexpr bool RAGGED = SLICES > TEAMS&& SLICES % TEAMS != 0;
  static constexpr int WIDTH = TILE;
  static constexpr bool WIDE = false;  // it lies in registers
  static constexpr bool EQUAL = COLS % TILE == 0 && !UNEVEN;  // is no slice narrower?
  // all threads of a team hold columns of a whole tile
  static constexpr bool FULL = TILE == FOLDS * FOLD;
  static constexpr bool EXACT = COLS % TILE == 0 && FULL && !RAGGED && !UNEVEN;
  static constexpr bool WHOLE = HEAD_DIM % VECTOR == 0 && OtherShape::HEAD_DIM % VECTOR == 0;
  static constexpr int PACK = !WHOLE ? 4 : VECTOR < 8 ? VECTOR : 8;
  static_assert(CONSUMER_WARPS % TEAM == 0 && (!FOLDED || SLICES == 1), "a team covers a tile");

  // Of thread `me`:
  __device__ static int team(int me) { return me / (32 * TEAM); }
  __device__ static int row_group(int me) { return SLICES < TEAMS ? team(me) / SLICES : 0; }
  __device__ static int slice(int me, int c) {
    return SLICES < TEAMS ? team(me) % SLICES : team(me) + c * TEAMS;
  }
  // Only a team's last slice may be missing, short or narrow: the others need no condition, whose
  // register each would cost.
  __device__ static constexpr bool inner(int c) { return c + 1 < PORTIONS; }
  __device__ static bool beyond(int me, int c) {
    return RAGGED && !inner(c) && slice(me, c) >= SLICES;
  }
  __device__ static int part(int me) {
    return (SLICES < TEAMS ? team(me) % SLICES : team(me)) * TEAM + me / 32 % TEAM;
  }
  // Threads that hold the same columns, one of each row group, share the work of combining them:
  // the number of a thread among its row group's.
  static constexpr int SHARERS = GROUPS, SHARING_THREADS = 32 * TEAM * (SLICES < TEAMS ? SLICES : TEAMS);
  // The stride of elements of neighbouring threads, in whole slices of so many.
  static constexpr int SIDE_BY_SIDE = VECTOR, SIDE_WIDTH = TILE;
  __device__ static int sharing_thread(int me) {
    return slice(me, 0) * 32 * TEAM + me % (32 * TEAM);
  }
  // first column inside a tile, of fold c where it is taken in folds
  __device__ static int local(int me, int c) {
    return (FOLDED ? c * FOLD : 0) + me % (32 * TEAM) * VECTOR;
  }
  __device__ static int begin(int slice) {  // its first column
    return UNEVEN ? slice / EACH_SLICES * EACH + slice % EACH_SLICES * TILE : slice * TILE;
  }
  __device__ static int local(int me) { return local(me, 0); }
  // The other way round, of columns that are divided into slices for all teams in turn.
  struct Held {
    u32 thread, portion, element;
  };
  __device__ static Held held(u32 column) {
    constexpr u32 WIDE = UNEVEN ? EACH : COLS ? COLS : 1;
    const u32 within = UNEVEN ? column % WIDE : column,
              slice = (UNEVEN ? column / WIDE * EACH_SLICES : 0u) + within / TILE,
              at = within % TILE;
    return {slice % TEAMS * (32 * TEAM) + at / VECTOR, slice / TEAMS, at % VECTOR};
  }
  __device__ static int column(int me, int c) { return begin(slice(me, c)) + local(me, c); }
  // columns of a slice of one of several matrices
  __device__ static int uneven_width(int slice) {
    const int left = EACH - slice % EACH_SLICES * TILE;
    return left < TILE ? left : TILE;
  }
  __device__ static bool valid(int me, int c) {
    if constexpr (UNEVEN) return !beyond(me, c) && local(me, c) < uneven_width(slice(me, c));
    return EXACT || ((FULL || local(me, c) < TILE) && (inner(c) || column(me, c) < COLS));
  }
  // Do threads without columns of a slice look for others', and throw them away? The compiler makes
  // a branch of each load's condition, and what one has loaded is looked at before the next branch:
  // output projections of three slices waited four times a round of splits, 6 % of a step in long
  // contexts (studies/h200-history/tried.md). Coded weights and recurrent states have other code.
  static constexpr bool ALL_LOOK =
      !CODED && !EXACT && !UNEVEN && !(Plan::kinds >> int(StageKind::DELTA) & 1);
  // A single portion has one condition, alike in a warp.
  __device__ static bool looks(int me, int c) {
    constexpr bool EACH_WARP = TILE > 32 * VECTOR * (TEAM - 1) && COLS % TILE == 0;
    return PORTIONS > 1 || EACH_WARP || valid(me - me % 32, c);
  }
  // The slice's last columns, or those that the thread has in the portion before.
  __device__ static int nearest(int me, int c) {
    const int at = c > 0 && beyond(me, c) ? c - 1 : c, own = column(me, at),
              end = begin(slice(me, at)) + TILE, last = (end < COLS ? end : COLS) - VECTOR;
    return own < last ? own : last;
  }
  // Where a norm's weight of a column lies: of each slice the first four of every thread, then the
  // next four, as twin/schedule/teams.py orders them. A warp's loads then ask for neighbours.
  __device__ static int norm_place(int column) {
    const int slice = column / TILE, at = column % TILE;
    return slice * TILE + at % VECTOR / 4 * plane(slice) + at / VECTOR * 4;
  }
  __device__ static int norm_place(int me, int c, int i) {  // of four elements of a thread
    return begin(slice(me, c)) + i / 4 * plane(slice(me, c)) + local(me) / VECTOR * 4;
  }
  __device__ static int plane(int slice) {  // floats between a thread's fours
    constexpr int LAST = COLS - (SLICES - 1) * TILE;
    return (LAST == TILE || slice + 1 < SLICES ? TILE : LAST) / VECTOR * 4;
  }
  // Do threads hold columns, or not, `count` neighbours alike?
  __device__ static constexpr bool alike(int count) {
    return TILE % (VECTOR * count) == 0 && EACH % (VECTOR * count) == 0 &&
           COLS % (VECTOR * count) == 0;
  }
  __device__ static int stride(int me, int c) {  // bytes between rows of a tile
    if constexpr (UNEVEN) return uneven_width(slice(me, c)) * type_bytes(WEIGHT);
    const int cols = COLS % TILE == 0 || inner(c) || COLS - slice(me, c) * TILE > TILE
                         ? TILE
                         : COLS - slice(me, c) * TILE;
    return cols * type_bytes(WEIGHT);
  }
  __device__ static int row_bytes_of(int slice, Code code) {  // of a slice in a code
    if constexpr (UNEVEN) return uneven_width(slice) * code_bits(code) / 8;
    return (COLS - slice * TILE < TILE ? COLS - slice * TILE : TILE) * code_bits(code) / 8;
  }
  __device__ static int row_bytes(int me, int c, Code code) {  // the same of a code
    return stride(me, c) * code_bits(code) / (8 * type_bytes(WEIGHT));
  }

  // A row's sum from its warps' parts, [PARTS][batch].
  __device__ __forceinline__ float total(const Stage&, const float* sums, int batch) const {
    float sum = sums[0];
#pragma unroll
    for (int p = 1; p < PARTS; ++p) sum += sums[p * batch];
    return sum;
  }
};

}  // namespace twin
