"""A step as a fixed part and a part for each layer: what a change does to deep models, from two
short ones.

Layers repeat, so a draw of the hardware need not be simulated over all 80 of them. With t(n) the
time of the first n layers, embedding and head, t(deep) + (layers - deep) * (t(deep) - t(shallow)) /
(deep - shallow) is the time of all; its ratio between a draw and the hardware as it is on file is
applied to the full simulation. How good that is: tests/study/test_depth.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twin.models.depth import line, repeated_layers
from twin.models.spec import ModelSpec
from twin.study.point import Point, Row
from twin.study.runner import Runner


@dataclass(frozen=True, slots=True)
class Depths:
    """Two numbers of layers."""

    shallow: int
    deep: int

    def short(self, point: Point) -> tuple[Point, ...]:
        """The point at both depths; itself alone where it is not deeper than that."""
        if point.spec().layers <= self.deep:
            return (point,)
        return tuple(point.with_options(layers=layers) for layers in (self.shallow, self.deep))

    def extended(self, point: Point, rows: tuple[Row, ...]) -> float:
        """Seconds of a step of all layers, from the rows of `short`."""
        if len(rows) == 1:
            return rows[0].step_s
        return self.line(point.spec().layers, rows[0].step_s, rows[1].step_s)

    def line(self, layers: int, shallow: float, deep: float) -> float:
        """What is the same in every layer, from its values at both depths."""
        return line(layers, (self.shallow, self.deep), (shallow, deep))


def repeating(spec: ModelSpec) -> Depths | None:
    """The least depths between which lies what all layers below repeat; None where nothing does."""
    found = repeated_layers(spec)
    return Depths(*found) if found else None


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step and what is drafted before it, or why there are none."""

    step_s: float
    problem: str = ""
    # numbers that it rests on and nobody measured; what a draw sets is among them
    assumed: tuple[str, ...] = ()


def times(points: Sequence[Point], runner: Runner, depths: Depths | None, what: str) -> list[Time]:
    """A step of each point: simulated whole, or with depths extended from short models."""
    if depths is None:
        return [
            Time(row.step_s + row.draft_s, row.problem, row.assumed)
            for row in runner.rows(points, what)
        ]
    short = [depths.short(point) for point in points]
    rows = iter(runner.rows([one for shorts in short for one in shorts], what))
    return list(_extended(points, short, rows, depths))


def _extended(
    points: Sequence[Point], short: Sequence[tuple[Point, ...]], rows: Iterator[Row], depths: Depths
) -> Iterator[Time]:
    for point, shorts in zip(points, short, strict=True):
        found = tuple(next(rows) for _ in shorts)
        problem = next((row.problem for row in found if row.problem), "")
        yield (
            Time(0.0, problem)
            if problem
            else Time(depths.extended(point, found) + found[0].draft_s, "", found[0].assumed)
        )
