// The loaders' way through a plan: weights of every stage, and what its attention
// reads of the cache.
#pragma once

namespace twin {

// What the ring brings of the cache: at each attention stage what the block's items hold, but for
// the newest key and value.
struct CacheStream {
  const Launch& launch;
  const RankMemory& memory;
  const Signals& signals;
  Loader& loader;
  int block;
  u32 stages = 0;  // of attention, with items of the block, so far
  u32 of_a_step = 0;

  // What was appended a step ago has to be there. False: the generation is over.
  __device__ __forceinline__ bool appended() const {
    const u32 scanned = shared_address(&signals.scanned);
    for (;;) {
      u32 seen;
      asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(scanned) : "memory");
      if (seen + of_a_step > stages) return true;
      if (barrier_seen(loader.left, 0)) return false;
    }
  }
  __device__ __forceinline__ bool operator()(const Stage& stage, int step, bool follows) {
    return by_heads(stage, [&](auto heads) {
      return of_heads<decltype(heads)>(stage, step, follows);
    });
  }
  template <class S>
  __device__ __forceinline__ bool of_heads(const Stage& stage, int step, bool follows) {
    constexpr int TILE = Core::Cached<S>::CACHE_TILE, ROW = S::ROW;
    const Plan& plan = launch.plan;
    const Span items = plan.owned_of(stage.items, block);
    if (items.lo >= items.hi) return true;
    if (follows && !appended()) return false;
    ++stages;
    const u64 policy = read_again();
    for (int i = items.lo; i < items.hi; ++i) {
      // no Item, which knows the newest position, too: registers are scarce
      const int position = position_at(plan, launch.request, step), split = i % S::splits(plan);
      int first = 0, end = 0;
      TWIN_ONCE
      for (int k = 0; k < 2; ++k) {
        first = end;
        end = held<S>(plan, k ? position + plan.probe : oldest(stage, position), split);
      }
      u64 bytes;
      const u8* const keys = Item<S>::keys_of(plan, memory, stage, i, bytes);
      for (; first < end; first += TILE) {
        const int count = least(TILE, end - first);
        const u8* const at = keys + u64(first) * ROW;
        if (!loader.fill(at, count * ROW, at + bytes, TILE * ROW, policy))
          return false;
      }
    }
    return true;
  }
};

// What the ring brings of experts, once the block has chosen. ROUTE writes a choice only behind all
// tiles of the one before, so a loader that copies a tile reads the choice that the tile is of.
struct ExpertStream {
  const RankMemory& memory;
  Loader& loader;
  int block;

