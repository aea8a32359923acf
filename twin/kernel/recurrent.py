"""Recurrent states as the kernel keeps them: behind a rank's cached keys and values, of each stage
DELTA [items][a state of key_dim x columns, a history of conv - 1 positions], of each stage CONV_IN
[conv - 1 positions][channels], FP32.

A block owns its items, and its channels, from step to step: nobody else reads or writes them. At a
sequence's first position a block takes them for zero, whatever they hold.
"""

from __future__ import annotations

from twin.plan.types import Plan

STATE_ALIGNED = 256  # bytes: where states begin behind the cache


def state_bytes(plan: Plan) -> int:
    """Of all states of a rank, and what fills up the cache before them."""
    held = sum(stage.scan.held_bytes for stage in plan.delta_stages if stage.scan)
    held += sum(plan.history_bytes(stage) for stage in plan.convolving_stages)
    return STATE_ALIGNED + held if plan.kernel_recurs else 0
