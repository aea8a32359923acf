"""How many strips of weights a wave of an AMD block has under way: its ring lies in registers
(native/platform/hip_stream.h).
"""

from __future__ import annotations

from dataclasses import replace

from twin.plan.types import Plan
from twin.schedule.choose import schedule_of

THREADS = 512  # of a block: eight waves
STRIP_ROWS, LOAD_BYTES = 4, 16  # of a strip; of a row's weights in a lane
STRIP_BYTES = THREADS * STRIP_ROWS * LOAD_BYTES  # of a block's waves together
STRIP_REGISTERS = STRIP_ROWS * LOAD_BYTES // 4  # of a lane
MOST_STRIPS = 4
# of a lane, for strips and for its part of the residual; with more, kernels of wide residuals and
# of experts spilled
REGISTERS, EXPERT_REGISTERS = 76, 36


def most_strips(plan: Plan) -> int:
    """As many as a lane has registers for, next to its elements of the residual."""
    room = EXPERT_REGISTERS if plan.kernel_routed else REGISTERS
    return max(1, min(MOST_STRIPS, (room - -(-plan.shard.hidden // THREADS)) // STRIP_REGISTERS))


def has_strips(plan: Plan) -> bool:
    """Does the kernel load its weights in strips? Low-bit ones it reads when it multiplies them."""
    return plan.without_code() is None and not plan.coded


def with_strips(plan: Plan, count: int) -> Plan:
    """The plan with a ring of so many strips, as far as its kernel can have them and the plan's
    budget holds them. All of them are under way, so its window is as large.
    """
    most, slot_bytes = min(count, most_strips(plan)), plan.options.slot_bytes
    rings = [max(1, held * STRIP_BYTES // slot_bytes) for held in range(most, 0, -1)]
    memory, room = schedule_of(plan).memory, plan.limits.on_chip_bytes
    slots = next((ring for ring in rings if memory.bytes(ring, ring) <= room), rings[-1])
    return replace(plan, options=replace(plan.options, ring_slots=slots, window_slots=slots))


def strips_of(plan: Plan) -> int:
    """The plan's ring in strips, at least one."""
    ring = plan.options.ring_slots * plan.options.slot_bytes
    return max(1, min(most_strips(plan), ring // STRIP_BYTES))
