// Which rows of experts a block of a prompt pass multiplies together, and where they lie.
// tests/native/chunk.cpp brings the names that it needs.
#pragma once

namespace twin {

// Where a tile of low-bit weights of experts lies, in units from its expert's first
// (twin/kernel/experts.py). `first`: of the block's rows in each expert, where it has rows of its
// own.
template <class Stage>
__device__ __forceinline__ u32 coded_place(const Stage& stage, int block, int first, int row,
                                           int rows, int slice) {
  const bool shared = stage.kind == int(StageKind::ROUTED_UP);  // blocks share the row groups
  const u32 group = u32(stage.expert_group), high = u32(stage.tile_rows),
            from = shared ? 0u : u32(first);
  const u32 home = (from * group + high - 1u) / high + u32(block) * u32(stage.expert_gap);
  return home + (u32(row) - from) / high * group +
         u32(slice) * u32(coded_bytes(stage, rows, true) / UNIT_BYTES);
}

// Rows of an expert that a block multiplies together.
struct RowBatch {
  int owner, owners;  // blocks whose rows they are, in low-bit weights; 0: they share row groups
  int lo, hi;
};

// Do tiles of an expert's low-bit weights begin with each block's first row?
template <class Stage>
__device__ __forceinline__ constexpr bool owned_tiles(const Stage& stage) {
  return CODED && stage.kind == int(StageKind::ROUTED_DOWN);
}

template <class Block, class Stage>
__device__ __forceinline__ int batch_rows(const Block& b, const Stage& stage) {
  const int groups = b.plan.prompt_batch / stage.tile_rows;
  return (groups ? groups : 1) * stage.tile_rows;
}

// Batches of rows of an expert.
template <class Block, class Stage>
__device__ __forceinline__ int row_batches(const Block& b, const Stage& stage) {
  const int most = batch_rows(b, stage);
  return owned_tiles(stage) ? (b.plan.blocks + b.plan.prompt_owners - 1) / b.plan.prompt_owners
                            : (stage.expert_rows + most - 1) / most;
}

template <class Block, class Stage>
__device__ __forceinline__ RowBatch row_batch(const Block& b, const Stage& stage, int number) {
  if (!owned_tiles(stage)) {
    const int most = batch_rows(b, stage), lo = number * most;
    return {0, 0, lo, stage.expert_rows - lo < most ? stage.expert_rows : lo + most};
  }
  const int first = number * b.plan.prompt_owners, left = b.plan.blocks - first,
            end = first + (left < b.plan.prompt_owners ? left : b.plan.prompt_owners);
  return {first, end - first, b.plan.owned_of(stage.owned, first).lo,
          b.plan.owned_of(stage.owned, end - 1).hi};
}

// use(first row, rows, place) for each row group of low-bit weights; place(slice) is where its tile
// lies, in units from the expert's first.
template <class Block, class Stage, class Use>
__device__ __forceinline__ void each_group(const Block& b, const Stage& stage,
                                           const RowBatch& batch, Use use) {
  const int high = stage.tile_rows, owners = batch.owners ? batch.owners : 1;
  TWIN_ONCE
  for (int o = 0; o < owners; ++o) {
    const int owner = batch.owner + o;
    const Span own = batch.owners ? b.plan.owned_of(stage.owned, owner)
                                    : Span{batch.lo, batch.hi};
    // of an expert that blocks share the first group begins with its first row
    const int from = batch.owners ? own.lo : 0;
    TWIN_ONCE
    for (int row = own.lo; row < own.hi; row += high) {
      const int rows = own.hi - row < high ? own.hi - row : high;
      use(row, rows, [&](int slice) {
        if constexpr (CODED) return coded_place(stage, owner, from, row, rows, slice);
        return 0u;
      });
    }
  }
}

// use(first row, rows, place) as `each_group` does, of the row group of low-bit weights that has a
// row of the batch.
template <class Block, class Stage, class Use>
__device__ __forceinline__ void group_of(const Block& b, const Stage& stage, const RowBatch& batch,
                                         int row, Use use) {
  const int high = stage.tile_rows;
  int owner = batch.owner;
  Span own = {batch.lo, batch.hi};
  if (batch.owners) {
    own = b.plan.owned_of(stage.owned, owner);
    TWIN_ONCE
    while (row >= own.hi) own = b.plan.owned_of(stage.owned, ++owner);
  }
  const int from = batch.owners ? own.lo : 0, first = from + (row - from) / high * high,
            rows = own.hi - first < high ? own.hi - first : high;
  use(first, rows, [&](int slice) {
    if constexpr (CODED) return coded_place(stage, owner, from, first, rows, slice);
    return 0u;
  });
}

// Some of an expert's entries.
struct EntryPart {
  int first, count;
};

// The batches of rows of all experts that some token visits; blocks take them in turn. Where all
// tokens visit an expert, each of its batches is taken several times, for some of the entries each:
// else the others would wait for those blocks that have one.
template <class Stage>
struct RowBatches {
  const Stage& stage;
  int count;   // of an expert
  int expert;  // EXPERTS: there are no more
  int number;  // from the expert's first on

