"""Numbers with their kind and source as a table; each source once, below it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from twin.hardware.number import Number
from twin.hardware.override import interval
from twin.report.tables import hanging, table
from twin.units import binary_bytes, format_quantity, format_range, unit_of

FIT = re.compile(r"\((fit of [^()]*)\)")
HEAD = ("number", "value", "range", "kind", "from")  # a short word: names take the width
GAP = 2  # between columns


@dataclass(slots=True)
class Sources:
    """What a table rests on, numbered in the order in which it is cited."""

    _cited: dict[str, int] = field(default_factory=dict)

    def cite(self, source: str) -> str:
        """The mark that stands for `source`: "[1]". A fit that it names in brackets is a source of
        its own: many numbers are derived from one.
        """
        within = FIT.sub(lambda found: self.cite(found[1]), source)
        return f"[{self._cited.setdefault(within, len(self._cited) + 1)}]"

    def listed(self) -> list[tuple[str, str]]:
        """(mark, source)."""
        return [(f"[{number}]", source) for source, number in self._cited.items()]

    def text(self, width: int) -> str:
        """The list for a terminal of `width` columns."""
        return "\n".join(hanging(f"{mark} ", source, width) for mark, source in self.listed())


def number_rows(
    numbers: Mapping[str, Number], sources: Sources
) -> list[tuple[str, str, str, str, str]]:
    """The rows of HEAD. All bytes are in one family of units."""
    units = {path: unit_of(path.rsplit(".", 1)[-1]) for path in numbers}
    binary = binary_bytes(n.value for path, n in numbers.items() if units[path] == "B")
    return [
        (
            path.removeprefix("device."),
            format_quantity(number.value, units[path], binary=binary),
            format_range(*interval(number), units[path], binary=binary),
            number.kind.value,
            sources.cite(number.source),
        )
        for path, number in numbers.items()
    ]


def numbers_text(numbers: Mapping[str, Number], width: int) -> str:
    """The table and its sources for a terminal of `width` columns."""
    sources = Sources()
    rows = list(_broken(number_rows(numbers, sources), width))
    return with_sources(table(HEAD, rows, text_columns=5), sources, width)


def _broken(rows: Sequence[Sequence[str]], width: int) -> Iterator[Sequence[str]]:
    """Names that leave no room for the other columns go over two lines, after their last dot."""
    others = [max(map(len, column)) for column in list(zip(HEAD, *rows, strict=True))[1:]]
    room = width - sum(others) - GAP * len(others)
    for name, *rest in rows:
        place, dot, last = name.rpartition(".")
        if len(name) > room and dot:
            yield (place + dot, *("" for _ in rest))
            name = f"  {last}"
        yield (name, *rest)


def with_sources(text: str, sources: Sources, width: int) -> str:
    """`text`, and below it what it cites."""
    return f"{text}\n\nsources\n{sources.text(width)}" if sources.listed() else text
