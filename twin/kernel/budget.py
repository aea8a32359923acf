"""What a plan takes of a block's on-chip memory, and how large a ring fits there."""

from __future__ import annotations

from dataclasses import dataclass

from twin.kernel.fields import up
from twin.kernel.layout import (
    BARRIER_BYTES,
    PROGRESS_BYTES,
    SIGNAL_BYTES,
    input_floats,
    scratch_of,
)
from twin.kernel.prompt import chip_bytes
from twin.models.formats import UNIT_BYTES
from twin.plan.types import Plan, Residual
from twin.schedule.block import TEAM_WARPS
from twin.schedule.choose import schedule_of

SCRATCH_BYTES = 12 << 10  # judged by what the dense kernel's stages take beside ring and residual
INPUT_SHARE = 4  # judged
WARP_SIGNALS = 16  # bytes of each consumer warp


@dataclass(frozen=True, slots=True)
class OnChip:
    """Of a block, by the size of its ring: ring and what lies beside it."""

    slot_bytes: int
    vectors: int  # bytes of a step beside its ring
    pass_bytes: int = 0  # of a prompt pass, which has no ring
    mbarriers: bool = False  # NVIDIA: of each slot, and what a block's warps tell each other

    def bytes(self, slots: int, window: int) -> int:
        """With so many slots, of which up to `window` are under way."""
        ring = max(slots * self.slot_bytes + self.vectors, self.pass_bytes)
        return ring + (_signal_bytes(slots, window) if self.mbarriers else 0)

    def most_slots(self, room: int) -> int:
        """The largest ring that fits, all of it under way, at least one slot; what lies beside it
        may grow with it.
        """
        slots = max(1, room // self.slot_bytes)
        while slots > 1:
            over = self.bytes(slots, slots) - room
            if over <= 0:
                break
            slots = max(1, slots - -(-over // self.slot_bytes))
        return slots


def on_chip(plan: Plan) -> OnChip:
    """All that an NVIDIA block asks for: ring and vectors of a step or a prompt pass, mbarriers;
    elsewhere the ring, the FP32 residual and stage input.
    """
    slot = plan.options.slot_bytes
    if plan.without_code():
        return OnChip(slot, _activation_bytes(plan))
    schedule = schedule_of(plan)
    if schedule.warps is None:
        widest = max((s.matrix.cols for s in plan.stages if s.matrix), default=0)
        return OnChip(slot, 4 * (plan.shard.hidden + widest))
    vectors = up(4 * scratch_of(schedule).floats, UNIT_BYTES)
    # models keep them in registers
    vectors += up(4 * input_floats(schedule), UNIT_BYTES) if plan.spec is None else 0
    return OnChip(slot, vectors, chip_bytes(plan), mbarriers=True)


def on_chip_bytes(plan: Plan) -> int:
    """With the plan's own ring."""
    options = plan.options
    window = max(options.window_slots, options.head_window)
    return on_chip(plan).bytes(options.ring_slots, window)


def _signal_bytes(slots: int, window: int) -> int:
    least = slots + 2 * TEAM_WARPS + (window | 1)  # Ring::BARRIERS in cuda_ring.cuh
    barriers = 1 << (least - 1).bit_length()
    signals = up(SIGNAL_BYTES + WARP_SIGNALS * TEAM_WARPS, UNIT_BYTES)
    return 2 * BARRIER_BYTES * barriers + signals + PROGRESS_BYTES


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
