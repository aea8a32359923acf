// Vectors, tiles and cached rows of platforms whose blocks keep them in memory that all their
// threads see. Included by a platform before its Core.
#pragma once

namespace twin {

// Columns of one of the matrices that are one to a stage: an expert's, or all.
__device__ __forceinline__ int whole_columns(const Stage& stage) {
  return stage.expert_rows ? stage.expert_cols : stage.cols;
}

// An activation vector of a block. Every function is called by all threads of the block and ends
// with a block barrier.
struct MemoryVector {
  static constexpr int PACK = 4;  // neighbours that belong to one attention head
  static constexpr int SHARERS = 1;  // threads that hold the same elements
  static constexpr int SIDE_BY_SIDE = 0, SIDE_WIDTH = 0;  // a thread's neighbours hold any others
  using Factors = const float*;
  __device__ static int norm_place(int column) { return column; }

  float* at;
  int count;

  __device__ static MemoryVector in(float* memory, int count) { return {memory, count}; }
  template <class Core>
  __device__ static Factors factors(Core&, const float* at) {
    return at;
  }

  // this = the sum of the source's parts. False: a wait was given up.
  template <class Core, class Stall>
  __device__ bool gather(Core& core, const Source& source, Stall stall) {
    return core.gather(source, 0, count, at, stall);
  }

  // this = keep * this + scale * x
  template <class Core>
  __device__ void add(Core& core, float keep, const MemoryVector& x, float scale) {
    for (int i = core.thread(); i < count; i += core.threads())
      at[i] = keep * at[i] + scale * x.at[i];
    core.barrier();
  }

  // The sum of squares over the block, in two halves with a barrier of the caller's between them:
  // here the first does it all.
  template <class Core>
  __device__ float begin_squares(Core& core) const {
    return core.dot(at, at, count);
  }
  template <class Core>
  __device__ static float end_squares(Core&, float begun) {
    return begun;
  }

  // this = x * by * factor, without factors x itself.
  template <class Core, class Vector>
  __device__ void scaled(Core& core, const Vector& x, float by, Factors factor) {
    x.scale_to(core, *this, by, factor);
    core.barrier();
  }
  template <class Core>
  __device__ void scale_to(Core& core, MemoryVector& to, float by, Factors factor) const {
    for (int i = core.thread(); i < count; i += core.threads())
      to.at[i] = factor ? at[i] * by * TWIN_GLOBAL(factor)[i] : at[i];
  }

  template <class Core>
  __device__ void load_row(Core& core, const u8* row) {
    for (int i = core.thread(); i < count; i += core.threads())
      at[i] = load_element<WEIGHT>(TWIN_GLOBAL(row) + i * type_bytes(WEIGHT));
  }

  template <class Core, class Each>
  __device__ void each(Core& core, Each each) {
    for (int i = core.thread(); i < count; i += core.threads()) each(i, at[i]);
    core.barrier();
  }

  // Each element times by(index / WIDTH).
  template <int WIDTH, class Core, class By>
  __device__ void times(Core& core, By by) {
    each(core, [&](int i, float& value) { value *= by(i / WIDTH); });
  }

  // make(first, valid, elements), arrays of a pack each: PACK neighbours at a time. False when one
  // of them says so.
  template <class Core, class Make>
  __device__ bool packs(Core& core, Make make) {
    bool good = true;
    for (int i = core.thread() * PACK; i < count && good; i += core.threads() * PACK) {
      const int first[1] = {i};
      const bool here[1] = {true};
      float* const out[1] = {at + i};
      good = make(first, here, out);
    }
    return good;
  }

  __device__ static int parts(const Stage& stage) {
    const int each = whole_columns(stage);  // none of its slices has columns of the next one
    return stage.cols / each * ((each + stage.tile_cols - 1) / stage.tile_cols);
  }

  // A row's sum from those of its column slices, [parts][batch].
  __device__ float total(const Stage& stage, const float* sums, int batch) const {
    float sum = sums[0];
    for (int part = 1; part < parts(stage); ++part) sum += sums[part * batch];
    return sum;
  }
};

struct Nothing {};  // no weights are taken from the ring before a stage's inputs are there

struct MemoryResidual {
  MemoryVector vector;

