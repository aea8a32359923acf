"""The table and the figure of README.md, from rows.csv: `python studies/several-tokens/page.py`."""

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
HEAD = (
    *("products", "model", "after", "tokens", "predicted, us", "a round, us", "a step, us"),
    *("ratio", "all count, tokens/s", "by steps, tokens/s", "equal"),
)


def stamp() -> Stamp:
    return Stamp(RUN, files_digest([ROWS]))


def rows() -> list[dict[str, str]]:
    with ROWS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def ratio(row: dict[str, str]) -> float:
    """A round's time in steps: so many of its tokens have to count."""
    return float(row["us"]) / float(row["step_us"])


def table() -> str:
    lines = [
        (
            row["products"],
            row["model"],
            f"{int(row['after']):,}",
            row["tokens"],
            f"{float(row['predicted_us']):,.0f}" if row["predicted_us"] else "-",
            f"{float(row['us']):,.0f}",
            f"{float(row['step_us']):,.0f}",
            f"{ratio(row):.2f}",
            f"{1e6 * int(row['tokens']) / float(row['us']):,.0f}",
            f"{1e6 / float(row['step_us']):,.0f}",
            "yes" if row["equal"] == "True" else "no",
        )
        for row in rows()
    ]
    return markdown_table(HEAD, lines)


def chart() -> Bars:
    found = [row for row in rows() if row["products"] == "by the ring"]
    names = tuple(f"{row['model']}, {row['after']}, {row['tokens']}" for row in found)
    series = Series("a round's time in steps", tuple(map(ratio, found)))
    return Bars(names, (series,), "a round of so many tokens, in times of a step")


def main() -> None:
    write_page(HERE, stamp(), {"rows": table()}, chart())


if __name__ == "__main__":
    main()
