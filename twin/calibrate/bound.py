"""Do probes bind a number? Only one that they bind is called fitted.

Probes bind a number when moving it to either end of its allowed range raises their misfit by more
than noise, although the group's other numbers follow. Near the least misfit its curvature answers
that. Where the curvature does not, the ends are simulated. A rate that nothing waits for is bound
on one side only: the probes say that it is no less, and not what it is. Numbers that are known only
as a sum hide behind each other, so the one that is bound least is taken out first, and the others
are judged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.hardware.number import Number

Vector = NDArray[np.float64]
# of the numbers' logarithms: the sum of squares that the fit makes least
Misfit = Callable[[Vector], float]

# standard deviations: a number that is bound has an interval (fit.INTERVAL) narrower than its
# allowed range
CERTAIN = 1.645
# e-folds to either side, at least: what a file states too narrowly is no reason to trust it less
ALLOWED = math.log(2.0)
QUIET = 0.005  # noise of a logarithm, at least: the twin is not right to more
# e-folds that another number follows at most: a linear step does not lead further
FOLLOWED = math.log(4.0)
UNSEEN = 1e-6  # curvature, as a root, of what no probe sees


@dataclass(frozen=True, slots=True)
class Binding:
    """How well each number of a group is bound, in units of what would just do: from 1 on it is
    bound.
    """

    strength: dict[str, float]
    # of those that are not bound: what their file says fits the probes as well
    replaced: tuple[str, ...]

    @property
    def unbound(self) -> list[str]:
        return [path for path, strength in self.strength.items() if strength < 1]


@dataclass(frozen=True, slots=True)
class Group:
    """Numbers of one group at their least misfit."""

    paths: Sequence[str]
    point: Vector  # logarithms
    slopes: Vector  # [residuals][numbers], weighted as the misfit weighs the residuals
    noise: float  # of one residual
    misfit: Misfit

    def judged(self, before: Sequence[Number]) -> Binding:
        """`before`: each number as its file has it."""
        found: dict[int, float] = {}
        replaced: list[int] = []
        left = list(range(len(self.paths)))
        while left:
            free = [at for at in range(len(self.paths)) if at not in replaced]
            curved = dict(zip(free, curvature(self.slopes[:, free]), strict=True))
            ranges = {at: allowed(before[at], self.point[at]) for at in left}
            strengths = {
                at: curved[at] * (ranges[at][1] - ranges[at][0]) / 2 / (CERTAIN * self.noise)
                for at in left
            }
            least = min(left, key=lambda at: strengths[at])
            if strengths[least] >= 1:
                found |= strengths
                break
            left.remove(least)
            found[least] = max(
                strengths[least], min(self._rise(least, end, free) for end in ranges[least])
            )
            if (
                found[least] < 1
                and before[least].value > 0
                and self._rise(least, math.log(before[least].value), free) < 1
            ):
                replaced.append(least)
        return Binding(
            {path: float(found[at]) for at, path in enumerate(self.paths)},
            tuple(self.paths[at] for at in sorted(replaced)),
        )

    def _rise(self, at: int, value: float, free: Sequence[int]) -> float:
        """The root of the misfit's rise with a number at another value and the others as they are
        or following, over noise.
        """
        others = [other for other in free if other != at]
        following = (
            -np.linalg.pinv(self.slopes[:, others], rcond=1e-3) @ self.slopes[:, at]
            if others
            else np.zeros(0)
        )
        alone = self.point.copy()
        alone[at] = value
        together = alone.copy()
        together[others] += np.clip(following * (value - self.point[at]), -FOLLOWED, FOLLOWED)
        rise = min(self.misfit(alone), self.misfit(together)) - self.misfit(self.point)
        return math.sqrt(max(0.0, rise)) / (CERTAIN * self.noise)


def allowed(number: Number, point: float) -> tuple[float, float]:
    """Logarithms of the ends of a number's allowed range: what its file says, and a factor of two
    about the fitted value.
    """
    low, high = number.low or number.value, number.high or number.value
    known = [math.log(end) for end in (low, high) if end > 0]
    return min(point - ALLOWED, *known), max(point + ALLOWED, *known)


def curvature(slopes: Vector) -> Vector:
    """Of each number, how much the misfit's root grows for an e-fold, the others following: a root
    of the misfit's curvature.
    """
    inverse = np.linalg.inv(slopes.T @ slopes + UNSEEN**2 * np.eye(slopes.shape[1]))
    return np.asarray(1 / np.sqrt(np.diag(inverse)), dtype=np.float64)


def noise(squares: float, residuals: int, numbers: int, repeats: float) -> float:
    """Of a residual: what the fit leaves, or what repeats of a probe differ by, whichever is
    more.
    """
    return max(QUIET, repeats, math.sqrt(squares / max(1, residuals - numbers)))
