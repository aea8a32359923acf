"""What a change of each number by itself does to the speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twin.hardware.number import Kind, Number
from twin.hardware.override import numbers
from twin.study.depth import Depths, Time, times
from twin.study.outcome import Bars, Series
from twin.study.point import Point
from twin.study.runner import Runner
from twin.units import unit_of

STEP = 0.10  # relative change of each number
# engine options that a step of 10% makes sense for
OPTIONS = ("blocks", "ring_slots", "window_slots", "slot_bytes", "context")


@dataclass(frozen=True, slots=True)
class Effect:
    """What one number does to the speed when it alone changes."""

    name: str
    kind: str  # of the number, or "option"
    before: float
    after: float
    tokens_per_s: float | None  # None: cannot be planned, `problem` says why
    effect: float  # relative change of tokens/s
    problem: str = ""

    @property
    def label(self) -> str:
        return self.name.removeprefix("device.") + (
            " (lowered)" if self.after < self.before else ""
        )

    @property
    def assumed(self) -> bool:
        return self.kind in (Kind.ASSUMED.value, Kind.UNBOUND.value)


def effects_chart(effects: Sequence[Effect], step: float = STEP) -> Bars:
    """Relative change of tokens/s by each number alone; those that nobody measured stand out."""
    series = []
    for label, assumed in (("has a source", False), ("assumed", True)):
        values = tuple(e.effect if e.assumed is assumed else None for e in effects)
        if any(value is not None for value in values):
            series.append(Series(label, values))
    axis = f"change of tokens/s for +{step:.0%} of the number"
    return Bars(tuple(e.label for e in effects), tuple(series), axis)


@dataclass(frozen=True, slots=True)
class Trial:
    """One number changed; `ways` are tried in order until one can be planned."""

    name: str
    kind: str
    before: float
    ways: tuple[tuple[float, Point], ...]  # (value, point)


def sensitivity(point: Point, runner: Runner) -> list[Effect]:
    """Each hardware number and each of OPTIONS raised by STEP, one at a time; the strongest effect
    first.

    An option that cannot be raised (all blocks are in use) is lowered instead.
    """
    return effects(point, trials(point), runner)


def effects(
    point: Point, tried: list[Trial], runner: Runner, depths: Depths | None = None
) -> list[Effect]:
    """The effect of each trial against `point`; with depths from short models."""
    speed = runner.rows([point])[0].tokens_per_s
    base, *first = times(
        [point, *(trial.ways[0][1] for trial in tried)], runner, depths, "sensitivity"
    )
    again = [
        trial
        for trial, one in zip(tried, first, strict=True)
        if one.problem and len(trial.ways) > 1
    ]
    lowered = (
        times([trial.ways[1][1] for trial in again], runner, depths, "lowered instead")
        if again
        else []
    )
    second = dict(zip((trial.name for trial in again), lowered, strict=True))
    found = [
        _effect(speed, base.step_s, trial, one, second.get(trial.name))
        for trial, one in zip(tried, first, strict=True)
    ]
    return sorted(found, key=lambda effect: (-abs(effect.effect), effect.name))


def trials(point: Point) -> list[Trial]:
    return list(_trials(point))


def _trials(point: Point) -> Iterator[Trial]:
    for path, number in numbers(point.on_node()).items():
        raised = _raised(path, number)
        if raised is not None:
            yield Trial(
                path,
                number.kind.value,
                number.value,
                ((raised, point.with_settings((path, raised))),),
            )
    options = point.case().plan().options
    for name in OPTIONS:
        before = getattr(options, name)
        step = _option_step(name, before)
        yield Trial(
            name,
            "option",
            before,
            tuple(
                (value, _with_option(point, name, value))
                for value in (before + step, before - step)
            ),
        )


def _with_option(point: Point, name: str, value: int) -> Point:
    together = {"window_slots": value} if name == "ring_slots" else {}
    return point.with_options(**{name: value}, **together)


def _raised(path: str, number: Number) -> float | None:
    """The number one STEP higher; None for zero and for counts too small to change by it."""
    if unit_of(path.rsplit(".", 1)[-1]):
        return number.value * (1 + STEP) or None
    whole = float(int(number.value * (1 + STEP)))
    return whole if whole > number.value else None


def _option_step(name: str, value: int) -> int:
    grain = 16 if name == "slot_bytes" else 1
    return max(grain, int(value * STEP) // grain * grain)


def _effect(speed: float, base_s: float, trial: Trial, first: Time, second: Time | None) -> Effect:
    for (after, _), found in zip(trial.ways, (first, second), strict=False):
        if found is not None and not found.problem:
            ratio = base_s / found.step_s
            return Effect(trial.name, trial.kind, trial.before, after, speed * ratio, ratio - 1)
    return Effect(trial.name, trial.kind, trial.before, trial.ways[0][0], None, 0.0, first.problem)
