"""The table of README.md, from rows.csv: `python studies/hybrids/page.py`. Nothing is simulated."""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.inputs import files_digest
from twin.files import write

PAGE = Path(__file__).with_name("README.md")
ROWS = PAGE.with_name("rows.csv")
FIT = "2026-11-27"  # of an H200, by which the rows were predicted
HEAD = ("model", "after", "predicted, tokens/s", "p10 to p90", "measured", "off by", "floor")


def table() -> str:
    lines = []
    for row in csv.DictReader(ROWS.open(encoding="utf-8")):
        predicted, speed = float(row["predicted"]), 1e6 / float(row["step_us"])
        span = f"{float(row['p10']):,.4g} to {float(row['p90']):,.4g}"
        off = f"{100 * (predicted / speed - 1):+.1f} %"
        floor = f"{float(row['floor']):,.4g}" if row["floor"] else None
        lines.append(
            (row["model"], row["after"], f"{predicted:,.4g}", span, f"{speed:,.1f}", off, floor)
        )
    return markdown_table(HEAD, lines)


def main() -> None:
    stamp = Stamp(FIT, files_digest([ROWS]))
    write({PAGE: filled(PAGE.read_text(encoding="utf-8"), lambda _: table(), stamp)})


if __name__ == "__main__":
    main()
