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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twin.errors import HardwareError
from twin.hardware.override import apply_fit, interval, numbers, resolve, with_numbers
from twin.hardware.schema import check_keys, number, text, together
from twin.hardware.types import Device, Kind, Number
from twin.text import shown
from twin.units import unit_of

KEYS = ("name", "like", "title", "set")


@dataclass(frozen=True, slots=True)
class Overlay:
    """The content of such a file."""

    file: Path
    name: str
    title: str | None
    device: str  # on file
    changes: Mapping[str, Any]  # by path: a quantity, a factor, or a number with kind and source


def is_overlay(data: Mapping[str, object]) -> bool:
    return isinstance(data.get("like"), str)


def read_overlay(data: Mapping[str, object], file: Path) -> Overlay:
    """Raises HardwareError with all keys that are wrong."""
    found = check_keys(data, file, "", required=["name", "like"], allowed=list(KEYS))
    changes = found.get("set", {})
    if not isinstance(changes, Mapping):
        raise HardwareError(f"{file}: set: {shown(changes)} must be a mapping of numbers by path")
    title = text(found["title"], file, "title") if "title" in found else None
    return Overlay(
        file, text(found["name"], file, "name"), title, text(found["like"], file, "like"), changes
    )


def overlaid(overlay: Overlay, base: Device) -> Device:
    """`base` with the overlay's numbers. Raises HardwareError with all that are wrong."""
    values: list[tuple[str, str | float]] = []
    stated: dict[str, Number] = {}
    wrong = []
    for path, item in overlay.changes.items():
        try:
            full = resolve(base, str(path))
            if isinstance(item, Mapping):
                stated[full] = number(item, overlay.file, full)
                item = stated[full].value
            elif isinstance(item, bool) or not isinstance(item, str | int | float):
                raise HardwareError(f"{full}: {shown(item)} is no quantity; write 12 TB/s or x1.5")
            with_numbers(base, [(full, item)])
            values.append((full, item))
        except HardwareError as error:
            wrong.append(str(error).removeprefix(f"{overlay.file}: "))
    if wrong:
        raise HardwareError(f"{overlay.file}: set: {together(wrong)}")
    source = f"as {overlay.file.name} says"
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
