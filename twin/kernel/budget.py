"""What a plan takes of a block's on-chip memory."""

from __future__ import annotations

from twin.kernel.layout import beside_bytes, prompt_chip, step_bytes
from twin.plan.types import Plan, Residual

SCRATCH_BYTES = 12 << 10  # judged by what the dense kernel's stages take beside ring and residual
INPUT_SHARE = 4  # judged


def on_chip_bytes(plan: Plan) -> int:
    """The ring and what lies beside it: all that an NVIDIA block asks for; elsewhere the FP32
    residual and stage input.
    """
    if plan.without_code():
        return plan.options.ring_slots * plan.options.slot_bytes + _activation_bytes(plan)
    if plan.limits.teams:
        return shared_bytes(plan)
    vectors = plan.shard.hidden + max((s.matrix.cols for s in plan.stages if s.matrix), default=0)
    return plan.options.ring_slots * plan.options.slot_bytes + 4 * vectors


def _activation_bytes(plan: Plan) -> int:
    """FP32 residuals (or a block's slice of them) and stage input of all tokens, where no kernel
    fixes what lies on the chip.

    Blocks that keep their input in registers (NVIDIA's) need scratch instead; an input beyond
    INPUT_SHARE of the chip comes in pieces.
    """
    residuals = plan.spec.hyper.residuals if plan.spec and plan.spec.hyper else 1
    residual = residuals * plan.shard.hidden
    if plan.options.residual is Residual.SLICED:
        residual = -(-residual // plan.blocks)
    widest = max([plan.shard.hidden, *(m.cols for s in plan.stages for m in s.matrices)])
    held = (
        SCRATCH_BYTES
        if plan.limits.teams
        else min(4 * plan.tokens * widest, plan.limits.on_chip_bytes // INPUT_SHARE)
    )
    return 4 * plan.tokens * residual + held


def shared_bytes(plan: Plan) -> int:
    """NVIDIA: ring and vectors of a step or a prompt pass, mbarriers, and what a block's warps tell
    each other.
    """
    return max(step_bytes(plan), prompt_chip(plan)) + beside_bytes(plan)
