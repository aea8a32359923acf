"""Runs that a fit had not seen: which of their errors make a prediction's interval.

A prediction knows its features beforehand: the time of a layer, the hand-off, the number of GPUs,
the kind of model and what distinguishes it, positions, the device. Its interval is of the errors of
held-out runs, those alike more (`Law`, hwmodels/intervals.yaml): weighted quantiles, wider by
Student's for few shapes. Every record ran on a card of its own, so how cards of one name differ is
in it.

What never ran is wronger than that: each new thing about a prediction adds the error of earlier
first predictions, the squares of the logarithms being added up (`Evidence.new`).

`studies/intervals` judges both on runs that the interval is no part of.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.data import data_dir, read_yaml
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of, stored_as
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, Options
from twin.reading import read

Floats = NDArray[np.float64]
LEVELS = (0.10, 0.90)  # of the runs' speeds over their predictions: an interval holds eight of ten
FILE = "intervals.yaml"
WIDER = 1.3  # of all distances, while too few shapes count
LANES = "lanes"


@frozen
class Constant:
    value: float
    source: str


@frozen
class Law:
    """How much a run counts for a prediction, by how unlike they are, and what nobody ran adds."""

    layer_time: Constant  # one standard deviation, of the logarithm of a layer's predicted time
    context: Constant  # the same of positions
    gpus: Constant  # the same of the number of GPUs
    other_handoff: Constant  # squared standard deviations, where it is another
    other_kind: Constant
    other_device: Constant
    other_part: Constant  # for each part of the model that only one of the two has
    shapes: Constant  # by weight, of which an interval is at least
    widest: Constant  # squared standard deviations are divided by no more than this
    first: Constant  # logarithm of the speed: eight of ten first predictions were off by less


@lru_cache(maxsize=1)
def law() -> Law:
    """Raises ConfigError for a file that is no such law."""
    file = data_dir("hwmodels") / FILE
    return read(read_yaml(file), Law, file)


@frozen
class Features:
    """What a prediction knows of itself beforehand, and a run alike."""

    device: str
    gpus: int
    kind: ModelKind
    handoff: str  # of a resident kernel; else how it is executed
    parts: tuple[str, ...]  # what distinguishes the model: layers, formats, lanes
    layers: int
    context: int  # positions
    tokens: int = 1  # of a step: sequences, times drafted ones and their first

    @property
    def labels(self) -> tuple[str, ...]:
        """What there is to be new, each of its own."""
        return (self.device, f"{self.kind.value} on {self.gpus} GPUs", self.handoff, *self.parts)


def features_of(node: Node, spec: ModelSpec, chosen: Mapping[str, Any] | Options) -> Features:
    """`chosen`: values of Options fields, by name; what is left out is as by default."""
    of = Options()
    if isinstance(chosen, Options):
        of, chosen = chosen, {}
    execution = _value(chosen.get("execution", of.execution))
    resident = execution == Execution.RESIDENT.value
    return Features(
        node.device.name,
        node.gpus,
        kind_of(spec),
        _value(chosen.get("handoff", of.handoff)) if resident else execution,
        _parts(spec),
        spec.layers,
        max(1, int(chosen.get("context", of.context))),
        int(chosen.get("batch", of.batch)) * (1 + int(chosen.get("draft", of.draft))),
    )


def _value(option: Any) -> str:
    return str(getattr(option, "value", option))


def _parts(spec: ModelSpec) -> tuple[str, ...]:
    lanes = (LANES,) if spec.lanes else ()
    return tuple(dict.fromkeys((*spec.features(), *stored_as(spec).split(), *lanes)))


@frozen
class Seen:
    """A run: how far off its predicted speed was, positive where the twin is too fast, and the
    predicted time of a layer in seconds.
    """

    record: str
    name: str
    error: float
    layer_s: float
    features: Features
    public: bool = False  # a public model, which a study timed

    @property
    def factor(self) -> float:
        """Measured over predicted speed."""
        return 1 / (1 + self.error)

    @property
    def shape(self) -> tuple[str, str]:
        """All whose runs have the same model, and so err together."""
        return self.record, shape_of(self.name)


def shape_of(name: str) -> str:
    """Of a drawn run its shape; of another its name, up to a space."""
    found = re.match(r"s\d+-\d+", name)
    return found[0] if found else name.partition(" ")[0]


class Evidence:
    """Runs, by columns: who counts for a prediction, and what about it never ran."""

    def __init__(self, runs: Sequence[Seen]) -> None:
        self.runs = tuple(runs)
        features = [run.features for run in runs]
        self._factors = np.array([run.factor for run in runs])
        self._layer = np.log([run.layer_s for run in runs])
        self._context = np.log([one.context for one in features])
        self._gpus = np.log([one.gpus for one in features])
        self._handoff = np.array([one.handoff for one in features])
        self._kind = np.array([one.kind.value for one in features])
        self._device = np.array([one.device for one in features])
        names = sorted({part for one in features for part in one.parts})
        self._names = {name: at for at, name in enumerate(names)}
        self._parts = np.zeros((len(runs), len(names)), bool)
        for at, one in enumerate(features):
            self._parts[at, [self._names[part] for part in one.parts]] = True
        places: dict[tuple[str, str], int] = {}
        shapes = [places.setdefault(run.shape, len(places)) for run in runs]
        self._shapes = np.array(shapes)
        self._labels = _shapes_by_label(features, shapes)
        self._positions = max((one.context for one in features), default=math.inf)
        self._tokens = max((one.tokens for one in features), default=math.inf)

    def levels(self, about: Features, layer_s: float) -> tuple[float, float]:
        """LEVELS of measured over predicted speed, of a prediction with such features and time of a
        layer. It lies inside its own interval.
        """
        return wider(self.alike(about, layer_s), self.new(about))

    def alike(self, about: Features, layer_s: float) -> tuple[float, float]:
        """The same of runs alone; without any, 1."""
        if not self.runs:
            return 1.0, 1.0
        return spread(self._factors, self._weights(about, layer_s), self._shapes)

    def new(self, about: Features) -> float:
        """Logarithm of the speed that eight of ten predictions are off by, if they are as new."""
        return law().first.value * math.sqrt(self.news(about))

    def news(self, about: Features) -> float:
        """How many things are new about a prediction: a label without a run counts one, one of n
        shapes 1 / (1 + n), of `Law.shapes` none; each doubling beyond the most positions, and
        beyond the most tokens a step, that ran counts one.
        """
        shapes = [self._labels.get(label, 0) for label in about.labels]
        count = sum(1 / (1 + n) for n in shapes if n < law().shapes.value)
        beyond = (about.context / self._positions, about.tokens / self._tokens)
        return count + sum(math.log2(max(1.0, times)) for times in beyond)

    def unseen(self, about: Features) -> list[str]:
        """What of it never ran, in words."""
        found = [label for label in about.labels if label not in self._labels]
        if about.context > self._positions:
            found.append(f"more than {self._positions} positions")
        if about.tokens > self._tokens:
            found.append(f"{about.tokens} tokens a step")
        return found

    def _weights(self, about: Features, layer_s: float) -> Floats:
        """Of each run, by how unlike it is; those further away count more while the weight is of
        too few shapes.
        """
        by = law()
        far = self._far(about, layer_s)
        divided = 1.0
        while True:
            weights: Floats = np.exp(-0.5 * (far - far.min()) / divided)
            enough = effective(weights, self._shapes) >= by.shapes.value
            if enough or divided > by.widest.value:
                return weights
            divided *= WIDER

    def _far(self, about: Features, layer_s: float) -> Floats:
        """Squared standard deviations."""
        by = law()
        own = np.zeros(len(self._names), bool)
        own[[self._names[part] for part in about.parts if part in self._names]] = True
        far: Floats = (
            ((self._layer - math.log(layer_s)) / by.layer_time.value) ** 2
            + ((self._context - math.log(about.context)) / by.context.value) ** 2
            + ((self._gpus - math.log(about.gpus)) / by.gpus.value) ** 2
            + by.other_handoff.value * (self._handoff != about.handoff)
            + by.other_kind.value * (self._kind != about.kind.value)
            + by.other_device.value * (self._device != about.device)
            + by.other_part.value * (self._parts != own).sum(axis=1)
        )
        return far


def _shapes_by_label(features: Sequence[Features], shapes: Sequence[int]) -> dict[str, int]:
    """How many shapes ran with each; `shapes`: of the runs with these features."""
    alike: dict[Features, set[int]] = {}
    for one, shape in zip(features, shapes, strict=True):
        alike.setdefault(one, set()).add(shape)
    found: dict[str, set[int]] = {}
    for one, ran in alike.items():
        for label in one.labels:
            found.setdefault(label, set()).update(ran)
    return {label: len(ran) for label, ran in found.items()}


def wider(ends: tuple[float, float], new: float) -> tuple[float, float]:
    """Ends about 1, and an error that has nothing to do with theirs, to either side: the squares of
    the logarithms add up.
    """
    low, high = (math.hypot(math.log(end), new) for end in ends)
    return math.exp(-low), math.exp(high)


def spread(factors: Floats, weights: Floats, shapes: NDArray[np.int64]) -> tuple[float, float]:
    """LEVELS of weighted factors, and of 1, further from their median for few `shapes`, whose runs
    err together.
    """
    order = np.argsort(factors)
    values, ordered = factors[order], weights[order]
    places = (np.cumsum(ordered) - ordered / 2) / ordered.sum()
    low, middle, high = (
        float(end) for end in np.interp((LEVELS[0], 0.5, LEVELS[1]), places, values)
    )
    by = few_shapes(effective(weights, shapes))
    low, high = (middle * (end / middle) ** by for end in (low, high))
    return min(low, 1.0), max(high, 1.0)


def effective(weights: Floats, shapes: NDArray[np.int64]) -> float:
    """The number of shapes that weights are of: one for each, if all count alike."""
    own = np.bincount(shapes, weights)
    return float(own.sum() ** 2 / (own**2).sum())


def few_shapes(count: float) -> float:
    """By how much the interval of the next model is wider than that of the ones seen: Student's, by
    the effective number of their shapes.
    """
    count = max(2.0, count)
    level = LEVELS[1]
    normal = NormalDist().inv_cdf(level)
    return float(_student(level, count - 1) * np.sqrt(1 + 1 / count) / normal)


@lru_cache(maxsize=4096)
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
    angles = np.linspace(0.0, np.pi / 2, 1 << 14)
    return angles, np.cos(angles)


def levels_of(factors: Sequence[float], shapes: Sequence[str]) -> tuple[float, float]:
    """LEVELS of measured over predicted, of runs that count alike; those of one shape err
    together.
    """
    places: dict[str, int] = {}
    at = np.array([places.setdefault(shape, len(places)) for shape in shapes])
    return spread(np.asarray(factors, dtype=np.float64), np.ones(len(factors)), at)
