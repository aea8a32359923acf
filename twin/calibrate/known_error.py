"""How far a fit was from engine runs that it never saw, shapes that a seed drew among them: kept by
`twin validate`, shown by `twin simulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.experiment import Errors
from twin.calibrate.fitted import fit_of, numbers_of
from twin.calibrate.node import fits_of
from twin.calibrate.seen import (
    LEVELS,
    Seen,
    both,
    bytes_of,
    levels_at,
    mirrored,
    rows,
    shape_of,
    usual,
)
from twin.frozen import frozen
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.spec import ModelSpec

if TYPE_CHECKING:  # who asks for an error needs neither the engine nor its runs
    from twin.calibrate.experiment import Experiment
    from twin.calibrate.validate import Validation

DRAWN = "drawn"  # what a kept file calls the errors of a seed's shapes
KINDS = "kinds"  # and those of shapes that are not dense, by kind
PUBLIC = "public"  # and those of public models, which studies timed, by kind
STAGES = "stages"  # and those of traced runs' kinds of stages, by run: positive is too slow
SIZES = "sizes"  # and each shape's bytes a step and GPU, by record
# runs of a kind, or of a node of several devices, from which its interval is of their own errors
FEWEST = 8
# of a kind, below which it is of the errors of all kinds but dense ones, and of their mirror
# images: so few runs do not say which way the next model is off
MANY = 64


@frozen
class KnownError(Errors):
    """Errors of the predicted speed of held-out runs, positive where the twin is too fast."""

    node: str  # that was fitted and ran
    fit: str  # the probing run behind the fit
    record: str  # the engine runs
    errors: Mapping[str, float]
    # by record, of shapes that a seed drew
    drawn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kind: ModelKind = ModelKind.DENSE  # of the models that ran
    # what the interval is of: runs about as large as a model of `size` bytes a step and GPU
    seen: tuple[Seen, ...] = ()
    size: float = 0.0  # of no model in particular: all runs count alike
    # dense runs of several GPUs, where `seen` are of one: their errors come on top
    links: tuple[Seen, ...] = ()

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

    def interval(self, speed: float) -> tuple[float, float]:
        """LEVELS of a predicted speed, if it is as wrong as the held-out runs were."""
        if self.seen and self.size:
            low, high = levels_at(self.seen, self.size)
            if self.links:
                low, high = both((low, high), levels_at(self.links, self.size))
        else:
            low, high = levels(self.every)
        return speed * low, speed * high


def levels(errors: Sequence[float]) -> tuple[float, float]:
    """LEVELS of the runs' speeds over their predictions, which lie between them."""
    low, high = np.quantile([1 / (1 + error) for error in errors], LEVELS)
    return min(float(low), 1.0), max(float(high), 1.0)


def keep(node: Node, found: Validation, record: store.Run) -> None:
    """Stores what a validation found, for the fit that is in force. Drawn shapes of the same fit
    stay.
    """
    before = _of_fit(node, node.name) or {}
    errors = {run.name: _rounded(run.error) for run in found.runs}
    about = _about(node, record.id, errors)
    about |= {name: before[name] for name in (DRAWN, KINDS, PUBLIC, SIZES) if name in before}
    # slow to load, and who asks for an error does not need it
    from twin.calibrate.recorded import recorded

    stages: dict[str, dict[str, float]] = {}
    for one in found.stages:
        stages.setdefault(one.run, {})[one.stage] = _rounded(one.error)
    about |= {STAGES: stages} if stages else {}
    sizes = sizes_of(node, recorded(record.folder, record.meta) or ())
    store.write_held_out(node.name, _with_sizes(about, record.id, sizes))


def sizes_of(node: Node, runs: Iterable[Experiment]) -> dict[str, float]:
    """Bytes a step and GPU of each shape that ran."""
    return {shape_of(run.name): float(round(bytes_of(run.spec, node))) for run in runs}


def _with_sizes(kept: dict[str, Any], record: str, sizes: Mapping[str, float]) -> dict[str, Any]:
    return {**kept, SIZES: {**kept.get(SIZES, {}), record: dict(sizes)}} if sizes else kept


