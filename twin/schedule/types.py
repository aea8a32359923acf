"""The schedule: how a device's kernel runs a plan. The plan says what each block computes, the
schedule with which warps, from where, and what they prefetch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from twin.frozen import frozen
from twin.plan.matrix import Matrix
from twin.plan.types import Plan, Stage
from twin.schedule.homes import FeedForward, Home, NormOrder, Residual
from twin.schedule.memory import SharedMemory
from twin.schedule.passes import Passes
from twin.schedule.prefetch import Prefetch
from twin.schedule.scan import CacheScan
from twin.schedule.teams import NO_TEAM, Team

ID_DIGITS = 12
MOST_TOGETHER = 3  # portions of a residual, at most, where a block looks at several parts together


@frozen(kw_only=True)
class WarpSchedule:
    """What the consumer warps of an NVIDIA block do. `teams` and `prefetch` by input."""

    teams: Mapping[str, Team]  # NO_TEAM of an input that no matrix multiplies
    prefetch: Mapping[str, Prefetch]  # empty of a plan that the kernel has no code for
    residual: Residual
    ffn: FeedForward
    # may a block look at several of the parts that other GPUs push of a residual?
    several_parts: bool

    def parts_together(self, portions: int, *, coded: bool) -> int:
        """Of these parts, those behind the first one that a block looks at together, with so many
        portions of a thread; 1: one after the other. `coded`: low-bit weights multiply them.
        Steps of such weights spilled with any; those of 16-bit weights did with four portions.
        """
        if not self.several_parts or coded or portions > MOST_TOGETHER:
            return 1
        return 4 if portions == 1 else 2


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Of one plan, made by `schedule_of`, for blocks whose threads share no rows."""

    plan: Plan
    matrices: tuple[Matrix | None, ...]  # [stages] as a block multiplies them for one token
    scans: tuple[CacheScan, ...]  # of each of the plan's attentions, at least one
    passes: Passes | None  # None: prompts are read by ordinary steps
    memory: SharedMemory  # of a block
    # what the generated header says of the warps; zeros of blocks without them
    warp_sizes: Mapping[str, int]
    norm_order: NormOrder
    # does a warp that schedules make sums of late parts while others compute? Ours for NVIDIA polls
    spare_warp: bool

    @property
    def id(self) -> str:
        """Digest of what is chosen: tiles, splits, ring, warps, prefetch, homes, passes, memory.
        Runs of one kernel whose schedules have the same id differ in their models' numbers alone.
        """
        plan, options, passes = self.plan, self.plan.options, self.passes
        tiles = {
            (s.kind.value, m.rows, m.cols, m.tile_rows, m.tile_cols, m.pack, m.joined, m.folded)
            for s, m in zip(plan.stages, self.matrices, strict=True)
            if m is not None
        }
        ring = (options.slot_bytes, options.ring_slots, options.window_slots, options.head_window)
        in_passes = passes and (
            passes.chunk,
            passes.tensor,
            passes.batch,
            passes.owners,
            tuple((one.rows, one.batches) for one in passes.stages),
            *((one.rows, one.batches) for one in passes.rounds),
        )
        content = (
            sorted(tiles),
            plan.attention,
            *plan.attentions[1:],
            ring,
            self.scan,
            *self.scans[1:],
            self._work,
            in_passes,
            self.memory,
            sorted(self.warp_sizes.items()),
        )
        return hashlib.sha256(repr(content).encode()).hexdigest()[:ID_DIGITS]

    @property
    def scan(self) -> CacheScan:
        """Of the first layers' heads."""
        return self.scans[0]

    @property
    def block_bytes(self) -> int:
        """Shared memory of a block with the plan's own ring."""
        options = self.plan.options
        return self.memory.bytes(options.ring_slots, max(options.window_slots, options.head_window))

    @property
    def most_slots(self) -> int:
        """The largest ring that a block has room for, at least one slot."""
        return self.memory.most_slots(self.plan.limits.on_chip_bytes)

    def scheduler_makes(self, stage: Stage) -> bool:
        """Does the block's scheduler warp make this stage while the others compute?"""
        return self.spare_warp and stage.late

    def of_passes(self) -> Passes:
        """`passes` of a plan that reads prompts so."""
        assert self.passes is not None, f"{self.plan.name} reads prompts by ordinary steps"
        return self.passes

    @property
    def by_fours(self) -> bool:
        """Is a narrow residual gathered by fours of each thread (cuda_activation.cuh)?"""
        return False

    def team(self, name: str) -> Team:
        """Of warps that share the matrices of an input; NO_TEAM where none do."""
        return NO_TEAM

    def prefetch(self, stage: Stage) -> Prefetch | None:
        """What warps prefetch for a stage; None where nobody knows."""
        return None

    @property
    def _work(self) -> WarpSchedule | None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class BlockOfWarps(Schedule):
    """Of a plan for blocks whose warps share the rows of a tile."""

    warps: WarpSchedule

    @property
    def by_fours(self) -> bool:
        return self.warps.residual.home is Home.BY_FOURS

    def team(self, name: str) -> Team:
        return self.warps.teams[name]

    @property
    def _work(self) -> WarpSchedule | None:
        return self.warps

    def prefetch(self, stage: Stage) -> Prefetch | None:
        read = self.plan.input_of(stage)
        return self.warps.prefetch.get(read) if read else None
