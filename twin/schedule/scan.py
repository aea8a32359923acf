"""How an NVIDIA block looks at cached keys and values. The kernel's half is Scan in attention.cuh
and TileScan in cuda_scan.cuh.
"""

from __future__ import annotations

from twin.errors import PlanError
from twin.frozen import frozen
from twin.models.spec import DType
from twin.plan.attention import Attention, word_outputs
from twin.plan.catalogue import StageKind
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.chooser import Chooser
from twin.schedule.splits import TENSOR_HEADS, WIDE_HEADS, slot_positions

# elements of heads of which 8 and 16 threads share a cached position
NARROW_HEAD, MIDDLE_HEAD = 96, 128
TENSOR_WARPS = 4  # that share an item's positions on tensor cores
# The same of caches of 8 bits: these bring twice the positions in the time, and a warp's products
# of 16 positions await each other.
TENSOR_WARPS_OF_8_BITS = 8
# Of them, where each takes up to eight heads: partial results that lie in shared memory at once.
# The others are added to them before. Those of all four would cost a ring of InternLM-3-8B two of
# 13 slots, 54 us of 4,024 in the twin; those of two one slot, 22 us.
WIDE_PARTIALS = 1
COPY_BYTES = 16  # the grain of bulk copies


@frozen(kw_only=True)
class CacheScan:
    """Of an item of attention, which all warps of a block share."""

    tensor: bool  # do the tensor cores compare queries with cached keys?
    heads: int  # query heads for which a warp reads a cached key once
    # heads that all warps scan, those of several warps several times: as many partial results are
    # in shared memory
    partials: int
    warps: int  # of tensor cores, that share an item's positions
    meetings: int  # how often the warps of a set add up what they found, before sets are merged
    # outputs of a query head that a thread merges at a time: those of a word, or of two where
    # tensor cores scan and the block has fewer threads than words (MERGED_WORDS in attention.cuh)
    merged: int
    positions: int  # cached positions of a ring slot, keys and the values behind them


def cache_scans(plan: Plan, chooser: Chooser) -> tuple[CacheScan, ...]:
    """Of each of the plan's attentions; of a plan without one of none."""
    return tuple(_scan(plan, chooser, own) for own in plan.attentions or (None,))


def _scan(plan: Plan, chooser: Chooser, own: Attention | None) -> CacheScan:
    """One head where a plan has no attention of the kernel's, and where no warps share an item."""
    options = plan.options
    if own is None:
        return CacheScan(
            tensor=False,
            heads=1,
            partials=TEAM_WARPS,
            warps=TENSOR_WARPS,
            meetings=0,
            merged=1,
            positions=slot_positions(options, 0),
        )
    tensor = chooser.tensor_scan(options, group=own.group, head_dim=own.head_dim)
    heads = _heads_on_tensor_cores(own) if tensor else chooser.scan_heads(own)
    wide = tensor and heads > TENSOR_HEADS
    more = options.kv_dtype is DType.FP8 and not wide
    warps = TENSOR_WARPS_OF_8_BITS if more else TENSOR_WARPS
    each = WIDE_PARTIALS if wide else warps  # of all heads of an item
    return CacheScan(
        tensor=tensor,
        heads=heads,
        partials=each * own.group if tensor else TEAM_WARPS * heads,
        warps=warps,
        meetings=warps // WIDE_PARTIALS - 1 if wide else 0,
        merged=_merged(own, options, tensor=tensor),
        positions=slot_positions(options, own.head_dim),
    )


def _heads_on_tensor_cores(own: Attention) -> int:
    """Up to four, up to eight of groups that have more than twice four."""
    return min(own.group, WIDE_HEADS if own.group > 2 * TENSOR_HEADS else TENSOR_HEADS)


def _merged(own: Attention, options: Options, *, tensor: bool) -> int:
    each = word_outputs(options.kv_dtype)
    words = own.group * own.head_dim // each
    return each * (2 if tensor and words > TEAM_WARPS * WARP else 1)


def position_threads(dim: int) -> int:
    """Threads of a warp that share a cached position of heads of `dim` elements."""
    return 8 if dim <= NARROW_HEAD else 16 if dim <= MIDDLE_HEAD else 32


def check_cache_tiles(plan: Plan) -> None:
    """Cached keys and values come through the ring. Raises PlanError where a slot holds none, or
    where bulk copies cannot start.
    """
    if not any(stage.kind is StageKind.ATTENTION for stage in plan.stages):
        return
    for own in plan.attentions:
        _check_tiles(plan, own.head_dim)


def _check_tiles(plan: Plan, head_dim: int) -> None:
    row = head_dim * plan.options.kv_dtype.bytes
    if row % COPY_BYTES:
        raise PlanError(
            f"head_dim={head_dim}: a cached key of {row} bytes is no multiple of {COPY_BYTES}, a "
            "bulk copy's grain on NVIDIA; use a wider kv_dtype, or run on the host"
        )
    if plan.options.slot_bytes < 2 * row:
        raise PlanError(
            f"slot_bytes={plan.options.slot_bytes} holds no cached key and value of {row} bytes "
            f"each: use at least {2 * row}"
        )
