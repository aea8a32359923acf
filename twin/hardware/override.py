"""Read and replace single numbers of a device or node by dotted path."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from twin.data import did_you_mean
from twin.errors import ConfigError, HardwareError
from twin.hardware.schema import check_number
from twin.hardware.types import Device, Kind, Node, Number
from twin.units import example, parse_quantity, stem, unit_of

T = TypeVar("T", Device, Node)
_FACTOR = re.compile(r"\s*[x*]\s*(\S+)\s*\Z")
_PERCENT = re.compile(r"\s*([+-]\s*\S+?)\s*%\s*\Z")

# Half-width of the interval of a number that states none, relative to its value.
SPREAD = {
    Kind.MEASURED: 0.03,
    Kind.FITTED: 0.05,
    Kind.DATASHEET: 0.0,
    Kind.THIRD_PARTY: 0.10,
    Kind.VENDOR: 0.15,
    Kind.ASSUMED: 0.0,  # only a user's own what-if lacks a range, and it is meant exactly
}


def numbers(target: Device | Node) -> dict[str, Number]:
    """Every number with its dotted path ("memory.stream_bytes_per_s"; a node's device under "device.")."""
    return dict(_walk(target, ""))


def assumed(target: Device | Node) -> list[str]:
    """Paths of the numbers that nobody measured: what a report must list."""
    return [path for path, number in numbers(target).items() if number.kind is Kind.ASSUMED]


def interval(number: Number) -> tuple[float, float]:
    """(low, high) as stated, or from the number's kind."""
    spread = SPREAD[number.kind]
    low = number.value * (1 - spread) if number.low is None else number.low
    high = number.value * (1 + spread) if number.high is None else number.high
    return low, high


def with_number(target: T, path: str, value: str | float, kind: Kind | str = Kind.ASSUMED, source: str = "what-if") -> T:
    """A copy with one number replaced.

    `path` may omit the unit ("memory.stream") and a node's "device."; `value` is a quantity ("5 TB/s"), a number in
    base units, or a factor of the present value ("x1.1", "+10%"), which scales the range too.
    """
    known = numbers(target)
    full = _resolved(target.name, known, path)
    old = known[full]
    factor = _factor(value, full)
    if factor is None:
        new = Number(_value(value, full), _kind(kind), source)
    else:
        low, high = (None if end is None else end * factor for end in (old.low, old.high))
        new = Number(old.value * factor, _kind(kind), source, low, high, old.like)
    return apply_fit(target, {full: new})


def apply_fit(target: T, fit: Mapping[str, Number]) -> T:
    """A copy with every number of `fit` put in place of the one at its path."""
    known = numbers(target)  # a fit changes values, no paths
    for path, number in fit.items():
        full = _resolved(target.name, known, path)
        check_number(full, number)
        target = _replace(target, full.split("."), number)
    return target


def resolve(target: Device | Node, path: str) -> str:
    """The full path that `path` means. Raises HardwareError with the closest paths."""
    return _resolved(target.name, numbers(target), path)


def _resolved(name: str, known: Mapping[str, Number], path: str) -> str:
    for candidate in (path, f"device.{path}", path.removeprefix("device.")):
        if candidate in known:
            return candidate
        short = [p for p in known if _short(p) == candidate]
        if len(short) == 1:
            return short[0]
    raise HardwareError(f"{name} has no number {path!r}; {did_you_mean(path, known)}")


def _walk(item: object, path: str) -> Iterator[tuple[str, Number]]:
    if isinstance(item, Number):
        yield path, item
    elif dataclasses.is_dataclass(item):
        for field in dataclasses.fields(item):
            inner = f"{path}.{field.name}" if path else field.name
            yield from _walk(getattr(item, field.name), inner)


def _replace(item: Any, keys: list[str], number: Number) -> Any:
    key, *rest = keys
    inner = _replace(getattr(item, key), rest, number) if rest else number
    return dataclasses.replace(item, **{key: inner})


def _factor(value: str | float, path: str) -> float | None:
    if not isinstance(value, str):
        return None
    try:
        if match := _FACTOR.match(value):
            return float(match[1])
        if match := _PERCENT.match(value):
            return 1 + float(match[1].replace(" ", "")) / 100
    except ValueError as error:
        raise HardwareError(f"{path}: factor {value!r} is not a number; write 'x1.1' or '+10%'") from error
    return None


def _value(value: str | float, path: str) -> float:
    if not isinstance(value, str):
        return float(value)
    try:
        return parse_quantity(value, unit_of(path.rsplit(".", 1)[-1]))
    except ConfigError as error:
        unit = unit_of(path.rsplit(".", 1)[-1])
        raise HardwareError(f"{path}: {error} (or a factor: 'x1.1', '+10%'; example {example(unit)!r})") from error


def _kind(kind: Kind | str) -> Kind:
    if isinstance(kind, Kind):
        return kind
    names = [k.value for k in Kind]
    if kind not in names:
        raise HardwareError(f"{kind!r} is not a kind; {did_you_mean(kind, names)}")
    return Kind(kind)


def _short(path: str) -> str:
    head, _, leaf = path.rpartition(".")
    return f"{head}.{stem(leaf)}"
