"""The tables and the figure of README.md, from CSV files: `python studies/hybrids/page.py`. Nothing
is simulated.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import errors_chart, write_page
from twin.study.outcome import Bars

HERE = Path(__file__).resolve().parent
ROWS, CHOICES = HERE / "rows.csv", HERE / "choices.csv"
FAMILIES = HERE / "families.csv"
FIT = "2026-11-27"  # of an H200, by which the rows were predicted
FAMILIES_HEAD = (
    *("family", "on", "tokens in a row", "equal runs", "KL, engine", "KL, transformers in BF16"),
    *("decided tokens", "of them other ones", "off the reference", "choices followed"),
)
CHOICES_HEAD = ("family", "on", "token", "layer", "margin", "off before", "off after")
HEAD = ("model", "after", "predicted, tokens/s", "p10 to p90", "measured", "off by", "floor")


def rows(file: Path = ROWS) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def stamp() -> Stamp:
    return Stamp(FIT, files_digest([ROWS, CHOICES, FAMILIES]))


def table() -> str:
    lines = []
    for row in rows():
        predicted, step = float(row["predicted"]), row["step_us"]
        speed = 1e6 / float(step) if step else None  # None: predicted, and not measured yet
        span = f"{float(row['p10']):,.4g} to {float(row['p90']):,.4g}"
        off = f"{100 * (predicted / speed - 1):+.1f} %" if speed else None
        measured = f"{speed:,.1f}" if speed else None
        floor = f"{float(row['floor']):,.4g}" if row["floor"] else None
        lines.append((row["model"], row["after"], f"{predicted:,.4g}", span, measured, off, floor))
    return markdown_table(HEAD, lines)


def families_table() -> str:
    lines = [
        (
            row["family"],
            row["node"],
            f"{int(row['tokens_soaked']):,}",
            row["equal_runs"],
            f"{float(row['kl_engine']):.1e}",
            f"{float(row['kl_transformers']):.1e}",
            row["decided"],
            row["mismatches"],
            f"{100 * float(row['difference']):.2f} %",
            row["choices"],
        )
        for row in rows(FAMILIES)
    ]
    return markdown_table(FAMILIES_HEAD, lines)


def choices_table() -> str:
    lines = [
        (
            row["family"],
            row["node"],
            row["token"],
            row["layer"],
            *(f"{100 * float(row[key]):.2f} %" for key in ("margin", "before", "after")),
        )
        for row in rows(CHOICES)
    ]
    return markdown_table(CHOICES_HEAD, lines)


def chart() -> Bars:
    known = [row for row in rows() if row["step_us"]]
    errors = [float(row["predicted"]) * float(row["step_us"]) / 1e6 - 1 for row in known]
    return errors_chart([f"{row['model']}, {row['after']}" for row in known], {"error": errors})


def main() -> None:
    write_page(
        HERE,
        stamp(),
        {"rows": table(), "families": families_table(), "choices": choices_table()},
        chart(),
    )


if __name__ == "__main__":
    main()
