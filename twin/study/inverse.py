"""Which changes of a machine reach a speed: the inverse of a prediction.

A number's change is measured in doublings: a rate twice as high and a time half as long are one
doubling each, so a rate and a time can be compared. What every number does by itself is simulated
at a few levels up to its bound, and all of them together at their bounds. From these a table
proposes the cheapest changes of each few numbers; every proposal is then simulated, and drawn back
or forth along its own direction until it just reaches the speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from twin.errors import ConfigError, TwinError
from twin.hardware.override import numbers
from twin.study.depth import repeating, times
from twin.study.hardware import Setting, setting_path, with_settings
from twin.study.point import Point, Row
from twin.study.runner import Runner
from twin.text import shown
from twin.units import unit_of

# what people call a number that is called otherwise on file
CALLED = {"structure.sms": "structure.blocks_per_die", "structure.cus": "structure.blocks_per_die"}
LOWER = ("s", "cycles")  # units of which less is better
MOST, HIGHEST = 4.0, 1000.0  # factor of a bound: where none is given, and at most
MOST_VARIED = 8
TOGETHER = 3  # numbers of a proposal, besides all of them
LEVELS = 3  # of each number, between as it is and its bound
GRAIN = 1 / 16  # doublings: steps of a proposal
PROPOSED = 8
ROUNDS = 6  # halvings of the distance to the speed
# Of a change that all layers put below the speed: by how much more, and twice that each time.
NUDGE, NUDGES = 0.01, 6


@dataclass(frozen=True, slots=True)
class Varied:
    """A number that may change, from its value to `most` times better."""

    path: str
    value: float
    most: float  # factor, above 1
    lower: bool  # less is better
    whole: bool  # a count

    def better(self, doublings: float) -> float:
        """The number after so many doublings, 0 to `limit`."""
        factor = 2.0**doublings
        changed = self.value / factor if self.lower else self.value * factor
        return float(math.ceil(changed - 1e-9)) if self.whole else changed

    @property
    def limit(self) -> float:
        """Doublings."""
        return math.log2(self.most)

    @property
    def name(self) -> str:
        return self.path.removeprefix("device.")


Change = tuple[float, ...]  # doublings of each varied number


@dataclass(frozen=True, slots=True)
class Machine:
    """A change that reaches the speed, and the step of all layers on it."""

    change: Change
    settings: tuple[Setting, ...]
    row: Row

    @property
    def doublings(self) -> float:
        """What it costs: those of all numbers together."""
        return sum(self.change)


@dataclass(frozen=True, slots=True)
class Found:
    """The frontier, the cheapest first: no machine needs as much or more of every number than
    another.
    """

    varied: tuple[Varied, ...]
    base: Row
    machines: tuple[Machine, ...]


class Unreached(ConfigError):
    """No change within the bounds reaches the speed."""


def parse_varied(text: str, point: Point) -> tuple[Varied, ...]:
    """`name` or `name=x8`, separated by commas. Raises ConfigError or HardwareError with what is
    wrong and the closest names.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"--vary {shown(text)}: a name is empty; remove a comma")
    found = [_varied(part, point) for part in parts]
    paths = [one.path for one in found]
    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"--vary: {path.removeprefix('device.')} is given twice; remove one")
    if len(found) > MOST_VARIED:
        raise ConfigError(f"--vary: {len(found)} numbers; at most {MOST_VARIED}: leave some out")
    return tuple(found)


def _varied(text: str, point: Point) -> Varied:
    name, given, bound = (part.strip() for part in text.partition("="))
    node = point.on_node()
    path = setting_path(node, CALLED.get(name, name))
    known = numbers(node)
    if path not in known:
        raise ConfigError(f"--vary {name}: changes several numbers; name one, as memory.stream")
    most = _bound(text, bound) if given else MOST
    value, unit = known[path].value, unit_of(path.rsplit(".", 1)[-1])
    if value <= 0:
        raise ConfigError(f"--vary {name}: it is {value:g} on {node.name}, no factor changes that")
    one = Varied(path, value, most, unit in LOWER, not unit and value.is_integer())
    try:  # refused here, where the name is known
        with_settings(node, [(path, one.better(one.limit))])
    except TwinError as error:
        raise ConfigError(f"--vary {text}: {error}; give a nearer bound, {name}=x2") from error
    return one


def _bound(text: str, bound: str) -> float:
    """ "x8" or "x0.125": both eight times better."""
    try:
        factor = float(bound.removeprefix("x"))
        factor = max(factor, 1 / factor)
    except (ValueError, ZeroDivisionError):
        factor = 0.0
    if not bound.startswith("x") or not 1 < factor <= HIGHEST:
        raise ConfigError(
            f"--vary {shown(text)}: a bound is a factor such as x8 (at most x{HIGHEST:g}, or "
            f"x{1 / HIGHEST:g} of a time)"
        )
    return factor


