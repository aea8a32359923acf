"""Read and replace single numbers of a device or node by dotted path."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

from twin.data import did_you_mean
from twin.errors import ConfigError, HardwareError
from twin.hardware.moved import moved
from twin.hardware.number import Kind, Number
from twin.hardware.schema import check_blocks, check_number
from twin.hardware.types import Device, Node
from twin.text import shown
from twin.units import LONGEST, NUMBER, UNSIGNED, example, parse_quantity, stem, unit_of

T = TypeVar("T", Device, Node)
_SHORTEST = 3  # letters of a name's part that is looked for
_FACTOR = re.compile(rf"\s*[x*]\s*({NUMBER})\s*\Z")
_PERCENT = re.compile(rf"\s*([+-])\s*({UNSIGNED})\s*%\s*\Z")
_A_FACTOR = re.compile(r"\s*[x*]|.*%\s*\Z", re.DOTALL)  # meant as one

PIPE, CEILING = "memory.stream_bytes_per_s", "memory.ceiling_bytes_per_s"
# what a wait in the queue is added to
IDLE = {"l2.loaded_latency_s": "l2.latency_s", "handoff.loaded_hop_s": "handoff.hop_s"}

# Half-width of the interval of a number that states none, relative to its value.
SPREAD = {
    Kind.MEASURED: 0.03,
    Kind.FITTED: 0.05,
    Kind.DATASHEET: 0.0,
    Kind.THIRD_PARTY: 0.10,
    Kind.VENDOR: 0.15,
    Kind.UNBOUND: 0.5,
    Kind.ASSUMED: 0.0,  # only a user's own what-if lacks a range, and it is meant exactly
}


def numbers(target: Device | Node) -> dict[str, Number]:
    """Every number with its dotted path ("memory.stream_bytes_per_s"; a node's device under
    "device.").
    """
    found: dict[str, Number] = {}
    _walk(target, "", found)
    return found


def assumed(target: Device | Node) -> list[str]:
    """Paths of the numbers that nobody measured: what a report must list."""
    return [
        path
        for path, number in numbers(target).items()
        if number.kind in (Kind.UNBOUND, Kind.ASSUMED)
    ]


def interval(number: Number) -> tuple[float, float]:
    """(low, high) as stated, or from the number's kind."""
    spread = SPREAD[number.kind]
    low = number.value * (1 - spread) if number.low is None else number.low
    high = number.value * (1 + spread) if number.high is None else number.high
    return low, high


def with_number(
    target: T,
    path: str,
    value: str | float,
    kind: Kind | str = Kind.ASSUMED,
    source: str = "what-if",
) -> T:
    """A copy with one number replaced, and what would otherwise change against it.

    The wait behind the stream stays the same when an idle time changes (IDLE), and so do the bytes
    that a block keeps in flight when memory's latency does. The read ceiling changes by the same
    factor as the pipe: another memory is meant. `path` may omit the unit ("memory.stream") and a
    node's "device."; `value` is a quantity ("5 TB/s"), a number in base units, or a factor of the
    present value ("x1.1", "+10%"), which scales the range too.
    """
    return with_numbers(target, [(path, value)], kind, source)


def with_numbers(
    target: T,
    changes: Iterable[tuple[str, str | float]],
    kind: Kind | str = Kind.ASSUMED,
    source: str = "what-if",
) -> T:
    """A copy with several numbers replaced, in order. A loaded time that is named itself is what it
    is said to be.
    """
    before, kind = numbers(target), _kind(kind)
    known, named = dict(before), set()
    for path, value in changes:
        full = _resolved(target.name, known, path)
        known[full] = _changed(known[full], value, full, kind, source)
        # by the name that was given, before anything follows from it
        check_number(full, known[full])
        named.add(full)
    for loaded, idle in _pairs(before):
        if idle in named and loaded not in named:
            known[loaded] = _behind_the_stream(
                before[loaded], before[idle].value, known[idle].value, kind, source
            )
    for pipe, ceiling in ((f"{prefix}{PIPE}", f"{prefix}{CEILING}") for prefix in ("", "device.")):
        if pipe in named and ceiling in known and ceiling not in named:
            known[ceiling] = scaled(
                before[ceiling],
                known[pipe].value / before[pipe].value,
                kind,
                f"{source}: as the pipe",
            )
    target = apply_fit(
        target, {path: number for path, number in known.items() if number is not before[path]}
    )
    return _in_flight(target, before, named)


def _in_flight(target: T, before: Mapping[str, Number], named: Collection[str]) -> T:
    """The same bytes in flight to each block behind another latency: with fewer behind a better
    one, what lies in a cache came slower.
    """
    for prefix in ("", "device."):
        latency, behind = f"{prefix}memory.latency_s", f"{prefix}block.load_latency_s"
        if latency in named and behind not in before:
            old = before[latency]
            target = _replace(
                target,
                behind.split("."),
                Number(
                    old.value, old.kind, f"memory.latency_s: {old.source}", old.value, old.value
                ),
            )
    return target


def scaled(number: Number, factor: float, kind: Kind, source: str) -> Number:
    """The number and its range times a factor."""
    low, high = (None if end is None else end * factor for end in (number.low, number.high))
    return Number(number.value * factor, kind, source, low, high, number.like)


