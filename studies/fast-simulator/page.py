"""Writes this study's page from points.csv and agree.csv:
`python studies/fast-simulator/page.py`.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import NO_FIT, files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
POINTS, AGREE = HERE / "points.csv", HERE / "agree.csv"
WAITING = ("execution=graph", "execution=stream")
EDGES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5)  # core-seconds


def stamp() -> Stamp:
    """The points take the numbers of hwmodels, without a fit."""
    return Stamp(NO_FIT, files_digest([POINTS, AGREE]))


def main() -> None:
    rows = [row for row in _read(POINTS) if row["tokens_per_s"]]
    chart = Bars(
        tuple(f"below {edge:g} s" for edge in EDGES),
        (Series("points", _counts(rows)),),
        "points, by the core-seconds that one takes",
    )
    write_page(HERE, stamp(), {"points": points(rows), "agreement": agreement(_read(AGREE))}, chart)


def points(rows: list[dict[str, str]]) -> str:
    kinds = {
        "all": rows,
        "only hardware numbers change": [row for row in rows if not row["chosen"]],
        "options change too: plan and proof are new": [
            row for row in rows if row["chosen"] and not _launched(row)
        ],
        "... to a graph or to launches": [row for row in rows if _launched(row)],
    }
    cells = []
    for kind, members in kinds.items():
        took = sorted(float(row["cpu_s"]) for row in members)
        high = statistics.quantiles(took, n=10)[-1]
        cells.append(
            (
                kind,
                len(took),
                f"{sum(took):,.0f}",
                f"{statistics.median(took):.2f}",
                f"{high:.2f}",
                f"{took[-1]:.2f}",
            )
        )
    return markdown_table(
        ("points", "count", "core time, s", "median, s", "90 of 100, s", "most, s"), cells
    )


def agreement(rows: list[dict[str, str]]) -> str:
    done = [row for row in rows if not row["refused"]]
    equal = sum(row["equal"] == "True" for row in done)
    simpy, compiled = (sum(float(row[name]) for row in done) for name in ("simpy_s", "compiled_s"))
    return (
        f"{len(done)} pairs of a shipped model and a node at full size, {len(rows) - len(done)} "
        f"more refused: {equal} equal in result and in the trace of two blocks. SimPy took "
        f"{simpy:,.0f} s of a core, compiled code {compiled:,.0f} s."
    )


def _launched(row: dict[str, str]) -> bool:
    return any(way in row["chosen"] for way in WAITING)


def _counts(rows: list[dict[str, str]]) -> tuple[float, ...]:
    took = [float(row["cpu_s"]) for row in rows]
    lows = (0.0, *EDGES)
    return tuple(
        float(sum(low <= one < high for one in took))
        for low, high in zip(lows, EDGES, strict=False)
    )


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
