"""Recorded steps of the engine next to simulated steps of the same plan: one trace, and one
table by kind of stage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.errors import CalibrationError
from twin.hardware.types import Node
from twin.kernel.marks import of_consumers
from twin.plan.types import Plan
from twin.report.recording import Recording
from twin.report.tables import percent, table
from twin.sim.attribution import critical_path
from twin.sim.executor import run
from twin.sim.machine import Machine
from twin.sim.prepare import prepare
from twin.sim.trace import Event, Trace, collect, marks, named_process, named_track, span

MEASURED = 10**6 + 1  # process ids of the measured GPUs: after every simulated one
PS_PER_NS = 1000
# [steps][ranks][blocks][stages][inputs ready, finished] ps; the first step for its end alone
Marks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Microseconds of one stage of a kind, mean of its stages, median of the steps.

    `span`: from the end of the stage before, over all blocks, to its own: spans add up to the step.
    `wait`, mean of all blocks: from the end of a block's stage before until all inputs are there;
    `work`: from there to the end of the stage, its publication included. Means, because a GPU's
    clock may tick in 256 ns: single marks are coarse.
    """

    kind: str
    stages: int  # per step
    measured_wait_us: float
    simulated_wait_us: float
    measured_work_us: float
    simulated_work_us: float
    measured_span_us: float
    simulated_span_us: float

    @property
    def difference(self) -> float | None:
        """Of the spans, relative; positive when the simulated stage takes longer. None where a
        scheduler warp makes the stage next to others.
        """
        return self.simulated_span_us / self.measured_span_us - 1 if self.measured_span_us else None


@dataclass(frozen=True, slots=True)
class SideBySide:
    plan: Plan
    node: str
    positions: tuple[int, int]  # cached positions of the first and the last measured step
    measured_step_us: float  # median
    simulated_step_us: float
    stages: tuple[StageTimes, ...]
    conditions: dict[str, Any]
    trace: Trace

    @property
    def difference(self) -> float:
        return self.simulated_step_us / self.measured_step_us - 1


def side_by_side(
    recording: Recording, node: Node, *, shown: Collection[int], steps: int = 2
) -> SideBySide:
    """Simulates the recorded plan on `node`. `steps` steps of the blocks `shown` of each GPU go
    into the trace.
    """
    plan = recording.plan
    measured: Marks = of_consumers(plan, recording.marks * PS_PER_NS)
    if not 1 <= steps < len(measured):
        raise CalibrationError(
            f"steps={steps}: the recording holds {len(measured) - 1} complete steps; choose "
            "between 1 and that"
        )
    prepared = prepare(plan, node.device, steps=steps + 1)
    machine = Machine(plan, node, steps=steps + 1, keep_all=True, program=prepared.program)
    machine.record_loaders(shown)
    run(machine, prepared)
    simulated = of_consumers(plan, marks(machine))
    typical = _typical(measured, steps)
    return SideBySide(
        plan=plan,
        node=node.name,
        positions=(int(recording.positions[1]), int(recording.positions[-1])),
        measured_step_us=float(np.median(_step_us(measured))),
        simulated_step_us=float(np.median(_step_us(simulated))),
        stages=tuple(_stage_times(plan, measured, simulated)),
        conditions=recording.conditions,
        trace=_trace(
            machine,
            measured[typical : typical + steps + 1],
            recording.positions[typical + 1 :],
            shown,
        ),
    )


# ---- times ---------------------------------------------------------------------------------------


def _ends(times: Marks) -> NDArray[np.int64]:
    """When the last block ended each step, ps."""
    ends: NDArray[np.int64] = times[:, :, :, -1, 1].max(axis=(1, 2))
    return ends


def _step_us(times: Marks) -> NDArray[np.float64]:
    """Durations of the complete steps."""
    took: NDArray[np.float64] = np.diff(_ends(times)) / 1e6
    return took


def _typical(times: Marks, steps: int) -> int:
    """Index before the `steps` consecutive steps whose durations come closest to the median."""
    took = _step_us(times)
    away = np.abs(took - np.median(took))
    return int(np.argmin(np.convolve(away, np.ones(steps), "valid")))


def _parts(times: Marks) -> tuple[NDArray[np.float64], ...]:
    """(wait, work, span), each [steps - 1][stages] in us."""
    ready, finished = times[1:, ..., 0], times[1:, ..., 1]
    before = np.concatenate([times[:-1, ..., -1:, 1], finished[..., :-1]], axis=-1)
    wait, work = (ready - before).mean(axis=(1, 2)), (finished - ready).mean(axis=(1, 2))
    whole = finished.max(axis=(1, 2)) - before.max(axis=(1, 2))
    return wait / 1e6, work / 1e6, whole / 1e6


