"""Runs that a fit had not seen, by size: which of their errors make a model's interval.

Errors grow as models shrink: of one H100 eight of ten lie within 1.2 % of the prediction from 8 GB
on, within 4 % below 2. So an interval is of runs of about its model's bytes a step and GPU, the
nearer ones more (NEAR). Every record ran on a card of its own, so how cards of one name differ is
in it. Public models are what people ask about, drawn shapes what lies between them: where both
ran, either has half of the weight. Leaving out one record in turn, and one public model in turn, 71
to 84 % of an H200's and an H100's dense runs lie inside, in every class of size with more than two
(`python -m studies.common.coverage`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.spec import ModelSpec

Floats = NDArray[np.float64]
LEVELS = (0.10, 0.90)  # of the runs' speeds over their predictions: an interval holds eight of ten
NEAR = 0.5  # one standard deviation, of the logarithm of bytes a step and GPU
ENOUGH = 3.0  # runs, by their weights, below which those further away count more
WIDER, WIDEST = 1.3, 5.0
# names of drawn runs end so where their hand-off is not the default one
UNUSUAL = ("-counter", "-grid")


@frozen
class Seen:
    """One run: how far off its predicted speed was, positive where the twin is too fast, and the
    bytes that a GPU streams in a step of its model.
    """

    record: str
    name: str
    error: float
    bytes: float
    public: bool = False

    @property
    def factor(self) -> float:
        """Measured over predicted speed."""
        return 1 / (1 + self.error)


def bytes_of(spec: ModelSpec, node: Node) -> float:
    """What a GPU of the node streams of the model's weights in a step."""
    return spec.streamed_bytes / node.gpus


def shape_of(name: str) -> str:
    """Of a drawn run its shape, all whose runs have the same model; of another its name."""
    found = re.match(r"s\d+-\d+", name)
    return found[0] if found else name


def usual(runs: Iterable[Seen]) -> list[Seen]:
    """Those with the default hand-off."""
    return [run for run in runs if not run.name.endswith(UNUSUAL)]


def mirrored(runs: Sequence[Seen]) -> list[Seen]:
    """Each also as if it were off the other way: so few do not say which way the next one is."""
    return [*runs, *(replace(run, error=run.factor - 1) for run in runs)]


def levels_at(runs: Sequence[Seen], size: float) -> tuple[float, float]:
    """LEVELS of measured over predicted speed, of a model with so many bytes a step and GPU. A
    prediction lies inside its own interval.
    """
    factors = np.array([run.factor for run in runs])
    far = np.log([run.bytes for run in runs]) - np.log(size)
    public = np.array([run.public for run in runs])
    weights = _weights(far, ~public)
    if public.any():
        own = _weights(far, public)
        share = weights.sum() / own.sum() if not public.all() else 1.0
        weights = weights + own * share
    low, high = _quantiles(factors, weights)
    wider = few_shapes(runs, weights)
    return min(low, 1.0) ** wider, max(high, 1.0) ** wider


def both(one: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """Of two errors that have nothing to do with each other: their logarithms' squares add up."""
    low, high = (float(np.hypot(*np.log(ends))) for ends in zip(one, other, strict=True))
    return float(np.exp(-low)), float(np.exp(high))


def few_shapes(runs: Sequence[Seen], weights: Floats) -> float:
    """By how much the interval of the next model is wider than that of the ones seen: Student's, by
    the effective number of their shapes, whose runs err together.
    """
    by_shape: dict[tuple[str, str], float] = {}
    for run, weight in zip(runs, weights, strict=True):
        key = (run.record, shape_of(run.name))
        by_shape[key] = by_shape.get(key, 0.0) + float(weight)
    own = np.array(list(by_shape.values()))
    count = max(2.0, float(own.sum() ** 2 / (own**2).sum()))
    level = LEVELS[1]
    normal = NormalDist().inv_cdf(level)
    return float(_student(level, count - 1) * np.sqrt(1 + 1 / count) / normal)


@lru_cache(maxsize=64)
def _student(level: float, freedom: float) -> float:
    """Student's quantile above one half, without SciPy, which is slow to load: with t = sqrt(n) *
    tan(u) its density is that of cos(u)^(n - 1).
    """
    angles, cosines = _quarter()
    density = cosines ** (freedom - 1)
    share = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(level - 0.5, 0.5 * share / share[-1], angles)
    return float(np.sqrt(freedom) * np.tan(angle))


@lru_cache(maxsize=1)
def _quarter() -> tuple[Floats, Floats]:
    """Angles of a quarter of a circle, and their cosines."""
    angles = np.linspace(0.0, np.pi / 2, 1 << 16)
    return angles, np.cos(angles)


def _weights(far: Floats, among: NDArray[np.bool_]) -> Floats:
    """By the distance in size, of some of the runs."""
    near = NEAR
    while True:
        weights: Floats = np.exp(-0.5 * (far / near) ** 2) * among
        if weights.sum() >= min(ENOUGH, among.sum()) or near > WIDEST:
            return weights
        near *= WIDER


def _quantiles(values: Floats, weights: Floats) -> tuple[float, float]:
    order = np.argsort(values)
    values, weights = values[order], weights[order]
    places = (np.cumsum(weights) - weights / 2) / weights.sum()
    low, high = np.interp(LEVELS, places, values)
    return float(low), float(high)


def rows(
    record: str,
    errors: Mapping[str, float],
    sizes: Mapping[str, float],
    *,
    public: bool = False,
) -> list[Seen]:
    """The runs of a record whose sizes are known."""
    return [
        Seen(record, name, error, sizes[shape_of(name)], public)
        for name, error in errors.items()
        if shape_of(name) in sizes
    ]
