"""Compare the twin's predictions with engine runs that no number was fitted to."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from twin.calibrate import store
from twin.calibrate.compared import Compared, Errors
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.fitted import fit_of
from twin.calibrate.heldout import HeldOut
from twin.calibrate.kernel_id import is_superseded
from twin.calibrate.node import calibrated_node
from twin.calibrate.simulated import Simulated, simulated
from twin.errors import CalibrationError
from twin.hardware.types import Node

__all__ = ["Compared", "StageCompared", "Validation", "calibrated_node", "compare"]


@dataclass(frozen=True, slots=True)
class StageCompared:
    """One kind of stage of a traced run, all layers together."""

    run: str
    stage: str
    predicted_s: float
    measured_s: float
    wait_s: float  # measured, mean over blocks
    work_s: float

    @property
    def error(self) -> float:
        """Relative, positive when the prediction is too slow."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, slots=True)
class Validation(Errors):
    node: str
    fit: str  # the probing run behind the fit
    runs: tuple[Compared, ...]
    stages: tuple[StageCompared, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()  # runs that the engine could not do, and why
    busy: str | None = None  # why no error can be told: something else used the computer

    @property
    def every(self) -> Sequence[float]:
        return [run.error for run in self.runs]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "name": r.name,
                "blocks": r.blocks,
                "predicted_tokens_per_s": r.predicted_tokens_per_s,
                "measured_tokens_per_s": r.measured_tokens_per_s,
                "error": r.error,
                "measured_spread": r.spread,
            }
            for r in self.runs
        ]
        stages = [
            {
                "run": s.run,
                "stage": s.stage,
                "predicted_s": s.predicted_s,
                "measured_s": s.measured_s,
                "error": s.error,
                "measured_wait_s": s.wait_s,
                "measured_work_s": s.work_s,
            }
            for s in self.stages
        ]
        return {
            "node": self.node,
            "fit": self.fit,
            "runs": rows,
            "stages": stages,
            "failed": dict(self.failed),
            "busy": self.busy,
            "median_abs_error": None if self.busy else self.median,
            "worst_abs_error": None if self.busy else abs(self.worst),
        }


def compare(node: Node, measured: store.Run, progress: Callable[[str], None]) -> Validation:
    """Predict every run of `measured` from the fit of its node. Raises CalibrationError without a
    fit or without a known run.
    """
    fit = fit_of(node)
    if fit is None:
        raise CalibrationError(f"no fit of {node.name}: run `twin calibrate {node.name}` first")
    device = node.device.name
    runs = [r for r in runs_of(measured, node) if not is_superseded(measured, r, device)]
    if not runs:
        raise CalibrationError(
            f"{measured.folder} holds none of the held-out runs of {node.name}: measure them with "
            f"`twin validate {node.name}`"
        )
    predicted = {}
    for done, (name, guess) in enumerate(_predictions(node.device.name, runs, measured), start=1):
        progress(f"predicting held-out runs: {done}/{len(runs)} {name}")
        predicted[name] = guess
    return Validation(
        node.name,
        fit,
        tuple(_compared(run, predicted[run.name], measured.samples[run.name]) for run in runs),
        tuple(stages_compared(measured.stages, predicted)),
        tuple((measured.meta.get("failed") or {}).items()),
    )


def _compared(run: HeldOut, guess: Simulated, took: Sequence[float]) -> Compared:
    middle = statistics.median(took)
    return Compared(
        run.name, 1 / guess.step_s, 1 / middle, (max(took) - min(took)) / middle, run.options.blocks
    )


def stages_compared(
    measured: Sequence[store.StageTimes], predicted: dict[str, Simulated]
) -> Iterator[StageCompared]:
    for one in measured:
        spans = predicted[one.run].spans_s if one.run in predicted else {}
        if one.stage in spans and one.span_s:  # what the keeper makes has no span of its own
            yield StageCompared(
                one.run, one.stage, spans[one.stage], one.span_s, one.wait_s, one.work_s
            )


def _predictions(
    device: str, runs: Sequence[HeldOut], measured: store.Run
) -> Iterator[tuple[str, Simulated]]:
    """Every run's name and prediction, on all cores."""
    traced = {one.run for one in measured.stages}
    work = [(device, run, run.name in traced) for run in runs]
    workers = min(len(work), len(os.sched_getaffinity(0)))
    if workers <= 1:
        yield from ((one[1].name, _predict(one)) for one in work)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from zip((run.name for run in runs), pool.map(_predict, work), strict=True)


def _predict(work: tuple[str, HeldOut, bool]) -> Simulated:
    device, run, traced = work
    plan, node = run.plan(device), calibrated_node(f"{run.options.gpus}x{device}")
    return simulated(plan, node, stages=traced)
