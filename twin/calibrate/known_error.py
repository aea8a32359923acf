"""How far a fit was from engine runs that it never saw, shapes that a seed drew among them: kept by
`twin validate`, told by `twin simulate`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.fitted import fit_of, numbers_of
from twin.calibrate.node import fits_of
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.spec import ModelSpec

if TYPE_CHECKING:  # who asks for an error needs neither the engine nor its runs
    from twin.calibrate.validate import Validation

# of the runs' speeds over their predictions: an interval holds eight of ten runs
LEVELS = (0.10, 0.90)
DRAWN = "drawn"  # what a kept file calls the errors of a seed's shapes
KINDS = "kinds"  # and those of shapes that are not dense, by kind
# runs of a kind, or of a node of several devices, from which its interval is of their own errors
FEWEST = 8
# of a kind, below which it is of the errors of all kinds but dense ones, and of their mirror
# images: so few runs do not say which way the next model is off
MANY = 64


@dataclass(frozen=True, slots=True)
class KnownError:
    """Errors of the predicted speed of held-out runs, positive where the twin is too fast."""

    node: str  # that was fitted and ran
    fit: str  # the probing run behind the fit
    record: str  # the engine runs
    errors: Mapping[str, float]
    # by record, of shapes that a seed drew
    drawn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    kind: ModelKind = ModelKind.DENSE  # of the models that ran
    # what the interval is of, where it is not of these errors alone
    spread: tuple[float, ...] = ()

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
    def median(self) -> float:
        return statistics.median(map(abs, self.every))

    @property
    def worst(self) -> float:
        """With its sign."""
        return max(self.every, key=abs)

    def interval(self, speed: float) -> tuple[float, float]:
        """LEVELS of a predicted speed, if it is as wrong as the held-out runs were."""
        low, high = levels(self.spread or self.every)
        return speed * low, speed * high


def levels(errors: Sequence[float]) -> tuple[float, float]:
    """LEVELS of the runs' speeds over their predictions."""
    low, high = np.quantile([1 / (1 + error) for error in errors], LEVELS)
    return float(low), float(high)


def keep(node: Node, found: Validation, record: store.Run) -> None:
    """Stores what a validation found, for the fit that is in force. Drawn shapes of the same fit
    stay.
    """
    before = _of_fit(node, node.name) or {}
    errors = {run.name: _rounded(run.error) for run in found.runs}
    about = _about(node, record.id, errors)
    about |= {name: before[name] for name in (DRAWN, KINDS) if name in before}
    store.write_held_out(node.name, about)


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
    node: Node, record: str, errors: Mapping[str, float], kind: ModelKind = ModelKind.DENSE
) -> None:
    """Stores how far the fit in force is from a seed's shapes, beside its held-out runs; nothing
    where none of these are on file. Those of several devices need none beside them.
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
    store.write_held_out(node.name, {**kept, **about})


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
    """A node's own held-out runs, else those of the last fit that holds for it; None without any,
    or where the fit is another. A node of several devices needs FEWEST runs of its own.

    `spec`: of a model's kind, once FEWEST runs of that kind are on file, be they of this node or of
    one device; else of dense models.
    """
    kind = kind_of(spec) if spec else ModelKind.DENSE
    names = dict.fromkeys((node.name, *reversed(fits_of(node))))
    found = [kept for name in names if (kept := _of_fit(node, name))]
    for kept in found:
        kinds = {name: _drawn(records) for name, records in kept.get(KINDS, {}).items()}
        own = kinds.get(kind.value, {})
        if (count := sum(map(len, own.values()))) >= FEWEST:
            return KnownError(*_head(kept), {}, own, kind, _mirrored(kinds) if count < MANY else ())
    for kept in found:
        dense = KnownError(*_head(kept), _numbers(kept["errors"]), _drawn(kept.get(DRAWN, {})))
        one_device = store.name_of(dense.node) == node.device.name
        if dense.errors if one_device else len(dense.every) >= FEWEST:
            return dense
    return None


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


def _mirrored(kinds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> tuple[float, ...]:
    """Errors of all kinds, each once as it is and once with the other sign."""
    found = [
        error
        for records in kinds.values()
        for errors in records.values()
        for error in errors.values()
    ]
    return (*found, *(-error for error in found))


def _drawn(kept: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {str(record): _numbers(errors) for record, errors in kept.items()}


def _numbers(errors: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): float(error) for name, error in errors.items()}
