"""Speeds over two axes of one model on one node, as a map."""

from __future__ import annotations

from collections.abc import Sequence

from twin.study.grid import Grid
from twin.study.outcome import Heat, Part
from twin.study.point import Row


def part(grid: Grid, rows: Sequence[Row]) -> Part | None:
    """`rows` in the order of the grid's cells; None unless it has two axes and nothing else."""
    if len(grid.axes) != 2 or len(grid.models) * len(grid.nodes) != 1:
        return None
    down, across = grid.axes
    speeds = [None if row.problem else row.tokens_per_s for row in rows]
    wide = len(across.values)
    chart = Heat(
        tuple(str(value) for value in down.values),
        tuple(str(value) for value in across.values),
        tuple(tuple(speeds[at : at + wide]) for at in range(0, len(speeds), wide)),
        down.name,
        across.name,
        "tokens/s, predicted",
    )
    said = f"Down {down.name}, across {across.name}. Darker is faster; an empty cell has no plan."
    return Part("As a map", said, (chart,))
