"""An engine run beside its prediction, and what the errors of several come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compared:
    """Tokens per second predicted by the twin and measured on the engine."""

    name: str
    predicted_tokens_per_s: float
    measured_tokens_per_s: float = math.nan  # before it ran
    spread: float = 0.0  # of the repeats: (slowest - fastest) / median
    blocks: int = 0
    p10: float | None = None  # where the fit's held-out runs gave an interval
    p90: float | None = None

    @property
    def error(self) -> float:
        """Of the speed, relative, positive where the twin is too fast."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1.0

    @property
    def held(self) -> bool | None:
        """Does p10-p90 hold it? None without an interval."""
        if self.p10 is None or self.p90 is None:
            return None
        return self.p10 <= self.measured_tokens_per_s <= self.p90


class Errors:
    """Of several runs: whoever has `every` error and who of them was `held` by its interval."""

    __slots__ = ()

    @property
    def every(self) -> Sequence[float]:
        raise NotImplementedError

    @property
    def held(self) -> Sequence[bool]:
        """Of the runs that have an interval."""
        return ()

    @property
    def median(self) -> float:
        return statistics.median(map(abs, self.every))

    @property
    def worst(self) -> float:
        """With its sign."""
        return max(self.every, key=abs)

    @property
    def share_held(self) -> float | None:
        return sum(self.held) / len(self.held) if self.held else None


@dataclass(frozen=True, slots=True)
class Runs(Errors):
    """Runs that were compared."""

    runs: tuple[Compared, ...]

    @property
    def every(self) -> Sequence[float]:
        return [run.error for run in self.runs]

    @property
    def held(self) -> Sequence[bool]:
        return [run.held for run in self.runs if run.held is not None]
