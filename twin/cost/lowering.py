"""Compiles a plan for a device: what is equal in layers, blocks and variants is worked out once."""

from __future__ import annotations

from itertools import accumulate, islice, takewhile

from twin.cost import attend, consume, terms, tiles, vectors
from twin.cost.causes import CAUSES
from twin.cost.forms import reset_words
from twin.cost.gathers import Gathers, polled
from twin.cost.program import Program, StageWork, Variant
from twin.cost.routing import Chosen, Draw, Draws, Routing
from twin.cost.streams import Streams, Weights
from twin.cost.terms import cost_in_time
from twin.cost.warp_gathers import WarpGathers
from twin.cost.warp_streams import WarpStreams
from twin.cost.wiring import Wiring, wire
from twin.hardware.types import BlockCosts, Device
from twin.kernel.experts import compared
from twin.plan.catalogue import ROWS, Spent
from twin.plan.types import Execution, HandOffKind, Plan, Sampling, Span, Stage, StageKind
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.choose import priced_schedule, schedule_of
from twin.units import picoseconds

ROUNDS_AHEAD = 2  # of cached positions: one is scanned, the next is on its way
CAUSE = {spent: CAUSES.index(spent.value) for spent in Spent}


def compile_plan(
    plan: Plan, device: Device, routing: Routing | None = None, steps: int = 2
) -> Program:
    """Everything that does not depend on time. `routing` (uniform by default) is drawn for `steps`
    steps and the one after them.
    """
    wiring = wire(plan)
    lowering = _Lowering(wiring, device)
    draws = Draws(plan, routing or Routing())
    known: dict[Draw, int] = {}
    choices = tuple(
        tuple(known.setdefault(draw, len(known)) for draw in draws.step(step))
        for step in (range(steps + 1) if draws.vary else range(1))
    )
    variants = tuple(lowering.variant(dict(zip(draws.layers, draw, strict=True))) for draw in known)
    resident = plan.options.execution is Execution.RESIDENT
    return Program(
        plan=plan,
        wiring=wiring,
        variants=variants,
        barriers=resident and plan.options.handoff is HandOffKind.GRID,
        borders=not resident,
        fetch_ps=_fetch_ps(plan, device),
        choices=choices if draws.vary else (),
        step_sizes=tuple(variant.bytes() for variant in variants),
    )


def _fetch_ps(plan: Plan, device: Device) -> int:
    """A sentinel poll returns the data; behind a counter, a barrier or a kernel border they are
    loaded afterwards.
    """
    if (
        plan.options.execution is Execution.RESIDENT
        and plan.options.handoff is HandOffKind.SENTINEL
    ):
        return 0
    return picoseconds(device.exchange.latency_s.value)


