"""Many cases at once, as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.api import given
from twin.calibrate.known_error import known_error
from twin.errors import ConfigError
from twin.files import resolved
from twin.models.files import is_there
from twin.reading import Reader
from twin.study.grid import Cell, Grid, GridFields
from twin.study.point import Row
from twin.study.runner import Runner
from twin.study.store import Store, default_folder
from twin.text import shown

if TYPE_CHECKING:
    import pandas as pd

MOST_WORKERS = 1024
NOTHING = math.nan  # in place of a number that a case does not have


def sweep(
    models: str | Path | Sequence[str | Path],
    nodes: str | Sequence[str],
    axes: Mapping[str, Sequence[str | int | float]] | None = None,
    *,
    workers: int = 1,
    keep: bool = True,
    **options: Any,
) -> pd.DataFrame:
    """Every combination of models, nodes and axes, simulated: one row each, the last axis fastest.

    `axes`: values of engine options or hardware numbers, by the names that `what_if` takes:
    `{"context": [128, 4096], "clock": ["x1", "x0.6"]}`. `workers`: processes; with more than one
    call it below `if __name__ == "__main__"`. `keep`: what was computed once is read from the
    user's cache (`MONOTWIN_POINTS`), as `twin project` does.

    Columns: `model`, `node`, one for each axis, and

    - `tokens_per_s` of one sequence; `low`, `high`: its interval as in `Prediction`;
    - `step_s`, `floor_s` in seconds, `stream_fraction`, `mbu` between 0 and 1;
    - `bytes_per_step` of all GPUs;
    - `problem`: why a case cannot be planned (then its numbers are NaN), else empty.

    Raises ConfigError or HardwareError for what no case could take.
    """
    import pandas as pd

    grid = _grid(models, nodes, given.named("axes", {} if axes is None else axes), options)
    cells = list(grid.cells())
    rows = _runner(workers, keep).rows([cell.point for cell in cells])
    return pd.DataFrame([_record(cell, row) for cell, row in zip(cells, rows, strict=True)])


def _grid(
    models: str | Path | Sequence[str | Path],
    nodes: str | Sequence[str],
    axes: Mapping[str, Sequence[str | int | float]],
    options: Mapping[str, Any],
) -> Grid:
    data = {
        "models": [_place(name) for name in _listed(models)],
        "nodes": _listed(nodes),
        "axes": {name: _listed(values) for name, values in axes.items()},
        "options": {name: getattr(value, "value", value) for name, value in options.items()},
    }
    reader = Reader({})
    fields = reader.value(data, GridFields, "")
    reader.refuse("sweep")
    with reader.at(""):
        grid: Grid = fields.grid(reader)
    reader.refuse("sweep")
    return grid


def _listed(given: Any) -> list[Any]:
    """One or several; pandas and NumPy hand out numbers of their own kinds."""
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, str | Path | int | float):
        return [given]
    if not isinstance(given, Sequence):
        raise ConfigError(f"sweep: {shown(given)} must be a value or a list of values")
    return list(given)


def _place(name: str | Path) -> str:
    """A path whole: the cases may be computed by other processes."""
    place = given.text("models", name)
    return str(resolved(Path(place))) if is_there(Path(place), Path.exists) else place


def _runner(workers: int, keep: bool) -> Runner:
    count = given.whole("workers", workers, 1, MOST_WORKERS)
    return Runner.local(Store(default_folder()) if keep else None, lambda _: None, count)


def _record(cell: Cell, row: Row) -> dict[str, Any]:
    at = {"model": cell.model, "node": cell.node, **dict(cell.at)}
    if row.problem:
        return at | {"tokens_per_s": NOTHING, "problem": row.problem}
    known = known_error(cell.point.on_node(), cell.point.spec(), cell.point.chosen())
    low, high = known.interval(row.tokens_per_s) if known else (NOTHING, NOTHING)
    return at | {
        "tokens_per_s": row.tokens_per_s,
        "low": low,
        "high": high,
        "step_s": row.step_s,
        "floor_s": row.floor_s,
        "stream_fraction": row.stream_fraction,
        "mbu": row.bytes_per_step / (row.peak_bytes_per_s * row.step_s),
        "bytes_per_step": row.bytes_per_step,
        "problem": "",
    }