def inverse(point: Point, varied: Sequence[Varied], target: float, runner: Runner) -> Found:
    """Machines that reach `target` tokens/s. Raises Unreached with the best that is reached, and
    TwinError for a point that cannot be simulated.
    """
    (base,) = runner.rows([point], "as it is")
    if base.problem:
        raise ConfigError(base.problem)
    if base.tokens_per_s >= target:
        none = Machine((0.0,) * len(varied), (), base)
        return Found(tuple(varied), base, (none,))
    made = _Inverse(point, tuple(varied), base, target, runner)
    return Found(tuple(varied), base, made.machines())


class _Inverse:
    """Owns what is known of each number's effect."""

    def __init__(
        self, point: Point, varied: tuple[Varied, ...], base: Row, target: float, runner: Runner
    ) -> None:
        self._point, self._varied, self._base = point, varied, base
        self._target, self._runner = target, runner
        self._target_s = base.tokens_per_step / target - base.draft_s
        self._depths = repeating(point.spec())
        (short,) = times([point], runner, self._depths, "a few layers")
        self._scale = base.step_s / (short.step_s - base.draft_s)
        self._none: Change = (0.0,) * len(varied)
        self._all: Change = self._none  # each where it alone helps most

    def machines(self) -> tuple[Machine, ...]:
        curves, all_s = self._measured()
        if all_s > self._target_s:
            raise self._unreached()
        changes = self._reaching(self._proposals(curves, all_s))
        found = list(self._whole(changes)) or list(self._whole([self._all]))
        if not found:
            raise self._unreached()
        return tuple(sorted(_frontier(found), key=lambda one: one.doublings))

    def _settings(self, change: Change) -> tuple[Setting, ...]:
        return tuple(
            (one.path, one.better(by)) for one, by in zip(self._varied, change, strict=True) if by
        )

    def _seconds(self, changes: Sequence[Change], what: str) -> list[float]:
        points = [self._point.with_settings(*self._settings(change)) for change in changes]
        found = times(points, self._runner, self._depths, what)
        return [
            float("inf") if one.problem else (one.step_s - self._base.draft_s) * self._scale
            for one in found
        ]

    def _alone(self, at: int, by: float) -> Change:
        return tuple(by if i == at else 0.0 for i in range(len(self._varied)))

    def _measured(self) -> tuple[list[list[float]], float]:
        """Seconds that each number by itself saves at its levels, and a step with all changed as
        far as each by itself helps: more blocks, for one, need more hand-offs.
        """
        changes = [
            self._alone(at, one.limit * level / LEVELS)
            for at, one in enumerate(self._varied)
            for level in range(1, LEVELS + 1)
        ]
        saved = [self._base.step_s - seconds for seconds in self._seconds(changes, "each number")]
        curves = [[0.0, *saved[at * LEVELS : (at + 1) * LEVELS]] for at in range(len(self._varied))]
        best = [max(range(LEVELS + 1), key=curve.__getitem__) for curve in curves]
        self._all = tuple(
            one.limit * level / LEVELS for one, level in zip(self._varied, best, strict=True)
        )
        without = [
            tuple(0.0 if i == at else by for i, by in enumerate(self._all))
            for at in range(len(self._varied))
        ]
        tried = [self._all, *without]  # what helps alone may lose next to the others
        seconds = self._seconds(tried, "all numbers")
        all_s, self._all = min(zip(seconds, tried, strict=True))
        return curves, all_s

    def _proposals(self, curves: list[list[float]], all_s: float) -> list[Change]:
        """The cheapest change of every few numbers by the table, without those that need all that
        another one needs and more.
        """
        count_of = len(self._varied)
        alone = sum(max(curve) for curve in curves)
        # what the numbers' savings are worth together, of their sum
        worth = (self._base.step_s - all_s) / alone if alone > 0 else 1.0
        sizes = {*range(1, min(TOGETHER, count_of) + 1), count_of}
        found: dict[Change, None] = {}
        for size in sorted(sizes):
            share = 1 + (worth - 1) * (size - 1) / max(1, count_of - 1)
            for some in combinations(range(count_of), size):
                change = self._cheapest(some, curves, share)
                if change is not None:
                    found[change] = None
        ordered = sorted(found, key=sum)
        kept: list[Change] = []
        for change in ordered:
            if not any(_needs_no_more(other, change) for other in kept):
                kept.append(change)
        return kept[:PROPOSED] or [self._all]

    def _cheapest(
        self, some: Sequence[int], curves: list[list[float]], share: float
    ) -> Change | None:
        """Step by step what saves most for a step; None where these numbers do not reach it. What
        the table puts a little beyond reach is proposed at the bounds.
        """
        change, saved, wanted = list(self._none), 0.0, self._base.step_s - self._target_s
        while share * saved < wanted:
            moves = [
                (
                    self._saving(curves[at], at, change[at] + GRAIN)
                    - self._saving(curves[at], at, by),
                    at,
                )
                for at in some
                if (by := change[at]) + GRAIN <= self._varied[at].limit + 1e-9
            ]
            if not moves:
                return tuple(change) if share * saved > 0.9 * wanted else None
            gain, at = max(moves)
            change[at] += GRAIN
            saved += gain
        return tuple(change)

    def _saving(self, curve: list[float], at: int, by: float) -> float:
        """Seconds, between levels in proportion."""
        place = by / self._varied[at].limit * LEVELS
        low = min(int(place), LEVELS - 1)
        return curve[low] + (curve[low + 1] - curve[low]) * (place - low)

    def _reaching(self, proposals: Sequence[Change]) -> list[Change]:
        """Each drawn along its direction to where a few layers just reach the speed; those that do
        not reach it at their bounds are dropped.
        """
        most = {change: self._stretch(change) for change in proposals}
        ends = self._seconds([self._times(c, most[c]) for c in proposals], "proposals")
        low = {c: 0.0 for c, s in zip(proposals, ends, strict=True) if s <= self._target_s}
        high = {c: most[c] for c in low}
        for at in range(ROUNDS):
            # the first look is where the table puts it
            middle = {c: 1.0 if not at and most[c] > 1 else (low[c] + high[c]) / 2 for c in low}
            seconds = self._seconds([self._times(c, middle[c]) for c in low], "proposals")
            for change, one in zip(list(low), seconds, strict=True):
                (high if one <= self._target_s else low)[change] = middle[change]
        return [self._times(change, high[change]) for change in low] or [self._all]

    def _stretch(self, change: Change) -> float:
        """How far a direction goes before its last number is at its bound."""
        return max(most / by for most, by in zip(self._all, change, strict=True) if by)

    def _times(self, change: Change, factor: float) -> Change:
        """So far along its direction; a number at its bound stays there."""
        return tuple(min(by * factor, most) for by, most in zip(change, self._all, strict=True))

    def _whole(self, changes: Sequence[Change]) -> Iterator[Machine]:
        """Simulated with all layers, and pushed on where these fall short."""
        left, nudge = list(changes), NUDGE
        for _ in range(NUDGES):
            settings = [self._settings(change) for change in left]
            rows = self._runner.rows([self._point.with_settings(*s) for s in settings], "machines")
            short = []
            for change, made, row in zip(left, settings, rows, strict=True):
                if not row.problem and row.tokens_per_s >= self._target:
                    yield Machine(change, made, row)
                elif change != self._all:
                    further = self._times(change, 1 + nudge)
                    short.append(further if further != change else self._all)
            left, nudge = short, 2 * nudge
            if not left:
                return

    def _unreached(self) -> Unreached:
        settings = self._settings(self._all)
        (row,) = self._runner.rows([self._point.with_settings(*settings)], "all at their bounds")
        if row.problem:
            return Unreached(f"all numbers changed: {row.problem}; give nearer bounds")
        named = ", ".join(
            f"{one.name} x{(2**-by if one.lower else 2**by):.3g}"
            for one, by in zip(self._varied, self._all, strict=True)
        )
        causes = sorted(row.attribution.items(), key=lambda item: -item[1])[:3]
        binds = ", ".join(f"{cause} {100 * s / row.step_s:.0f}%" for cause, s in causes)
        return Unreached(
            f"no change within the bounds reaches {self._target:,.4g} tokens/s: with {named} it "
            f"is {row.tokens_per_s:,.4g} (as it is {self._base.tokens_per_s:,.4g}), and what "
            f"binds there is {binds}; vary numbers of that, or set a wider bound: NAME=x16 (x1: a "
            "number that by itself only loses)"
        )


def _needs_no_more(one: Change, other: Change) -> bool:
    return all(a <= b + 1e-9 for a, b in zip(one, other, strict=True))


def _frontier(found: Sequence[Machine]) -> Iterator[Machine]:
    for at, machine in enumerate(found):
        others = [one for i, one in enumerate(found) if i != at]
        if not any(
            _needs_no_more(one.change, machine.change)
            and (one.change != machine.change or found.index(one) < at)
            for one in others
        ):
            yield machine


def factors(found: Found, machine: Machine) -> Mapping[str, float]:
    """Each changed number's factor, by its short name."""
    settings = dict(machine.settings)
    return {
        one.name: float(settings[one.path]) / one.value
        for one in found.varied
        if one.path in settings
    }
