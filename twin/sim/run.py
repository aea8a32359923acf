"""Simulate a plan on a node."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, field, replace
from itertools import pairwise
from math import ceil

from twin.cost.causes import CAUSES
from twin.cost.model_floor import model_floor_s
from twin.cost.rests import rests_on
from twin.cost.routing import Routing
from twin.errors import PlanError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim.attribution import Table, critical_path, tabulate
from twin.sim.compiled.room import lent
from twin.sim.executor import (
    MOST_WHOLE,
    Executor,
    can_compile,
    run,
    run_first_gpu,
    run_representative,
)
from twin.sim.machine import Machine, check, gpus_alike
from twin.sim.prepare import prepare
from twin.sim.speculation import Speculation, gain
from twin.sim.trace import Trace, collect


@frozen
class StageTime:
    """Time of one stage on the critical path."""

    name: str
    kind: str
    ps: int
    dominant: str  # the cause with the largest share
    causes_ps: dict[str, int]

    @property
    def seconds(self) -> float:
        return self.ps / 1e12


@frozen
class Result:
    """One steady decode step: from the end of the step before it to its own.

    It is the last one, or where steps differ by their routing the median of those after the first
    (the lower of two).
    """

    plan: str
    node: str
    step_ps: int
    # bytes per step / (packages x read ceiling), without what caches serve, or that at their
    # ceiling if it takes longer
    floor_s: float
    # the same of the model: each byte that a step needs moved once, whatever the plan
    model_floor_s: float
    bytes_per_step: int
    stream_bytes_per_s: float  # of the pipes of all packages together
    peak_bytes_per_s: float  # datasheet, all packages together
    attribution_ps: dict[str, int]  # sums to step_ps
    stages: tuple[StageTime, ...]
    step_ends_ps: tuple[int, ...]
    delivered_bytes: int  # by all memory and cache pipes, in all steps
    consumed_bytes: int
    in_ring_bytes: int  # prefetched for the step after the last
    assumed: tuple[str, ...]  # paths of the assumed numbers that this result rests on
    routing: str = ""  # what was drawn, where steps differ
    sequences: int = 1  # decoded together
    tokens_per_step: float = 1.0  # of a sequence; more with accepted drafts
    draft_s: float = 0.0  # before each step
    executor: str = field(default=Executor.SIMPY.value, compare=False)  # both give the same result
    why_simpy: str = field(default="", compare=False)  # where it was not chosen
    wall_s: float = field(default=0.0, compare=False)
    trace: Trace | None = field(default=None, compare=False, repr=False)

    @property
    def step_s(self) -> float:
        return self.step_ps / 1e12

    @property
    def tokens_per_s(self) -> float:
        """Of one sequence."""
        return self.tokens_per_step / (self.step_s + self.draft_s)

    @property
    def total_tokens_per_s(self) -> float:
        """Of all sequences."""
        return self.sequences * self.tokens_per_s

    @property
    def step_times_s(self) -> tuple[float, ...]:
        """Of the steps after the first, which starts with cold caches."""
        return tuple((end - begin) / 1e12 for begin, end in pairwise(self.step_ends_ps))

    @property
    def distribution(self) -> dict[str, float]:
        """Seconds of a step: p10, p50 and p90 (of the simulated steps, none between them), the mean
        and the slowest.
        """
        times = sorted(self.step_times_s) or [self.step_s]
        shares = {
            f"p{share}": times[max(0, ceil(share / 100 * len(times)) - 1)] for share in (10, 50, 90)
        }
        return shares | {"mean": sum(times) / len(times), "max": times[-1], "steps": len(times)}

    @property
    def stream_fraction(self) -> float:
        return self.floor_s / self.step_s

    @property
    def mbu(self) -> float:
        return self.bytes_per_step / (self.peak_bytes_per_s * self.step_s)

    @property
    def attribution(self) -> dict[str, float]:
        """Seconds of the critical path by cause."""
        return {cause: ps / 1e12 for cause, ps in self.attribution_ps.items()}

    @property
    def simulated_steps_per_s(self) -> float:
        """Speed of the twin itself; the only thing here that depends on the computer it runs on."""
        return len(self.step_ends_ps) / self.wall_s if self.wall_s else 0.0

    def to_dict(self) -> dict[str, object]:
        """Everything that the same input reproduces."""
        derived = (
            "step_s",
            "tokens_per_s",
            "total_tokens_per_s",
            "stream_fraction",
            "mbu",
            "attribution",
            "distribution",
        )
        return _fields(self, without=("why_simpy", "wall_s", "trace")) | {
            name: getattr(self, name) for name in derived
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, sort_keys=True) + "\n"


def simulate(
    plan: Plan,
    node: Node,
    *,
    steps: int = 2,
    trace: bool = False,
    blocks: Collection[int] | None = None,
    executor: Executor | None = None,
    routing: Routing | None = None,
    speculation: Speculation | None = None,
    whole: bool = False,
    representative: bool = False,
) -> Result:
    """Time one decode step of `plan` on `node`.

    The first step starts with empty rings and cold caches, so at least two are needed for the
    steady state. Where steps differ by their `routing` (uniform if not given), give more of them.
    `blocks` limits a trace to these blocks of each GPU. `executor`: compiled where possible, if
    none is chosen. Where the first GPU stands for all, only that is simulated and the result is the
    same: `whole` simulates all of them, as a trace does. Of more than 8 GPUs one always stands for
    all: within 0.5 % of them, and 2 % where experts are dealt to ranks, of which it does what the
    busiest does in each layer (tests/sim/test_representatives.py). So does one of fewer, where
    possible, for a search that takes a `representative`: in an eighth of the time on 8 GPUs.

    Raises HardwareError when plan and node do not fit, PlanError for a plan that drafts without
    `speculation` and for one of many GPUs that no GPU can stand for, ToolchainError or Unsupported
    where compiled code was chosen, or is needed, and cannot be had.
    """
    if steps < 1:
        raise PlanError(f"steps={steps}: simulate at least 1, and 2 for the steady state")
    started = time.perf_counter()
    check(plan, node)
    tokens, draft_s = gain(plan, speculation)
    many = plan.options.gpus > MOST_WHOLE
    if many and (trace or whole or executor is Executor.SIMPY):
        raise PlanError(
            f"gpus={plan.options.gpus}: of more than {MOST_WHOLE} one is simulated and stands for "
            f"all, in compiled code; traces and whole machines have at most {MOST_WHOLE} GPUs"
        )
    alone = many or (representative and gpus_alike(plan, node) and can_compile())
    prepared = prepare(plan, node.device, routing, steps, busiest=alone)
    drawn = prepared.program.drawn
    with lent() as room, _no_collections():
        chosen, why = Executor.COMPILED, ""
        if alone:
            machine: Machine | None = run_representative(plan, node, steps, prepared, room)
        elif trace or whole:
            machine = None
        else:
            machine = run_first_gpu(plan, node, steps, prepared, executor, room)
        if machine is None:
            machine = Machine(
                plan, node, steps=steps, keep_all=trace or drawn, program=prepared.program
            )
            if trace:
                machine.record_loaders(blocks)
            chosen, why = run(machine, prepared, executor, room)
        shown = _shown(machine, drawn=drawn)
        pieces = critical_path(machine.blocks, shown, len(plan.stages))
        table = tabulate(pieces, len(plan.stages))
        collected = collect(machine, blocks, pieces) if trace else None
    result = _result(machine, shown, table, collected)
    said = str(routing or Routing()) if drawn else ""
    result = replace(
        result, routing=said, sequences=plan.options.batch, tokens_per_step=tokens, draft_s=draft_s
    )
    return replace(
        result, executor=chosen.value, why_simpy=why, wall_s=time.perf_counter() - started
    )


def step_s(plan: Plan, node: Node, *, steps: int = 2) -> float:
    """Seconds of a step as `simulate` gives them, without where they went: in three quarters of its
    time, of which a fit has thousands. Raises as it does.
    """
    check(plan, node)
    prepared = prepare(plan, node.device, steps=steps)
    drawn = prepared.program.drawn
    with lent() as room, _no_collections():
        machine = run_first_gpu(plan, node, steps, prepared, None, room)
        if machine is None:
            machine = Machine(plan, node, steps=steps, keep_all=drawn, program=prepared.program)
            run(machine, prepared, None, room)
        return _step_ps(_ends(machine), _shown(machine, drawn=drawn)) / 1e12


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python looks for no garbage meanwhile: of a machine's many thousand objects, which refer to
    each other, none is garbage before the machine has run."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _ends(machine: Machine) -> list[int]:
    return [max(block.ended[step] for block in machine.blocks) for step in range(machine.steps)]


def _step_ps(ends: Sequence[int], step: int) -> int:
    return ends[step] - (ends[step - 1] if step else 0)


def _shown(machine: Machine, *, drawn: bool) -> int:
    """The last step; of those after the first the median one, where what they do is drawn."""
    if not drawn:
        return machine.steps - 1
    ends = _ends(machine)
    times = sorted((ends[step] - ends[step - 1], step) for step in range(1, machine.steps))
    return times[(len(times) - 1) // 2][1] if times else 0


def _fields(result: Result, *, without: tuple[str, ...]) -> dict[str, object]:
    fields = {
        name: getattr(result, name) for name in Result.__dataclass_fields__ if name not in without
    }
    return fields | {"stages": [asdict(stage) for stage in result.stages]}


def _result(machine: Machine, step: int, table: Table, trace: Trace | None) -> Result:
    plan, device = machine.plan, machine.node.device
    ends, moved = tuple(_ends(machine)), machine.program.step_bytes(step)
    floor_s = machine.floor_s(step)
    pipes = machine.package_count() * device.memory.stream_bytes_per_s.value
    totals = [sum(row[cause] for row in table) for cause in range(len(CAUSES))]
    return Result(
        plan=plan.name,
        node=machine.node.name,
        step_ps=_step_ps(ends, step),
        floor_s=floor_s,
        model_floor_s=model_floor_s(plan, floor_s, moved),
        bytes_per_step=moved,
        stream_bytes_per_s=pipes,
        peak_bytes_per_s=machine.package_count() * device.memory.peak_bytes_per_s.value,
        attribution_ps=dict(zip(CAUSES, totals, strict=True)),
        stages=tuple(_stage_time(plan, index, row) for index, row in enumerate(table)),
        step_ends_ps=ends,
        delivered_bytes=machine.stands_for * sum(pipe.bytes for pipe in machine.loads()),
        consumed_bytes=machine.stands_for * sum(block.consumed_bytes() for block in machine.blocks),
        in_ring_bytes=machine.stands_for
        * sum(block.ring.in_flight_bytes() for block in machine.blocks),
        assumed=tuple(rests_on(plan, machine.node)),
        trace=trace,
    )


def _stage_time(plan: Plan, index: int, row: list[int]) -> StageTime:
    stage = plan.stages[index]
    causes = dict(zip(CAUSES, row, strict=True))
    return StageTime(
        stage.name, stage.kind.value, sum(row), max(causes, key=lambda cause: causes[cause]), causes
    )
