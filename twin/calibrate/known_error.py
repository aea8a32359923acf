"""How far a fit was from engine runs that it never saw: kept by `twin validate`, told by
`twin simulate`.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate import store
from twin.calibrate.node import fits_of
from twin.hardware.types import Node, Number

if TYPE_CHECKING:  # who asks for an error needs neither the engine nor its runs
    from twin.calibrate.validate import Validation

# of the runs' speeds over their predictions: an interval holds eight of ten runs
LEVELS = (0.10, 0.90)
DIGITS = 12  # of a digest


@dataclass(frozen=True, slots=True)
class KnownError:
    """Errors of the predicted speed of held-out runs, positive where the twin is too fast."""

    node: str  # that was fitted and ran
    fit: str  # the probing run behind the fit
    record: str  # the engine runs
    errors: Mapping[str, float]

    @property
    def median(self) -> float:
        return statistics.median(map(abs, self.errors.values()))

    @property
    def worst(self) -> float:
        """With its sign."""
        return max(self.errors.values(), key=abs)

    def interval(self, speed: float) -> tuple[float, float]:
        """LEVELS of a predicted speed, if it is as wrong as the held-out runs were."""
        low, high = np.quantile([1 / (1 + error) for error in self.errors.values()], LEVELS)
        return speed * float(low), speed * float(high)


def keep(node: Node, found: Validation, record: store.Run) -> None:
    """Stores what a validation found, for the fit that is in force."""
    fit = store.read_fit(node.name)
    assert fit is not None
    errors = {run.name: round(run.error, 6) for run in found.runs}
    about = {
        "node": node.name,
        "fit": found.fit,
        "numbers": numbers_digest(fit[0]),
        "record": record.id,
        "errors": errors,
    }
    store.write_held_out(node.name, about)


def known_error(node: Node) -> KnownError | None:
    """Of the fits that hold for a node, the last whose held-out runs are on file; None without any,
    or where the fit is another.
    """
    for name in reversed(fits_of(node)):
        kept, fit = store.read_held_out(name), store.read_fit(name)
        if kept and fit and kept.get("numbers") == numbers_digest(fit[0]) and kept.get("errors"):
            return _read(kept)
    return None


def _read(kept: Mapping[str, Any]) -> KnownError:
    errors = {str(name): float(error) for name, error in kept["errors"].items()}
    return KnownError(str(kept["node"]), str(kept["fit"]), str(kept["record"]), errors)


def numbers_digest(numbers: Mapping[str, Number]) -> str:
    """Tells fits apart that a probing run alone does not."""
    values = json.dumps({path: number.value for path, number in numbers.items()}, sort_keys=True)
    return hashlib.sha256(values.encode()).hexdigest()[:DIGITS]
