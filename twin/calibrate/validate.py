"""Compare the twin's predictions with engine runs that no number was fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from twin.calibrate import store
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.experiment import Experiment, Runs
from twin.calibrate.fitted import fit_of
from twin.calibrate.kernel_id import is_superseded
from twin.calibrate.node import calibrated_node
from twin.calibrate.simulated import Simulated, simulated
from twin.errors import CalibrationError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.workers import each


@frozen
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


@frozen(kw_only=True)
class Validation(Runs):
    """Runs and traced stages by the fit in force."""

    node: str
    fit: str  # the probing run behind the fit
    stages: tuple[StageCompared, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()  # runs that the engine could not do, and why
    busy: str | None = None  # why errors say nothing: something else used the computer

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "name": r.name,
                "blocks": r.options.blocks,
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
    runs = [run for run in runs_of(measured, node) if not is_superseded(run, device)]
    if not runs:
        raise CalibrationError(
            f"{measured.folder} holds none of the held-out runs of {node.name}: measure them with "
            f"`twin validate {node.name}`"
        )
    traced = {one.run for one in measured.stages}
    work = [(device, run, run.name in traced) for run in runs]
    predicted: dict[str, Simulated] = {}
    for run, guess in zip(runs, each(_predict, work), strict=True):
        predicted[run.name] = guess
        progress(f"predicting held-out runs: {len(predicted)}/{len(runs)} {run.name}")
    return Validation(
        runs=tuple(
            replace(run, predicted_tokens_per_s=1 / predicted[run.name].step_s) for run in runs
        ),
        node=node.name,
        fit=fit,
        stages=tuple(stages_compared(measured.stages, predicted)),
        failed=tuple((measured.meta.get("failed") or {}).items()),
    )


def stages_compared(
    measured: Sequence[store.StageTimes], predicted: dict[str, Simulated]
) -> Iterator[StageCompared]:
    for one in measured:
        spans = predicted[one.run].spans_s if one.run in predicted else {}
        if (
            one.stage in spans and one.span_s
        ):  # what the scheduler warp makes has no span of its own
            yield StageCompared(
                one.run, one.stage, spans[one.stage], one.span_s, one.wait_s, one.work_s
            )


def _predict(work: tuple[str, Experiment, bool]) -> Simulated:
    device, run, traced = work
    plan, node = run.plan(device), calibrated_node(f"{run.options.gpus}x{device}")
    return simulated(plan, node, stages=traced)
