"""Into how many splits attention divides the cached positions of a key head, and how many pages each holds."""

from __future__ import annotations

from twin.errors import PlanError
from twin.plan.types import Kv, Limits, Options, Shard

# On the tensor cores a few positions more cost nothing, and whoever gathers partial outputs looks at four splits at once: Llama-3.2-1B
# with 704 positions and 3, 4, 6 or 8 splits 647, 635, 650 and 639 us, Qwen3-8B with 1,536 and 4, 8 or 12 splits 3,730, 3,711 and 3,741.
POSITIONS_ON_TENSOR_CORES, SPLITS_AT_ONCE = 192, 4
POSITIONS_PER_SPLIT = 128  # on an H200 with up to 1,024 positions: 8 splits 742 us, 4 splits 755, 2 splits 797 (studies/h200-history)
TENSOR_POSITIONS, TENSOR_HEADS = 16, 4  # of a product on tensor cores: positions, query heads
TENSOR_ROW, TENSOR_HEAD = 128, 128  # bytes that a cached key is a multiple of; most elements: wider heads leave no registers


def kv_of(options: Options, shard: Shard, blocks: int, limits: Limits) -> Kv:
    """Splits of each KV head and the page capacity of each split."""
    pages = -(-options.max_context // options.kv_page)
    wanted = -(-options.max_context // POSITIONS_PER_SPLIT)
    if scans_on_tensor_cores(limits, options, shard):
        wanted = min(pages, -(-options.max_context // (SPLITS_AT_ONCE * POSITIONS_ON_TENSOR_CORES)) * SPLITS_AT_ONCE)
    splits = options.attention_splits or max(1, min(blocks // shard.kv_heads, wanted))
    if splits > pages:
        raise PlanError(f"attention_splits={splits}: more than the {pages} pages of {options.kv_page} positions")
    return Kv(splits, options.kv_page, -(-pages // splits) * options.kv_page, options.kv_dtype)


def scans_on_tensor_cores(limits: Limits, options: Options, shard: Shard) -> bool:
    """A product takes 16 positions and up to 4 query heads; two sets of warps make those of 8. Rows of cached keys are whole 128 bytes, in
    which an item's positions are stored twisted."""
    if not limits.teams or not shard.kv_heads or options.kv_dtype.bytes != 2:
        return False
    whole = shard.head_dim * options.kv_dtype.bytes % TENSOR_ROW == 0 and shard.head_dim <= TENSOR_HEAD
    return whole and shard.heads // shard.kv_heads <= 2 * TENSOR_HEADS and slot_positions(options, shard) % TENSOR_POSITIONS == 0


def slot_positions(options: Options, shard: Shard) -> int:
    """Cached positions of a ring slot."""
    return max(1, options.slot_bytes // max(1, 2 * shard.head_dim * options.kv_dtype.bytes))
