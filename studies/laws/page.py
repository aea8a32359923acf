"""The tables and the figure of README.md, from laws.csv and kinds.csv:
`python studies/laws/page.py`. Nothing is simulated.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
FILES = [HERE / f"{name}.csv" for name in ("laws", "kinds")]
FIT = "2026-11-27"  # of an H200
HEAD = ("removed", "alone: mean", "p90", "with those above: mean", "p90", "needed")
KINDS = ("runs of", "runs", "all laws: mean", "p90", "fewer: mean", "p90")


def read(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def stamp() -> Stamp:
    return Stamp(FIT, files_digest(FILES))


def laws() -> str:
    return markdown_table(
        HEAD,
        [
            (
                row["removed"].removeprefix("device."),
                *(_share(row[name]) for name in ("alone_mean", "alone_p90", "all_mean", "all_p90")),
                row["kept"],
            )
            for row in read(FILES[0])
        ],
    )


def kinds() -> str:
    names = ("all_mean", "all_p90", "fewer_mean", "fewer_p90")
    lines = [
        (row["kind"], row["runs"], *(_share(row[name]) for name in names)) for row in read(FILES[1])
    ]
    return markdown_table(KINDS, lines)


def _share(text: str) -> str:
    return f"{100 * float(text):.2f}%"


def chart() -> Bars:
    """The mean error as laws go."""
    rows = read(FILES[0])
    names = tuple(row["removed"].removeprefix("device.") for row in rows)
    means = tuple(float(row["all_mean"]) for row in rows)
    return Bars(names, (Series("mean error", means),), "mean error, left out, as laws go")


def main() -> None:
    write_page(HERE, stamp(), {"laws": laws(), "kinds": kinds()}, chart())


if __name__ == "__main__":
    main()
