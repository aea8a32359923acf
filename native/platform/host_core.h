// A block of the host: `Core`, its ring, and what it makes of exchanged words and cached rows.
#pragma once

namespace twin {

// The stream lies packed in memory; acquiring a tile is free, and the window ahead of it is
// prefetched while it is used.
struct Ring {
  const u8* stream;
  u64 cursor;
  u64 ahead;

  bool mine() const { return true; }
  const u8* acquire() const { return stream + cursor; }
  void release() {}
  void next(int bytes) { cursor += u64(bytes); }
  void rewind() { cursor = 0; }
};

// A thread's part of a cached key or value: here all of it, unpacked when it is used.
template <class S>
struct Piece {
  static constexpr int HEAD_DIM = S::HEAD_DIM;

  const u8* row;
  template <class Core>
  void load(const Core&, const u8* from) {
    row = from;
  }
  template <class Core>
  void load_near(const Core& core, const u8* from) {
    load(core, from);
  }
  void clear() { row = nullptr; }
  void unpack(float* out) const {
    constexpr int SIZE = type_bytes(KV);
    int d = 0;
    for (; d + VECTOR <= HEAD_DIM && row; d += VECTOR)
      *reinterpret_cast<vfloat*>(out + d) = load_vector<KV>(row + d * SIZE);
    for (; d < HEAD_DIM; ++d) out[d] = row ? load_element<KV>(row + d * SIZE) : 0.0f;
  }
};

// How a block looks at cached rows of heads of a shape.
template <class S>
struct CachedRows {
  using Piece = twin::Piece<S>;
  // cached positions scored before the running maximum moves
  static constexpr int POSITIONS = 16;
  static constexpr int SCAN_HEADS = S::GROUP;   // query heads that share one read of a key
  static constexpr int POSITION_THREADS = 1;    // threads that share a cached position
  static constexpr int CACHE_TILE = 1;
  static constexpr bool TENSOR_SCAN = false;
  struct TileScan {
    static constexpr int WARPS = 1, PARTIALS = 1, POSITIONS = 1;
  };

  template <class Core>
  static float subwarp_sum(const Core&, float v) {
    return v;
  }
  static float piece_dot(const float* a, const float* b) {
    vfloat sum = {};
    int d = 0;
    for (; d + VECTOR <= S::HEAD_DIM; d += VECTOR)
      sum += *reinterpret_cast<const vfloat*>(a + d) * *reinterpret_cast<const vfloat*>(b + d);
    float total = sum_elements(sum);
    for (; d < S::HEAD_DIM; ++d) total += a[d] * b[d];
    return total;
  }
};

struct Core {
  using Hidden = MemoryVector;
  using Normed = Hidden;
  using Residual = MemoryResidual;
  template <class S>
  using Heads = MemoryVector;
  using States = MemoryVector;
  using Ffn = MemoryVector;
  using Shared = MemoryVector;
  using Dense = MemoryVector;
  template <class S>
  using Cached = CachedRows<S>;

  Ring ring;
  Parking* parking;  // more blocks than cores: some may sleep; null when each has a core
  bool alone;        // no other block shares this one's core
  int seen = 0;      // publications before the last poll
  u64 began = 0;     // of the present wait

  // query heads that share one read of a key in a prompt pass
  static constexpr int HEADS = GROUP;
  static constexpr int SPLITS = 4;              // of a head, looked at together
  static constexpr bool SCHEDULER = false;         // no scheduler warp makes the resets
  static constexpr bool FOURS = false;
  static constexpr bool CACHE_IN_RING = false;  // cached keys and values are read where they lie
  static constexpr bool EXPERTS_IN_RING = false;
  static constexpr bool OWN_GPUS = false;  // ranks have GPUs of their own

