"""Quantities as text in YAML, parsed once into SI base units."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache

from twin.errors import ConfigError
from twin.text import shown

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{p}B": scale for p, scale in (_DECIMAL | _BINARY | {"K": 1e3}).items()}

# Spellings that each dimension accepts, with their size in its base unit.
_SPELLINGS: dict[str, dict[str, float]] = {
    "B": _BYTES,
    "B/s": {f"{u}/s": scale for u, scale in _BYTES.items()},
    "Hz": {f"{p}Hz": scale for p, scale in _DECIMAL.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9, "ps": 1e-12},
    "W": {"mW": 1e-3, "W": 1.0, "kW": 1e3, "MW": 1e6},
    "cycles": {"cycles": 1.0},
    "B/cycle": {"B/cycle": 1.0},
    "ratio": {"": 1.0},
    "": {"": 1.0},
}
_SHOWN = {  # descending; what people read, not everything that is accepted
    "B": ("TB", "GB", "MB", "kB", "B"),
    "B/s": ("PB/s", "TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    "Hz": ("GHz", "MHz", "kHz", "Hz"),
    "s": ("s", "ms", "us", "ns", "ps"),
    "W": ("MW", "kW", "W", "mW"),
    "cycles": ("cycles",),
    "B/cycle": ("B/cycle",),
    "ratio": ("",),
    "": ("",),
}
_SHOWN_BINARY = ("TiB", "GiB", "MiB", "KiB", "B")
_SUFFIXES = (
    ("bytes_per_s", "B/s"),
    ("bytes_per_cycle", "B/cycle"),
    ("bytes", "B"),
    ("hz", "Hz"),
    ("cycles", "cycles"),
    ("ratio", "ratio"),
    ("s", "s"),
    ("w", "W"),
)
LONGEST = 100  # characters of a quantity: matching takes the square of them
UNSIGNED = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
NUMBER = rf"[+-]?{UNSIGNED}"
_COUNTS = {"": 1, "k": 10**3, "K": 2**10, "Ki": 2**10, "M": 10**6, "Mi": 2**20}
_COUNT = re.compile(
    r"\s*([+-]?(?:[0-9]{1,3}(?:[,_][0-9]{3})+|[0-9]+(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?))"
    r"(k|Ki?|Mi?)?\s*\Z"
)
_NUMBER = re.compile(rf"\s*({NUMBER})\s*(\S*)\s*\Z")


def parse_quantity(text: str, unit: str) -> float:
    """`text` ("4.8 TB/s", "256 KiB") in the base unit `unit`: "B", "B/s", "Hz", "s", "W",
    "cycles", "B/cycle", "ratio", or "" for a count.

    Never negative. GB is 1e9 bytes, GiB is 2**30. Raises ConfigError.
    """
    spellings = _spellings(unit)
    match = _NUMBER.match(text) if len(text) <= LONGEST else None
    if not match:
        raise ConfigError(
            f"{shown(text)} is not a quantity: write a finite number and its unit, such as "
            f"{example(unit)!r}"
        )
    number, spelling = float(match[1]), match[2]
    if spelling not in spellings:
        allowed = ", ".join(s for s in spellings) or "no unit (a plain count)"
        raise ConfigError(
            f"unit {shown(spelling)} of {shown(text)} is unknown here; allowed: {allowed}"
        )
    value = number * spellings[spelling]
    if value < 0 or not math.isfinite(value):
        raise ConfigError(f"{shown(text)} is out of range: a quantity is finite and not negative")
    return value


def parse_count(text: str) -> int:
    """A whole number as people write it: "4096", "4,096", "1e5", "128k" (of 1,000), "128K" or
    "128Ki" (of 1,024). Raises ConfigError.
    """
    if len(text) > LONGEST:
        raise ConfigError(
            f"{shown(text)} is out of range: {len(text)} characters are no whole number that fits"
        )
    match = _COUNT.match(text)
    value = float("nan")
    if match:
        plain = re.sub("[,_]", "", match[1])
        if not match[2] and not re.search("[.eE]", plain):
            return int(plain)
        value = float(plain) * _COUNTS[match[2] or ""]
    if not math.isfinite(value) or value != int(value):
        raise ConfigError(
            f"{shown(text)} is not a whole number; write 4096, 4,096, 1e5, 128k (128,000) or 128K "
            "(131,072)"
        )
    return int(value)


def format_quantity(value: float, unit: str, *, binary: bool | None = None) -> str:
    """`value` in base units for people, to three digits: "4.61 TB/s", "1.2 us", "256 KiB".

    `binary`: bytes in KiB, MiB, GiB, or in kB, MB, GB, for a table that needs one family of units
    (`binary_bytes`). None: binary where that is whole.
    """
    spellings = _spellings(unit)
    if unit == "ratio":
        return f"{value:.3g}"
    if not unit:
        return f"{value:,.0f}" if value == int(value) or value >= 999.5 else f"{value:.3g}"
    if unit == "B" and binary is not False and (whole := _whole_binary(value)):
        return whole
    for spelling in _SHOWN_BINARY if unit == "B" and binary else _SHOWN[unit]:
        if abs(value) >= spellings[spelling] * 0.9995:
            return f"{_three_digits(value / spellings[spelling])} {spelling}"
    return (
        f"{_three_digits(value / spellings[_SHOWN[unit][-1]])} {_SHOWN[unit][-1]}"
        if value
        else f"0 {unit}"
    )


def format_range(low: float, high: float, unit: str, *, binary: bool | None = None) -> str:
    """Both ends, their unit once where they share it: "10.8 .. 17.2 TB/s". Empty where they are
    equal.
    """
    if low == high:
        return ""
    first, last = (format_quantity(end, unit, binary=binary) for end in (low, high))
    if unit and first.partition(" ")[2] == last.partition(" ")[2]:
        first = first.partition(" ")[0]
    return f"{first} .. {last}"


def binary_bytes(counts: Iterable[float]) -> bool:
    """Whether a table of these bytes reads better in KiB, MiB and GiB: where one of them is whole
    there.
    """
    return any(_whole_binary(count) for count in counts)


@lru_cache(maxsize=1024)
def unit_of(field: str) -> str:
    """The base unit that a field's name ends in: "stream_bytes_per_s" -> "B/s", "dies" -> "" (a
    count).
    """
    for suffix, unit in _SUFFIXES:
        if field == suffix or field.endswith("_" + suffix):
            return unit
    return ""


@lru_cache(maxsize=1024)
def stem(field: str) -> str:
    """A field's name without its unit: "stream_bytes_per_s" -> "stream"."""
    for suffix, _ in _SUFFIXES:
        if field.endswith("_" + suffix):
            return field[: -len(suffix) - 1]
    return field


