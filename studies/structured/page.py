"""The table and the figure of README.md, from rows.csv: `python studies/structured/page.py`."""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.csv"
RUN = "2026-11-29"
HEAD = ("node", "model", "answer", "predicted, us", "us a token", "of plain", "host, us", "right")


def stamp() -> Stamp:
    return Stamp(RUN, files_digest([ROWS]))


def rows() -> list[dict[str, str]]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def plain(row: dict[str, str]) -> float:
    same = [one for one in rows() if (one["node"], one["model"]) == (row["node"], row["model"])]
    return next(float(one["us_a_token"]) for one in same if one["what"] == "plain")


def share(row: dict[str, str]) -> float:
    """Of the speed of a plain answer."""
    return plain(row) / float(row["us_a_token"])


def table() -> str:
    lines = [
        (
            row["node"],
            row["model"],
            row["what"],
            row["predicted_us"],
            row["us_a_token"],
            f"{share(row):.2f}",
            row["host_us"] or "-",
            "yes" if row["holds"] == "True" else "no",
        )
        for row in rows()
    ]
    return markdown_table(HEAD, lines)


def chart() -> Bars:
    found = rows()
    names = tuple(f"{row['model']}, {row['what']}" for row in found)
    return Bars(
        names, (Series("share", tuple(map(share, found))),), "share of a plain answer's speed"
    )


def main() -> None:
    write_page(HERE, stamp(), {"rows": table()}, chart())


if __name__ == "__main__":
    main()
