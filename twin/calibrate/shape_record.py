"""A seed's shapes on disk: what the twin said before the first of them ran, then what the engine
did.

The folder is calibration/runs/NODE/shapes-N-seed-S, with its kind behind it where that is not
dense. predictions.json is written once and never again; samples are added run by run, so that
whoever stops goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from twin.calibrate import store
from twin.calibrate.drawn import drawn_runs
from twin.calibrate.experiment import Experiment, Runs
from twin.calibrate.fitted import moved_by, numbers_of
from twin.calibrate.kernel_id import is_superseded, kernel_id
from twin.calibrate.known_error import keep_runs, known_error, seen
from twin.calibrate.measure import Progress, require
from twin.calibrate.node import calibrated_node, fits_of
from twin.calibrate.packed import unpacked
from twin.calibrate.recipe import recipe_of
from twin.calibrate.recorded import RUNS, measured, recorded, written
from twin.calibrate.tracing import SEED, WARMUP_TOKENS, prompt_of
from twin.engine.choose import compiled_in_turn, open_random
from twin.errors import CalibrationError, ConfigError, EngineError, InvalidPlan, TwinError
from twin.files import MOST_RECORD_BYTES, read_json, write
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of, stored_as
from twin.schedule.choose import schedule_of
from twin.text import shown
from twin.workers import each

PREDICTIONS = "predictions.json"
COMPILED_TOGETHER = 96  # runs whose plans the compilers are given at once


@dataclass(frozen=True, slots=True)
class Record:
    """What a seed drew, what the twin predicted of it, and what was measured so far."""

    folder: Path
    node: str
    fit: str  # the probing run behind the fit, or why there is none
    date: str  # of the predictions
    runs: tuple[Experiment, ...]
    failed: Mapping[str, str]  # what did not run, and why

    @property
    def kind(self) -> ModelKind:
        """Of all its models."""
        return kind_of(self.runs[0].spec)

    @property
    def has_intervals(self) -> bool:
        """Were held-out errors of the fit on file when it was predicted?"""
        return any(run.p10 is not None for run in self.runs)

    @property
    def measured(self) -> Runs:
        return Runs(tuple(run for run in self.runs if run.samples))

    @property
    def left(self) -> list[Experiment]:
        """Runs that neither have samples nor failed."""
        return [run for run in self.runs if not run.samples and run.name not in self.failed]


def folder_of(node: Node, count: int, seed: int, kind: ModelKind = ModelKind.DENSE) -> Path:
    name = f"shapes-{count}-seed-{seed}"
    return store.runs_folder(node.name) / (
        name if kind is ModelKind.DENSE else f"{name}-{kind.value}"
    )


def opened(
    node: Node,
    count: int,
    seed: int,
    folder: Path,
    progress: Progress,
    kind: ModelKind = ModelKind.DENSE,
) -> Record:
    """The record in `folder`; without one, draws the shapes, predicts all of them and writes it."""
    if not folder.is_dir() and unpacked(folder).is_dir():
        raise CalibrationError(
            f"{folder}: was measured on an older kernel and is packed; take another seed"
        )
    file = folder / PREDICTIONS
    if not file.exists():
        if (folder / "samples.csv").exists():
            raise CalibrationError(
                f"{folder}: has samples and no {PREDICTIONS}, so nobody knows what was predicted "
                "before; take another seed"
            )
        predict(
            node,
            drawn_runs(node, count, seed, progress, kind=kind),
            {"shapes": count, "seed": seed, "kind": kind.value},
            file,
            progress,
        )
    return read(node, folder)


def predict(
    node: Node, runs: Sequence[Experiment], about: Mapping[str, Any], file: Path, progress: Progress
) -> None:
    """Simulates every run by the fits in force, and writes what it says."""
    from twin.sim.run import simulate  # a machine that only measures has no simulator

    known, said = None, {}
    for done, run in enumerate(runs, start=1):
        progress(f"predicting {node.name}: {done}/{len(runs)} {run.name}")
        speed = simulate(run.plan(node.device.name), calibrated_node(node.name)).tokens_per_s
        known = known_error(node, run.spec, run.options)
        low, high = known.interval(speed) if known else (None, None)
        said[run.name] = {"tokens_per_s": speed, "p10": low, "p90": high}
    why = (
        f"held-out errors of {known.fit} ({', '.join(known.records)}), of {known.kind.value} models"
        f"{'' if known.node == node.name else f' on {known.node}'}"
        if known
        else "none: no held-out runs of this fit are on file"
    )
    text = {
        "node": node.name,
        **about,
        "date": store.conditions()["date"],
        "commit": store.conditions()["commit"],
        "fit": _fit_of(node),
        "interval": why,
        "predicted": said,
        RUNS: {run.name: written(run) for run in runs},
    }
    write({file: json.dumps(text, indent=1) + "\n"})


def _fit_of(node: Node) -> dict[str, str]:
    """The last fit that holds for a node: its probing run, and a digest of its numbers."""
    for name in reversed(fits_of(node)):
        if found := store.read_fit(name):
            return {
                "of": name,
                "run": str(found[1].get("run")),
                "numbers": numbers_of(node),
            }
    return {"of": "", "run": "no fit: numbers on file", "numbers": ""}


def read(node: Node, folder: Path) -> Record:
    """Raises CalibrationError for a file that holds no predictions of this node."""
    here = unpacked(folder)
    file = here / PREDICTIONS
    try:
        text = read_json(file, MOST_RECORD_BYTES)
        runs = [
            replace(
                run,
                predicted_tokens_per_s=float(stated["tokens_per_s"]),
                p10=_level(stated["p10"]),
                p90=_level(stated["p90"]),
            )
            for run in recorded(folder, text) or ()
            for stated in [text["predicted"][run.name]]
        ]
        named = len(text["predicted"])
        of, fit, date = str(text["node"]), str(text["fit"]["run"]), str(text["date"])
    except (ConfigError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(
            f"{file}: holds no predictions ({shown(str(error))}); move it away, or take another "
            "seed"
        ) from error
    if of != node.name or not runs or len(runs) != named:
        raise CalibrationError(
            f"{file}: was made for {of} or is not whole; name that node, or take another seed"
        )
    failed: Mapping[str, str] = {}
    if (here / store.SAMPLES).exists():
        kept = store.read_run(folder)
        found = {run.name: run for run in measured(runs, kept)}
        runs = [found.get(run.name, run) for run in runs]
        failed = dict(kept.meta.get("failed") or {})
    return Record(folder, of, fit, date, tuple(runs), failed)


def _level(value: Any) -> float | None:
    return None if value is None else float(value)


def measure(node: Node, record: Record, progress: Progress) -> Record:
    """Times every run of the record that has no samples yet; keeps them after each run."""
    device = node.device
    recipe = recipe_of(device)
    require(device, node.gpus)
    samples = {run.name: list(run.samples) for run in record.measured.runs}
    failed, left = dict(record.failed), record.left
    schedules: dict[str, str] = {}
    meta: dict[str, Any] = {
        **store.conditions(),
        **recipe.conditions(),
        store.KERNEL_ID: kernel_id(device),
        store.SCHEDULES: schedules,
        "node": node.name,
        "what": "shapes that a seed drew",
        "predicted": record.date,
        "failed": failed,
        RUNS: {run.name: written(run) for run in record.runs},
    }
    for first in range(0, len(left), COMPILED_TOGETHER):
        batch = left[first : first + COMPILED_TOGETHER]
        plans = [run.plan(device.name) for run in batch]
        compiled = compiled_in_turn(device, plans, progress)
        for at, (run, plan, refused) in enumerate(zip(batch, plans, compiled, strict=True)):
            progress(f"measuring {node.name}: {first + at + 1}/{len(left)} {run.name}")
            schedules[run.name] = schedule_of(plan).id
            if refused:
                failed[run.name] = refused
            else:
                try:
                    samples[run.name] = timed(node, run, plan)
                except TwinError as error:
                    failed[run.name] = str(error)
            store.save_run(record.folder, meta, samples)
    return read(node, record.folder)


def timed(node: Node, run: Experiment, plan: Any) -> list[float]:
    """Of a step, of each repeat; the engine holds one model at a time. Raises EngineError where
    repeats give different tokens.
    """
    took, said = [], []
    # only what follows a prompt is timed: reading it once is enough, as other kinds were measured
    reuse = kind_of(run.spec) is not ModelKind.DENSE
    with open_random(node.device, plan, SEED) as engine:
        for _ in range(run.repeats):
            made = engine.generate(
                prompt_of(run), max_tokens=run.tokens + WARMUP_TOKENS, reuse=reuse
            )
            if made.stop_reason == "cancelled":
                raise KeyboardInterrupt
            said.append(made.tokens)
            if said[0] != made.tokens:
                raise EngineError(f"{run.name}: two repeats gave different tokens; report this")
            took.append(recipe_of(node.device).read(made.step_ns[WARMUP_TOKENS:] * 1e-9))
    return took


def keep_errors(node: Node, record: Record, progress: Progress) -> None:
    """How far the fit in force is from the record's runs, kept next to its held-out ones; nothing
    without these, or while runs are left. The predictions on file may be of another fit or of other
    laws. Runs whose plan the kernel refuses are left out: one that needed less memory made them. So
    are those of older kernels; of a record that moved the fit's numbers, errors are those by what
    the other records give.
    """
    if record.left:
        return
    ran = [run for run in record.measured.runs if not is_superseded(run, node.device.name)]
    name = record.folder.name
    if moved := moved_by(node).get(name):
        keep_runs(
            node, [seen(node, name, run, moved[run.name]) for run in ran if run.name in moved]
        )
        return
    if known_error(node) is None:
        return
    found = []
    speeds = each(_speed, [(node.name, run) for run in ran])
    for done, (run, speed) in enumerate(zip(ran, speeds, strict=True), start=1):
        progress(f"predicting by the fit in force: {done}/{len(ran)} {run.name}")
        if speed is not None:
            found.append(seen(node, name, run, speed * run.measured_s - 1))
    keep_runs(node, found)


def _speed(work: tuple[str, Experiment]) -> float | None:
    """Predicted tokens/s; None where the kernel refuses the plan."""
    from twin.sim.run import simulate  # a machine that only measures has no simulator

    name, run = work
    node = calibrated_node(name)
    try:
        plan = run.plan(node.device.name)
    except InvalidPlan:
        return None
    return simulate(plan, node).tokens_per_s


def groups(record: Record) -> dict[str, list[Experiment]]:
    """Its runs, by what is distinguished among models of their kind: the stored format, of experts
    the family too, of dense ones nothing; on several devices their hand-off and lanes.
    """
    found: dict[str, list[Experiment]] = {}
    for run in record.runs:
        if record.kind is ModelKind.DENSE:
            several = f"{run.options.handoff.value}{', lanes' if run.spec.lanes else ''}"
            label = several if run.options.gpus > 1 else record.kind.value
        elif record.kind is ModelKind.EXPERTS:
            label = f"{run.spec.family} {stored_as(run.spec)}"
        else:
            label = stored_as(run.spec)
        found.setdefault(label, []).append(run)
    return dict(sorted(found.items()))