def apply_fit(target: T, fit: Mapping[str, Number]) -> T:
    """A copy with every number of `fit` put in place of the one at its path."""
    known = numbers(target)  # a fit changes values, no paths
    for path, number in fit.items():
        full = _resolved(target.name, known, path)
        check_number(full, number)
        target = _replace(target, full.split("."), number)
    check_blocks(target.device if isinstance(target, Node) else target)
    return target


def resolve(target: Device | Node, path: str) -> str:
    """The full path that `path` means. Raises HardwareError with the closest paths."""
    (found,) = resolve_all(target, [path])
    return found


def resolve_all(target: Device | Node, paths: Iterable[str]) -> set[str]:
    """The full paths that `paths` mean."""
    known = numbers(target)
    return {_resolved(target.name, known, path) for path in paths}


def _resolved(name: str, known: Mapping[str, Number], path: str) -> str:
    candidates = (path, f"device.{path}", path.removeprefix("device."))
    for candidate in candidates:
        if candidate in known:
            return candidate
    for candidate in candidates:
        short = [p for p in known if _short(p) == candidate]
        if len(short) == 1:
            return short[0]
    if now := moved(path.removeprefix("device.")):
        raise HardwareError(f"{name} has no number {shown(path)}; it is called {now}")
    hint = did_you_mean(path, known)
    if not hint.startswith("did") and (near := _near(known, path)):
        hint = f"did you mean {' or '.join(near)}? `twin hardware {name}` lists all"
    raise HardwareError(f"{name} has no number {shown(path)}; {hint}")


def _near(known: Iterable[str], path: str) -> list[str]:
    """The numbers whose own name holds that of `path` ("hop": handoff.hop_s, link.hop_s), else
    those of the group that it names.
    """
    *group, last = path.lower().split(".")
    by_name = [p for p in known if len(last) >= _SHORTEST and last in p.rpartition(".")[2]]
    return by_name or [p for p in known if group and p.split(".")[-2] == group[-1]]


def _walk(item: object, before: str, found: dict[str, Number]) -> None:
    """Adds the numbers of `item` to `found`, whose paths begin with `before`."""
    kind: Any = type(item)
    for name in _names(kind):
        inner = getattr(item, name)
        if isinstance(inner, Number):
            found[before + name] = inner
        else:
            _walk(inner, f"{before}{name}.", found)


@cache
def _names(kind: type) -> tuple[str, ...]:
    """The fields of a data class, none of another type: a fit simulates thousands of steps, and
    looks through all numbers several times for each.
    """
    return tuple(getattr(kind, "__dataclass_fields__", ()))


def _replace(item: Any, keys: list[str], number: Number) -> Any:
    key, *rest = keys
    inner = _replace(getattr(item, key), rest, number) if rest else number
    return dataclasses.replace(item, **{key: inner})


def _changed(old: Number, value: str | float, path: str, kind: Kind, source: str) -> Number:
    factor = _factor(value, path)
    return (
        Number(_value(value, path), kind, source)
        if factor is None
        else scaled(old, factor, kind, source)
    )


def _pairs(known: Mapping[str, Number]) -> Iterator[tuple[str, str]]:
    """Paths of each loaded time and its idle one."""
    for prefix in ("", "device."):
        yield from (
            (prefix + loaded, prefix + idle)
            for loaded, idle in IDLE.items()
            if prefix + loaded in known
        )


def _behind_the_stream(
    loaded: Number, before_s: float, after_s: float, kind: Kind, source: str
) -> Number:
    """The same wait behind the same queue after the idle time has changed: bytes in flight do not
    know what comes behind them.

    A loaded time that stayed would mean a longer wait after each improvement of the idle one, and
    behind a queue longer than QUEUE_S a slower hand-off: 12 % of a step were lost so.
    """
    change = after_s - min(before_s, loaded.value)
    low, high = (
        None if end is None else max(0.0, end + change) for end in (loaded.low, loaded.high)
    )
    return Number(
        loaded.value + change,
        kind,
        f"{source}: the same wait behind the stream",
        low,
        high,
        loaded.like,
    )


def _factor(value: str | float, path: str) -> float | None:
    """Of "x1.1" or "+10%"; None where the value is no change of the present one."""
    if not isinstance(value, str) or not _A_FACTOR.match(value):
        return None
    if len(value) <= LONGEST:
        if match := _FACTOR.match(value):
            return float(match[1])
        if match := _PERCENT.match(value):
            return 1 + float(match[1] + match[2]) / 100
    raise HardwareError(f"{path}: factor {shown(value)} is not a number; write 'x1.1' or '+10%'")


def _value(value: str | float, path: str) -> float:
    if not isinstance(value, str):
        return float(value)
    try:
        return parse_quantity(value, unit_of(path.rsplit(".", 1)[-1]))
    except ConfigError as error:
        unit = unit_of(path.rsplit(".", 1)[-1])
        raise HardwareError(
            f"{path}: {error} (or a factor: 'x1.1', '+10%'; example {example(unit)!r})"
        ) from error


def _kind(kind: Kind | str) -> Kind:
    if isinstance(kind, Kind):
        return kind
    names = [k.value for k in Kind]
    if kind not in names:
        raise HardwareError(f"{shown(kind)} is not a kind; {did_you_mean(kind, names)}")
    return Kind(kind)


def _short(path: str) -> str:
    head, _, leaf = path.rpartition(".")
    return f"{head}.{stem(leaf)}"
