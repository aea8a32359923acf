"""The tables and the figure of README.md, from the csv files: `studies/structured/page.py`."""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
ROWS, SERVED, GGUF = (HERE / f"{name}.csv" for name in ("rows", "served", "gguf"))
RUN = "2026-11-29"
HEAD = ("node", "model", "answer", "predicted, us", "us a token", "of plain", "host, us", "right")


def stamp() -> Stamp:
    return Stamp(RUN, files_digest([ROWS, SERVED, GGUF]))


def rows(table: Path = ROWS) -> list[dict[str, str]]:
    with table.open(encoding="utf-8", newline="") as file:
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


def served() -> str:
    """The same request to two trees, one row."""
    found = {(row["tree"], row["what"]): row for row in rows(SERVED)}
    before, after = dict.fromkeys(tree for tree, _ in found)
    lines = []
    for what in dict.fromkeys(what for _, what in found):
        one, other = found.get((before, what)), found[after, what]
        waits = "next to others" in what  # for each other: no time of its own
        behind = [row["behind_ms"] if row and not waits else "-" for row in (one, other)]
        rates = [
            row["tokens_per_s"] if row and int(row["tokens"]) > 3 else "-" for row in (one, other)
        ]
        lines.append((what, other["prompt"], *behind, *rates))
    head = ("request", "prompt", f"ms behind the kernel, {before}", after, "tokens/s", after)
    return markdown_table(head, lines)


def gguf() -> str:
    head = ("model", "a file of", "predicted, us", "us a step", "error of steps", "behind passes")
    return markdown_table(
        head, [tuple(value or "-" for value in row.values()) for row in rows(GGUF)]
    )


def chart() -> Bars:
    found = rows()
    names = tuple(f"{row['model']}, {row['what']}" for row in found)
    return Bars(
        names, (Series("share", tuple(map(share, found))),), "share of a plain answer's speed"
    )


def main() -> None:
    write_page(HERE, stamp(), {"rows": table(), "served": served(), "gguf": gguf()}, chart())


if __name__ == "__main__":
    main()
