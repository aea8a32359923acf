"""A study file's mappings, read strictly: each key is taken by name, and what nobody took is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, overload

from twin.data import did_you_mean
from twin.errors import ConfigError
from twin.text import shown
from twin.units import format_quantity, parse_quantity, unit_of

MOST_WHOLE = 10**12  # of any count; a field may allow less
MOST_NUMBER = 1e15  # of any plain number or quantity: what is made of it stays finite
LONGEST_TEXT = 10_000  # characters
LONGEST_KEY = 80  # characters of a key that stands in a message as it is
D = TypeVar("D")
_NEEDED: Any = object()


class Fields:
    """One mapping. `where` is its dotted place in `file`, empty at the top; all errors are
    ConfigErrors that name both.
    """

    def __init__(self, data: object, file: Path, where: str = "") -> None:
        self.file = file
        self.where = where
        if not isinstance(data, Mapping):
            raise self.error("", f"must be a mapping, not {shown(data)}")
        for key in data:
            if not isinstance(key, str):
                raise self.error("", f"key {shown(key)} must be text; put it in quotes")
        self._data: dict[str, Any] = dict(data)
        self._known: list[str] = []
        self._asked: list[str] = []  # keys that may be given, whether they are or not

    def __contains__(self, key: str) -> bool:
        self._asked.append(key)
        return key in self._data

    def names(self) -> list[str]:
        """All keys that the file gives."""
        return list(self._data)

    def error(self, key: str, reason: str) -> ConfigError:
        """The refusal of one field, for the caller to raise."""
        place = ".".join(_readable(part) for part in (self.where, key) if part) or "top level"
        return ConfigError(f"{self.file}: {place}: {reason}")

    @overload
    def take(self, key: str) -> Any: ...
    @overload
    def take(self, key: str, default: D) -> Any | D: ...
    def take(self, key: str, default: Any = _NEEDED) -> Any:
        """The value as YAML gave it; without a default the key is needed."""
        self._known.append(key)
        if key in self._data:
            return self._data[key]
        if default is _NEEDED:
            others = [
                name for name in self._data if name not in self._known and len(name) <= LONGEST_KEY
            ]
            meant = get_close_matches(key, others, n=1, cutoff=0.7)
            raise self.error(
                key,
                f"missing; is it {_readable(meant[0])}, misspelt?" if meant else "missing; add it",
            )
        return default

    def text(self, key: str, default: str = _NEEDED) -> str:
        value = self.take(key, default)
        if not isinstance(value, str) or (not value.strip() and value != default):
            raise self.error(key, f"{shown(value)} must be text, not empty")
        if len(value) > LONGEST_TEXT:
            raise self.error(
                key, f"{shown(value)} has {len(value):,} characters; at most {LONGEST_TEXT:,}"
            )
        return " ".join(value.split())

    def choice(self, key: str, allowed: Sequence[str], default: str = _NEEDED) -> str:
        value = self.take(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(
                key, f"{shown(value)} is unknown; {did_you_mean(shown(value), allowed)}"
            )
        return value

    def flag(self, key: str, default: bool = _NEEDED) -> bool:
        value = self.take(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"{shown(value)} must be true or false")
        return value

    def whole(
        self, key: str, default: int = _NEEDED, *, low: int = 0, high: int = MOST_WHOLE
    ) -> int:
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"{shown(value)} must be a whole number, {low} to {high}")
        return value

    def number(
        self, key: str, default: float = _NEEDED, *, low: float = 0.0, high: float = MOST_NUMBER
    ) -> float:
        """A plain number without a unit, or a percentage as text ("36%" is 0.36)."""
        value = self.take(key, default)
        if isinstance(value, str) and value.strip().endswith("%"):
            try:
                value = float(value.strip()[:-1]) / 100
            except ValueError:
                raise self.error(
                    key, f"{shown(value)} is not a percentage; write it as '36%'"
                ) from None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise self.error(key, f"{shown(value)} must be a number, {low:g} to {high:g}")
        return float(value)

    def quantity(
        self, key: str, default: str = _NEEDED, *, low: float = 0.0, high: float = MOST_NUMBER
    ) -> float:
        """A quantity with its unit ("4.5 us"); the key's own ending says which: `tool_s`,
        `link_bytes_per_s`, `board_w`.
        """
        value = self.take(key, default)
        unit = unit_of(key)
        if not isinstance(value, str):
            raise self.error(key, f"{shown(value)} must be text with its unit")
        try:
            found = parse_quantity(value, unit)
        except ConfigError as error:
            raise self.error(key, str(error)) from error
        if not low <= found <= high:
            raise self.error(
                key,
                f"{shown(value)} is out of range: from {format_quantity(low, unit)} to "
                f"{format_quantity(high, unit)}",
            )
        return found

    def items(self, key: str, default: Sequence[object] = _NEEDED) -> list[Any]:
        """A list that is not empty (unless that is the default)."""
        value = self.take(key, default)
        if value is default:
            return list(value)
        if not isinstance(value, list) or not value:
            raise self.error(key, f"{shown(value)} must be a list with at least one entry")
        return list(value)

    def texts(self, key: str, default: Sequence[object] = _NEEDED) -> list[str]:
        """A list of texts, such as names."""
        found = self.items(key, default)
        for index, item in enumerate(found):
            if not isinstance(item, str) or not item.strip():
                raise self.error(f"{key}[{index}]", f"{shown(item)} must be text, not empty")
        return found

    def mapping(self, key: str) -> Fields:
        """The mapping under `key`; an empty one when the key is absent."""
        return Fields(self.take(key, {}), self.file, f"{self.where}.{key}" if self.where else key)

    def mappings(self, key: str, default: Sequence[object] = _NEEDED) -> list[Fields]:
        """A list of mappings."""
        place = f"{self.where}.{key}" if self.where else key
        return [
            Fields(item, self.file, f"{place}[{index}]")
            for index, item in enumerate(self.items(key, default))
        ]

    def done(self) -> None:
        """Refuses the keys that nobody took."""
        for key in self._data:
            if key not in self._known:
                raise self.error(
                    key,
                    f"unknown key; {did_you_mean(key, dict.fromkeys(self._known + self._asked))}",
                )


def _readable(part: str) -> str:
    """A place in the file as it may stand in a message."""
    return part if len(part) <= LONGEST_KEY and part.isprintable() else shown(part, LONGEST_KEY)
