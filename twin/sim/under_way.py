"""What of its rate memory delivers to few bytes under way.

A latency alone makes a sharp bend: below it a stream takes bytes under way over latency, beyond it
the memory's rate. Measured streams bend softly; why was not looked for. On an H200 32 KiB under way
to each of 132 blocks, 0.95 us of the rate, bring 0.91 of what 48 KiB bring, and 48 KiB to each of
96 blocks, 1.03 us, bring 0.95 (2026-11-27T094746-probes).
"""

from __future__ import annotations

from twin.hardware.types import Device
from twin.plan.types import Plan, StageKind

# of the rate for all that is missing under way: 0.31 of it cost 0.09 of the rate
SHORTFALL = 0.27


def delivered_share(plan: Plan, device: Device) -> float:
    """Of the memory's rate, over all of a step: the LM head may have a window of its own."""
    memory, options = device.memory, plan.options
    if memory.under_way_s is None:
        return 1.0
    needed = memory.under_way_s.value * memory.stream_bytes_per_s.value
    slots = options.blocks * options.slot_bytes

    def share(window: int) -> float:
        return 1 - SHORTFALL * max(0.0, 1 - window * slots / needed)

    head = _head_share(plan) if options.head_window_slots else 0.0
    late = options.head_window_slots or options.window_slots
    return 1 / ((1 - head) / share(options.window_slots) + head / share(late))


def enough_under_way(plan: Plan, device: Device) -> bool:
    """Does memory deliver all of its rate?"""
    return delivered_share(plan, device) == 1


def _head_share(plan: Plan) -> float:
    """Of a plan's weights those of the LM head."""
    sizes = [
        (stage.kind, sum(matrix.rows * matrix.cols for matrix in stage.matrices))
        for stage in plan.stages
    ]
    head = sum(size for kind, size in sizes if kind is StageKind.LM_HEAD)
    return head / max(1, sum(size for _, size in sizes))
