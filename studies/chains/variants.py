"""Chains of stages that no plan of ours has, made of a plan's program: what a kernel with them
would take by the twin. Simulated only: nothing proves them, and the engine runs none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from twin.cost.program import Program, Publication, ReadWork, StageWork
from twin.cost.terms import FP32_BYTES
from twin.cost.wiring import Lists, Wires, Wiring
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan, Stage
from twin.units import picoseconds

Works = list[StageWork]  # of a block, by stage
Change = Callable[[Plan, Device, Works], None]  # of a block's works, in place
# st.async to the other block of a pair and its mbarrier, 32 lanes: 184 to 193 ns on an H200,
# whatever streams meanwhile (own probe, 2026-11-28)
PAIR_S = 190e-9


def k_split(program: Program, device: Device) -> Program:
    """The block that makes activations of chosen experts owns the columns of the down projection
    which multiply them, and goes on without a hand-off. Blocks publish parts of all rows, each
    row's to its owner, who adds them in the order of blocks and publishes the sum as today.
    """
    changed = _changed(program, device, _k_split)
    unread = {s.index for s in program.plan.stages if s.kind is StageKind.SHARED_DOWN}
    return replace(changed, wiring=_without_reads(program.wiring, unread))


def _k_split(plan: Plan, device: Device, works: Works) -> None:
    kernel, blocks = device.kernel, plan.blocks
    assert isinstance(kernel, WarpKernel)
    for up, shared, down in _experts(plan):
        assert down.matrix is not None
        rows = -(-down.matrix.rows // blocks)  # of a block, of whose parts it is the owner
        slots = works[up.index].slots
        if shared is not None:  # likewise split, between the two in the stream
            slots += works[shared.index].slots
            works[shared.index] = replace(works[shared.index], reads=(), slots=(), fixed_ps=0)
        parts = FP32_BYTES * rows * blocks
        gather = picoseconds(device.exchange.latency_s.value + parts / _gathered(kernel))
        works[up.index] = replace(
            works[up.index],
            slots=slots + works[down.index].slots,
            publication=Publication(FP32_BYTES * down.matrix.rows, pushed=False),
        )
        works[down.index] = replace(
            works[down.index],
            slots=(),
            reads=tuple(
                ReadWork(False, parts, gather, 0, read.cause) for read in works[down.index].reads
            ),
            fixed_ps=picoseconds(kernel.stage_s.value),
        )


def own_router(program: Program, device: Device) -> Program:
    """The owners of the output projection's rows multiply the router's columns with them, and
    publish their parts of the logits next to the rows. Every block adds up all parts in the order
    of blocks, and the sum of squares, and chooses: no stage of logits, and none that awaits them.
    """
    route = {s.index for s in program.plan.stages if s.kind is StageKind.ROUTE}
    changed = _changed(program, device, _own_router, dropped=StageKind.ROUTER)
    return replace(changed, wiring=_without_reads(program.wiring, route))


def _own_router(plan: Plan, device: Device, works: Works) -> None:
    kernel, spec = device.kernel, plan.spec
    assert isinstance(kernel, WarpKernel)
    assert spec is not None
    assert spec.experts is not None
    parts = FP32_BYTES * plan.blocks * (spec.experts.experts + 1)
    for stage in plan.stages:
        work = works[stage.index]
        if stage.kind is StageKind.ROUTER:
            read = work.reads[-1]
            longer = replace(read, cost_ps=read.cost_ps + picoseconds(parts / _gathered(kernel)))
            # the products of its few rows take as long as one more wait
            fixed = work.fixed_ps + picoseconds(device.exchange.latency_s.value)
            works[stage.index] = replace(
                work, slots=(), publication=None, reads=(*work.reads[:-1], longer), fixed_ps=fixed
            )
        if stage.kind is StageKind.ROUTE:
            fixed = max(0, work.fixed_ps - picoseconds(kernel.stage_s.value))
            works[stage.index] = replace(work, reads=(), fixed_ps=fixed)


def paired_splits(program: Program, device: Device, half: Program) -> Program:
    """The two blocks of a cluster add their splits of a cached head before they publish them, so
    the output projection gathers half as many: those of `half`, a plan with half the splits.
    """
    reads = {
        stage.index: half.stages[0][stage.index].reads
        for stage in program.plan.stages
        if stage.kind is StageKind.O_PROJ
    }

    def change(plan: Plan, _: Device, works: Works) -> None:
        for stage in plan.stages:
            work = works[stage.index]
            if stage.kind is StageKind.ATTENTION and work.publication is not None:
                works[stage.index] = replace(work, fixed_ps=work.fixed_ps + picoseconds(PAIR_S))
            if stage.index in reads:
                works[stage.index] = replace(work, reads=reads[stage.index])

    return _changed(program, device, change)


def _gathered(kernel: WarpKernel) -> float:
    return kernel.gather_bytes_per_s.value


def _experts(plan: Plan) -> Iterator[tuple[Stage, Stage | None, Stage]]:
    """Of each layer with chosen experts the up projection, a shared expert's down projection behind
    it, and the down projection.
    """
    for up, then, last in zip(plan.stages, plan.stages[1:], plan.stages[2:], strict=False):
        if up.kind is StageKind.ROUTED_UP:
            shared = then.kind is StageKind.SHARED_DOWN
            yield up, then if shared else None, last if shared else then


def _changed(
    program: Program, device: Device, change: Change, dropped: StageKind | None = None
) -> Program:
    """The program with every block's works changed; `dropped`: a kind of stages whose weights do
    not come through the ring any more.
    """
    (variant,) = program.variants
    known: dict[StageWork, StageWork] = {}  # equal works are one object, of equal blocks too
    done: dict[int, tuple[tuple[StageWork, ...], tuple[int, ...]]] = {}
    for before, sizes in zip(variant.stages, variant.sizes, strict=True):
        if id(before) in done:
            continue
        works = list(before)
        change(program.plan, device, works)
        after = tuple(known.setdefault(work, work) for work in works)
        done[id(before)] = after, _without(program.plan, before, sizes, dropped)
    made = [done[id(before)] for before in variant.stages]
    stages, sizes = (tuple(column) for column in zip(*made, strict=True))
    return replace(program, variants=(replace(variant, stages=stages, sizes=sizes),))


def _without(
    plan: Plan, works: Sequence[StageWork], sizes: tuple[int, ...], dropped: StageKind | None
) -> tuple[int, ...]:
    """Bytes of a block's slots but those of a kind of stages."""
    if dropped is None:
        return sizes
    kept, at = [], 0
    for stage in plan.stages:
        count = len(works[stage.index].slots)
        kept += [] if stage.kind is dropped else sizes[at : at + count]
        at += count
    return tuple(kept)


def _without_reads(wiring: Wiring, stages: set[int]) -> Wiring:
    """No block waits before these stages."""
    blocks = wiring.plan.blocks
    nothing = Lists(np.zeros(blocks + 1, np.int64), np.zeros(0, np.int64))
    wires = tuple(
        Wires(nothing, one.own, one.others) if index in stages else one
        for index, one in enumerate(wiring.stages)
    )
    return Wiring(wiring.plan, wiring.channels, wires, wiring.forms)
