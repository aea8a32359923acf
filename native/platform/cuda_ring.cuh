// The ring of weight tiles in a block's shared memory, and those who fill it. tests/native/ring.cpp
// runs it with threads of a CPU.
#pragma once

namespace twin {

// Where a tile is: its slot, and its barriers.
struct Place {
  u32 slot, full, empty, parity;
};

constexpr u32 power_of_two(u32 least) {
  u32 power = 1;
  while (power < least) power *= 2;
  return power;
}

// Tile n lies in slot n % SLOTS; barriers n % BARRIERS tell that it has arrived and that its team
// is done with it. A parity distinguishes two neighbouring phases, no more. When a warp looks for
// tile n, its team's tile before it in the stage has been taken, or all of the stage before have;
// that tile is at most TURN back: two rounds of the teams, where the last portion is not of all
// teams. Its loader copied it after the slots of all its tiles until then had been left, and after
// the other loader's tile ODD back had arrived. So all tiles from SLOTS + TURN + ODD back on have
// been used, and with so many barriers or more, barrier n % BARRIERS is in the phase of tile n or
// in that before it. They are a power of two: each tile that a warp looks for is divided by it.
struct Ring {
  static constexpr u32 SLOTS = u32(STREAMED_ROUNDS ? Few::SLOTS : Plan::ring_slots),
                       WINDOW = u32(Plan::window_slots) < SLOTS ? u32(Plan::window_slots) : SLOTS,
                       HEAD_WINDOW = u32(Plan::head_window_slots) < SLOTS
                                         ? u32(Plan::head_window_slots)
                                         : SLOTS,
                       ODD = (HEAD_WINDOW < WINDOW ? WINDOW : HEAD_WINDOW) | 1u;
  static constexpr u32 TURN = 2 * u32(CONSUMER_WARPS),
                       BARRIERS = power_of_two(SLOTS + TURN + ODD);
  static constexpr u32 STEP = 8;  // bytes of a barrier

  u32 slots;  // addresses in shared memory
  // [BARRIERS] bytes have arrived; behind them [BARRIERS] CONSUMER_WARPS arrivals: each warp of the
  // team counts for its share
  u32 full;
  u32 tile;  // tiles of the block so far, of all teams

  __device__ static u32 parity_of(u32 tile) { return tile / BARRIERS & 1u; }
  __device__ u32 full_of(u32 tile) const { return full + tile % BARRIERS * STEP; }
  __device__ u32 empty_of(u32 tile) const { return full_of(tile) + BARRIERS * STEP; }
  __device__ u32 slot(u32 tile) const { return slots + tile % SLOTS * u32(Plan::slot_bytes); }
  __device__ __forceinline__ Place place(u32 tile) const {
    return {slot(tile), full_of(tile), empty_of(tile), parity_of(tile)};
  }
  __device__ __forceinline__ u32 acquire(u32 tile) const {  // its address in shared memory
    barrier_wait(full_of(tile), parity_of(tile));
    return slot(tile);
  }
  __device__ __forceinline__ void release(u32 tile, int share) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(empty_of(tile), share);
  }
  // The same of a tile's barrier, `empty_of`, for a warp that is together.
  __device__ static __forceinline__ void leave(u32 empty, int share) {
    if (threadIdx.x % 32 == 0) barrier_arrive(empty, share);
  }
  __device__ void rewind() {}
};

// One of the ring's barriers and its phase, every LOADERS-th tile: counted, because a division for
// each is time without copies.
struct Turn {
  static constexpr u32 ROUND = Ring::BARRIERS * Ring::STEP;

  u32 at, parity;

  __device__ __forceinline__ void next(u32 first) {
    at += u32(LOADERS) * Ring::STEP;
    if (at >= first + ROUND) at -= ROUND, parity ^= 1u;
  }
  // That of the tile `back` tiles before; of one before the first, a phase that has passed. Not
  // counted: side warps have few registers.
  __device__ __forceinline__ Turn before(u32 first, u32 back) const {
    const bool round = at < first + back * Ring::STEP;
    return {at + (round ? ROUND : 0u) - back * Ring::STEP, parity ^ u32(round)};
  }
};

