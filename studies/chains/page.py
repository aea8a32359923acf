"""The tables and the figure of README.md, from predictions.csv: `python studies/chains/page.py`.
Nothing is simulated.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions.csv"
FIT = "2026-11-27"  # of an H200, by which they were made
AS_IT_IS, ONE = "as it is", "1xh200-sxm"
SHORT = "32"


def rows() -> list[dict[str, str]]:
    with PREDICTIONS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def stamp() -> Stamp:
    return Stamp(FIT, files_digest([PREDICTIONS]))


def table(*, one: bool) -> str:
    """A line a model and context, a column a chain."""
    some = [row for row in rows() if (row["node"] == ONE) is one]
    chains = list(dict.fromkeys(row["chain"] for row in some))
    cases = list(dict.fromkeys((row["model"], row["node"], row["after"]) for row in some))
    found = {(row["model"], row["node"], row["after"], row["chain"]): row for row in some}
    lines = [(*case, *(_cell(found[*case, chain]) for chain in chains)) for case in cases]
    return markdown_table(("model", "node", "after", *chains), lines, text_columns=2)


def _cell(row: dict[str, str]) -> str:
    speed = f"{float(row['tokens_per_s']):,.0f}"
    return speed if row["chain"] == AS_IT_IS else f"{speed} ({100 * float(row['more']):+.1f}%)"


def chart() -> Bars:
    """What each chain brings after few positions."""
    some = [row for row in rows() if row["node"] == ONE and row["after"] == SHORT]
    models = list(dict.fromkeys(row["model"] for row in some))
    chains = [name for name in dict.fromkeys(row["chain"] for row in some) if name != AS_IT_IS]
    series = tuple(
        Series(chain, tuple(float(row["more"]) for row in some if row["chain"] == chain))
        for chain in chains
    )
    return Bars(tuple(models), series, "tokens/s more than the plan as it is, predicted")


def main() -> None:
    bodies = {"one": table(one=True), "several": table(one=False)}
    write_page(HERE, stamp(), bodies, chart())


if __name__ == "__main__":
    main()
