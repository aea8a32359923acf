"""Cells of a study's predictions.json, which was written once and before any run, next to what was
measured. Needs no simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twin.files import MOST_RECORD_BYTES, read_json
from twin.study.outcome import Series

FILE = "predictions.json"
Cell = Mapping[str, Any]


def read_cells(folder: Path) -> dict[str, Any]:
    """The file's rows; none where there is no file."""
    file = folder / FILE
    if not file.is_file():
        return {}
    found: dict[str, Any] = read_json(file, MOST_RECORD_BYTES)["rows"]
    return found


def next_to(speed: float | None, cell: Cell) -> tuple[str, str, str]:
    """Measured, predicted with its interval, how far off: empty where there is none."""
    there = "p50" in cell
    return (
        f"{speed:,.0f}" if speed else "not run",
        f"{cell['p50']:,.0f} ({cell['p10']:,.0f}-{cell['p90']:,.0f})" if there else "",
        f"{cell['p50'] / speed - 1:+.1%}" if there and speed else "",
    )


def limits_text(cell: Cell) -> str:
    """The largest causes of a step, as shares of it."""
    return ", ".join(
        f"{cause.replace('_', '-')} {share:.0%}" for cause, share in cell["limits"].items()
    )


def series(label: str, cells: Sequence[Cell]) -> Series:
    """The medians of a chart's rows with their intervals; an empty cell has no bar."""
    p50, p10, p90 = (tuple(cell.get(level) for cell in cells) for level in ("p50", "p10", "p90"))
    return Series(label, p50, p10, p90)
