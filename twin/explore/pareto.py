"""Machines for a model that no other one beats in everything: speed, cost, energy and what its
format rounds away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from twin.batching.prices import rates_of
from twin.errors import TwinError
from twin.explore.answers import Answer
from twin.explore.rows import Rows
from twin.explore.view import ViewCase
from twin.hardware.load import node_names
from twin.models.codes import CODES
from twin.models.formats import PLAIN
from twin.study.depth import repeating
from twin.study.point import Point, Row

GPUS = (1, 2, 4, 8)
FORMATS = ("", "fp8-128x128", "int4-g128", "mxfp4")  # the model's own first
ROUNDED = (256, 1024)  # of the matrix whose rounding is measured


@dataclass(frozen=True, slots=True)
class Choice:
    """A node and a format, and what they come to: the more speed and the less of the rest, the
    better.
    """

    node: str
    format: str
    tokens_per_s: float
    usd: float  # per million tokens
    kwh: float  # per million tokens
    rounding: float

    def beats(self, other: Choice) -> bool:
        """As good in everything, and better in something."""
        mine, theirs = self._all(), other._all()
        return mine != theirs and all(m <= t for m, t in zip(mine, theirs, strict=True))

    def _all(self) -> tuple[float, ...]:
        return -self.tokens_per_s, self.usd, self.kwh, self.rounding


def front(choices: Sequence[Choice]) -> list[Choice]:
    """Those that none beats, the fastest first."""
    kept = [one for one in choices if not any(other.beats(one) for other in choices)]
    return sorted(kept, key=lambda one: -one.tokens_per_s)


def pareto(one: ViewCase, rows: Rows) -> Answer:
    """All devices with a price on file, by default options; deep models by a few layers, several
    GPUs by one that stands for all.
    """
    base = one.point()
    points = [
        point
        for node in node_names()
        if _gpus(node) in GPUS and rates_of(Point(base.model, node).on_node()).cents_per_hour
        for point in _in_formats(replace(base, node=node, settings=()))
    ]
    looked = yield from rows.of([replace(point, steps=0) for point in points], "plans")
    possible = [point for point, row in zip(points, looked, strict=True) if not row.problem]
    short = [_short(point) for point in possible]
    found = iter((yield from rows.of([each for some in short for each in some], "machines")))
    choices = []
    for point, some in zip(possible, short, strict=True):
        made = _choice(point, [next(found) for _ in some])
        if made is not None:
            choices.append(made)
    best = front(choices)
    yield {
        "part": "pareto",
        "choices": [_data(choice) | {"front": choice in best} for choice in choices],
        "left_out": len(points) - len(choices),
    }


def _gpus(node: str) -> int:
    return int(node.partition("x")[0])


def _in_formats(point: Point) -> list[Point]:
    """In its own format, and in those that make it smaller."""
    named = point.condition("format", "") or point.model.partition("@")[2]
    if named:
        return [point]
    own = point.spec().streamed_bytes
    found = [point]
    for form in FORMATS[1:]:
        other = point.with_options(format=form)
        try:
            if other.spec().streamed_bytes < 0.9 * own:
                found.append(other)
        except TwinError:  # a model that has no such format
            continue
    return found


def _short(point: Point) -> tuple[Point, ...]:
    one = replace(point, representative=True)
    depths = repeating(one.spec())
    return depths.short(one) if depths else (one,)


def _choice(point: Point, some: Sequence[Row]) -> Choice | None:
    if any(row.problem for row in some):
        return None
    depths, last = repeating(point.spec()), some[-1]
    step_s = last.step_s
    if depths and len(some) == 2:
        step_s = depths.line(point.spec().layers, some[0].step_s, some[1].step_s)
    speed = last.sequences * last.tokens_per_step / (step_s + last.draft_s)
    node = point.on_node()
    rates = rates_of(node)
    usd, kwh = rates.usd_per_million(node, speed), rates.kwh_per_million(node, speed)
    if usd is None or kwh is None:
        return None
    form = point.condition("format", "")
    return Choice(point.node, form, speed, usd, kwh, rounding(form) if form else 0.0)


@lru_cache
def rounding(form: str) -> float:
    """What a format takes of normal weights when they are rounded to it by our codes, as the root
    of its share of their power: of weights alone, not of what the model then answers.
    """
    if form in PLAIN:
        return 0.0
    weights = np.random.default_rng(0).standard_normal(ROUNDED).astype(np.float32)
    left = CODES[form].quantise(weights).astype(np.float64) - weights
    return float(np.sqrt(np.mean(left**2) / np.mean(weights.astype(np.float64) ** 2)))


def _data(choice: Choice) -> dict[str, Any]:
    return {
        "node": choice.node,
        "format": choice.format or "its own",
        "tokens_per_s": choice.tokens_per_s,
        "usd": choice.usd,
        "kwh": choice.kwh,
        "rounding": choice.rounding,
    }