  template <class Block, class Chunk>
  __device__ RowBatches(const Block& b, const Chunk& chunk, const Stage& stage)
      : stage(stage), count(row_batches(b, stage)), expert(0), number(b.block) {
    find(b, chunk);
  }
  __device__ bool more() const { return expert < Entries::EXPERTS; }
  template <class Block>
  __device__ RowBatch rows(const Block& b) const { return row_batch(b, stage, number % count); }
  template <class Block, class Chunk>
  __device__ EntryPart entries(const Block& b, const Chunk& chunk) const {
    const int all = chunk.entries_of(b, expert), parts = parts_of(b, chunk),
              most = (all + parts - 1) / parts, first = number / count * most;
    return {first, all - first < most ? all - first : most};
  }
  template <class Block, class Chunk>
  __device__ int parts_of(const Block& b, const Chunk& chunk) const {
    if (Entries::EACH == Experts::TOP_K || expert < Experts::COUNT) return 1;
    return (chunk.entries_of(b, expert) + Chunk::PART - 1) / Chunk::PART;
  }
  template <class Block>
  __device__ const u8* weights(const Block& b) const {
    return b.memory.stream + u64(stage.expert_page) * PAGE_BYTES +
           u64(expert) * u64(stage.expert_units) * UNIT_BYTES;
  }
  template <class Block, class Chunk>
  __device__ void next(const Block& b, const Chunk& chunk) {
    number += b.plan.blocks;
    find(b, chunk);
  }
  template <class Block, class Chunk>
  __device__ void find(const Block& b, const Chunk& chunk) {
    TWIN_ONCE
    for (; expert < Entries::EXPERTS; ++expert) {
      if (chunk.entries_of(b, expert) == 0) continue;
      const int batches = count * parts_of(b, chunk);
      if (number < batches) return;
      number -= batches;
    }
  }
};

// emit(entry, element, sum of its first row, sum of its last row) for each entry, and each element
// of its expert's rows, whose biases are [experts][rows]. Weights of the next batch come towards
// the block while it multiplies one.
template <int UNIT, bool DOWN, class Block, class Chunk, class Stage, class Emit>
__device__ __forceinline__ void multiply_experts(Block& b, Chunk& chunk, const Stage& stage,
                                                 const float* x, Emit emit) {
  const bool biased = Additions::EXPERT_BIAS && stage.bias >= 0;
  RowBatches<Stage> at(b, chunk, stage);
  if (at.more()) chunk.prefetch_batch(b, stage, at.rows(b), at.weights(b));
  TWIN_ONCE
  while (at.more()) {
    const int expert = at.expert;
    const RowBatch rows = at.rows(b);
    const EntryPart part = at.entries(b, chunk);
    const u8* const weights = at.weights(b);
    const float* const biases =
        biased ? b.memory.constants + stage.bias + long(expert) * stage.expert_rows : nullptr;
    at.next(b, chunk);
    if (rows.lo == rows.hi) continue;
    chunk.template decode_batch<DOWN>(b, stage, rows, weights);
    if (at.more()) chunk.prefetch_batch(b, stage, at.rows(b), at.weights(b));
    chunk.template multiply_entries<UNIT, DOWN>(b, stage, x, expert, part, rows, weights, biases,
                                                emit);
  }
}

}  // namespace twin
