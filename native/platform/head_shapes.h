// The heads of attention, by kind of layers: their shape, and what the plan says of them and of
// their caches. A plan whose layers all have one shape has FirstHeads alone, and so have prompt
// passes. Included by each platform.
#pragma once

#include "cached_rows.h"

namespace twin {

template <int DIM, int QUERIES, bool SHARED>
struct HeadShape {
  static constexpr int HEAD_DIM = DIM, HALF = DIM / 2;
  static constexpr int GROUP = QUERIES;  // query heads that share a key head
  // no rows make values: they are the keys before norm and rotation
  static constexpr bool VALUES_ARE_KEYS = SHARED;
  static constexpr int ROW = DIM * type_bytes(KV);  // bytes of a cached key or value
};

struct FirstHeads : HeadShape<HEAD_DIM, GROUP, FirstShape::VALUES_ARE_KEYS> {
  static constexpr bool OTHER = false;

  __device__ __forceinline__ static int heads(const Plan& plan) { return plan.heads; }
  __device__ __forceinline__ static int kv_heads(const Plan& plan) { return plan.kv_heads; }
  __device__ __forceinline__ static int splits(const Plan& plan) { return plan.splits; }
  __device__ __forceinline__ static int together(const Plan& plan) { return plan.together; }
  __device__ __forceinline__ static int first_pages(const Plan& plan) { return plan.first_pages; }
  __device__ __forceinline__ static int kv_items(const Plan& plan) { return plan.kv_items; }
  __device__ __forceinline__ static int item_positions(const Plan& plan) {
    return plan.item_positions;
  }
  // where the caches of such layers begin
  __device__ __forceinline__ static u64 begin(const Plan&) { return 0; }
};

struct OtherHeads
    : HeadShape<OtherShape::HEAD_DIM, OtherShape::GROUP, OtherShape::VALUES_ARE_KEYS> {
  static constexpr bool OTHER = true;

  __device__ __forceinline__ static int heads(const Plan& plan) { return plan.other_heads; }
  __device__ __forceinline__ static int kv_heads(const Plan& plan) { return plan.other_kv_heads; }
  __device__ __forceinline__ static int splits(const Plan& plan) { return plan.other_splits; }
  __device__ __forceinline__ static int together(const Plan& plan) { return plan.other_together; }
  __device__ __forceinline__ static int first_pages(const Plan& plan) {
    return plan.other_first_pages;
  }
  __device__ __forceinline__ static int kv_items(const Plan& plan) { return plan.other_kv_items; }
  __device__ __forceinline__ static int item_positions(const Plan& plan) {
    return plan.other_item_positions;
  }
  __device__ __forceinline__ static u64 begin(const Plan& plan) {
    return u64(plan.kv_stages) * u64(plan.kv_items) * 2 * u64(plan.item_positions) *
           FirstHeads::ROW;
  }
};

// run(the shape of the stage's heads)
template <class Stage, class Run>
__device__ __forceinline__ bool by_heads(const Stage& stage, Run run) {
  if constexpr (OtherShape::ANY)
    if (stage.heads) return run(OtherHeads{});
  return run(FirstHeads{});
}

}  // namespace twin
