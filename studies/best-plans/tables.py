"""The best plans of a study's cells, next to default options: results/tables.csv.

    python studies/best-plans/tables.py [STUDY ...]

Steps are those that the search compares plans by: the best plan's with all layers, default options'
mostly by a few of them, both by one GPU that stands for all.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from twin.data import data_dir
from twin.study.grid import Cell
from twin.study.kinds import read_study
from twin.study.optimise import Found, Value, search, searched, together
from twin.study.projection import Projection
from twin.study.runner import Runner
from twin.study.store import Store, default_folder

FILE = Path(__file__).parent / "results" / "tables.csv"
STUDIES = ("published-table",)


class Line(NamedTuple):
    """A cell; speeds in tokens/s of one sequence."""

    study: str
    model: str
    node: str
    default: float
    best: float
    plan: str
    runs: str  # the engine, or the simulator alone


def lines(study: str, runner: Runner) -> list[Line]:
    """Of every cell on several GPUs."""
    body = read_study(data_dir("studies") / study).body
    assert isinstance(body, Projection)
    known: dict[Cell, Found] = {}
    for node in body.grid.nodes:  # a search begins with the plans found on the nodes before
        cells = [one for one in body.grid.cells() if one.node == node and searched(one.point)]
        searches = [search(c.point, starts=_starts(c, known), confirm=False) for c in cells]
        found = together(searches, runner, f"{study} on {node}")
        known |= {c: one for c, one in zip(cells, found, strict=True) if isinstance(one, Found)}
    return [_line(study, cell, known[cell]) for cell in body.grid.cells() if cell in known]


def _starts(cell: Cell, known: Mapping[Cell, Found]) -> list[Value]:
    found = (one.best.way.options for other, one in known.items() if other.model == cell.model)
    return list(dict.fromkeys(found))


def _line(study: str, cell: Cell, found: Found) -> Line:
    default, best = found.of(found.standard), found.best
    assert default is not None
    runs = "simulator" if best.only_simulated else "engine"
    speeds = (round(1 / default.step_s, 1), round(1 / best.step_s, 1))
    return Line(study, cell.model, cell.node, *speeds, str(best.way), runs)


def main(studies: list[str]) -> None:
    runner = Runner.local(Store(default_folder()), lambda said: None)
    made = [line for study in studies or STUDIES for line in lines(study, runner)]
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Line._fields)
        table.writerows(made)


if __name__ == "__main__":
    main(sys.argv[1:])