  // In shared memory, addressed anew each time: side warps have few registers.
  __device__ static __forceinline__ u32 word(int at) {
    extern __shared__ __align__(128) u8 shared[];
    return shared_address(shared) + u32(Shared::scratch) + 4u * u32(Plan::choice + at);
  }
  __device__ static __forceinline__ u32 look(int at) {
    u32 seen;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(seen) : "r"(word(at)) : "memory");
    return seen;
  }

  // Waits for the choice of the next layer, or of the same once more.
  __device__ __forceinline__ bool chosen(bool next) const {
    // layers whose experts were requested
    const int mine = 2 * Experts::VISITED + 1 + int(threadIdx.x / 32 - LOADER_WARP);
    const u32 wanted = look(mine) + u32(next);
    if (next) asm volatile("st.shared.u32 [%0], %1;" ::"r"(word(mine)), "r"(wanted) : "memory");
    while (look(2 * Experts::VISITED) < wanted)
      if (barrier_seen(loader.left, 0)) return false;
    return true;
  }

  // Rows of a slice of an expert, from one on.
  __device__ __forceinline__ const u8* at(const Stage& stage, int place, int row, int col,
                                          int cols) const {
    const u32 within = (u32(stage.expert_rows) * u32(col) + u32(row) * u32(cols)) *
                       u32(type_bytes(WEIGHT)) / u32(UNIT_BYTES);
    const u64 units = u64(look(place)) * u64(stage.expert_units) + within;
    return memory.stream + u64(stage.expert_page) * PAGE_BYTES + units * UNIT_BYTES;
  }

  // Rows of an expert that feed its down projection.
  static constexpr int HIGH = (Family::GATED ? 2 : 1) * Experts::WIDTH;

  // The tile at a row and a column of the wide matrix. Its rows are of one expert, or of two, one
  // below the other.
  __device__ __forceinline__ bool fill(const Stage& stage, int row, int rows, int column) {
    const bool up = stage.kind == int(StageKind::ROUTED_UP);
    const int place = up ? row / HIGH : column / Experts::WIDTH;
    if (up) row -= place * HIGH;
    const int col = up ? column : column - place * Experts::WIDTH,
              cols = least(stage.tile_cols, stage.expert_cols - col);
    const int upper = up ? least(rows, HIGH - row) : rows, row_bytes = cols * type_bytes(WEIGHT);
    if (!loader.place(rows * row_bytes)) return false;
    bulk_copy(loader.slot, at(stage, place, row, col, cols), upper * row_bytes, loader.now.at,
              loader.policy);
    if (upper < rows)
      bulk_copy(loader.slot + u32(upper * row_bytes), at(stage, place + 1, 0, col, cols),
                (rows - upper) * row_bytes, loader.now.at, loader.policy);
    loader.placed();
    return true;
  }

  // An expert's columns, those of several side by side with what its last slice lacks.
  template <class Shape>
  __device__ static constexpr int filled() {
    if (Shape::cols == Shape::expert_cols) return Shape::cols;
    return (Shape::expert_cols + Shape::tile_cols - 1) / Shape::tile_cols * Shape::tile_cols;
  }

  // The same of low-bit weights and of what stands next to them: a tile with its scales lies in one
  // piece, of one expert. `Shape` says what all such stages have in common: side warps have too few
  // registers for what a table says of it.
  template <class Shape>
  __device__ __forceinline__ bool fill_coded(Shape shape, const u8* all, int first, int row,
                                             int rows, int column) {
    constexpr bool UP = Shape::kind == int(StageKind::ROUTED_UP);
    const int place = UP ? row / HIGH : column / filled<Shape>();
    row -= UP ? place * HIGH : 0;
    column -= UP ? 0 : place * filled<Shape>();
    const int bytes =
        coded_bytes(shape, rows, int(Shape::expert_cols) - column >= int(Shape::tile_cols));
    const u64 units = u64(look(place)) * u64(Shape::expert_units) +
                      coded_place(shape, block, first, row, rows, column / Shape::tile_cols);
    if (!loader.place(bytes)) return false;
    bulk_copy(loader.slot, all + units * UNIT_BYTES, bytes, loader.now.at, loader.policy);
    loader.placed();
    return true;
  }

  template <class Shape>  // `all`: the stage's experts
  __device__ __forceinline__ bool coded(Shape shape, const u8* all, const Span& own) {
    TWIN_ONCE
    for (int row = own.lo; row < own.hi; row += Shape::tile_rows)
      TWIN_ONCE
      for (int column = 0; column < Shape::cols / Shape::expert_cols * filled<Shape>();
           column += Shape::tile_cols)
        if (loader.mine() && !fill_coded(shape, all, own.lo, row,
                                         least(Shape::tile_rows, own.hi - row), column))
          return false;
    return true;
  }

  __device__ __forceinline__ bool operator()(const Stage& stage, const Span& own) {
    const bool up = stage.kind == int(StageKind::ROUTED_UP);
    int page = stage.expert_page;
    TWIN_KEEP(page);  // looked up before the wait
    if (!chosen(up)) return false;
    if constexpr (CODED) {
      const u8* const all = memory.stream + u64(page) * PAGE_BYTES;
      return up ? coded(RoutedUp{}, all, own) : coded(RoutedDown{}, all, own);
    } else {
      for (int row = own.lo; row < own.hi; row += stage.tile_rows)
        for (int column = 0; column < stage.cols; column += stage.tile_cols)
          if (loader.mine() && !fill(stage, row, least(stage.tile_rows, own.hi - row), column))
            return false;
      return true;
    }
  }
};

// Nothing in a plan without experts.
struct NoExperts {
  __device__ __forceinline__ bool operator()(const Stage&, const Span&) const { return true; }
};