class _Lowering:
    """Makes StageWorks."""

    def __init__(self, wiring: Wiring, device: Device) -> None:
        plan = wiring.plan
        self.plan, self.device, self.forms = plan, device, wiring.forms
        spare = polled(plan) and device.warps is not None and device.sharing is None
        # sums of late parts, by a warp that a block has to spare
        self.by_keeper = [spare and stage.late for stage in plan.stages]
        self.gathers, self.streams = _costs(plan, device, self.by_keeper)
        self.schedule = self.streams.schedule
        # State from kernel to kernel. Two chains of narrow residuals as graphs leave nothing for
        # it: they take 30 and 8 % less than a day before (2026-11-27T094746-probes); why is not
        # found.
        self.hands_over = plan.spec is not None and not self.gathers.by_fours
        self.fixed: dict[object, int] = {}
        self.works: dict[object, tuple[StageWork, Weights]] = {}
        self.stretches = _stretches(plan)
        # of a stretch of stages, a block and its experts
        self.parts: dict[object, tuple[list[StageWork], list[int]]] = {}
        # somebody asks for them
        self.ends = (
            plan.options.execution is not Execution.RESIDENT or device.block.loading == "on-demand"
        )

    def variant(self, chosen: dict[int, Chosen]) -> Variant:
        """`chosen` by stage that routed experts begin with: how many tokens chose each expert in
        use on the rank.
        """
        kinds = self.forms.kinds
        made = {block: self._stream(block, chosen) for block in sorted(set(kinds))}
        ends = {
            block: tuple(accumulate(len(work.slots) for work in made[block][0]))
            if self.ends
            else ()
            for block in made
        }
        return Variant(
            tuple(made[k][0] for k in kinds),
            tuple(made[k][1] for k in kinds),
            tuple(ends[k] for k in kinds),
        )

    def _stream(
        self, block: int, chosen: dict[int, Chosen]
    ) -> tuple[tuple[StageWork, ...], tuple[int, ...]]:
        """A block's stages, and the bytes of its slots."""
        works: list[StageWork] = []
        sizes: list[int] = []
        last: Chosen = ()
        for number, stages in enumerate(self.stretches):
            last = chosen.get(stages[0].index, last)
            experts = last if stages[0].routed else ()
            key = (number, block, experts)
            if key not in self.parts:
                self.parts[key] = self._part(stages, block, experts)
            part = self.parts[key]
            works += part[0]
            sizes += part[1]
        return tuple(works), tuple(sizes)

    def _part(
        self, stages: list[Stage], block: int, experts: Chosen
    ) -> tuple[list[StageWork], list[int]]:
        works: list[StageWork] = []
        sizes: list[int] = []
        for stage in stages:
            key = (self.forms.of[stage.index], self.forms.alike[stage.index][block], experts)
            known = self.works.get(key)
            if known is None:
                known = self.works[key] = self._work(stage, key[1], experts)
            works.append(known[0])
            sizes += known[1].sizes
        return works, sizes

    def _work(self, stage: Stage, block: int, experts: Chosen) -> tuple[StageWork, Weights]:
        plan, device = self.plan, self.device
        weights = self.streams.weights(stage, block, experts)
        lo, hi = stage.items[block] if stage.items else (0, 0)
        ahead = self.streams.ahead(stage, weights)
        kv = self.streams.scan(stage, block)
        publication = self.gathers.publication(stage, block, experts)
        far_fences = _far_fences(plan, stage, arrives=publication is not None)
        work = StageWork(
            kind=stage.kind,
            reads=self.gathers.of(stage, block, experts),
            fixed_ps=self._fixed(stage, block),
            fixed_cause=CAUSE[ROWS[stage.kind].spent],
            slots=weights.costs,
            kv=kv,
            kv_ahead=ROUNDS_AHEAD if device.warps else 0,
            sample_ps=_sample(plan, device.block, stage, block),
            publication=publication,
            fence_ps=0 if far_fences else _fence_ps(plan, device, stage),
            far_fences=far_fences,
            launch_ps=terms.launch_ps(
                device.launch, plan.options.execution, stage, model=self.hands_over
            ),
            library=stage.kind is StageKind.COLLECTIVE,
            touches_memory=bool(weights.costs or kv),
            stored=(hi - lo) * stage.scan.written_bytes if stage.scan else 0,
            kv_after=stage.scan is not None and stage.scan.chosen,
            by_keeper=self.by_keeper[stage.index],
            ahead=ahead,
            group=self.streams.group(stage) if ahead else 1,
            asks=self._asks(stage),
        )
        _check(stage, work)
        return work, weights

    def _asks(self, stage: Stage) -> int:
        """Stages behind this one that the keeper makes."""
        return (
            0
            if self.by_keeper[stage.index]
            else sum(1 for _ in takewhile(bool, islice(self.by_keeper, stage.index + 1, None)))
        )

    def _fixed(self, stage: Stage, block: int) -> int:
        plan = self.plan
        value = None if stage.publishes is None else plan.values[stage.publishes]
        published = (
            0 if stage.matrix or value is None else _length(value.owned[block]) * value.words
        )
        resets = reset_words(plan, stage, block)
        # where it is gathered
        combined = self.device.warps is not None and any(
            self.gathers.splits(stage, read) for read in stage.reads
        )
        vector = 0 if combined else stage.vector_elements
        normed = plan.tokens if ROWS[stage.kind].vector and vector else 0
        behind = normed if stage.matrix and self.streams.may_prefetch(stage) else 0
        groups = plan.tokens if self.streams.holds_group(stage) else 0
        if (
            self.device.warps
            and stage.kind in (StageKind.LM_HEAD, StageKind.SAMPLE)
            and plan.options.sampling is Sampling.GREEDY
        ):
            normed += plan.tokens  # the best of all threads' candidates is found as a sum is
        numbers = self._whole_numbers(stage) + self._settled(stage) + self._chosen(stage)
        quads = self.gathers.quads(stage)
        key = (resets, vector, published, normed, behind, groups, numbers, quads)
        if key not in self.fixed:
            self.fixed[key] = (
                terms.stage_cost(
                    self.device,
                    resets=resets,
                    vector=vector,
                    published=published,
                    normed=normed,
                    behind=behind,
                    groups=groups,
                    quads=quads,
                ).ps
                + numbers
            )
        turns = (
            stage.kind is StageKind.ATTENTION
            and plan.spec is not None
            and any(read.spans[block] for read in stage.reads)
        )
        return self.fixed[key] + (self._heads(stage, block) if turns else 0) + self._merged(stage)

    def _merged(self, stage: Stage) -> int:
        """In which a core adds up attention's splits."""
        each = self.device.block.merged_s
        if self.device.warps is not None or each is None:
            return 0
        splits = max((self.gathers.splits(stage, read) for read in stage.reads), default=0)
        return self.plan.tokens * picoseconds(stage.vector_elements * splits * each.value)

    def _whole_numbers(self, stage: Stage) -> int:
        """In which a block of warps makes them of its input, where threads multiply such."""
        if self.device.warps is None or self.plan.tokens > 1:
            return 0
        wide, in_memory = self.schedule.matrices[stage.index], self._input_in_memory(stage)
        if wide is None or not consume.as_whole_numbers(wide, input_in_memory=in_memory):
            return 0
        return picoseconds(tiles.vector_portions(wide) * self.device.warps.whole_s.value)

    def _settled(self, stage: Stage) -> int:
        """In which the elements of a gathered vector go to the threads that have 16 neighbours of
        it.
        """
        if self.device.warps is None or self.plan.tokens > 1:
            return 0
        wide = stage.matrix is not None and stage.matrix.pack > vectors.PACK_ELEMENTS
        gathers = wide and ROWS[stage.kind].vector and stage.reads
        return picoseconds(self.device.warps.settle_s.value) if gathers else 0

    def _chosen(self, stage: Stage) -> int:
        """In which a block of warps chooses a token's experts from their logits."""
        spec, warps = self.plan.spec, self.device.warps
        if stage.kind is not StageKind.ROUTE or spec is None or spec.experts is None or not warps:
            return 0
        looks = compared(spec.experts.experts, spec.experts.top_k, TEAM_WARPS * WARP)
        return self.plan.tokens * picoseconds(looks * warps.compare_s.value)

    def _input_in_memory(self, stage: Stage) -> bool:
        return self.gathers.ffn_in_memory and stage.kind in self.plan.kinds_by_input["ffn"]

    def _heads(self, stage: Stage, block: int) -> int:
        """New tokens' heads on their way to the scans of a block's items; one round of them where a
        stage has a scan of its own.
        """
        if self.device.warps is None:
            return 0
        if stage.scan:
            # a head of the size that the model shows: judged, no kernel of ours does such scans
            assert self.plan.spec is not None
            return attend.heads_ps(self.device.warps, self.plan.spec.head_dim, 1)
        own, (lo, hi) = self.plan.kernel_attention(), stage.items[block]
        splits = own.splits_of(stage.window)
        keys = (hi - 1) // splits - lo // splits + 1
        heads, in_step = keys * (own.group + 2), self.gathers.by_fours
        return attend.heads_ps(self.device.warps, own.head_dim, heads, in_step=in_step)


