"""How an NVIDIA block looks at cached keys and values. The kernel's half is Scan in attention.cuh and TileScan in cuda_scan.cuh."""

from __future__ import annotations

from twin.errors import PlanError
from twin.plan.teams import teams_of
from twin.plan.types import Limits, Options, Plan, Shard, StageKind

LONG_SCAN = 256  # positions of an item; measured on an H200: two heads a key cost 1 % at 200 positions of context and save 3 % at 16k
TENSOR_POSITIONS, TENSOR_WARPS, TENSOR_HEADS = 16, 4, 4  # of a product on tensor cores: positions, warps that share an item's, query heads
TENSOR_ROW, TENSOR_HEAD = 128, 128  # bytes that a cached key is a multiple of; most elements: wider heads leave no registers
COPY_BYTES = 16  # the grain of bulk copies


def scan_heads(plan: Plan) -> int:
    """Query heads for which a warp reads a cached key once.

    On the tensor cores up to four. Else one, so that heads go side by side; two where a block scans long; more where a group has
    more heads than a block has warps.
    """
    if not plan.limits.teams or not plan.shard.kv_heads:
        return 1
    group = plan.shard.heads // plan.shard.kv_heads
    if tensor_scan(plan):
        return min(group, TENSOR_HEADS)
    sets = -(-group // 2) if plan.kv.item_positions >= LONG_SCAN else group
    return -(-group // min(sets, teams_of(plan).warps))


def scanning_warps(plan: Plan) -> int:
    """Warps of a block that scan, each for `scan_heads` query heads."""
    if not tensor_scan(plan):
        return teams_of(plan).warps
    return TENSOR_WARPS * -(-plan.shard.heads // plan.shard.kv_heads // TENSOR_HEADS)


def tensor_scan(plan: Plan) -> bool:
    """Do the tensor cores compare queries with cached keys?"""
    return scans_on_tensor_cores(plan.limits, plan.options, plan.shard)


def scans_on_tensor_cores(limits: Limits, options: Options, shard: Shard) -> bool:
    """A product takes 16 positions and up to 4 query heads; two sets of warps make those of 8. Rows of cached keys are whole 128 bytes, in
    which an item's positions are stored twisted."""
    if not limits.teams or not shard.kv_heads or options.kv_dtype.bytes != 2:
        return False
    whole = shard.head_dim * options.kv_dtype.bytes % TENSOR_ROW == 0 and shard.head_dim <= TENSOR_HEAD
    return whole and shard.heads // shard.kv_heads <= 2 * TENSOR_HEADS and _positions(options, shard) % TENSOR_POSITIONS == 0


def cache_tile(plan: Plan) -> int:
    """Cached positions of a ring slot, keys and the values behind them."""
    return _positions(plan.options, plan.shard)


def _positions(options: Options, shard: Shard) -> int:
    return max(1, options.slot_bytes // max(1, 2 * shard.head_dim * options.kv_dtype.bytes))


def check_cache_tiles(plan: Plan) -> None:
    """Cached keys and values come through the ring. Raises PlanError where a slot holds none, or where bulk copies cannot start."""
    row = plan.shard.head_dim * plan.kv.dtype.bytes
    if not any(stage.kind is StageKind.ATTENTION for stage in plan.stages):
        return
    if row % COPY_BYTES:
        raise PlanError(
            f"head_dim={plan.shard.head_dim}: a cached key of {row} bytes is no multiple of {COPY_BYTES}, a bulk copy's grain on NVIDIA; "
            "use a wider kv_dtype, or run on the host"
        )
    if plan.options.slot_bytes < 2 * row:
        raise PlanError(f"slot_bytes={plan.options.slot_bytes} holds no cached key and value of {row} bytes each: use at least {2 * row}")
