"""Which measurements of a node shrink the interval of its predictions most, and in which order.

A measurement is a group of probes with the numbers that it settles (twin/calibrate/recipe.py), or a
number that no probe of ours measures. Its weight is what the speed does when its numbers alone are
drawn from their ranges: range times effect, those that are wrong together at once. In that order
the interval is drawn again with what has been measured at its value. A measurement is taken as
exact, so a real one leaves a little more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from twin.calibrate.recipe import recipe_of
from twin.errors import CalibrationError, ConfigError
from twin.hardware.types import Node
from twin.study import interval
from twin.study.depth import repeating, times
from twin.study.hardware import Setting
from twin.study.interval import Draws, drawn_together, mechanism
from twin.study.point import Point
from twin.study.runner import Runner

SEED = 1
AGAIN = "the fit's probes again"
UNSEEN = 1e-3  # relative width of a speed, below which a measurement says nothing
MOST_STEPS = 8  # measurements after which an interval is drawn


@dataclass(frozen=True, slots=True)
class Measurement:
    """What is measured, and the numbers that are known then."""

    name: str
    paths: tuple[str, ...]
    probed: bool  # by `twin calibrate`


@dataclass(frozen=True, slots=True)
class Step:
    """A measurement in its place. Widths are p90 / p10 - 1 of the speed, averaged over models."""

    measurement: Measurement
    alone: float  # when its numbers alone are uncertain
    left: float | None  # once it and those before it are known; None: not drawn any more


@dataclass(frozen=True, slots=True)
class Found:
    width: float  # as it is
    steps: tuple[Step, ...]  # the most useful first
    unseen: tuple[str, ...]  # measurements that these models do not notice


def measurements(node: Node) -> tuple[Measurement, ...]:
    """All that would make an uncertain number of the node certain."""
    together, probes = drawn_together(node), _probes(node)
    found: dict[tuple[str, bool], list[str]] = {}
    for path in _uncertain(node):
        short = path.removeprefix("device.")
        if path in together:
            key = (AGAIN, True)
        elif short in probes:
            key = (f"{probes[short]} probes", True)
        else:
            key = (mechanism(path).removeprefix("device."), False)
        found.setdefault(key, []).append(path)
    return tuple(Measurement(name, tuple(paths), probed) for (name, probed), paths in found.items())


def _uncertain(node: Node) -> list[str]:
    (first, *_) = interval.settings(node, Draws(interval.FEWEST, SEED))
    return [path for path, _ in first]


def _probes(node: Node) -> dict[str, str]:
    """The group of probes of each number that one settles."""
    found: dict[str, str] = {}
    for gpus in dict.fromkeys((1, node.gpus)):
        try:
            groups = recipe_of(node.device, gpus).groups
        except CalibrationError:
            continue
        found |= {path: group for group, paths in groups.items() for path in paths}
    return found


def probe_plan(points: Sequence[Point], draws: int, runner: Runner) -> Found:
    """The order for predictions of `points`, which are on one node. Raises ConfigError for a node
    without uncertain numbers and for a point that cannot be simulated.
    """
    node = points[0].on_node()
    known = measurements(node)
    if not known:
        raise ConfigError(f"{node.name}: every number is certain, or meant exactly")
    drawn = interval.settings(node, Draws(draws, SEED))
    everything = {path for one in known for path in one.paths}
    kept = [everything, *({*one.paths} for one in known)]
    width, *alone = _widths(points, drawn, kept, runner, "each measurement")
    ordered = sorted(zip(alone, known, strict=True), key=lambda one: (-one[0], one[1].name))
    useful = [(by, one) for by, one in ordered if by >= UNSEEN]
    left = list(_left(everything, [one for _, one in useful[:MOST_STEPS]]))
    widths: list[float | None] = [*_widths(points, drawn, left, runner, "one after the other")]
    widths += [None] * (len(useful) - len(widths))
    return Found(
        width,
        tuple(Step(one, by, rest) for (by, one), rest in zip(useful, widths, strict=True)),
        tuple(one.name for by, one in ordered if by < UNSEEN),
    )


def _left(everything: Collection[str], ordered: Sequence[Measurement]) -> Iterator[set[str]]:
    left = {*everything}
    for one in ordered:
        left -= {*one.paths}
        yield set(left)


def _widths(
    points: Sequence[Point],
    drawn: Sequence[Sequence[Setting]],
    kept: Sequence[Collection[str]],
    runner: Runner,
    what: str,
) -> list[float]:
    """Of the speeds' eight of ten, where only the numbers of `kept` are drawn; the mean over
    points.
    """
    found = [[_width(s) for s in _speeds(one, drawn, kept, runner, what)] for one in points]
    return [fmean(each) for each in zip(*found, strict=True)]


def _speeds(
    point: Point,
    drawn: Sequence[Sequence[Setting]],
    kept: Sequence[Collection[str]],
    runner: Runner,
    what: str,
) -> Iterator[list[float]]:
    varied = [
        point.with_settings(*(setting for setting in one if setting[0] in some))
        for some in kept
        for one in drawn
    ]
    depths = repeating(point.spec())
    base, *rows = times([point, *varied], runner, depths, f"{point.model}: {what}")
    if base.problem:
        raise ConfigError(base.problem)
    for at in range(len(kept)):
        some = rows[at * len(drawn) : (at + 1) * len(drawn)]
        yield [base.step_s / one.step_s for one in some if not one.problem]


def _width(speeds: Sequence[float]) -> float:
    """p90 / p10 - 1, the prediction between them."""
    if not speeds:
        return math.nan
    low, high = interval.about(1.0, speeds, 0.0)
    return high / low - 1
