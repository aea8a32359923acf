"""What the works of a plan's stages cost a block: one protocol, for a core (cores.py) and for a
block of warps (warps.py). kinds.py says which of them a device has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from twin.cost.gathers import Gathers
from twin.cost.streams import Streams
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.types import Stage
from twin.units import picoseconds


class Costs(ABC):
    """Times in picoseconds, pure functions of a plan's schedule and a device's numbers; what stages
    and blocks have in common is worked out once.
    """

    kv_ahead = 0  # requests for cached entries under way; 0: as many as the ring's window

    def __init__(self, gathers: Gathers, streams: Streams, device: Device) -> None:
        self.gathers, self.streams, self.device = gathers, streams, device
        self.schedule, self.plan = streams.schedule, streams.plan
        # of each stage: does a warp that a block has to spare make it?
        self.by_scheduler = [False] * len(self.plan.stages)
        self.hands_over = self.plan.spec is not None  # does state go from kernel to kernel?

    @abstractmethod
    def fixed_ps(self, stage: Stage, block: int, resets: int) -> int:
        """What a block pays once for a stage, after its inputs are there; `resets` are elements
        that it sets back.
        """

    def published(self, stage: Stage, block: int) -> int:
        """Elements that no matrix row pays for."""
        if stage.matrix or stage.publishes is None:
            return 0
        value = self.plan.values[stage.publishes]
        return length(value.owned[block]) * value.words

    def sample_ps(self, stage: Stage, block: int) -> int:
        """Blocks look at their own logits, each at its own; the one that publishes the token also
        at those of the block from which it takes it. A probe's block does both with all logits.
        """
        plan = self.plan
        if stage.kind is not StageKind.SAMPLE or stage.publishes is None:
            return 0
        if not length(plan.values[stage.publishes].owned[block]):
            return 0
        logits = -(-plan.shard.vocab // plan.blocks)
        return picoseconds(logits * self.device.kernel.sample_element_s.value)

    def fence_ps(self, stage: Stage) -> int:
        """Between kernels the border does it; a sentinel needs none."""
        plan, fence = self.plan, self.device.handoff.fence_s
        if fence is None or not plan.options.resident or plan.options.polled:
            return 0
        waits = plan.options.handoff.meets or stage.publishes is not None
        return picoseconds(fence.value) if waits else 0


def length(span: Span) -> int:
    return span[1] - span[0]
