"""A part of one's own that is another one but for a few numbers.

    name: my-gpu
    like: h200-sxm
    set:
      memory.stream: 12 TB/s
      structure.blocks_per_die: {value: 160, kind: vendor, source: "its announcement"}

What `set` says is meant as `--set` means it, a factor too; the other numbers are those of the part
on file as it is best known, its fit included (twin.calibrate.node), and assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit, interval, numbers, resolve, with_numbers
from twin.hardware.schema import OWN
from twin.hardware.types import Device
from twin.reading import REFUSED, Reader
from twin.text import shown
from twin.units import unit_of


@frozen
class Overlay:
    """The content of such a file."""

    name: str
    like: str  # a device on file
    title: str = ""
    # by path: a quantity, a factor, or a number with kind and source
    set: dict[str, Any] = field(default_factory=dict)


def is_overlay(data: Mapping[str, object]) -> bool:
    return isinstance(data.get("like"), str)


def overlaid(overlay: Overlay, base: Device, file: Path) -> Device:
    """`base` with the overlay's numbers. Raises HardwareError with all that are wrong."""
    values: list[tuple[str, str | float]] = []
    stated: dict[str, Number] = {}
    reader = Reader(OWN)
    for path, item in overlay.set.items():
        with reader.at("set"):
            full = resolve(base, path)
            if isinstance(item, Mapping):
                item = reader.value(item, Number, full)
                if item is REFUSED:
                    continue
                stated[full] = item
                item = item.value
            elif isinstance(item, bool) or not isinstance(item, str | int | float):
                raise HardwareError(f"{full}: {shown(item)} is no quantity; write 12 TB/s or x1.5")
            with_numbers(base, [(full, item)])
            values.append((full, item))
    reader.refuse(file, HardwareError)
    source = f"as {file.name} says"
    made = with_numbers(base, values, Kind.ASSUMED, source)
    before = numbers(base)
    copied = {
        path: _copied(base.name, path, n) for path, n in numbers(made).items() if n is before[path]
    }
    return dataclasses.replace(
        apply_fit(made, copied | stated),
        name=overlay.name,
        title=overlay.title or f"{overlay.name}, like {base.title}",
        isa=None,
    )


def _copied(device: str, path: str, number: Number) -> Number:
    # a count is what it is
    low, high = interval(number) if unit_of(path.rpartition(".")[2]) else (number.value,) * 2
    return Number(number.value, Kind.ASSUMED, f"derived: as {device} ({number.source})", low, high)
