"""How an NVIDIA block looks at cached keys and values. The kernel's half is Scan in attention.cuh
and TileScan in cuda_scan.cuh.
"""

from __future__ import annotations

from twin.errors import PlanError
from twin.kernel.teams import WARP, WARPS, teams_of
from twin.plan.splits import TENSOR_HEADS, WIDE_HEADS, scans_on_tensor_cores, slot_positions
from twin.plan.types import Plan, StageKind, word_outputs

# positions of an item; measured on an H200: two heads a key cost 1 % at 200 positions of context
# and save 3 % at 16k
LONG_SCAN = 256
# elements of heads of which 8 and 16 threads share a cached position
NARROW_HEAD, MIDDLE_HEAD = 96, 128
TENSOR_WARPS = 4  # that share an item's positions on tensor cores
# Of them, where each takes up to eight heads: partial results that lie on the chip at once. The
# others are added to them before. Those of all four would cost a ring of InternLM-3-8B two of 13
# slots, 54 us of 4,024 in the twin; those of two one slot, 22 us.
WIDE_PARTIALS = 1
COPY_BYTES = 16  # the grain of bulk copies


def scan_heads(plan: Plan) -> int:
    """Query heads for which a warp reads a cached key once.

    On the tensor cores up to four, up to eight of groups that have more than twice four. Else one,
    so that heads go side by side; two where a block scans long; more where a group has more heads
    than a block has warps.
    """
    own = plan.attention
    if not plan.limits.teams or own is None:
        return 1
    group = own.group
    if tensor_scan(plan):
        return min(group, WIDE_HEADS if group > 2 * TENSOR_HEADS else TENSOR_HEADS)
    sets = -(-group // 2) if own.item_positions >= LONG_SCAN else group
    return -(-group // min(sets, teams_of(plan).warps))


def scanned_heads(plan: Plan) -> int:
    """Heads that all warps of a block scan, those of several warps several times: as many partial
    results are on the chip.
    """
    if not tensor_scan(plan):
        return teams_of(plan).warps * scan_heads(plan)
    group = plan.kernel_attention().group
    return (WIDE_PARTIALS if scan_heads(plan) > TENSOR_HEADS else TENSOR_WARPS) * group


def meetings(plan: Plan) -> int:
    """How often the warps of a set add up what they found, before a block merges sets."""
    wide = tensor_scan(plan) and scan_heads(plan) > TENSOR_HEADS
    return TENSOR_WARPS // WIDE_PARTIALS - 1 if wide else 0


def merged_elements(plan: Plan) -> int:
    """Outputs of a query head that a thread merges at a time: those of a word, or of two where
    tensor cores scan and the block has fewer threads than words (MERGED_WORDS in attention.cuh).
    """
    own, each = plan.kernel_attention(), word_outputs(plan.options.kv_dtype)
    words = own.group * own.head_dim // each
    return each * (2 if tensor_scan(plan) and words > WARPS[0] * WARP else 1)


def position_threads(dim: int) -> int:
    """Threads of a warp that share a cached position of heads of `dim` elements."""
    return 8 if dim <= NARROW_HEAD else 16 if dim <= MIDDLE_HEAD else 32


def tensor_scan(plan: Plan) -> bool:
    """Do the tensor cores compare queries with cached keys?"""
    own = plan.attention
    return own is not None and scans_on_tensor_cores(
        plan.limits, plan.options, group=own.group, head_dim=own.head_dim
    )


def cache_tile(plan: Plan) -> int:
    """Cached positions of a ring slot, keys and the values behind them."""
    return slot_positions(plan.options, plan.attention.head_dim if plan.attention else 0)


def check_cache_tiles(plan: Plan) -> None:
    """Cached keys and values come through the ring. Raises PlanError where a slot holds none, or
    where bulk copies cannot start.
    """
    if not any(stage.kind is StageKind.ATTENTION for stage in plan.stages):
        return
    head_dim = plan.kernel_attention().head_dim
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
