"""How far a fit was from engine runs that it never saw, shapes that a seed drew among them: kept by
`twin validate`, shown by `twin simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.experiment import Errors
from twin.calibrate.fitted import fit_of, numbers_of
from twin.calibrate.node import fits_of
from twin.calibrate.seen import (
    LEVELS,
    Evidence,
    Features,
    Seen,
    features_of,
    levels_of,
)
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.load import load_node
from twin.hardware.types import HOST, Node
from twin.models.kind import ModelKind, kind_of
from twin.models.spec import ModelSpec
from twin.plan.options import Options

if TYPE_CHECKING:  # who asks for an error needs neither the engine nor its runs
    from twin.calibrate.experiment import Experiment
    from twin.calibrate.validate import Validation

STAGES = "stages"  # errors of traced runs' kinds of stages, by run: positive is too slow
# runs of a kind, or of a node of several devices, from which its errors are stated for its own
FEWEST = 8
Chosen = Mapping[str, Any] | Options  # values of Options fields
DIGITS = 6  # of an error
US = 1e-6
PUBLIC, SEPARATOR = "yes", "; "  # in a table of runs
FEATURES = ("kind", "handoff", "parts", "layers", "context", "tokens")  # its columns of them


@frozen
class KnownError(Errors):
    """Errors of the predicted speed of held-out runs, positive where the twin is too fast."""

    node: str  # that was fitted and ran
    fit: str  # the probing run behind the fit
    record: str  # the engine runs
    errors: Mapping[str, float]
    # by record, of shapes that a seed drew
    drawn: Mapping[str, Mapping[str, float]]
    kind: ModelKind = ModelKind.DENSE  # of the models that ran
    evidence: Evidence | None = None  # what the interval is of
    about: Features | None = None  # of the prediction; None: of no model in particular

    @property
    def every(self) -> list[float]:
        """Of all runs, drawn shapes included."""
        found = list(self.errors.values())
        for errors in self.drawn.values():
            found += errors.values()
        return found

    @property
    def records(self) -> tuple[str, ...]:
        return (*([self.record] if self.errors else []), *self.drawn)

    @property
    def unseen(self) -> list[str]:
        """What of the prediction never ran."""
        return self.evidence.unseen(self.about) if self.evidence and self.about else []

    def interval(self, speed: float) -> tuple[float, float]:
        """LEVELS of a predicted speed in tokens/s, if it is as wrong as the held-out runs alike."""
        if self.about is None or self.evidence is None:
            low, high = levels(self.every)
        else:
            layer_s = 1 / speed / self.about.layers
            low, high = self.evidence.levels(self.about, layer_s)
        return speed * low, speed * high


def levels(errors: Sequence[float]) -> tuple[float, float]:
    """LEVELS of the runs' speeds over their predictions, which lie between them."""
    low, high = np.quantile([1 / (1 + error) for error in errors], LEVELS)
    return min(float(low), 1.0), max(float(high), 1.0)


@frozen
class Kept:
    """What is on file of a node's held-out runs, by the fits in force."""

    node: str
    fit: str
    record: str  # of the runs that `twin validate` makes
    stages: Mapping[str, Mapping[str, float]]
    runs: tuple[Seen, ...]

    def of(self, kind: ModelKind, *, drawn: bool) -> dict[str, dict[str, float]]:
        """By record, errors of the runs of a kind; public models are nobody's draw."""
        found: dict[str, dict[str, float]] = {}
        for run in self.runs:
            own = (run.record != self.record) is drawn and not run.public
            if own and run.features.kind is kind:
                found.setdefault(run.record, {})[run.name] = run.error
        return found

    def known(self, kind: ModelKind) -> KnownError:
        errors = self.of(kind, drawn=False).get(self.record, {})
        drawn = self.of(kind, drawn=True)
        return KnownError(self.node, self.fit, self.record, errors, drawn, kind)


def keep(node: Node, found: Validation, record: store.Run) -> None:
    """Stores what a validation found, for the fit that is in force. Drawn shapes of the same fit
    stay.
    """
    before = _of_fit(node)
    runs = [seen(node, record.id, run, run.error) for run in found.runs]
    stages: dict[str, dict[str, float]] = {}
    for one in found.stages:
        stages.setdefault(one.run, {})[one.stage] = round(one.error, DIGITS)
    others = [run for run in before.runs if run.record != before.record] if before else []
    _write(node, record.id, stages, [*runs, *others])


def keep_runs(node: Node, runs: Sequence[Seen]) -> None:
    """Stores how far the fit in force is from other runs, in place of those of the same records;
    nothing where no held-out runs are on file. Those of several devices need none.
    """
    before = _of_fit(node)
    if before is None and node.gpus == 1:
        return
    records = {run.record for run in runs}
    others = [run for run in before.runs if run.record not in records] if before else []
    record, stages = (before.record, before.stages) if before else ("", {})
    _write(node, record, stages, [*others, *runs])


def seen(node: Node, record: str, run: Experiment, error: float) -> Seen:
    """A run that was measured, and the error of its speed by the fit in force."""
    layer_s = run.measured_s / (1 + error) / run.spec.layers
    return Seen(record, run.name, error, layer_s, features_of(node, run.spec, run.options))


def _write(
    node: Node, record: str, stages: Mapping[str, Mapping[str, float]], runs: Sequence[Seen]
) -> None:
    fit = fit_of(node)
    assert fit is not None
    about: dict[str, Any] = {
        "node": node.name,
        "fit": fit,
        "numbers": numbers_of(node),
        "record": record,
    }
    about |= {STAGES: stages} if stages else {}
    store.write_held_out(node.name, about, [_row(run) for run in runs])