def _about(node: Node, record: str, errors: Mapping[str, float]) -> dict[str, Any]:
    """What a kept file begins with."""
    fit = fit_of(node)
    assert fit is not None
    return {
        "node": node.name,
        "fit": fit,
        "numbers": numbers_of(node),
        "record": record,
        "errors": dict(errors),
    }


def keep_drawn(
    node: Node,
    record: str,
    errors: Mapping[str, float],
    kind: ModelKind = ModelKind.DENSE,
    sizes: Mapping[str, float] | None = None,
) -> None:
    """Stores how far the fit in force is from a seed's shapes, and the `sizes_of` these, together
    with its held-out runs; nothing where none of these are on file. Those of several devices need
    none.
    """
    kept = _of_fit(node, node.name)
    if not kept and node.gpus > 1:
        kept = _about(node, "", {})
    if not kept:
        return
    rounded = {name: _rounded(error) for name, error in errors.items()}
    if kind is ModelKind.DENSE:
        about = {DRAWN: {**kept.get(DRAWN, {}), record: rounded}}
    else:
        kinds = kept.get(KINDS, {})
        about = {KINDS: {**kinds, kind.value: {**kinds.get(kind.value, {}), record: rounded}}}
    store.write_held_out(node.name, _with_sizes({**kept, **about}, record, sizes or {}))


def keep_public(
    node: Node,
    record: str,
    errors: Mapping[str, float],
    sizes: Mapping[str, float],
    kind: ModelKind = ModelKind.DENSE,
) -> None:
    """Stores how far the fit in force is from public models that a study timed; nothing where no
    held-out runs are on file.
    """
    kept = _of_fit(node, node.name)
    if not kept:
        return
    found = kept.get(PUBLIC, {})
    rounded = {name: _rounded(error) for name, error in errors.items()}
    own = {**found.get(kind.value, {}), record: rounded}
    about = {**kept, PUBLIC: {**found, kind.value: own}}
    store.write_held_out(node.name, _with_sizes(about, record, sizes))


def _rounded(error: float) -> float:
    return round(error, 6)


def _of_fit(node: Node, name: str) -> dict[str, Any] | None:
    """What is kept of the node `name`, this one or one whose fit holds for it, if it is of the fits
    in force.
    """
    kept = store.read_held_out(name)
    if not kept:
        return None
    numbers = numbers_of(node if name == node.name else load_node(name))
    return kept if numbers and kept.get("numbers") == numbers else None


def known_error(node: Node, spec: ModelSpec | None = None) -> KnownError | None:
    """A node's own held-out runs, else those of another number of its devices; None without any, or
    where the fit is another. A node of several devices needs FEWEST runs of its own. No other
    device's: nobody knows how wrong its numbers are here.

    `spec`: of a model's kind, once FEWEST runs of that kind are on file, be they of this node or of
    one device, else of dense models; and its interval is of runs about as large.
    """
    kind = kind_of(spec) if spec else ModelKind.DENSE
    size = bytes_of(spec, node) if spec else 0.0
    device = node.device.name
    names = [name for name in (node.name, *reversed(fits_of(node))) if _device(name) == device]
    found = [kept for name in dict.fromkeys(names) if (kept := _of_fit(node, name))]
    for kept in found:
        kinds = {name: _drawn(records) for name, records in kept.get(KINDS, {}).items()}
        own = kinds.get(kind.value, {})
        if (count := sum(map(len, own.values()))) >= FEWEST:
            seen = _seen(kept, (kind,) if count >= MANY else tuple(map(ModelKind, kinds)))
            known = KnownError(*_head(kept), {}, own, kind)
            if node.gpus > 1 and not _several(kept):
                known = replace(known, links=tuple(mirrored(_of_several(found))))
            return _sized(known, node, seen, size, few=count < MANY)
    for kept in found:
        dense = KnownError(*_head(kept), _numbers(kept["errors"]), _drawn(kept.get(DRAWN, {})))
        one_device = store.name_of(dense.node) == device
        if dense.errors if one_device else len(dense.every) >= FEWEST:
            seen = _of_dense(kept)
            few = node.gpus > 1 and (len(seen) < MANY or dense.node != node.name)
            if few:  # those of other numbers of GPUs, too
                seen = _of_several(found) or seen
            return _sized(dense, node, seen, size, few=few)
    return None