  static constexpr int thread() { return 0; }
  static constexpr int threads() { return 1; }
  static constexpr int warp() { return 0; }
  static constexpr int warps() { return 1; }
  static constexpr int warp_thread() { return 0; }
  static constexpr int warp_threads() { return 1; }
  void barrier() {}
  bool any(bool mine) { return mine; }
  void warp_sync() {}
  void settle() {}
  float warp_sum(float v) { return v; }
  template <class T>
  T shuffle_xor(T v, int) {
    return v;
  }
  static u32 count(u32* at, u32 by) {
    const u32 held = *at;
    *at += by;
    return held;
  }
  static void confirm(const float*, int) {}
  bool agree(bool good) { return good; }
  bool gave_up() { return false; }
  void forget() { nap_at_random(); }
  void begin() { nap_at_random(); }
  void cleared() {}
  bool abort_requested(const int* abort) { return load_host(abort); }
  template <class Vector>
  Nothing prefetch(const Stage&, Span, bool) {
    return {};
  }
  // What this thread's stage multiplies as integers, where its weights are GGUF's blocks.
  static InputRoom& inputs() {
    static thread_local InputRoom room;
    return room;
  }
  static void quantise(const Stage& stage, const MemoryVector& x, Nothing) {
    if (in_blocks(code_of(stage))) inputs().make(x.at, x.count, 1);
  }
  // The same of a prompt chunk, [tokens][columns]; `dot_coded` looks there until `chunk_done`.
  static void quantise_chunk(const Stage& stage, const float* x, int tokens) {
    if (in_blocks(code_of(stage))) inputs().make(x, stage.cols, tokens), inputs().open = true;
  }
  static void chunk_done() { inputs().open = false; }
  static const MemoryVector& normed(const MemoryVector& x, Span) { return x; }
  void dot_tiles(const Stage& stage, const MemoryVector& x, int lo, int hi, float* sums, int batch,
                 Nothing) {
    if (in_blocks(code_of(stage))) {
      BlockTiles tiles = {*this, ring, inputs(), x.at};
      return dot_memory_tiles(tiles, stage, x, lo, hi, sums, batch);
    }
    dot_memory_tiles(*this, stage, x, lo, hi, sums, batch);
  }
  // Tiles of GGUF's blocks times inputs that are integers already.
  struct BlockTiles {
    Core& core;
    Ring& ring;
    InputRoom& made;
    const float* of;

    void dot_coded(Code code, const u8* w, int rows, int cols, const float* x, float* sums) {
      dot_in_blocks(code, w, rows, cols, made.of(0).from(int(x - of)), sums, ring.ahead);
    }
    void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
      core.dot_tile(w, rows, cols, x, sums);
    }
  };
  template <class T>
  T sum(T v) {
    return v;
  }
  template <class Wins>
  Candidate best(Candidate mine, Wins) {
    return mine;
  }

  float dot(const float* a, const float* b, int n) {
    vfloat sum[4] = {};
    int i = 0;
    for (; i + 4 * VECTOR <= n; i += 4 * VECTOR)
      for (int j = 0; j < 4; ++j)
        sum[j] += *reinterpret_cast<const vfloat*>(a + i + j * VECTOR) *
                  *reinterpret_cast<const vfloat*>(b + i + j * VECTOR);
    float total = sum_elements((sum[0] + sum[1]) + (sum[2] + sum[3]));
    for (; i < n; ++i) total += a[i] * b[i];
    return total;
  }

  void dot_tile(const u8* w, int rows, int cols, const float* x, float* sums) {
    int r = 0;
    const long stride = long(cols) * type_bytes(WEIGHT);
    for (; r + 8 <= rows; r += 8) dot_rows<8>(w + r * stride, cols, x, sums + r, ring.ahead);
    for (; r + 2 <= rows; r += 2) dot_rows<2>(w + r * stride, cols, x, sums + r, ring.ahead);
    for (; r < rows; ++r) dot_rows<1>(w + r * stride, cols, x, sums + r, ring.ahead);
  }

