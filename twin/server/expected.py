"""What the twin predicts for the engine: the rate at a position; do the two differ?"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.known_error import known_error
from twin.errors import TwinError
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.types import Plan

FEWEST = 16  # tokens of a request whose rate says something


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of a step at the first and the last position; linear in between."""

    first_s: float
    last_s: float
    last: int  # position
    # The rate times these two is the interval, if it is as wrong as the held-out runs.
    low: float | None = None
    high: float | None = None

    def rate(self, position: float) -> float:
        share = min(1.0, position / self.last)
        return 1 / (self.first_s + (self.last_s - self.first_s) * share)

    def parted(self, rate: float, predicted: float) -> bool | None:
        """Does a measured rate lie outside the interval of the predicted one? None where nothing
        says so.
        """
        if self.low is None or self.high is None or not predicted:
            return None
        return not self.low <= rate / predicted <= self.high

    def json(self) -> dict[str, Any]:
        return {
            "tokens_per_s": [1 / self.first_s, 1 / self.last_s],
            "positions": [1, self.last],
            "interval": None if self.low is None else [self.low, self.high],
        }


def expect(spec: ModelSpec, node: Node, plan: Plan, chosen: Mapping[str, Any]) -> Expected:
    """Two simulations of the plan's options. Raises TwinError, and ImportError without the
    simulator.
    """
    from twin.study.case import Case  # the simulator, which a server does without

    last = plan.options.max_context
    options = {**chosen, "max_context": last, "sampling": plan.options.sampling}
    steps = [
        1 / Case(spec, node, {**options, "context": at}).simulate().tokens_per_s for at in (1, last)
    ]
    known = known_error(node, spec, plan.options)
    low = high = None
    if known is not None:
        speed = 2 / sum(steps)  # halfway
        low, high = (end / speed for end in known.interval(speed))
    return Expected(steps[0], steps[1], last, low, high)


class Expectation:
    """What the twin expects and what the engine did last. The prediction comes from a thread."""

    def __init__(self) -> None:
        self.expected: Expected | None = None
        self.reason = "the twin is still computing"  # why there is no prediction
        self.rate = 0.0  # of the last request that was long enough
        self.predicted = 0.0  # of the same positions
        self.partings = 0  # requests whose rate lay outside the interval

    def begin(self, predict: Callable[[], Expected]) -> None:
        threading.Thread(target=self._predict, args=[predict], name="twin", daemon=True).start()

    def _predict(self, predict: Callable[[], Expected]) -> None:
        try:
            self.expected = predict()
            self.reason = ""
        except TwinError as error:
            self.reason = str(error)
        except ImportError as error:
            self.reason = (
                f"no predictions for measured rates: the twin needs {error.name}: install it"
            )

    def measured(self, times: NDArray[np.float64], position: float) -> None:
        """Seconds of the steps of a request whose middle position this is."""
        if len(times) < FEWEST:
            return
        self.rate = len(times) / float(times.sum())
        self.predicted = self.expected.rate(position) if self.expected else 0.0
        self.partings += bool(self.parted)

    @property
    def parted(self) -> bool | None:
        """Does the measured rate lie outside the interval? None where nothing says so."""
        return self.expected.parted(self.rate, self.predicted) if self.expected else None

    def gauges(self) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        if self.rate:
            about = "tokens/s of the last request, by the kernel's clock"
            found["monotwin:measured_tokens_per_second"] = (self.rate, about)
        if self.predicted:
            about = "tokens/s that the twin predicts for the same positions"
            found["monotwin:predicted_tokens_per_second"] = (self.predicted, about)
        if (parted := self.parted) is not None:
            about = "1: the measured rate lies outside the prediction's interval"
            found["monotwin:prediction_parted"] = (float(parted), about)
        return found

    def json(self) -> dict[str, Any]:
        return {
            "expected": self.expected.json() if self.expected else None,
            "reason": self.reason,
            "measured_tokens_per_s": self.rate or None,
            "predicted_tokens_per_s": self.predicted or None,
            "parted": self.parted,
        }