// The loader's side: a thread copies every LOADERS-th tile, as far ahead as the window and the ring
// allow.
struct Loader {
  const Ring& ring;
  u32 left;  // barrier: the consumers are done
  u64 policy;
  u32 tile, slot, skip;  // the next to copy; its slot; tiles of the others before it
  Turn now;              // of the tile to come
  bool wide = false;     // does the LM head's window count for it?

  __device__ __forceinline__ Loader(const Ring& ring, u32 left, u32 me)
      : ring(ring),
        left(left),
        policy(read_once()),
        tile(me),
        slot(ring.slot(me)),
        skip(me),
        now{ring.full + me * Ring::STEP, 0} {}

  // False: the generation is over, and the other loader may have gone.
  __device__ __forceinline__ bool wait(const Turn& turn) const {
    while (!barrier_passed(turn.at, turn.parity))
      if (barrier_seen(left, 0)) return false;
    return true;
  }

  __device__ __forceinline__ u32 window() const {
    return Ring::HEAD_WINDOW != Ring::WINDOW && wide ? Ring::HEAD_WINDOW : Ring::WINDOW;
  }

  // The next tile of the stream: `bytes` of weights, or of keys with the values behind them. False:
  // the generation is over.
  __device__ __forceinline__ bool fill(const u8* from, int bytes) {
    return fill(from, bytes, nullptr, 0, policy);
  }
  // The next bytes of a stream, which then begins behind them.
  __device__ __forceinline__ bool go_on(const u8*& from, int bytes, bool late) {
    wide = late;
    const bool filled = fill(from, bytes);
    from += bytes;
    return filled;
  }
  __device__ __forceinline__ bool fill(const u8* from, int bytes, const u8* values, u32 behind,
                                       u64 policy) {
    if (skip-- > 0) return true;
    skip = u32(LOADERS) - 1;
    // Its slot has been left; the window lets it follow; the other loader's tile is there.
    Turn used = now.before(ring.full, Ring::SLOTS);
    used.at += Turn::ROUND;
    if (!wait(used) || (Ring::WINDOW < Ring::SLOTS && !wait(now.before(ring.full, window()))))
      return false;
    if (Ring::WINDOW != Ring::ODD && !wait(now.before(ring.full, Ring::ODD))) return false;
    expect_copies(now.at, values ? 2 * bytes : bytes);
    bulk_copy(slot, from, bytes, now.at, policy);
    if (values) bulk_copy(slot + behind, values, bytes, now.at, policy);
    now.next(ring.full);
    tile += u32(LOADERS);
    slot += u32(LOADERS) % Ring::SLOTS * u32(Plan::slot_bytes);
    if (slot >= ring.slots + Ring::SLOTS * u32(Plan::slot_bytes))
      slot -= Ring::SLOTS * u32(Plan::slot_bytes);
    return true;
  }

  // The same in steps, for a tile of several copies: is it this thread's, may it be copied into
  // `slot`, it has been. Not of `fill`, whose machine code it would change.
  __device__ __forceinline__ bool mine() { return skip-- == 0; }
  __device__ __forceinline__ bool place(int bytes) {
    skip = u32(LOADERS) - 1;
    Turn used = now.before(ring.full, Ring::SLOTS);
    used.at += Turn::ROUND;
    if (!wait(used) || (Ring::WINDOW < Ring::SLOTS && !wait(now.before(ring.full, Ring::WINDOW))))
      return false;
    if (Ring::WINDOW != Ring::ODD && !wait(now.before(ring.full, Ring::ODD))) return false;
    expect_copies(now.at, bytes);
    return true;
  }
  __device__ __forceinline__ void placed() {
    now.next(ring.full);
    tile += u32(LOADERS);
    slot += u32(LOADERS) % Ring::SLOTS * u32(Plan::slot_bytes);
    if (slot >= ring.slots + Ring::SLOTS * u32(Plan::slot_bytes))
      slot -= Ring::SLOTS * u32(Plan::slot_bytes);
  }

  // Nothing may arrive after the block has left.
  __device__ void drain() {
    for (u32 back = u32(LOADERS); back <= tile && back < Ring::SLOTS + u32(LOADERS);
         back += u32(LOADERS))
      ring.acquire(tile - back);
  }
};

}  // namespace twin