  // The same of a tile of low-bit weights, whose scales lie behind it.
  void dot_coded(Code code, const u8* w, int rows, int cols, const float* x, float* sums) {
    dot_part(code, w, rows, cols, x, sums, 0, rows);
  }
  // Of its rows first..last-1, all of GGUF's blocks.
  void dot_part(Code code, const u8* w, int rows, int cols, const float* x, float* sums, int first,
                int last) {
    if (code == Code::PLAIN)
      return dot_tile(w + long(first) * cols * type_bytes(WEIGHT), last - first, cols, x,
                      sums + first);
    if (in_blocks(code)) {
      InputRoom& made = inputs();
      if (!made.open) made.make(x, cols, 1);
      return dot_in_blocks(code, w, rows, cols, made.at(x), sums, ring.ahead);
    }
    const int bits = code_bits(code), block = code_block(code) ? code_block(code) : cols;
    const long pitch = long(cols) * bits / 8;
    const Scales scales = {code, w + whole_rows(code, rows) * pitch, scaled_rows(rows),
                           (cols + block - 1) / block};
    for (int r = first; r < last; ++r) sums[r] = 0;
    for (int c = 0, at = 0; c < cols; c += block, ++at)
      for (int r = first; r < last; r += CODED_ROWS) {
        float part[CODED_ROWS] = {}, zero[CODED_ROWS] = {};
        const int count = last - r < CODED_ROWS ? last - r : CODED_ROWS,
                  wide = cols - c < block ? cols - c : block;
        for (int i = 0; i < count; ++i) zero[i] = scales.zero(r + i, at);
        dot_codes(code_element(code), w + r * pitch + long(c) * bits / 8, pitch, count, wide, x + c,
                  zero, part, ring.ahead);
        for (int i = 0; i < count; ++i) sums[r + i] += part[i] * scales.of(r + i, at);
      }
  }

  // Between two polls. A block that shares its core lets the others run, then sleeps until somebody
  // published after its last poll.
  static void appended() {}
  static void scanned() {}
  static void chosen(u32*) {}
  void relax(u32 spins) {
    if (alone) {
      spins > PATIENT_SPINS ? nap(NAP_NS) : pause_core();
      return;
    }
    if (spins <= 1) began = now_ns();
    if (spins <= POLITE_YIELDS && now_ns() - began < POLITE_NS) {
      sched_yield();
      return;
    }
    const int now = __atomic_load_n(&parking->epoch, __ATOMIC_SEQ_CST);
    if (now == seen) park(*parking, seen);
    seen = now;
  }

  // The stage's publications are out: wake who waits for them.
  void published() {
    if (parking) unpark(*parking);
    nap_at_random();
  }

  // out[i - lo] = the sum of the parts at i. False when a wait was given up; stall(part, element)
  // is called between two polls. The vectors' part as a function of its own made other machine
  // code.
  template <class Stall>
  bool gather(const Source& source, int lo, int hi, float* out, Stall stall, int = 0) {
    int i = lo;
#if TWIN_VECTOR_EXCHANGE
    constexpr int UNROLL = 4, STEP = UNROLL * VECTOR;
    for (; i + STEP <= hi; i += STEP) {
      vfloat sum[UNROLL] = {};
      for (int p = 0; p < source.parts; ++p) {
        const float* from = source.at(p) + i;
        vfloat got[UNROLL];
        for (;;) {
          vint missing = {};
          for (int j = 0; j < UNROLL; ++j) {
            const vint bits = *reinterpret_cast<const volatile vint*>(from + j * VECTOR);
            missing |= bits == vint{} + int(SENTINEL);
            got[j] = bits_as<vfloat>(bits);
          }
          if (!source.polled || !any(missing)) break;
          if (!stall(source.part(p), i)) return false;
        }
        for (int j = 0; j < UNROLL; ++j) sum[j] = p ? sum[j] + got[j] : got[j];
      }
      for (int j = 0; j < UNROLL; ++j) {
        vfloat* neighbours = reinterpret_cast<vfloat*>(out + (i - lo) + j * VECTOR);
        *neighbours = sum[j];
      }
    }
#endif
    for (; i < hi; ++i) {
      float sum = 0;
      for (int p = 0; p < source.parts; ++p) {
        float got = load_shared(source.at(p) + i);
        while (source.polled && bits_as<u32>(got) == SENTINEL) {
          if (!stall(source.part(p), i)) return false;
          got = load_shared(source.at(p) + i);
        }
        sum = p ? sum + got : got;
      }
      out[i - lo] = sum;
    }
    acquire_fence();
    return true;
  }

  // Exchange memory: `count` words become `bits`.
  static void fill(float* at, int count, u32 bits) {
    int i = 0;
#if TWIN_VECTOR_EXCHANGE
    for (; i + VECTOR <= count; i += VECTOR)
      *reinterpret_cast<volatile vint*>(at + i) = vint{} + int(bits);
#endif
    for (; i < count; ++i) store_shared(at + i, bits_as<float>(bits));
  }

  static bool any(vint mask) {
    u64 words[sizeof(vint) / 8], all = 0;
    __builtin_memcpy(words, &mask, sizeof mask);
    for (u64 word : words) all |= word;
    return all != 0;
  }
};

}  // namespace twin
