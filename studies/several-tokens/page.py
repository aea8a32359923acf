"""The table and the figure of README.md, from rows.csv: `python studies/several-tokens/page.py`."""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
ROWS, TEXT = HERE / "rows.csv", HERE / "text.csv"
RUN = "2026-11-29"
HEAD = (
    *("products", "model", "after", "tokens", "predicted, us", "a round, us", "a step, us"),
    *("ratio", "all count, tokens/s", "by steps, tokens/s", "equal"),
)


def stamp() -> Stamp:
    return Stamp(RUN, files_digest([ROWS, TEXT]))


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


TEXT_HEAD = ("prompts", "prompt", "answer", "tokens a round", "tokens/s", "by steps", "equal")


def text_table() -> str:
    """SmolLM2-135M on a CPU."""
    with TEXT.open(encoding="utf-8", newline="") as file:
        lines = [
            (
                *(row["kind"], row["prompt"], row["tokens"]),
                f"{float(row['tokens_per_round']):.2f}",
                *(f"{float(row[name]):.1f}" for name in ("tokens_per_s", "by_steps")),
                "yes" if row["same"] == "True" else "no",
            )
            for row in csv.DictReader(file)
        ]
    return markdown_table(TEXT_HEAD, lines)


def chart() -> Bars:
    found = [row for row in rows() if row["products"] == "by hand-offs"]
    names = tuple(f"{row['model']}, {row['after']}, {row['tokens']}" for row in found)
    series = Series("a round's time in steps", tuple(map(ratio, found)))
    return Bars(names, (series,), "a round of so many tokens, in times of a step")


def main() -> None:
    write_page(HERE, stamp(), {"rows": table(), "text": text_table()}, chart())


if __name__ == "__main__":
    main()