def _row(run: Seen) -> dict[str, str]:
    about = run.features
    return {
        "record": run.record,
        "run": run.name,
        "public": PUBLIC if run.public else "",
        "kind": about.kind.value,
        "handoff": about.handoff,
        "parts": SEPARATOR.join(about.parts),
        "layers": str(about.layers),
        "context": str(about.context),
        "tokens": str(about.tokens),
        "layer_us": f"{run.layer_s / US:.4g}",
        "error": f"{run.error:.{DIGITS}f}",
    }


def _of_row(row: Mapping[str, str], device: str, gpus: int) -> Seen:
    about = _features(device, gpus, *map(row.__getitem__, FEATURES))
    public = row["public"] == PUBLIC
    layer_s = float(row["layer_us"]) * US
    return Seen(row["record"], row["run"], float(row["error"]), layer_s, about, public)


# runs of a model differ in their records: half of all rows are like others
@lru_cache(maxsize=4096)
def _features(
    device: str,
    gpus: int,
    kind: str,
    handoff: str,
    parts: str,
    layers: str,
    context: str,
    tokens: str,
) -> Features:
    return Features(
        device,
        gpus,
        ModelKind(kind),
        handoff,
        tuple(parts.split(SEPARATOR)),
        int(layers),
        int(context),
        int(tokens),
    )


def _of_fit(node: Node) -> Kept | None:
    """What is kept of a node, if it is of the fits in force."""
    file, numbers = store.held_out_of(node.name), numbers_of(node)
    if file is None or not numbers:
        return None
    state = (store.state_of(file), store.state_of(file.with_suffix(".csv")))
    return _read(file, state, node.device.name, node.gpus, numbers)


@lru_cache(maxsize=32)
def _read(file: Path, state: Any, device: str, gpus: int, numbers: str) -> Kept | None:
    """The content of a node's files in a state, which every prediction reads."""
    about, rows = store.read_held_out(file)
    if about.get("numbers") != numbers:
        return None
    with store.damaged(file):
        runs = tuple(_of_row(row, device, gpus) for row in rows)
        stages = about.get(STAGES, {})
        return Kept(about["node"], about["fit"], about["record"], stages, runs)


def known_error(
    node: Node, spec: ModelSpec | None = None, chosen: Chosen | None = None
) -> KnownError | None:
    """A node's own held-out runs, else those of another number of its devices; None without any, or
    where the fit is another. A node of several devices needs FEWEST runs of its own. No other
    device's: nobody knows how wrong its numbers are here.

    `spec`: of a model's kind, once FEWEST runs of that kind are on file, be they of this node or of
    one device, else of dense models; and its interval is of runs alike, with the options `chosen`
    as in `features_of`.
    """
    kind = kind_of(spec) if spec else ModelKind.DENSE
    device = node.device.name
    names = [name for name in (node.name, *reversed(fits_of(node))) if _device(name) == device]
    nodes = [node if name == node.name else load_node(name) for name in dict.fromkeys(names)]
    found = [kept for one in nodes if (kept := _of_fit(one))]
    known = _stated(found, kind, device) or _stated(found, ModelKind.DENSE, device)
    if known is None or spec is None:
        return known
    about = features_of(node, spec, chosen or Options())
    return replace(known, evidence=evidence(host=node.device.isa == HOST), about=about)


def _stated(found: Sequence[Kept], kind: ModelKind, device: str) -> KnownError | None:
    """Of the first node with enough runs of a kind."""
    for kept in found:
        known = kept.known(kind)
        one_device = store.name_of(kept.node) == device and kind is ModelKind.DENSE
        if known.errors if one_device else len(known.every) >= FEWEST:
            return known
    return None


def first_error(node: Node, spec: ModelSpec, chosen: Chosen) -> float:
    """What comes on top of an interval from ranges of numbers: the error of what is new about a
    prediction, as `Evidence.new` says.
    """
    return evidence(host=node.device.isa == HOST).new(features_of(node, spec, chosen))


def evidence(*, host: bool = False) -> Evidence:
    """Held-out runs of all nodes, of GPUs or of computers, by the fits in force."""
    return _evidence(store.version(), host)


@lru_cache(maxsize=4)
def _evidence(version: Any, host: bool) -> Evidence:
    found: list[Seen] = []
    for name in store.held_out_names():
        try:
            node = load_node(name)
        except HardwareError:  # a user's node that has gone
            continue
        if (node.device.isa == HOST) is host and (kept := _of_fit(node)):
            found += kept.runs
    return Evidence(found)


def stage_levels(node: Node) -> dict[str, tuple[float, float]]:
    """By kind of stage: between which shares of the predicted time eight of ten took, of the
    node's own traced runs; empty without any.
    """
    kept = _of_fit(node)
    runs: dict[str, list[tuple[str, float]]] = {}
    for run, stages in kept.stages.items() if kept else ():
        for stage, error in stages.items():
            # models of several runs err together
            runs.setdefault(stage, []).append((run.partition("-")[0], 1 / (1 + error)))
    return {
        stage: levels_of([factor for _, factor in found], [name for name, _ in found])
        for stage, found in runs.items()
    }


def _device(name: str) -> str:
    """Of a node's name."""
    return name.split("x", 1)[1]


def kept_records(node: Node) -> list[tuple[str, ModelKind, dict[str, float]]]:
    """Every record of a node's held-out runs with its kind and errors, by the fits in force; empty
    where none is kept, or of other fits.
    """
    kept = _of_fit(node)
    if kept is None:
        return []
    found = []
    for kind in ModelKind:
        own = kept.of(kind, drawn=False) | kept.of(kind, drawn=True)
        found += [(record, kind, errors) for record, errors in own.items()]
    return found