def seen_on(node: Node, kind: ModelKind) -> list[Seen]:
    """A node's own runs of a kind by the fits in force, of those with the default hand-off."""
    kept = _of_fit(node, node.name)
    return _seen(kept, (kind,)) if kept else []


def stage_levels(node: Node) -> dict[str, tuple[float, float]]:
    """By kind of stage: between which shares of the predicted time eight of ten took, of the
    node's own traced runs; empty without any.
    """
    kept = _of_fit(node, node.name) or {}
    runs: dict[str, list[Seen]] = {}
    for run, stages in kept.get(STAGES, {}).items():
        for stage, error in _numbers(stages).items():
            # models of several runs err together
            name = str(run).partition("-")[0]
            runs.setdefault(stage, []).append(Seen(name, run, error, 1.0))
    return {stage: levels_at(found, 1.0) for stage, found in runs.items()}


def _device(name: str) -> str:
    """Of a node's name."""
    return name.split("x", 1)[1]


def _of_dense(kept: Mapping[str, Any]) -> list[Seen]:
    return _seen(kept, (ModelKind.DENSE,))


def _of_several(found: Sequence[Mapping[str, Any]]) -> list[Seen]:
    """Dense runs of several GPUs, of all their numbers on file."""
    return [run for one in found if _several(one) for run in _of_dense(one)]


def _several(kept: Mapping[str, Any]) -> bool:
    return not str(kept["node"]).startswith("1x")


def _sized(
    known: KnownError, node: Node, seen: Sequence[Seen], size: float, *, few: bool
) -> KnownError:
    """With the runs of its interval; `few` of them, or of another number of GPUs, do not say which
    way the next is off.
    """
    return replace(known, seen=tuple(mirrored(seen) if few else seen), size=size)


def _seen(kept: Mapping[str, Any], kinds: Sequence[ModelKind]) -> list[Seen]:
    """Runs of some kinds with the default hand-off, whose sizes are on file."""
    sizes = {record: _numbers(found) for record, found in kept.get(SIZES, {}).items()}
    found: list[Seen] = []
    for kind in kinds:
        drawn = (
            kept.get(DRAWN, {})
            if kind is ModelKind.DENSE
            else kept.get(KINDS, {}).get(kind.value, {})
        )
        own = {str(kept["record"]): kept["errors"]} if kind is ModelKind.DENSE else {}
        for record, errors in _drawn({**own, **drawn}).items():
            found += rows(record, errors, sizes.get(record, {}))
        for record, errors in _drawn(kept.get(PUBLIC, {}).get(kind.value, {})).items():
            found += rows(record, errors, sizes.get(record, {}), public=True)
    return usual(found)


def kept_records(node: Node) -> list[tuple[str, ModelKind, dict[str, float]]]:
    """Every record of a node's held-out runs with its kind and errors, by the fits in force; empty
    where none is kept, or of other fits.
    """
    kept = _of_fit(node, node.name)
    if kept is None:
        return []
    found = [(str(kept["record"]), ModelKind.DENSE, _numbers(kept["errors"]))]
    kinds = {ModelKind.DENSE.value: kept.get(DRAWN, {}), **kept.get(KINDS, {})}
    for kind, drawn in kinds.items():
        found += [(record, ModelKind(kind), errors) for record, errors in _drawn(drawn).items()]
    return [one for one in found if one[2]]


def _head(kept: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(kept["node"]), str(kept["fit"]), str(kept["record"])


def _drawn(kept: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {str(record): _numbers(errors) for record, errors in kept.items()}


def _numbers(errors: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(error) for name, error in errors.items()}
