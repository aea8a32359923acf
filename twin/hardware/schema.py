"""Hardware YAML into the frozen dataclasses: the nesting is the dataclasses', every leaf is a
Number.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from twin.data import LONGEST_NAME, did_you_mean
from twin.errors import ConfigError, HardwareError
from twin.hardware.types import Device, Kind, Number
from twin.text import shown
from twin.units import example, format_quantity, parse_quantity, unit_of

T = TypeVar("T")
_LEAF = ("value", "kind", "source", "low", "high")

# What a number may be: far beyond any part that was or will be built, and still so that sums of
# times fit the simulator's clock (twin.sim.clock) and that the structures made of counts and sizes
# are made in seconds. By unit, then by name where that says more.
RANGES = {
    "B/s": (1e6, 1e18),
    "B": (1.0, 1e18),
    "Hz": (1e6, 1e12),
    "s": (0.0, 1.0),
    "W": (1e-3, 1e9),
    "": (1.0, 1e6),
}
_OF_ONE_ELEMENT = (0.0, 1e-3)
RANGES_BY_NAME = {
    "on_chip_bytes": (1.0, 1e9),
    "dies": (1.0, 64.0),
    "io_dies": (1.0, 64.0),
    "blocks_per_die": (1.0, 4096.0),
    "stacks": (1.0, 4096.0),
    "row_s": _OF_ONE_ELEMENT,
    "element_s": _OF_ONE_ELEMENT,
    "sample_element_s": _OF_ONE_ELEMENT,
    "merged_s": _OF_ONE_ELEMENT,
    "gate_s": _OF_ONE_ELEMENT,
}
MOST_WRONG, LONGEST_WRONG = 12, 600  # things and characters of one refusal
MOST_BLOCKS = 8192  # of a device


def build(cls: type[T], data: object, file: Path, path: str = "") -> T:
    """`data` as the dataclass `cls`. Raises HardwareError naming the file and the dotted key."""
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    mapping = check_keys(
        data,
        file,
        path,
        required=[n for n, f in fields.items() if _required(f)],
        allowed=list(fields),
    )
    hints = get_type_hints(cls)
    values, wrong = {}, []
    for key, item in mapping.items():
        try:
            values[key] = _field(_plain(hints[key]), item, file, _join(path, key))
        except HardwareError as error:
            wrong.append(str(error).removeprefix(f"{file}: "))
    if wrong:
        raise HardwareError(f"{file}: {together(wrong)}")
    return cls(**values)


def number(data: object, file: Path, path: str) -> Number:
    """One leaf: value, kind and source; an assumed number must also say its range."""
    leaf = check_keys(data, file, path, required=["value", "kind", "source"], allowed=list(_LEAF))
    unit = unit_of(path.rsplit(".", 1)[-1])
    kind = _kind(leaf["kind"], file, path)
    source = text(leaf["source"], file, f"{path}.source")
    value = _quantity(leaf["value"], unit, file, path)
    low, high = (
        _quantity(leaf[end], unit, file, f"{path}.{end}") if end in leaf else None
        for end in ("low", "high")
    )
    if kind is Kind.ASSUMED and (low is None or high is None):
        raise HardwareError(
            f"{file}: {path}: an assumed number needs low and high; add the range you believe in"
        )
    result = Number(value, kind, source, low, high)
    try:
        check_number(path, result)
    except HardwareError as error:
        raise HardwareError(f"{file}: {error}") from error
    return result


def check_number(path: str, number: Number) -> None:
    """The laws of a single number: finite, in order, and zero only where zero makes sense (a
    time).
    """
    unit = unit_of(path.rsplit(".", 1)[-1])
    for name, value in (("value", number.value), ("low", number.low), ("high", number.high)):
        if value is None:
            continue
        if not math.isfinite(value) or value < 0 or (value == 0 and unit != "s"):
            limit = "finite and not negative" if unit == "s" else "finite and greater than zero"
            raise HardwareError(
                f"{path}: {name} {value:g} must be {limit}, such as {example(unit)!r}"
            )
        least, most = limits(path)
        if not least <= value <= most:
            allowed = " to ".join(format_quantity(end, unit) for end in (least, most))
            raise HardwareError(
                f"{path}: {name} {_said(value, unit)} is out of range; give {allowed}, such as "
                f"{example(unit)!r}"
            )
        if not unit and value != int(value):
            raise HardwareError(f"{path}: {name} {value:g} is a count and must be whole")
    low, high = (number.value if end is None else end for end in (number.low, number.high))
    if not low <= number.value <= high:
        ends = ", ".join(format_quantity(x, unit) for x in (low, number.value, high))
        raise HardwareError(f"{path}: low <= value <= high does not hold for {ends}")


def limits(path: str) -> tuple[float, float]:
    """The least and the most that the number at a dotted path may be, in base units."""
    leaf = path.rsplit(".", 1)[-1]
    return RANGES_BY_NAME.get(leaf) or RANGES[unit_of(leaf)]


def check_blocks(device: Device) -> None:
    """Counts that may be large by themselves are refused together."""
    if device.blocks > MOST_BLOCKS:
        dies, blocks = (
            int(number.value) for number in (device.structure.dies, device.structure.blocks_per_die)
        )
        raise HardwareError(
            f"structure: {dies} dies of {blocks} blocks are {device.blocks}, more than "
            f"{MOST_BLOCKS}; give fewer of either"
        )


def check_keys(
    data: object, file: Path, path: str, *, required: list[str], allowed: list[str]
) -> Mapping[str, Any]:
    """`data` as a mapping that has all required keys and no unknown one."""
    where = path or "top level"
    if not isinstance(data, Mapping):
        raise HardwareError(
            f"{file}: {where}: must be a mapping with {', '.join(allowed)}, not {shown(data)}"
        )
    unknown = [key for key in data if key not in allowed]
    missing = [key for key in required if key not in data]
    wrong = [
        f"{_join(path, _named(key))}: unknown key; {did_you_mean(key, allowed)}" for key in unknown
    ]
    if missing:
        them = ", ".join(_join(path, key) for key in missing)
        wrong.append(f"{them}: missing; {where} needs {', '.join(required)}")
    if wrong:
        raise HardwareError(f"{file}: {together(wrong)}")
    return data


def together(wrong: Sequence[str]) -> str:
    """What is wrong with one file, as one text."""
    said = list(wrong[:MOST_WRONG])
    while len(said) > 1 and len("; ".join(said)) > LONGEST_WRONG:
        said.pop()
    more = f"; and {len(wrong) - len(said)} more" if len(wrong) > len(said) else ""
    return "; ".join(said) + more


def _field(hint: Any, data: object, file: Path, path: str) -> object:
    if hint is Number:
        return data if isinstance(data, Number) else number(data, file, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return build(hint, data, file, path)
    return None if data is None and path == "isa" else text(data, file, path)


def _quantity(data: object, unit: str, file: Path, path: str) -> float:
    if not unit and isinstance(data, int) and not isinstance(data, bool):
        return float(data)  # of at most 63 bits (twin.data)
    if not isinstance(data, str):
        raise HardwareError(
            f"{file}: {path}: {shown(data)} must be text with its unit, such as {example(unit)!r}"
        )
    try:
        return parse_quantity(data, unit)
    except ConfigError as error:
        raise HardwareError(f"{file}: {path}: {error}") from error


def _kind(data: object, file: Path, path: str) -> Kind:
    kinds = [k.value for k in Kind]
    if not isinstance(data, str) or data not in kinds:
        raise HardwareError(
            f"{file}: {path}.kind: {shown(data)} is not a kind; {did_you_mean(data, kinds)}"
        )
    return Kind(data)


def text(data: object, file: Path, path: str) -> str:
    """A line of text, which will be printed."""
    if not isinstance(data, str) or not data.strip() or not data.isprintable():
        raise HardwareError(f"{file}: {path}: {shown(data)} must be a line of text, not empty")
    return data


def _said(value: float, unit: str) -> str:
    """A value of any size: what people read within a thousand units of the scale, else in base
    units.
    """
    return (
        f"{value:g} {unit}".rstrip()
        if value and not 1e-15 <= value < 1e18
        else format_quantity(value, unit)
    )


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _plain(hint: Any) -> Any:
    """The type inside `X | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint


def _named(key: object) -> str:
    """A key as a part of a path; what is no short name comes in quotes."""
    return (
        key
        if isinstance(key, str) and key.isprintable() and len(key) <= LONGEST_NAME
        else shown(key)
    )


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
