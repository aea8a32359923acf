"""What an AMD block keeps in its local data share (native/platform/hip_vector.h)."""

from __future__ import annotations

from twin.plan.types import Plan
from twin.schedule.block import up
from twin.schedule.choose import schedule_of

LOCAL_BYTES = 64 << 10  # of a compute unit, all of which a block may take
# of that: what waves tell each other and know of their strips, a block's progress
STATUS_BYTES = 2048


def local_bytes(plan: Plan) -> int:
    """For a stage's input and its scratch. An input of a dense model's down projections that does
    not fit in FP32 takes three bytes an element.
    """
    memory = schedule_of(plan).memory
    widest, scratch = memory.input_floats, memory.scratch.floats
    whole = 4 * (widest + scratch)
    narrows = plan.spec is not None and not plan.coded and not plan.kernel_routed
    if whole <= LOCAL_BYTES - STATUS_BYTES or not narrows:
        return whole
    heads = plan.kernel_attention().heads * plan.kernel_attention().head_dim
    return 4 * (up(max(plan.shard.hidden, heads, -(-3 * widest // 4)), 4) + scratch)
