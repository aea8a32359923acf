"""Run what no number is fitted to on a device of this computer. Needs no simulator."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from twin.calibrate import store
from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import held_out
from twin.calibrate.kernel_id import kernel_id
from twin.calibrate.measure import Keep, Progress, require
from twin.calibrate.recipe import recipe_of
from twin.calibrate.recorded import RUNS, measured, recorded, written
from twin.calibrate.tracing import SEED, WARMUP_TOKENS, prompt_of, traced_stages
from twin.engine.choose import compile_all, open_random
from twin.engine.session import Session
from twin.errors import CalibrationError, TwinError
from twin.hardware.types import Node
from twin.schedule.choose import schedule_of


def runs_of(record: store.Run, node: Node) -> list[Experiment]:
    """What a record of engine runs ran and measured: as it says itself, else the node's held-out
    runs of the same names.
    """
    return measured(recorded(record.folder, record.meta) or held_out(node), record)


def measure_held_out(
    node: Node, progress: Progress, keep: Keep, runs: Sequence[Experiment] | None = None
) -> tuple[store.StageTimes, ...]:
    """Quiet seconds of a decoded token of every run, in rounds over all of them; then the stages of
    those that are traced.

    `runs`: the node's held-out ones, if not given. A run that does not compile or fit is left out;
    the meta data say why. Raises CalibrationError when none is left.
    """
    device = node.device
    recipe = recipe_of(device)
    require(device, node.gpus)
    runs = list(runs) if runs is not None else held_out(node)
    plans = {run.name: run.plan(device.name) for run in runs}
    failed: dict[str, str] = {}
    meta: dict[str, Any] = {
        **store.conditions(),
        **recipe.conditions(),
        store.KERNEL_ID: kernel_id(device),
        store.SCHEDULES: {name: schedule_of(plan).id for name, plan in plans.items()},
        "node": node.name,
        "what": "held-out engine runs",
        "failed": failed,
        RUNS: {run.name: written(run) for run in runs},
    }
    refused = compile_all(device, list(plans.values()), progress)
    failed |= {runs[at].name: said for at, said in refused.items()}
    samples: store.Samples = {}
    with ExitStack() as stack:
        engines: dict[str, Session] = {}
        for turn in range(max(run.repeats for run in runs)):
            for done, run in enumerate(runs, start=1):
                if run.name in failed or turn >= run.repeats:
                    continue
                progress(
                    f"held-out runs of {node.name}: round {turn + 1}, {done}/{len(runs)} {run.name}"
                )
                try:
                    if run.name not in engines:
                        engines[run.name] = stack.enter_context(
                            open_random(device, plans[run.name], SEED)
                        )
                    samples.setdefault(run.name, []).append(
                        recipe.read(_step_seconds(run, engines[run.name]))
                    )
                except TwinError as error:
                    failed[run.name] = str(error)
                    samples.pop(run.name, None)
                    progress(f"{run.name} failed: {error}")
            keep(meta, samples)
    if not samples:
        raise CalibrationError(
            f"no held-out run of {device.name} ran; the first one: {next(iter(failed.values()))}"
        )
    traced = [run for run in runs if run.traced and run.name not in failed]
    stages = traced_stages(device, traced, failed, progress)
    keep(meta | {"after": recipe.conditions()}, samples)
    return stages


def _step_seconds(run: Experiment, engine: Session) -> Any:
    made = engine.generate(prompt_of(run), max_tokens=run.tokens + WARMUP_TOKENS)
    if made.stop_reason == "cancelled":
        raise KeyboardInterrupt
    return made.step_ns[WARMUP_TOKENS:] * 1e-9
