"""Writes this study's page from points.csv and agree.csv:
`python studies/fast-simulator/page.py`.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import NO_FIT, files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
POINTS, AGREE = HERE / "points.csv", HERE / "agree.csv"
WAITING = ("execution=graph", "execution=stream")
EDGES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5)  # core-seconds
COLUMNS = {  # of a kind of points and the core-seconds of each, in order
    "points": "{r[0]}",
    "count": lambda row: len(row[1]),
    "core time, s": lambda row: f"{sum(row[1]):,.0f}",
    "median, s": lambda row: f"{statistics.median(row[1]):.2f}",
    "90 of 100, s": lambda row: f"{statistics.quantiles(row[1], n=10)[-1]:.2f}",
    "most, s": lambda row: f"{row[1][-1]:.2f}",
}


def stamp() -> Stamp:
    """The points take the numbers of hwmodels, without a fit."""
    return Stamp(NO_FIT, files_digest([POINTS, AGREE]))


def main() -> None:
    rows = [row for row in _read(POINTS) if row["tokens_per_s"]]
    took = [float(row["cpu_s"]) for row in rows]
    counts = (
        float(sum(low <= one < high for one in took))
        for low, high in zip((0.0, *EDGES), EDGES, strict=False)
    )
    chart = Bars(
        tuple(f"below {edge:g} s" for edge in EDGES),
        (Series("points", tuple(counts)),),
        "points, by the core-seconds that one takes",
    )
    bodies = {"points": points(rows), "agreement": agreement(_read(AGREE))}
    write_page(HERE, stamp(), bodies, chart)


def points(rows: list[dict[str, str]]) -> str:
    launched = [any(way in row["chosen"] for way in WAITING) for row in rows]
    chosen = [bool(row["chosen"]) for row in rows]
    kinds = {
        "all": [True for _ in rows],
        "only hardware numbers change": [not one for one in chosen],
        "options change too: plan and proof are new": [
            one and not other for one, other in zip(chosen, launched, strict=True)
        ],
        "... to a graph or to launches": launched,
    }
    cells = [
        (kind, sorted(float(row["cpu_s"]) for row, one in zip(rows, some, strict=True) if one))
        for kind, some in kinds.items()
    ]
    return table_of(cells, COLUMNS)


def agreement(rows: list[dict[str, str]]) -> str:
    done = [row for row in rows if not row["refused"]]
    equal = sum(row["equal"] == "True" for row in done)
    simpy, compiled = (sum(float(row[name]) for row in done) for name in ("simpy_s", "compiled_s"))
    return (
        f"{len(done)} pairs of a shipped model and a node at full size, {len(rows) - len(done)} "
        f"more refused: {equal} equal in result and in the trace of two blocks. SimPy took "
        f"{simpy:,.0f} s of a core, compiled code {compiled:,.0f} s."
    )


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
