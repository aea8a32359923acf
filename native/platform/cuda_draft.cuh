// Rows of a head that drafts, times a vector.
#pragma once

namespace twin {

static_assert(Plan::draft_dim == 0 ||
                  CONSUMER_WARPS * (Plan::draft_dim + 2) <= Plan::scratch_floats,
              "attention's parts of a head's warps lie in the scratch");

// Rows of 16-bit weights, one behind the other in memory, times x: a warp's. The first thread has
// the sums.
template <class Block>
__device__ __forceinline__ void dot_draft_rows(Block& b, const u8* rows, int count, int cols,
                                               const float* x, float* sums) {
  constexpr int EACH = 8, MOST = 8;  // neighbours of a thread's load; rows
  float sum[MOST] = {};
  if constexpr (WEIGHT != Type::FP32) {
#pragma unroll 1
    for (int c = b.core.warp_thread() * EACH; c < cols; c += EACH * b.core.warp_threads()) {
      const Pack<EACH> v = load_pack<EACH, 16>(x + c, true);
      uint4 w[MOST];
#pragma unroll
      for (int r = 0; r < MOST; ++r)
        w[r] = __ldg(reinterpret_cast<const uint4*>(
            rows + (long(r < count ? r : 0) * cols + c) * type_bytes(WEIGHT)));
#pragma unroll
      for (int r = 0; r < MOST; ++r) {
        const u32 words[4] = {w[r].x, w[r].y, w[r].z, w[r].w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float low, high;
          unpack<WEIGHT>(words[i], low, high);
          sum[r] += low * v.at[2 * i] + high * v.at[2 * i + 1];
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < MOST; ++r) {
    const float total = b.core.warp_sum(sum[r]);
    if (b.core.warp_thread() == 0) sums[r] = total;
  }
}

}  // namespace twin