def _costs(plan: Plan, device: Device, by_keeper: list[bool]) -> tuple[Gathers, Streams]:
    """By the kind of the device's blocks."""
    if device.warps is None:
        schedule = schedule_of(plan)
        return Gathers(schedule, device), Streams(schedule, device)
    schedule = priced_schedule(plan)
    gathers = WarpGathers(schedule, device, device.warps, by_keeper)
    return gathers, WarpStreams(schedule, device, device.warps)


def _stretches(plan: Plan) -> list[list[Stage]]:
    """Stages in a row that depend on the same routing, or on none: what variants have in common is
    found once.
    """
    stretches: list[list[Stage]] = []
    for stage in plan.stages:
        if (
            not stretches
            or stage.kind is StageKind.ROUTED_UP
            or bool(stage.routed) != bool(stretches[-1][-1].routed)
        ):
            stretches.append([])
        stretches[-1].append(stage)
    return stretches


def _length(span: Span) -> int:
    return span[1] - span[0]


def _check(stage: Stage, work: StageWork) -> None:
    """Raises HardwareError for a cost that no executor's clock is made for."""
    single = (work.fixed_ps, work.sample_ps, work.fence_ps, work.launch_ps, sum(work.ahead))
    longest = max(
        *single, *work.slots, *(ps for _, ps in work.kv), *(read.cost_ps for read in work.reads)
    )
    cost_in_time(f"stage {stage.name}: a piece of a block's work", longest)


def _fence_ps(plan: Plan, device: Device, stage: Stage) -> int:
    """Between kernels the border does it; a sentinel needs none."""
    handoff, fence = plan.options.handoff, device.handoff.fence_s
    if (
        fence is None
        or plan.options.execution is not Execution.RESIDENT
        or handoff is HandOffKind.SENTINEL
    ):
        return 0
    return (
        picoseconds(fence.value)
        if handoff is HandOffKind.GRID or stage.publishes is not None
        else 0
    )


def _far_fences(plan: Plan, stage: Stage, *, arrives: bool) -> int:
    """Of a block that pushes to other GPUs: the fence behind its stores, then an arrival at each
    rank's counter, which releases to all GPUs and so waits as a fence does (handoff.cuh, `finish`).
    """
    handoff, published = plan.options.handoff, stage.publishes
    if (
        plan.options.gpus == 1
        or plan.options.execution is not Execution.RESIDENT
        or handoff is HandOffKind.SENTINEL
        or published is None
        or not plan.values[published].pushed
    ):
        return 0
    return 1 + (plan.ranks if arrives or handoff is HandOffKind.GRID else 0)


def _sample(plan: Plan, costs: BlockCosts, stage: Stage, block: int) -> int:
    """Blocks look at their own logits, each at its own; the one that publishes the token also at
    those of the block from which it takes it. A probe's block does both with all logits.
    """
    if stage.kind is not StageKind.SAMPLE or stage.publishes is None:
        return 0
    if not _length(plan.values[stage.publishes].owned[block]):
        return 0
    return terms.sample_cost(costs, -(-plan.shard.vocab // plan.blocks))
