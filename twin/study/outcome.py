"""What a study answers: tables and charts as plain data, rendered by twin.report for terminals,
files and browsers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from twin.files import check_stems

T = TypeVar("T")
Cell = str | float | int | None


class Shown(Enum):
    """How people read a column; files keep the full number."""

    TEXT = "text"
    CHIP = "chip"  # a word on a coloured ground: the kind of a number
    COUNT = "count"  # rates and counts: thousands separated, three digits below 100
    PERCENT = "percent"  # of a fraction: 0.36 is 36.0%
    CHANGE = "change"  # of a fraction, signed
    MICROSECONDS = "us"  # of seconds
    QUANTITY = "quantity"  # with the unit of `Column.unit`


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    shown: Shown = Shown.COUNT
    unit: str = ""  # base unit of a QUANTITY: "s", "B", "B/s", "W"

    @property
    def textual(self) -> bool:
        return self.shown in (Shown.TEXT, Shown.CHIP)


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` has one cell for each column; None is "there is no such number", shown empty."""

    name: str  # of its CSV file: an Outcome refuses what cannot be one, and two of the same name
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    terminal: bool = True  # False: in files and in the report only
    page: bool = True  # False: not in the report either, which shows it as a chart

    @classmethod
    def of(
        cls,
        name: str,
        items: Iterable[T],
        columns: Mapping[Column, Callable[[T], Cell]],
        *,
        terminal: bool = True,
        page: bool = True,
    ) -> Table:
        """A row for each item: what each column reads of it."""
        rows = tuple(tuple(read(item) for read in columns.values()) for item in items)
        return cls(name, tuple(columns), rows, terminal, page)


@dataclass(frozen=True, slots=True)
class Series:
    """One colour. `low` and `high`: the ends of an interval about each value; a value may be
    missing.
    """

    label: str
    values: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    marks: bool = False  # points without bars or lines: published or measured figures next to ours

    @property
    def next_to(self) -> str:
        """With marks: the label of the series that they stand next to, "vllm" of "vllm,
        tabulated".
        """
        return self.label.rpartition(", ")[0]


@dataclass(frozen=True, slots=True)
class Bars:
    """A row for each name, the first on top; a series for each colour, side by side or stacked."""

    names: tuple[str, ...]
    series: tuple[Series, ...]
    axis: str
    stacked: bool = False
    log: bool = False


@dataclass(frozen=True, slots=True)
class Lines:
    """Values over `x`, with bands where a series has an interval."""

    x: tuple[float | str, ...]
    series: tuple[Series, ...]
    x_axis: str
    y_axis: str
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class Waterfall:
    """From the first value to the last, each step by what it adds; `values` are the levels reached,
    one for each name.
    """

    names: tuple[str, ...]
    values: tuple[float, ...]
    axis: str


@dataclass(frozen=True, slots=True)
class Heat:
    """Values over two axes: a row for each name of `down`, the first on top; None is "there is no
    such number".
    """

    down: tuple[str, ...]
    across: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    down_axis: str
    across_axis: str
    axis: str  # of the values


Chart = Bars | Lines | Waterfall | Heat


@dataclass(frozen=True, slots=True)
class Part:
    """A heading, a sentence that says what to see, charts, then tables."""

    title: str
    text: str = ""
    charts: tuple[Chart, ...] = ()
    tables: tuple[Table, ...] = ()
    long: bool = False  # may be split over printed pages


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer of a study, in the order of reading."""

    parts: tuple[Part, ...]
    headline: tuple[tuple[str, str], ...] = ()  # (value, what it is)
    notes: tuple[str, ...] = field(default=())  # conditions and limits that every reader must know

    def __post_init__(self) -> None:
        check_stems([table.name for table in self.tables()])

    def tables(self) -> tuple[Table, ...]:
        return tuple(table for part in self.parts for table in part.tables)
