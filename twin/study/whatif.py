"""Change anything about the engine or the hardware, and see what it buys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from twin.cost.routing import DRAWN_STEPS
from twin.errors import ConfigError
from twin.hardware.types import Node
from twin.models.feeds import ExpertFeed
from twin.sim.run import Result, simulate
from twin.study.grid import Axis, Grid, Model
from twin.study.hardware import GPUS, Setting, setting_path, with_setting
from twin.study.options import CONDITIONS, Plain, option_name, text_value
from twin.study.point import Point
from twin.text import shown

# Options that make several tokens of a step choose experts, or their ranks wait for each other.
SEVERAL = {"batch": 1, "draft": 0, "expert_ranks": 1}
MOST_LISTED, LONGEST_END = 64, 9  # numbers of a range `0..7`; digits of its ends
# (field of Options, text) -> its value; raises ConfigError
ReadOption = Callable[[str, str], object]


@dataclass(frozen=True, slots=True)
class Change:
    """One `--set name=value`: a field of Options (then `value` is its plain value) or a setting of
    the hardware (then text).
    """

    name: str
    value: Plain
    option: bool


def changed(point: Point, changes: Sequence[Change]) -> Point:
    """The point with all changes made. A hardware number that is set becomes an assumed one."""
    options = {change.name: change.value for change in changes if change.option}
    settings = [_setting(change) for change in changes if not change.option]
    return point.with_options(**options).with_settings(*sorted(settings, key=_gpus_first))


def sweep(point: Point, axes: Sequence[Axis]) -> Grid:
    """Every combination of the axes' values about a point."""
    return Grid(
        (Model(point.model, point.case().spec.name),),
        (point.node,),
        tuple(axes),
        point.options,
        point.settings,
        with_steps(point, [axis.name for axis in axes]).steps,
    )


def with_steps(point: Point, swept: Collection[str] = ()) -> Point:
    """The point with as many simulated steps as `twin simulate` takes: more where which experts are
    chosen makes steps differ, also by an option that is `swept`.
    """
    options = dict(point.options)
    several = any(options.get(name, usual) != usual for name, usual in SEVERAL.items())
    routed = any(isinstance(layer.feed, ExpertFeed) for layer in point.spec().layout)
    drawn = routed and (several or SEVERAL.keys() & {*swept})
    return replace(point, steps=DRAWN_STEPS) if drawn else point


def simulated(point: Point) -> Result:
    """Everything about a point, under its conditions. Raises TwinError."""
    case = point.case()
    return simulate(
        case.plan(),
        case.node,
        steps=point.steps,
        routing=point.routing(),
        speculation=point.speculation(),
    )


def parse_changes(texts: Sequence[str], node: Node, read_option: ReadOption) -> list[Change]:
    """`name=value` texts. Raises ConfigError or HardwareError with the closest names."""
    read: list[Change] = []
    for text in texts:
        name, value = _split("--set", text, "handoff=grid or link.hop=x0.5")
        change = _change(name, value, node, read_option)
        if change.name == GPUS:  # the numbers that can be set after it are those of another node
            node = with_setting(node, GPUS, value)
        if change.option and change.name in [other.name for other in read]:
            raise ConfigError(f"--set: {change.name} is set twice; remove one")
        read.append(change)
    return read


def parse_axes(texts: Sequence[str], node: Node, read_option: ReadOption) -> list[Axis]:
    """`name=value,value,...` texts, each an axis. Raises ConfigError or HardwareError."""
    axes = [_axis(text, node, read_option) for text in texts]
    for name, times in Counter(axis.name for axis in axes).items():
        if times > 1:
            raise ConfigError(f"--sweep: {name} is swept twice; remove one")
    return axes


def _axis(text: str, node: Node, read_option: ReadOption) -> Axis:
    name, values = _split("--sweep", text, "context=128,1024,8192, draft=0..7 or clock=x0.5,x1")
    listed = [one for value in values.split(",") for one in _listed(value.strip())]
    changes = [_change(name, value, node, read_option) for value in listed]
    if len({change.value for change in changes}) < len(changes):
        raise ConfigError(f"--sweep {shown(text)}: a value is given twice; remove one")
    return Axis(changes[0].name, tuple(change.value for change in changes), changes[0].option)


def _listed(text: str) -> list[str]:
    """The whole numbers that `0..7` means; any other text is itself. Raises ConfigError."""
    first, dots, last = text.partition("..")
    if not dots or not first.isdecimal() or not last.isdecimal():
        return [text]
    if max(len(first), len(last)) > LONGEST_END or not 0 < int(last) - int(first) < MOST_LISTED:
        raise ConfigError(
            f"--sweep {shown(text)}: from a number to a larger one, at most {MOST_LISTED} of them"
        )
    return [str(number) for number in range(int(first), int(last) + 1)]


def _split(flag: str, text: str, example: str) -> tuple[str, str]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not name or not value:
        raise ConfigError(f"{flag} {shown(text)}: write name=value, such as {example}")
    return name, value


def _change(name: str, value: str, node: Node, read_option: ReadOption) -> Change:
    option = option_name(name)
    if option is not None and option != GPUS:
        typed = text_value(option, value) if option in CONDITIONS else read_option(option, value)
        plain = typed.value if isinstance(typed, Enum) else typed
        assert plain is None or isinstance(plain, str | int | float)
        return Change(option, plain, True)
    path = setting_path(node, name)
    with_setting(node, path, value)  # refuses a bad value here, where the text is known
    return Change(path, value, False)


def _setting(change: Change) -> Setting:
    return change.name, str(change.value)


def _gpus_first(setting: Setting) -> bool:
    return setting[0] != GPUS