def picoseconds(seconds: float) -> int:
    """The nearest whole picosecond."""
    ps = seconds * 1e12
    if not math.isfinite(ps) or seconds < 0:
        raise ConfigError(
            f"{seconds} s is not a time: it must be finite, in picoseconds too, and not negative"
        )
    return round(ps)


def example(unit: str) -> str:
    """How a quantity of this unit is written."""
    return {
        "B": "256 KiB",
        "B/s": "4.8 TB/s",
        "Hz": "1.98 GHz",
        "s": "0.35 us",
        "W": "750 W",
        "cycles": "1420 cycles",
        "B/cycle": "128 B/cycle",
        "ratio": "0.25",
        "": "132",
    }[unit]


def _spellings(unit: str) -> dict[str, float]:
    if unit not in _SPELLINGS:
        raise ConfigError(
            f"unknown base unit {unit!r}; allowed: {', '.join(map(repr, _SPELLINGS))}"
        )
    return _SPELLINGS[unit]


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def _whole_binary(value: float) -> str | None:
    """On-chip sizes read better in binary units, where they are whole."""
    for spelling in ("GiB", "MiB", "KiB"):
        count = value / _BYTES[spelling]
        if 1 <= count < 10_000 and count == int(count):
            return f"{int(count)} {spelling}"
    return None
