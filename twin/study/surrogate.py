"""Speeds of very many machines from a few hundred simulated ones: a Gaussian process on the
logarithm of a step over the logarithms of the numbers that change.

Three sets of machines are simulated, each drawn by the seed. The process is fitted to the first
(`trained`), by a few layers of a deep model and one GPU that stands for all. The second (`bounded`)
has all layers and GPUs: a linear correction is fitted to it, and what that leaves of each machine,
fitted without it, says how many of the process' own standard deviations an error takes. So every
machine has a bound (a conformal one). The third (`checked`), whole as well, was seen by neither: it
says how good speeds and bounds are. Where a bound exceeds WITHIN the surrogate does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twin.errors import ConfigError
from twin.study.depth import repeating, times
from twin.study.hardware import Setting
from twin.study.inverse import Varied
from twin.study.point import Point
from twin.study.runner import Runner

Floats = npt.NDArray[np.float64]
WITHIN = 0.01  # of the speed
CERTAIN = 0.95  # of machines lie within their bound
CHUNK = 16_384  # machines at once: what a few hundred trained ones weigh for each is 40 MB
# Logarithms of the fit: signal, one length for each number (of their range, 1 long), noise.
LEAST, MOST = (-6.0, -2.5, -14.0), (3.0, 3.0, -4.0)
STARTS = (0.0, 1.0)  # logarithms of the lengths that the fit begins with


@dataclass(frozen=True, slots=True)
class Sizes:
    """Machines that are simulated: to fit, to say how far off, to check."""

    trained: int
    bounded: int
    checked: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A machine that the surrogate never saw: tokens/s of the simulator and of the surrogate, and
    the relative error that its bound allows.
    """

    change: tuple[float, ...]
    simulated: float
    guessed: float
    bound: float

    @property
    def error(self) -> float:
        return self.guessed / self.simulated - 1


class Surrogate:
    """Tokens per second of any machine within the bounds, and how far off at most."""

    def __init__(
        self, varied: Sequence[Varied], process: _Process, correction: Floats, sigmas: float
    ) -> None:
        self.varied = tuple(varied)
        self._process, self._correction, self._sigmas = process, correction, sigmas

    def speeds(self, machines: Floats) -> tuple[Floats, Floats]:
        """([n] tokens/s, [n] relative bounds) of [n, numbers] doublings."""
        unit = machines / np.array([one.limit for one in self.varied])
        mean, deviation = self._process.at(unit)
        whole = mean + _linear(unit) @ self._correction
        return np.exp(-whole), np.expm1(self._sigmas * deviation)

    def drawn(self, count: int, seed: int) -> Iterator[tuple[Floats, Floats, Floats]]:
        """Machines evenly over the bounds, in chunks, with `speeds`."""
        generator = np.random.default_rng(seed)
        limits = np.array([one.limit for one in self.varied])
        for at in range(0, count, CHUNK):
            machines = _counted(
                generator.random((min(CHUNK, count - at), len(limits))) * limits, self.varied
            )
            yield machines, *self.speeds(machines)


def surrogate(
    point: Point, varied: Sequence[Varied], sizes: Sizes, seed: int, runner: Runner
) -> tuple[Surrogate, list[Checked]]:
    """Fitted, and checked. Raises ConfigError where a machine cannot be simulated."""
    trained, bounded, checked = (
        _evenly(count, varied, (seed, at))
        for at, count in enumerate((sizes.trained, sizes.bounded, sizes.checked))
    )
    limits = np.array([one.limit for one in varied])
    short = replace(point, representative=True)
    few = times(_machines(short, varied, trained), runner, repeating(point.spec()), "machines")
    rows = runner.rows(_machines(point, varied, np.vstack((bounded, checked))), "whole machines")
    problems = (*(one.problem for one in few), *(row.problem for row in rows))
    if problem := next(filter(None, problems), ""):
        raise ConfigError(f"{problem}; give a nearer bound, NAME=x2")
    process = _Process(trained / limits, np.log([one.step_s for one in few]))
    # what a token of one sequence takes, as the speeds say it
    whole = -np.log([row.tokens_per_s for row in rows])
    places = bounded / limits
    mean, deviation = process.at(places)
    correction, left = _corrected(places, whole[: sizes.bounded] - mean)
    sigmas = _quantile(np.abs(left) / deviation, CERTAIN)
    made = Surrogate(varied, process, correction, sigmas)
    guessed, bounds = made.speeds(checked)
    return made, [
        Checked(tuple(change), row.tokens_per_s, float(speed), float(bound))
        for change, row, speed, bound in zip(
            checked.tolist(), rows[sizes.bounded :], guessed, bounds, strict=True
        )
    ]


def _machines(point: Point, varied: Sequence[Varied], machines: Floats) -> list[Point]:
    return [point.with_settings(*settings_of(varied, one)) for one in machines]


def _corrected(places: Floats, errors: Floats) -> tuple[Floats, Floats]:
    """A linear correction by least squares, and what it leaves of each place when fitted to all the
    others.
    """
    terms = _linear(places)
    correction = _least_squares(terms, errors)
    own = np.sum(terms * np.linalg.pinv(terms).T, axis=1)
    return correction, (errors - terms @ correction) / (1 - own)


