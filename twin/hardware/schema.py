"""Hardware YAML into the frozen dataclasses: the nesting is the dataclasses', every leaf is a
Number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from twin import reading
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.kernel import CoreKernel, WarpKernel
from twin.hardware.number import Kind, Number
from twin.hardware.types import Device
from twin.reading import REFUSED, FieldError, Parse, Reader
from twin.text import shown
from twin.units import example, format_quantity, parse_quantity, unit_of

T = TypeVar("T")

# What a number may be: far beyond any part that was or will be built, and still so that sums of
# times fit the simulator's clock (twin.sim.clock) and that the structures made of counts and sizes
# are made in seconds. By unit, then by name where that says more.
RANGES = {
    "B/s": (1e6, 1e18),
    "B": (1.0, 1e18),
    "Hz": (1e6, 1e12),
    "s": (0.0, 1.0),
    "W": (1e-3, 1e9),
    "cycles": (1e-3, 1e9),
    "B/cycle": (1e-3, 1e6),
    "ratio": (1e-6, 1e6),
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
MOST_BLOCKS = 8192  # of a device


def read(data: Any, kind: type[T], file: Path, at: str = "") -> T:
    """`data` of a file, or of its part `at`, as a type whose numbers have kind and source. Raises
    HardwareError with all that is wrong.
    """
    return reading.read(data, kind, file, refusal=HardwareError, own=OWN, at=at)


def _name(at: str) -> str:
    """Of the number at a place: one of several, by number of GPUs, is called as all of them."""
    return next(name for name in reversed(at.split(".")) if not name.isdecimal())


def _quantity(data: Any, at: str) -> float:
    """A value or an end of the number whose name says the unit."""
    unit = unit_of(_name(at.rpartition(".")[0]))
    plain = (int, float) if unit == "ratio" else () if unit else (int,)
    if isinstance(data, plain) and not isinstance(data, bool):
        return float(data)  # of at most 63 bits (twin.data)
    if not isinstance(data, str):
        raise HardwareError(f"{shown(data)} must be text with its unit, such as {example(unit)!r}")
    return parse_quantity(data, unit)


@frozen
class _Leaf:
    """A number as files have it."""

    value: Annotated[float, Parse(_quantity)]
    kind: Kind
    source: str
    low: Annotated[float, Parse(_quantity)] | None = None
    high: Annotated[float, Parse(_quantity)] | None = None

    def __post_init__(self) -> None:
        if self.kind is Kind.ASSUMED:
            for end in ("low", "high"):
                if getattr(self, end) is None:
                    raise FieldError(end, "missing; an assumed number needs low and high")


def _number(reader: Reader, data: Any, at: str) -> Any:
    if isinstance(data, Number):
        return data
    leaf = reader.value(data, _Leaf, at)
    if leaf is REFUSED:
        return leaf
    number = Number(leaf.value, leaf.kind, leaf.source, leaf.low, leaf.high)
    name = _name(at)
    try:
        check_number(name, number)
    except HardwareError as error:
        raise HardwareError(str(error).removeprefix(f"{name}: ")) from error
    return number


def _kernel(reader: Reader, data: Any, at: str) -> Any:
    """Costs of a kernel: of a core where the section has any that a block of warps has not."""
    cores = CoreKernel.__dataclass_fields__.keys() - WarpKernel.__dataclass_fields__.keys()
    of_core = isinstance(data, Mapping) and not cores.isdisjoint(data)
    return reader.value(data, CoreKernel if of_core else WarpKernel, at)


OWN: reading.Own = {Number: _number, WarpKernel | CoreKernel: _kernel}


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


def _said(value: float, unit: str) -> str:
    """A value of any size: what people read within a thousand units of the scale, else in base
    units.
    """
    return (
        f"{value:g} {unit}".rstrip()
        if value and not 1e-15 <= value < 1e18
        else format_quantity(value, unit)
    )
