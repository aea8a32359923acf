"""How far a fit was from engine runs that it never saw, shapes that a seed drew among them: kept by
`twin validate`, told by `twin simulate`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.node import fits_of
from twin.hardware.types import Node, Number
from twin.models.kind import ModelKind, kind_of
from twin.models.spec import ModelSpec

if TYPE_CHECKING:  # who asks for an error needs neither the engine nor its runs
    from twin.calibrate.validate import Validation

# of the runs' speeds over their predictions: an interval holds eight of ten runs
LEVELS = (0.10, 0.90)
DIGITS = 12  # of a digest
DRAWN = "drawn"  # what a kept file calls the errors of a seed's shapes
KINDS = "kinds"  # and those of shapes that are not dense, by kind
FEWEST = 8  # runs of a kind from which its interval is of its own errors
# below which it is of the errors of all kinds but dense ones, and of their mirror images: so few
# runs do not say which way the next model is off
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
        errors = self.spread or self.every
        low, high = np.quantile([1 / (1 + error) for error in errors], LEVELS)
        return speed * float(low), speed * float(high)


def keep(node: Node, found: Validation, record: store.Run) -> None:
    """Stores what a validation found, for the fit that is in force. Drawn shapes of the same fit
    stay.
    """
    fit = store.read_fit(node.name)
    assert fit is not None
    before = _of_fit(node.name) or {}
    errors = {run.name: _rounded(run.error) for run in found.runs}
    about = {
        "node": node.name,
        "fit": found.fit,
        "numbers": numbers_digest(fit[0]),
        "record": record.id,
        "errors": errors,
    }
    about |= {name: before[name] for name in (DRAWN, KINDS) if name in before}
    store.write_held_out(node.name, about)


def keep_drawn(
    node: Node, record: str, errors: Mapping[str, float], kind: ModelKind = ModelKind.DENSE
) -> None:
    """Stores how far the fit in force is from a seed's shapes, beside its held-out runs; nothing
    where none of these are on file.
    """
    kept = _of_fit(node.name)
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


def _of_fit(name: str) -> dict[str, Any] | None:
    """What is kept of a node, if it is of the fit in force."""
    kept, fit = store.read_held_out(name), store.read_fit(name)
    return kept if kept and fit and kept.get("numbers") == numbers_digest(fit[0]) else None


def known_error(node: Node, spec: ModelSpec | None = None) -> KnownError | None:
    """Of the fits that hold for a node, the last whose held-out runs are on file; None without any,
    or where the fit is another.

    `spec`: of a model's kind, once FEWEST runs of that kind are on file; else of dense models.
    """
    kind = kind_of(spec) if spec else ModelKind.DENSE
    for name in reversed(fits_of(node)):
        kept = _of_fit(name)
        if kept and kept.get("errors"):
            return _read(kept, kind)
    return None


def _read(kept: Mapping[str, Any], kind: ModelKind) -> KnownError:
    about = str(kept["node"]), str(kept["fit"]), str(kept["record"])
    kinds = {name: _drawn(records) for name, records in kept.get(KINDS, {}).items()}
    own = kinds.get(kind.value, {})
    if (count := sum(map(len, own.values()))) >= FEWEST:
        return KnownError(*about, {}, own, kind, _mirrored(kinds) if count < MANY else ())
    return KnownError(*about, _numbers(kept["errors"]), _drawn(kept.get(DRAWN, {})))


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


def numbers_digest(numbers: Mapping[str, Number]) -> str:
    """Tells fits apart that a probing run alone does not."""
    values = json.dumps({path: number.value for path, number in numbers.items()}, sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:DIGITS]