def _stage_times(plan: Plan, measured: Marks, simulated: Marks) -> Iterator[StageTimes]:
    kinds = np.array([stage.kind.value for stage in plan.stages])
    pairs = list(zip(_parts(measured), _parts(simulated), strict=True))
    for kind in dict.fromkeys(kinds.tolist()):
        at = kinds == kind
        yield StageTimes(
            kind,
            int(at.sum()),
            *(float(np.median(part[:, at].mean(axis=1))) for pair in pairs for part in pair),
        )


# ---- trace ---------------------------------------------------------------------------------------


def _trace(
    machine: Machine, measured: Marks, positions: NDArray[np.int64], shown: Collection[int]
) -> Trace:
    """Both start where the last block ended the step before the first one shown; a lead keeps all
    times positive.
    """
    path = critical_path(machine.blocks, machine.steps - 1, len(machine.plan.stages))
    simulated = list(collect(machine, shown, path, first_step=1, group="simulated ").events)
    start = max(block.ended[0] for block in machine.blocks)
    lead = max(
        start - min(block.ended[0] for block in machine.blocks),
        int(_ends(measured)[0] - measured[0, :, :, -1, 1].min()),
    )
    events = list(_measured(machine, measured - _ends(measured)[0] + lead, positions, shown))
    return Trace((*events, *(_moved(event, (lead - start) / 1e6) for event in simulated)))


def _moved(event: Event, by_us: float) -> Event:
    at = event.get("ts")
    return event | {"ts": round(at + by_us, 6)} if isinstance(at, float) else event


def _measured(
    machine: Machine, times: Marks, positions: NDArray[np.int64], shown: Collection[int]
) -> Iterator[Event]:
    """Steps, in them stages, in them waiting and working: the tracks of the simulated side, by the
    same names.
    """
    for gpu in range(machine.plan.options.gpus):
        yield named_process(MEASURED + gpu, f"measured Gpu[{gpu}]")
    for block in machine.blocks:
        tid = machine.number_on_gpu(block)
        if tid not in shown:
            continue
        pid, own = MEASURED + block.place.gpu, times[:, block.place.rank, block.place.index]
        yield named_track(pid, tid, f"{block.place.name}.consumer")
        begin = int(own[0, -1, 1])
        for step, stages in enumerate(own[1:].tolist()):
            about = {"args": {"positions": int(positions[step])}}
            yield span(f"step {step}", "step", pid, tid, begin, stages[-1][1]) | about
            for stage, (ready, finished) in zip(machine.plan.stages, stages, strict=True):
                yield span(stage.name, "stage", pid, tid, begin, finished)
                yield span("wait", "wait", pid, tid, begin, ready)
                yield span("work", "work", pid, tid, ready, finished)
                begin = finished


# ---- words ---------------------------------------------------------------------------------------


def to_json(result: SideBySide) -> dict[str, Any]:
    return {
        "plan": result.plan.name,
        "node": result.node,
        "positions": result.positions,
        "measured_step_us": result.measured_step_us,
        "simulated_step_us": result.simulated_step_us,
        "difference": result.difference,
        "stages": [
            {name: getattr(row, name) for name in (*StageTimes.__slots__, "difference")}
            for row in result.stages
        ],
        "conditions": result.conditions,
    }


def text(result: SideBySide) -> str:
    """One row a kind of stage, us a stage; then the whole step."""
    head = (
        "stage",
        "count",
        "wait",
        "simulated",
        "work",
        "simulated",
        "span",
        "simulated",
        "difference",
    )
    rows: list[tuple[object, ...]] = []
    for row in result.stages:
        wait, work = (
            (row.measured_wait_us, row.simulated_wait_us),
            (row.measured_work_us, row.simulated_work_us),
        )
        times = (*wait, *work, row.measured_span_us, row.simulated_span_us)
        difference = None if row.difference is None else percent(row.difference, signed=True)
        rows.append((row.kind, row.stages, *(f"{us:.2f}" for us in times), difference))
    whole = (
        f"{result.measured_step_us:.1f}",
        f"{result.simulated_step_us:.1f}",
        percent(result.difference, signed=True),
    )
    rows.append(("step", 1, None, None, None, None, *whole))
    low, high = result.positions
    title = (
        f"{result.plan.name}: measured steps at {low}-{high} positions, simulated on {result.node} "
        f"at {result.plan.options.context}"
    )
    return (
        f"{title}\nus a stage, median of the steps; wait and work: mean of all blocks; spans add "
        f"up to the step\n\n{table(head, rows)}"
    )