template <bool ANY>
__device__ __forceinline__ auto experts_of(const RankMemory& memory, Loader& loader, int block) {
  if constexpr (ANY) return ExpertStream{memory, loader, block};
  if constexpr (!ANY) return NoExperts{};
}

__device__ void load_weights(const Launch& launch, const RankMemory& memory, int block,
                             Loader& loader, const Signals& signals, int step, int first,
                             int last) {
  const Plan& plan = launch.plan;
  const u8* const stream = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
  CacheStream cache = {launch, memory, signals, loader, block};
  auto experts = experts_of<Experts::ANY>(memory, loader, block);
  const auto chosen = [&](const Stage& stage, const Span& own) { return experts(stage, own); };
  const u8* from = stream;
  const auto fill = [&](int bytes, bool wide) { return loader.go_on(from, bytes, wide); };
  const auto passed = [&](int bytes) {
    from += bytes;
    return true;
  };
  if (!Plan::resident) {
    if (step < 0) step = kept_progress(memory, block)->step;
    from += u64(plan.starts_at(first * Plan::blocks + block).units) * UNIT_BYTES;
    stream_stages(
        plan, block, first, last, head_needed(launch.request, step), fill,
        [&](const Stage& stage) { return cache(stage, step, false); }, chosen, passed);
  }
  bool more = Plan::resident;
  for (step = Plan::resident ? 0 : step; more && step < launch.request.steps; ++step) {
    more = stream_stages(
        plan, block, 0, Plan::stage_count, head_needed(launch.request, step), fill,
        [&](const Stage& stage) { return cache(stage, step, step > 0); }, chosen, passed);
    // looked up again next to low-bit experts, where it found no registers
    if constexpr (CODED && Experts::ANY)
      from = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
    else from = stream;
    if (step == 0) cache.of_a_step = cache.stages;
  }
  loader.drain();
}

// Are all rows of a column slice multiplied before the next slice's? Of few rows, whose sums lie in
// registers, so that a slice of many tokens' inputs is there once.
__device__ __forceinline__ constexpr bool by_slices(int kind) {
  return HANDED_ON && (kind == int(StageKind::O_PROJ) || kind == int(StageKind::DOWN));
}

// The same of passes that verify drafts: all stages' weights, again and again; attention looks at
// the cache where it lies.
__device__ void load_rounds(const Launch& launch, const RankMemory& memory, int block,
                            Loader& loader) {
  const Plan& plan = launch.plan;
  const u8* const stream = memory.stream + u64(plan.streams_at(block).page) * PAGE_BYTES;
  for (bool more = true; more;) {
    const u8* from = stream;
    const auto fill = [&](int bytes, bool wide) { return loader.go_on(from, bytes, wide); };
    if constexpr (!HANDED_ON) {
      more = stream_stages(
          plan, block, 0, Plan::round_stages, true, fill, [](const Stage&) { return true; },
          [](const Stage&, const Span&) { return true; },
          [&](int bytes) { return fill(bytes, false); });
      continue;
    }
    for (int s = 0; more && s < Plan::round_stages; ++s) {
      const Stage& stage = plan.stages_at(s);
      if (stage.owned < 0) continue;
      if (!by_slices(stage.kind)) {
        more = stream_stages(
            plan, block, s, s + 1, true, fill, [](const Stage&) { return true; },
            [](const Stage&, const Span&) { return true; }, [](int) { return true; });
        continue;
      }
      const Span own = plan.owned_of(stage.owned, block);
      const int row_bytes = stage.cols * type_bytes(WEIGHT);
      loader.wide = false;
      for (int column = 0; more && column < stage.cols; column += stage.tile_cols)
        for (int row = own.lo; more && row < own.hi; row += stage.tile_rows) {
          const int rows = least(stage.tile_rows, own.hi - row),
                    width = least(stage.tile_cols, stage.cols - column);
          more = loader.fill(from + (row - own.lo) * row_bytes +
                                 rows * column * type_bytes(WEIGHT),
                             rows * width * type_bytes(WEIGHT));
        }
      from += u64(own.hi - own.lo) * u64(row_bytes);
    }
  }
  loader.drain();
}

}  // namespace twin
