"""The plan as one block sees it: costs worked out once, shared by all ranks and steps, by equal
blocks and equal layers.

Where a step's work depends on its routing there are variants: what a block does when its rank's
tokens chose certain experts.
"""

from __future__ import annotations

from dataclasses import field

from twin.cost.wiring import Channel, Wiring
from twin.frozen import frozen
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan


@frozen
class ReadWork:
    previous_step: bool
    size: int  # bytes, all parts
    cost_ps: int
    rounds: int  # of loads that follow each other and queue behind the stream
    cause: int  # of the gather
    nearer: int = 0  # ps less than a look at words that lie on all I/O dies


@frozen
class Publication:
    size: int  # bytes this block publishes
    pushed: bool


@frozen
class StageWork:
    """One stage of one block, but for the channels of its reads and of its publication. Equal
    layers and equal blocks share it.
    """

    kind: StageKind
    reads: tuple[ReadWork, ...]
    fixed_ps: int
    fixed_cause: int
    slots: tuple[int, ...]  # consumer time of each ring slot
    kv: tuple[tuple[int, int], ...]  # (bytes, consumer time) of each request
    kv_ahead: int  # requests under way; 0: as many as the ring's window
    sample_ps: int
    publication: Publication | None
    fence_ps: int  # before its arrival at a counter, on its own GPU
    launch_ps: int  # kernel border before this stage
    library: bool  # a vendor collective
    touches_memory: bool
    stored: int = 0  # bytes written to memory when the stage ends; nobody waits for them
    kv_after: bool = False  # cached entries follow from the reads and are requested after them
    by_scheduler: bool = False  # made by the block's scheduler, next to the stages that follow
    # consumer time of the first slots, which are awaited and leave the ring before the reads
    ahead: tuple[int, ...] = ()
    group: int = 1  # of these slots, what one row group of all teams takes
    # such stages behind this one: the scheduler begins them when this one's reads have succeeded
    sums_behind: int = 0
    # of all GPUs, one after the other, in place of `fence_ps`: a fence and each rank's arrival
    far_fences: int = 0

    def cached_bytes(self) -> int:
        """Of caches, read and written."""
        return sum(size for size, _ in self.kv) + self.stored


@frozen
class Variant:
    """What the blocks of a rank do in a step: `stages[block][stage]`, and `sizes[block]`, the bytes
    of each slot.

    `ends[block][stage]`: slots up to and including the stage, where kernels or the cores themselves
    load; else nobody looks.
    """

    stages: tuple[tuple[StageWork, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, ...], ...]


@frozen
class Program:
    """All that does not depend on time. Without `choices` every rank does the first variant in
    every step.
    """

    plan: Plan
    wiring: Wiring = field(compare=False)  # the plan's own
    variants: tuple[Variant, ...]
    barriers: bool  # a full barrier after every stage
    borders: bool  # a kernel border before every stage
    fetch_ps: int  # from knowing that data are there to having the first of them
    # [step][rank] variant; a step more than is simulated, for the loaders run ahead
    choices: tuple[tuple[int, ...], ...] = ()
    step_sizes: tuple[int, ...] = field(default=(), compare=False)  # [variant] bytes of a rank
    # [step] bytes of all ranks, where `choices` has one: what the busiest rank of each layer does
    totals: tuple[int, ...] = ()

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self.wiring.channels

    @property
    def stages(self) -> tuple[tuple[StageWork, ...], ...]:
        """Of the first variant."""
        return self.variants[0].stages

    @property
    def sizes(self) -> tuple[tuple[int, ...], ...]:
        """Of the first variant."""
        return self.variants[0].sizes

    @property
    def drawn(self) -> bool:
        """Do steps or ranks differ?"""
        return bool(self.choices)

    @property
    def busiest(self) -> bool:
        """Is there one rank, which does in each layer what the busiest of all does?"""
        return bool(self.totals)

    def variant(self, step: int, rank: int) -> Variant:
        return self.variants[self.choices[step][rank] if self.choices else 0]

    def step_bytes(self, step: int) -> int:
        """Weights and caches that all ranks move in a step."""
        if self.totals:
            return self.totals[step]
        chosen = self.choices[step] if self.choices else (0,) * self.plan.ranks
        return sum(self.step_sizes[variant] for variant in chosen)
