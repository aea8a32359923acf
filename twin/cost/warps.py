"""What works cost a block of warps: teams of them share the rows of matrices, a thread of a warp of
its own loads, and a spare one sums what comes late.
"""

from __future__ import annotations

from twin.cost import attention, formats, terms, tiles, vectors
from twin.cost.costs import Costs
from twin.cost.warp_gathers import WarpGathers
from twin.cost.warp_streams import WarpStreams
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.kernel.experts import compared
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.matrix import Matrix
from twin.plan.options import Sampling
from twin.plan.types import Stage
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.scores import by_own_rows
from twin.schedule.types import BlockOfWarps
from twin.units import picoseconds


class WarpCosts(Costs):
    kv_ahead = 2  # of rounds of cached positions: one is compared, the next is on its way
    gathers: WarpGathers
    streams: WarpStreams

    def __init__(self, schedule: BlockOfWarps, device: Device, kernel: WarpKernel) -> None:
        plan = schedule.plan
        spare = plan.options.polled and device.sharing is None
        by_scheduler = [spare and stage.late for stage in plan.stages]
        gathers = WarpGathers(schedule, device, kernel, by_scheduler)
        super().__init__(gathers, WarpStreams(schedule, device, kernel), device)
        self.kernel, self.by_scheduler = kernel, by_scheduler
        # Two chains of narrow residuals as graphs leave nothing for the state that goes from kernel
        # to kernel: they take 30 and 8 % less than a day before (2026-11-27T094746-probes)
        self.hands_over = self.hands_over and not gathers.by_fours
        self.fixed: dict[object, int] = {}

    def fixed_ps(self, stage: Stage, block: int, resets: int) -> int:
        published, normed = self.published(stage, block), self._normed(stage)
        behind = 0
        if ROWS[stage.kind].vector and stage.matrix and self._vector(stage):
            behind = self.plan.tokens * self.streams.may_prefetch(stage)
        groups = self.plan.tokens if self.streams.holds_group(stage) else 0
        prepared = self._quantised(stage) + self._settled(stage) + self._chosen(stage)
        by_fours = self.gathers.by_fours_of(stage)
        key = (resets, self._vector(stage), published, normed, behind, groups, prepared, by_fours)
        if key not in self.fixed:
            self.fixed[key] = prepared + self._stage_ps(
                resets, published, self._vector(stage), normed, behind, groups, by_fours=by_fours
            )
        turns = stage.kind is StageKind.ATTENTION and self.plan.spec is not None
        heads = turns and any(read.spans[block] for read in stage.reads)
        return self.fixed[key] + (self._heads(stage, block) if heads else 0)

    def _stage_ps(
        self,
        resets: int,
        published: int,
        vector: int,
        normed: int,
        behind: int,
        groups: int,
        *,
        by_fours: bool,
    ) -> int:
        """`normed`: vectors that a block norms or combines in its registers, instead of touching
        `vector` elements; `behind`: of them those behind prefetched weights. `groups`: vectors
        behind whole row groups of a down projection. `by_fours`: the normed vector comes by way of
        shared memory.
        """
        kernel, element = self.kernel, self.kernel.element_s.value
        touched, fixed = vector * element, kernel.stage_s
        if normed:
            alone = 0.0 if by_fours else kernel.vector_s.value
            touched = normed * alone + behind * kernel.prefetch_s.value
        if by_fours:
            fixed = kernel.by_fours_s
        if groups:
            touched += groups * kernel.group_s.value
        return terms.stage_cost(published * element, resets * element, touched, fixed.value).ps

    def _vector(self, stage: Stage) -> int:
        """Elements that a block touches; what it combines is combined where it is gathered."""
        combined = any(self.gathers.splits(stage, read) for read in stage.reads)
        return 0 if combined else stage.vector_elements

    def _normed(self, stage: Stage) -> int:
        """Vectors; the best of all threads' candidates is found as a sum is."""
        plan = self.plan
        chooses = stage.kind in (StageKind.LM_HEAD, StageKind.SAMPLE)
        greedy = chooses and plan.options.sampling is Sampling.GREEDY
        return plan.tokens * (bool(self._gathering(stage) and self._vector(stage)) + greedy)

    def _gathering(self, stage: Stage) -> Matrix | bool | None:
        """What a vector that a stage gathers, or norms once more, is laid out for: its matrix, or
        True where it has none; None: it has no such vector. The choice of experts gathers what a
        router has been multiplied with. A router of own rows takes as long as a norm: a barrier,
        products, sums over threads.
        """
        router = self.plan.stages[stage.index - 1]
        if by_own_rows(self.plan, router):
            return router.matrix
        return (stage.matrix or True) if ROWS[stage.kind].vector else None

    def _quantised(self, stage: Stage) -> int:
        """In which a block quantises its input, where threads multiply integers."""
        if self.plan.tokens > 1:
            return 0
        wide, in_memory = self.schedule.matrices[stage.index], self._input_in_memory(stage)
        if wide is None or not formats.quantised(wide, input_in_memory=in_memory):
            return 0
        return picoseconds(tiles.vector_portions(wide) * self.kernel.quantise_s.value)

    def _settled(self, stage: Stage) -> int:
        """In which the elements of a gathered vector go to the threads that have 16 neighbours of
        it.
        """
        if self.plan.tokens > 1:
            return 0
        matrix = self._gathering(stage)
        wide = isinstance(matrix, Matrix) and matrix.pack > vectors.PACK_ELEMENTS
        return picoseconds(self.kernel.settle_s.value) if wide and stage.reads else 0

    def _chosen(self, stage: Stage) -> int:
        """In which a block of warps chooses a token's experts from their logits."""
        spec = self.plan.spec
        if stage.kind is not StageKind.ROUTE or spec is None or spec.experts is None:
            return 0
        looks = compared(spec.experts.experts, spec.experts.top_k, TEAM_WARPS * WARP)
        return self.plan.tokens * picoseconds(looks * self.kernel.compare_s.value)

    def _input_in_memory(self, stage: Stage) -> bool:
        return self.gathers.ffn_in_memory and self.plan.input_of(stage) == "ffn"

    def _heads(self, stage: Stage, block: int) -> int:
        """New tokens' heads on their way to the scans of a block's items; one round of them where a
        stage has a scan of its own.
        """
        if stage.scan:
            # a head of the size that the model shows: judged, no kernel of ours does such scans
            assert self.plan.spec is not None
            return attention.heads_ps(self.kernel, self.plan.spec.head_dim, 1)
        own, (lo, hi) = self.plan.attention_of(stage), stage.items[block]
        splits = own.splits_of(stage.window)
        keys = (hi - 1) // splits - lo // splits + 1
        heads, in_step = keys * (own.group + 2), self.gathers.by_fours
        return attention.heads_ps(self.kernel, own.head_dim, heads, in_step=in_step)
