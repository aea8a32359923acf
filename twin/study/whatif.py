"""Change anything about the engine or the hardware, and see what it buys; the effect of each number by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from twin.calibrate.validate import calibrated_node
from twin.errors import ConfigError, TwinError
from twin.hardware.override import numbers, resolve, with_number
from twin.hardware.types import Kind, Node, Number
from twin.plan.defaults import FIELDS
from twin.study.case import Case
from twin.study.parallel import each
from twin.units import unit_of

Progress = Callable[[str], None]
STEP = 0.10  # relative change of each number in a sensitivity table
OPTIONS = ("blocks", "ring_slots", "window_slots", "slot_bytes", "context")  # engine options that a step of 10% makes sense for
HARDWARE = "hardware."  # optional prefix of a hardware path


@dataclass(frozen=True, slots=True)
class Change:
    """One `--set name=value`: a field of Options (then `value` is its value) or a hardware path (then text)."""

    name: str
    value: Any
    option: bool


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
        return self.name.removeprefix("device.") + (" (lowered)" if self.after < self.before else "")

    @property
    def assumed(self) -> bool:
        return self.kind == Kind.ASSUMED.value


def changed(case: Case, changes: Sequence[Change]) -> Case:
    """The case with all changes made; another number of GPUs is another node, found by name.

    A hardware number that is set becomes an assumed one.
    """
    node, chosen = case.node, dict(case.chosen)
    for change in changes:
        if change.name == "gpus":
            node = calibrated_node(f"{change.value}x{node.device.name}")
        elif change.option:
            chosen[change.name] = change.value
    for change in changes:
        if not change.option:
            node = with_number(node, change.name, change.value)
    return Case(case.spec, node, chosen)


def parse_changes(texts: Sequence[str], node: Node, read_option: Callable[[str, str], object]) -> list[Change]:
    """`name=value` texts. Raises ConfigError or HardwareError with the closest names."""
    return [_parse_change(text, node, read_option) for text in texts]


def _parse_change(text: str, node: Node, read_option: Callable[[str, str], object]) -> Change:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not value:
        raise ConfigError(f"--set {text!r}: write name=value, such as handoff=grid or link.hop=x0.5")
    option = name.replace("-", "_")
    option = "weight_dtype" if option == "dtype" else option
    if option in FIELDS:
        return Change(option, read_option(option, value), True)
    path = resolve(node, name.removeprefix(HARDWARE))
    with_number(node, path, value)  # refuses a bad value here, where the text is known
    return Change(path, value, False)


def sensitivity(case: Case, base_tokens_per_s: float, progress: Progress, *, workers: int | None = None) -> list[Effect]:
    """Each hardware number and each of OPTIONS raised by STEP, one at a time; the strongest effect first.

    An option that cannot be raised (all blocks are in use) is lowered instead.
    """
    trials = list(_trials(case))
    done: list[Effect] = []
    for _, effect in each(partial(_effect, base_tokens_per_s), trials, workers=workers):
        done.append(effect)
        progress(f"sensitivity: {len(done)}/{len(trials)} {effect.name}")
    return sorted(done, key=lambda effect: (-abs(effect.effect), effect.name))


@dataclass(frozen=True, slots=True)
class _Trial:
    name: str
    kind: str
    before: float
    ways: tuple[tuple[float, Case], ...]  # (value, case): the first that can be planned is taken


def _trials(case: Case) -> Iterator[_Trial]:
    for path, number in numbers(case.node).items():
        raised = _raised(path, number)
        if raised is not None:
            node = with_number(case.node, path, raised)
            yield _Trial(path, number.kind.value, number.value, ((raised, Case(case.spec, node, case.chosen)),))
    options = case.plan().options
    for name in OPTIONS:
        before = getattr(options, name)
        step = _option_step(name, before)
        yield _Trial(name, "option", before, tuple((value, _with_option(case, name, value)) for value in (before + step, before - step)))


def _with_option(case: Case, name: str, value: int) -> Case:
    together = {"window_slots": value} if name == "ring_slots" else {}
    return Case(case.spec, case.node, {**case.chosen, name: value, **together})


def _raised(path: str, number: Number) -> float | None:
    """The number one STEP higher; None for zero and for counts too small to change by it."""
    if unit_of(path.rsplit(".", 1)[-1]):
        return number.value * (1 + STEP) or None
    whole = float(int(number.value * (1 + STEP)))
    return whole if whole > number.value else None


def _option_step(name: str, value: int) -> int:
    grain = 16 if name == "slot_bytes" else 1
    return max(grain, int(value * STEP) // grain * grain)


def _effect(base: float, trial: _Trial) -> Effect:
    problem = ""
    for after, case in trial.ways:
        try:
            speed = case.simulate().tokens_per_s
        except TwinError as error:
            problem = problem or str(error)
        else:
            return Effect(trial.name, trial.kind, trial.before, after, speed, speed / base - 1)
    return Effect(trial.name, trial.kind, trial.before, trial.ways[0][0], None, 0.0, problem)
