"""Compiles a plan for a device: what is equal in layers, blocks and variants is worked out once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import accumulate, islice, takewhile
from typing import NamedTuple

from twin.cost import terms
from twin.cost.causes import CAUSES
from twin.cost.forms import first_alike, reset_words
from twin.cost.kinds import costs_of
from twin.cost.program import Program, StageWork, Variant
from twin.cost.routing import Chosen, Draw, Draws, Routing, most_used
from twin.cost.terms import cost_in_time
from twin.cost.wiring import Wiring, wire
from twin.hardware.types import Device
from twin.plan.catalogue import ROWS, Spent, StageKind
from twin.plan.types import Plan, Stage
from twin.units import picoseconds

CAUSE = {spent: CAUSES.index(spent.value) for spent in Spent}


def compile_plan(
    plan: Plan,
    device: Device,
    routing: Routing | None = None,
    steps: int = 2,
    *,
    busiest: bool = False,
) -> Program:
    """Everything that does not depend on time. `routing` (uniform by default) is drawn for `steps`
    steps and the one after them. `busiest`: where ranks differ, of one that does in each layer what
    the busiest does; the others wait for that one's part of the layer's sum.
    """
    wiring = wire(plan)
    lowering = _Lowering(wiring, device)
    draws = Draws(plan, routing or Routing())
    every = [draws.step(step) for step in (range(steps + 1) if plan.steps_differ else range(1))]
    shown = [[most_used(ranks)] for ranks in every] if busiest else every
    known: dict[Draw, int] = {}
    choices = tuple(tuple(known.setdefault(draw, len(known)) for draw in ranks) for ranks in shown)
    variants = tuple(lowering.variant(dict(zip(draws.layers, draw, strict=True))) for draw in known)
    totals: tuple[int, ...] = ()
    if busiest and plan.steps_differ:
        totals = tuple(
            sum(
                times * lowering.bytes(dict(zip(draws.layers, draw, strict=True)))
                for draw, times in Counter(ranks).items()
            )
            for ranks in every
        )
    resident = plan.options.resident
    return Program(
        plan=plan,
        wiring=wiring,
        variants=variants,
        barriers=resident and plan.options.handoff.meets,
        borders=not resident,
        fetch_ps=_fetch_ps(plan, device),
        choices=choices if plan.steps_differ else (),
        step_sizes=tuple(
            lowering.bytes(dict(zip(draws.layers, draw, strict=True))) for draw in known
        ),
        totals=totals,
    )


def _fetch_ps(plan: Plan, device: Device) -> int:
    """A sentinel poll returns the data; behind a counter, a barrier or a kernel border they are
    loaded afterwards.
    """
    if plan.options.polled:
        return 0
    return picoseconds(device.exchange.latency_s.value)


# a block's share of a stage, bytes of each of its slots, bytes moved in all
_Work = tuple[StageWork, tuple[int, ...], int]


class _Part(NamedTuple):
    """The same of stages in a row."""

    works: list[StageWork]
    sizes: list[int]  # bytes of each slot
    bytes: int  # moved in all


class _Lowering:
    """Makes StageWorks."""

    def __init__(self, wiring: Wiring, device: Device) -> None:
        plan = wiring.plan
        self.plan, self.device, self.forms = plan, device, wiring.forms
        self.costs = costs_of(plan, device)
        self.works: dict[object, _Work] = {}
        self.stretches = self._stretches()
        self.like, self.alike = self._alike()
        # of a stretch of stages, a block and its experts
        self.parts: dict[object, _Part] = {}
        self.moved: dict[tuple[int, Chosen], int] = {}  # bytes of a stretch, all blocks
        # of works, where kernels or the cores themselves load
        self.ends = not plan.options.resident or device.block.loading == "on-demand"

    def _stretches(self) -> list[list[Stage]]:
        """Stages in a row that depend on the same routing, or on none: what variants have in
        common is found once.
        """
        stretches: list[list[Stage]] = []
        for stage in self.plan.stages:
            if (
                not stretches
                or stage.kind is StageKind.ROUTED_UP
                or bool(stage.routed) != bool(stretches[-1][-1].routed)
            ):
                stretches.append([])
            stretches[-1].append(stage)
        return stretches

    def _alike(self) -> tuple[list[int], list[list[int]]]:
        """Of each stretch the first one of the same stages, and of its blocks the first one with
        the same work in all of them: layers share what is made of these.
        """
        seen: dict[tuple[int, ...], int] = {}
        blocks: dict[int, list[int]] = {}
        like = []
        for number, stages in enumerate(self.stretches):
            of = tuple(self.forms.of[stage.index] for stage in stages)
            like.append(seen.setdefault(of, number))
            if like[-1] == number:
                alike = [self.forms.alike[stage.index] for stage in stages]
                blocks[number] = first_alike(list(zip(*alike, strict=True)))
        return like, [blocks[number] for number in like]

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

    def bytes(self, chosen: dict[int, Chosen]) -> int:
        """Of a variant, which need not be made for it."""
        total = 0
        for number, experts in self._used(chosen):
            key = (self.like[number], experts)
            if key not in self.moved:
                kinds = Counter(self.forms.kinds)
                self.moved[key] = sum(
                    times * self._known_part(number, block, experts).bytes
                    for block, times in kinds.items()
                )
            total += self.moved[key]
        return total

    def _used(self, chosen: dict[int, Chosen]) -> Iterator[tuple[int, Chosen]]:
        """Of each stretch the experts that it multiplies."""
        last: Chosen = ()
        for number, stages in enumerate(self.stretches):
            last = chosen.get(stages[0].index, last)
            yield number, last if stages[0].routed else ()

    def _known_part(self, number: int, block: int, experts: Chosen) -> _Part:
        first = self.like[number]
        key = (first, self.alike[first][block], experts)
        if key not in self.parts:
            self.parts[key] = self._part(self.stretches[first], key[1], experts)
        return self.parts[key]

    def _stream(
        self, block: int, chosen: dict[int, Chosen]
    ) -> tuple[tuple[StageWork, ...], tuple[int, ...]]:
        """A block's stages, and the bytes of its slots."""
        works: list[StageWork] = []
        sizes: list[int] = []
        for number, experts in self._used(chosen):
            part = self._known_part(number, block, experts)
            works += part.works
            sizes += part.sizes
        return tuple(works), tuple(sizes)

    def _part(self, stages: list[Stage], block: int, experts: Chosen) -> _Part:
        works: list[StageWork] = []
        sizes: list[int] = []
        moved = 0
        for stage in stages:
            key = (self.forms.of[stage.index], self.forms.alike[stage.index][block], experts)
            known = self.works.get(key)
            if known is None:
                known = self.works[key] = self._work(stage, key[1], experts)
            works.append(known[0])
            sizes += known[1]
            moved += known[2]
        return _Part(works, sizes, moved)

    def _work(self, stage: Stage, block: int, experts: Chosen) -> _Work:
        plan, device = self.plan, self.device
        costs, gathers, streams = self.costs, self.costs.gathers, self.costs.streams
        weights = streams.weights(stage, block, experts)
        lo, hi = stage.items[block] if stage.items else (0, 0)
        ahead, kv = streams.ahead(stage, weights), streams.scan(stage, block)
        publication = gathers.publication(stage, block, experts)
        far_fences = _far_fences(plan, stage, arrives=publication is not None)
        work = StageWork(
            kind=stage.kind,
            reads=gathers.of(stage, block, experts),
            fixed_ps=costs.fixed_ps(stage, block, reset_words(plan, stage, block)),
            fixed_cause=CAUSE[ROWS[stage.kind].spent],
            slots=weights.costs,
            kv=kv,
            kv_ahead=costs.kv_ahead,
            sample_ps=costs.sample_ps(stage, block),
            publication=publication,
            fence_ps=0 if far_fences else costs.fence_ps(stage),
            far_fences=far_fences,
            launch_ps=terms.launch_ps(
                device, plan.options.execution, stage, model=costs.hands_over
            ),
            library=stage.kind is StageKind.COLLECTIVE,
            touches_memory=bool(weights.costs or kv),
            stored=(hi - lo) * stage.scan.written_bytes if stage.scan else 0,
            kv_after=stage.scan is not None and stage.scan.chosen,
            by_scheduler=self.costs.by_scheduler[stage.index],
            ahead=ahead,
            group=streams.group(stage) if ahead else 1,
            sums_behind=self._sums_behind(stage),
        )
        _check(stage, work)
        return work, weights.sizes, sum(weights.sizes) + work.cached_bytes()

    def _sums_behind(self, stage: Stage) -> int:
        """Stages behind this one that the scheduler makes."""
        return (
            0
            if self.costs.by_scheduler[stage.index]
            else sum(
                1 for _ in takewhile(bool, islice(self.costs.by_scheduler, stage.index + 1, None))
            )
        )


def _check(stage: Stage, work: StageWork) -> None:
    """Raises HardwareError for a cost that no executor's clock is made for."""
    single = (work.fixed_ps, work.sample_ps, work.fence_ps, work.launch_ps, sum(work.ahead))
    longest = max(
        *single, *work.slots, *(ps for _, ps in work.kv), *(read.cost_ps for read in work.reads)
    )
    cost_in_time(f"stage {stage.name}: a piece of a block's work", longest)


def _far_fences(plan: Plan, stage: Stage, *, arrives: bool) -> int:
    """Of a block that pushes to other GPUs: the fence behind its stores, then an arrival at each
    rank's counter, which releases to all GPUs and so waits as a fence does (handoff.cuh, `finish`).
    """
    handoff, published = plan.options.handoff, stage.publishes
    if (
        plan.options.gpus == 1
        or not plan.options.resident
        or handoff.resets
        or published is None
        or not plan.values[published].pushed
    ):
        return 0
    return 1 + (plan.ranks if arrives or handoff.meets else 0)