  template <class Core>
  __device__ MemoryVector open(Core&) const {
    return vector;
  }
  template <class Core>
  __device__ void close(Core&, const MemoryVector&) const {}
};

// Calls use(tile, row, rows, column, columns, sums) with this core's tiles of rows lo..hi-1 of a
// stage's matrix, from the ring: [parts][batch] sums, one of each column slice.
template <class Core, class Use>
__device__ __forceinline__ void each_memory_tile(Core& core, const Stage& stage, int lo, int hi,
                                                 float* sums, int batch, Use use) {
  for (int row = lo; row < hi; row += stage.tile_rows) {
    const int rows = hi - row < stage.tile_rows ? hi - row : stage.tile_rows;
    float* to = sums + (row - lo);
    for (int col = 0; col < stage.cols; col += stage.tile_cols, to += batch) {
      const int cols = stage.cols - col < stage.tile_cols ? stage.cols - col : stage.tile_cols;
      if (core.ring.mine()) {
        use(core.ring.acquire(), row, rows, col, cols, to);
        core.ring.release();
      }
      core.ring.next(tile_bytes(stage, rows, cols));
    }
  }
}

// These rows times x.
template <class Core>
__device__ void dot_memory_tiles(Core& core, const Stage& stage, const MemoryVector& x, int lo,
                                 int hi, float* sums, int batch) {
  each_memory_tile(core, stage, lo, hi, sums, batch,
                   [&](const u8* tile, int, int rows, int col, int cols, float* to) {
                     if constexpr (CODED)
                       core.dot_coded(code_of(stage), tile, rows, cols, x.at + col, to);
                     else core.dot_tile(tile, rows, cols, x.at + col, to);
                   });
}

// The same of several matrices one below the other, `each` rows of which have an input of their own,
// of(group).
template <class Core, class Of>
__device__ void dot_group_tiles(Core& core, const Stage& stage, int each, Of of, int lo, int hi,
                                float* sums, int batch) {
  each_memory_tile(
      core, stage, lo, hi, sums, batch,
      [&](const u8* tile, int row, int rows, int col, int cols, float* to) {
        for (int r = 0, end; r < rows; r = end) {
          const int group = (row + r) / each, left = (group + 1) * each - row;
          end = left < rows ? left : rows;
          if constexpr (CODED) {
            core.dot_part(code_of(stage), tile, rows, cols, of(group) + col, to, r, end);
          } else {
            core.dot_tile(tile + long(r) * cols * type_bytes(WEIGHT), end - r, cols,
                          of(group) + col, to + r);
          }
        }
      });
}

// The same of a stage of experts, whose tiles lie where the choice says: [experts][column
// slices][rows][columns of a slice] from `first` on. Its rows are those of all chosen experts one
// below the other, or its columns side by side. In a plan with low-bit weights tiles lie where
// place(row, rows, column slice) says, in units.
template <class Core, class Stage, class Place>
__device__ void dot_expert_tiles(Core& core, const Stage& stage, const u8* first, const int* chosen,
                                 const MemoryVector& x, int lo, int hi, float* sums, Place place) {
  const int high = stage.expert_rows, wide = stage.expert_cols;
  for (int row = lo, end; row < hi; row = end) {
    end = (row / high + 1) * high;  // a tile is of one expert
    if (row + stage.tile_rows < end) end = row + stage.tile_rows;
    if (hi < end) end = hi;
    float* to = sums + (row - lo);
    for (int col = 0, cols = 0; col < stage.cols; col += cols, to += stage.batch) {
      const int left = wide - col % wide;
      cols = left < stage.tile_cols ? left : stage.tile_cols;
      const u8* expert =
          first + u64(chosen[row / high + col / wide]) * u64(stage.expert_units) * UNIT_BYTES;
      if (core.ring.mine()) {
        if constexpr (CODED) {
          const u32 units = place(row % high, end - row, col % wide / stage.tile_cols);
          const u8* tile = expert + u64(units) * UNIT_BYTES;
          core.dot_coded(code_of(stage), tile, end - row, cols, x.at + col, to);
        } else {
          const long at = long(high) * (col % wide) + long(row % high) * cols;
          core.dot_tile(expert + at * type_bytes(WEIGHT), end - row, cols, x.at + col, to);
        }
      }
      core.ring.next(0);
    }
  }
}

template <int N, int ALIGNED>
__device__ Pack<N> load_pack(const float* at, bool pushed = false) {
  Pack<N> pack;
  for (int i = 0; i < N; ++i) pack.at[i] = load_shared(at + i, pushed);
  return pack;
}

template <int N>
__device__ bool missing(const Pack<N>& pack) {
  bool any = false;
  for (int i = 0; i < N; ++i) any |= bits_as<u32>(pack.at[i]) == SENTINEL;
  return any;
}

}  // namespace twin
