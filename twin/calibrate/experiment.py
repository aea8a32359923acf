"""An engine run: what ran, what the twin predicted of it, what was measured; and what the errors
of several come to.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import field

from twin.frozen import frozen
from twin.hardware.load import load_node
from twin.models.spec import ModelSpec
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.plans import build
from twin.schedule.ring import limits_of

TOKENS = 48  # decoded and timed per repeat
REPEATS = 5


@frozen
class Experiment:
    """Random weights of a model's shape, decoded greedily after a prompt. Two that ran alike are
    equal, whatever was predicted or measured.
    """

    name: str
    spec: ModelSpec
    options: Options
    prompt: int  # positions
    tokens: int = TOKENS
    repeats: int = REPEATS
    traced: bool = False  # once more, with the time of each stage
    kernel: str = field(default="", compare=False)  # id of the kernel that ran; empty if unknown
    predicted_tokens_per_s: float = field(default=math.nan, compare=False)
    p10: float | None = field(default=None, compare=False)  # where held-out runs gave an interval
    p90: float | None = field(default=None, compare=False)
    samples: tuple[float, ...] = field(default=(), compare=False)  # s a step, one of each repeat

    def plan(self, device: str) -> Plan:
        """Planned for `device` and proven."""
        plan = build(self.spec, self.options, limits_of(load_node(f"{self.options.gpus}x{device}")))
        prove(plan)
        return plan

    @property
    def measured_s(self) -> float:
        """Of a step, the middle repeat."""
        return statistics.median(self.samples)

    @property
    def measured_tokens_per_s(self) -> float:
        return 1 / self.measured_s

    @property
    def spread(self) -> float:
        """Of the repeats: (slowest - fastest) / median."""
        return (max(self.samples) - min(self.samples)) / self.measured_s

    @property
    def error(self) -> float:
        """Of the speed, relative, positive where the twin is too fast."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1.0

    @property
    def held(self) -> bool | None:
        """Does p10-p90 hold the measured speed? None without an interval."""
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

    def __str__(self) -> str:
        return f"{self.median:.1%}, {self.worst:+.1%}"


@frozen
class Runs(Errors):
    """Runs that were measured."""

    runs: tuple[Experiment, ...]

    @property
    def every(self) -> Sequence[float]:
        return [run.error for run in self.runs]

    @property
    def held(self) -> Sequence[bool]:
        return [run.held for run in self.runs if run.held is not None]
