// The passes that verify drafts: how a block's shared memory is divided. They multiply a few tokens
// at once, so weights come through the ring, as a step's do, and tensor cores multiply eight rows of
// a tile with all tokens as eight columns.
#pragma once

namespace twin {

#ifdef TWIN_ROUNDS
constexpr bool FEW_TOKENS = true;
#else
constexpr bool FEW_TOKENS = false;
#endif
constexpr int MOST_FEW = facts::FEW_TOKENS;  // columns of a product
static_assert(!FEW_TOKENS || Plan::drafts < MOST_FEW, "a round's tokens are columns of a product");

// Do weights come through the ring? Experts' and low-bit ones are decoded first.
constexpr bool STREAMED_ROUNDS =
    FEW_TOKENS && !Experts::ANY && !CODED && WEIGHT != Type::FP32;

// Do blocks hand numbers on one by one (cuda_handed.cuh)?
constexpr bool HANDED_ON = STREAMED_ROUNDS && Plan::handed_on;

// Bytes from a token's inputs to the next one's: four tokens' loads meet in no bank.
__host__ __device__ constexpr int few_pitch(int cols) { return (2 * cols + 127) / 128 * 128 + 64; }

// Shared memory behind the ring: a stage's inputs, where they fit; two batches' sums; while
// attention looks at the cache, its tiles. The ring has the rest: it fills while blocks meet.
struct Few {
  static constexpr int INPUT_BYTES = facts::FEW_INPUT_BYTES, SUMS_BYTES = facts::FEW_SUMS_BYTES;
  static constexpr int SCAN_TILES = 2;  // of cached keys and values: one in use, one under way
  static constexpr bool KEPT = HEAD_DIM <= facts::KEPT_HEAD;
  // of a tile; a long one pays where blocks meet behind it
  static constexpr int POSITIONS =
      KEPT && !HANDED_ON ? facts::PASS_SCAN_POSITIONS : facts::PASS_WIDE_POSITIONS;
  static constexpr int CACHED_PITCH = HEAD_DIM * type_bytes(KV) + 16,
                       QUERY_PITCH = HEAD_DIM * 2 + 16,
                       TILES_BYTES = SCAN_TILES * 2 * POSITIONS * CACHED_PITCH;
  static constexpr int SCAN_BYTES = TILES_BYTES + (KEPT ? 0 : 16 * CONSUMER_WARPS * QUERY_PITCH);
  // where numbers are handed on: the round's own keys and values, and its queries, follow tiles
  static constexpr int FRESH = TILES_BYTES, QUERIES = FRESH + 2 * MOST_FEW * CACHED_PITCH,
                       HANDED_SCAN = QUERIES + 16 * ((MOST_FEW * GROUP + 15) / 16) * QUERY_PITCH;
  static constexpr int BATCH_ROWS = 32, HALF_FLOATS = CONSUMER_WARPS * BATCH_ROWS * MOST_FEW;
  // rows of the residual that a block has, in eights; what its warps tell each other
  static constexpr int OWN_GROUPS = ((Plan::hidden + Plan::blocks - 1) / Plan::blocks + 7) / 8;
  static constexpr int OWN_BYTES = 4 * (4 * CONSUMER_WARPS + 4) * MOST_FEW;
  static constexpr int PRODUCT_BYTES =
      HANDED_ON ? 2 * 4 * HALF_FLOATS : INPUT_BYTES + 2 * SUMS_BYTES;
  static constexpr int USED = HANDED_ON ? HANDED_SCAN : SCAN_BYTES;
  static constexpr int OWN = PRODUCT_BYTES > USED ? PRODUCT_BYTES : USED;
  static constexpr int BYTES = OWN + (HANDED_ON ? OWN_BYTES : 0);
  static constexpr int RING_BYTES =
      Plan::ring_slots * Plan::slot_bytes + up16(4 * Plan::scratch_floats) - BYTES;
  static constexpr int SLOTS = RING_BYTES / Plan::slot_bytes;
  static_assert(!STREAMED_ROUNDS || SLOTS > 2, "a ring of a few slots is left");
  static constexpr int BEGIN = SLOTS * Plan::slot_bytes;
};

}  // namespace twin
