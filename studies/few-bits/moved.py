"""Which cells of the projections moved once experts and few-bit weights had run: the table of
moved.md, which page.py writes.

`before-experts.csv` is what studies/next-gen said by the last fit before
(2026-11-22T161133-probes, at c26e0376); published-table's cells are among them.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.inputs import files_digest, study_fits

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "next-gen"
BEFORE, NOW = HERE / "before-experts.csv", STUDY / "results" / "cells.csv"
PAGE = HERE / "moved.md"


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def table() -> str:
    """A model a row, a node a column: tokens/s before and now, and the change."""
    before = {(row["model"], row["node"]): float(row["tokens_per_s"]) for row in read(BEFORE)}
    now = {
        (row["model"], row["node"]): float(row["tokens/s, predicted"])
        for row in read(NOW)
        if (row["model"], row["node"]) in before
    }
    nodes = list(dict.fromkeys(node for _, node in now))
    lines = []
    for model in dict.fromkeys(model for model, _ in now):
        cells = ((before[model, node], now[model, node]) for node in nodes)
        lines.append(
            (model, *(f"{was:,.0f}, {is_:,.0f} ({is_ / was - 1:+.0%})" for was, is_ in cells))
        )
    return markdown_table(("model", *nodes), lines)


def page() -> str:
    stamp = Stamp(study_fits(STUDY), files_digest([BEFORE, NOW]))
    return filled(PAGE.read_text(encoding="utf-8"), lambda _: table(), stamp)
