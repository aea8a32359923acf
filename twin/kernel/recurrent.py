"""Recurrent states as the kernel keeps them: behind a rank's cached keys and values, of each stage
DELTA [items][a state of key_dim x columns, a history of conv - 1 positions], FP32.

A block owns its items from step to step: nobody else reads or writes them. At a sequence's first
position a block takes them for zero, whatever they hold.
"""

from __future__ import annotations

from twin.kernel.fields import up
from twin.plan.types import Plan, Stage, StageKind

STATE_ALIGNED = 256  # bytes: where states begin behind the cache


def delta_stages(plan: Plan) -> list[Stage]:
    return [s for s in plan.stages if s.kind is StageKind.DELTA] if plan.kernel_recurs else []


def cache_bytes(plan: Plan) -> int:
    """Of a rank: keys and values, and the states behind them."""
    attended = sum(stage.kind is StageKind.ATTENTION for stage in plan.stages)
    size = 0
    if attended:
        own = plan.kernel_attention()
        position = own.position_bytes(plan.options.kv_dtype)
        size = attended * own.items * own.item_positions * position
    return size + state_bytes(plan)


def state_bytes(plan: Plan) -> int:
    """Of all states of a rank, and what fills up the cache before them."""
    stages = delta_stages(plan)
    held = sum(stage.scan.held_bytes for stage in stages if stage.scan)
    return STATE_ALIGNED + held if stages else 0


def scratch_floats(plan: Plan, stage: Stage) -> int:
    """What a block needs for its items: gathered vectors; an item's convolved channels; two sums of
    each column from every thread, or from one.
    """
    scan = stage.scan
    assert scan is not None
    gathered = sum(
        max((sum(hi - lo for lo, hi in spans) for spans in read.spans), default=0)
        for read in stage.reads
    )
    threads = max(THREADS, scan.page)
    channels = 2 * scan.dim + scan.page
    return up(gathered, FLOATS) + up(channels, FLOATS) + 2 * threads + up(scan.page, FLOATS)


FLOATS = 16  # parts of the scratch begin with a line
THREADS = 1024  # of a block on any platform, at most


def constants(plan: Plan) -> dict[str, bool | int | float]:
    """For C++; nothing of a plan without such states."""
    kind = plan.spec.delta if plan.spec and plan.kernel_recurs else None
    if kind is None:
        return {}
    scan = next(stage.scan for stage in delta_stages(plan) if stage.scan)
    return {
        "ANY": True,
        "KEY_DIM": kind.key_dim,
        "VALUE_DIM": kind.value_dim,
        "CONV": kind.conv,
        "KEY_HEADS": kind.key_heads // plan.ranks,
        "VALUE_HEADS": kind.value_heads // plan.ranks,
        "COLUMNS": scan.page,
    }