def _least_squares(terms: Floats, values: Floats) -> Floats:
    """[terms] weights."""
    return np.asarray(np.linalg.lstsq(terms, values, rcond=None)[0], dtype=np.float64)


def _linear(places: Floats) -> Floats:
    """[n, terms]: 1, and each number."""
    return np.column_stack((np.ones(len(places)), places))


def settings_of(varied: Sequence[Varied], change: Sequence[float] | Floats) -> tuple[Setting, ...]:
    """What a machine's doublings set."""
    return tuple(
        (one.path, one.better(float(by))) for one, by in zip(varied, change, strict=True) if by
    )


def _evenly(count: int, varied: Sequence[Varied], seed: tuple[int, int]) -> Floats:
    """[count, numbers] doublings, one in each stratum of each number (a Latin hypercube)."""
    generator = np.random.default_rng(seed)
    strata = np.stack([generator.permutation(count) for _ in varied], axis=1)
    unit = (strata + generator.random(strata.shape)) / count
    return _counted(unit * np.array([one.limit for one in varied]), varied)


def _counted(machines: Floats, varied: Sequence[Varied]) -> Floats:
    """The doublings that counts end at: there is no half of an SM."""
    for at, one in enumerate(varied):
        if one.whole:
            counts = np.ceil(one.value * 2.0 ** machines[:, at] - 1e-9)
            machines[:, at] = np.log2(counts / one.value)
    return machines


def _quantile(values: Floats, share: float) -> float:
    """The least that `share` of further values stay below: of n, the ceil((n + 1) share)-th."""
    ordered = np.sort(values)
    return float(ordered[min(len(ordered), math.ceil((len(ordered) + 1) * share)) - 1])


class _Process:
    """A quadratic mean by least squares, and what it leaves as a process with a Matern 5/2 kernel,
    a length for each number; all by the greatest likelihood.
    """

    def __init__(self, places: Floats, values: Floats) -> None:
        from scipy.optimize import minimize

        self._places = places
        self._mean = _least_squares(_quadratic(places), values)
        self._left = values - _quadratic(places) @ self._mean
        self._size = float(np.std(self._left)) or 1.0
        self._left = self._left / self._size
        numbers = places.shape[1]
        ends = [(LEAST[0], MOST[0]), *[(LEAST[1], MOST[1])] * numbers, (LEAST[2], MOST[2])]
        found = [
            minimize(
                self._unlikely,
                np.array([0.0, *[start] * numbers, -9.0]),
                method="L-BFGS-B",
                bounds=ends,
                options={"maxiter": 60},
            )
            for start in STARTS
        ]
        self._set(min(found, key=lambda one: float(one.fun)).x)

    def _covariance(self, wanted: Floats, chosen: Floats) -> Floats:
        """[wanted, trained]."""
        lengths = np.exp(chosen[1:-1])
        ours, theirs = wanted / lengths, self._places / lengths
        squared = (
            np.sum(ours**2, axis=1)[:, None]
            + np.sum(theirs**2, axis=1)[None, :]
            - 2 * ours @ theirs.T
        )
        far = np.sqrt(5 * np.maximum(squared, 0.0))
        return np.asarray(math.exp(2 * chosen[0]) * (1 + far + far**2 / 3) * np.exp(-far))

    def _unlikely(self, chosen: Floats) -> float:
        """Minus the logarithm of the likelihood."""
        from scipy.linalg import LinAlgError, cholesky, solve_triangular

        try:
            lower = cholesky(self._noisy(chosen), lower=True)
        except LinAlgError:
            return 1e9
        white = solve_triangular(lower, self._left, lower=True)
        return float(0.5 * white @ white + np.sum(np.log(np.diag(lower))))

    def _noisy(self, chosen: Floats) -> Floats:
        noise = math.exp(2 * chosen[-1]) + 1e-10
        return self._covariance(self._places, chosen) + noise * np.eye(len(self._places))

    def _set(self, chosen: Floats) -> None:
        from scipy.linalg import cho_solve, cholesky, solve_triangular

        self._chosen = chosen
        lower = cholesky(self._noisy(chosen), lower=True)
        self._weights: Floats = cho_solve((lower, True), self._left)
        self._whitened: Floats = solve_triangular(lower, np.eye(len(lower)), lower=True)

    def at(self, wanted: Floats) -> tuple[Floats, Floats]:
        """([n] mean, [n] standard deviation) of the logarithm."""
        covariance = self._covariance(wanted, self._chosen)
        explained = np.sum((covariance @ self._whitened.T) ** 2, axis=1)
        own = math.exp(2 * self._chosen[0]) + math.exp(2 * self._chosen[-1])
        mean = _quadratic(wanted) @ self._mean + self._size * (covariance @ self._weights)
        return mean, self._size * np.sqrt(np.maximum(own - explained, 1e-12))


def _quadratic(places: Floats) -> Floats:
    """[n, terms]: 1, each number, and each product of two."""
    numbers = places.shape[1]
    products = [places[:, i] * places[:, j] for i in range(numbers) for j in range(i, numbers)]
    return np.column_stack((np.ones(len(places)), places, *products))
