"""The tables and the figure of README.md, from predictions.csv, rows.csv and split.csv:
`python studies/long-contexts/page.py`. Nothing is simulated.
"""

from __future__ import annotations

import csv
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import errors_chart, write_page
from twin.study.outcome import Bars

HERE = Path(__file__).resolve().parent
FILES = [HERE / f"{name}.csv" for name in ("predictions", "rows", "split")]
FIT = "2026-11-27"  # of an H200, by which the rows were predicted
SHORT, LONG = "32", "32000"
SPEEDS = ("model", "after", "cache", "predicted, tokens/s", "p10 to p90", "measured", "off by")
LOSSES = ("model", "cache", "step after 32, us", "after 32,000", "more", "of it bytes", "not bytes")
DIVIDED = (
    *("model on 8xh200", "positions", "cache", "splits", "tokens/s", "attention, us"),
    *("caches moved, GB", "each once", "floor of the plan, us"),
)
Row = dict[str, str]
Key = tuple[str, str, str]


def read(name: str) -> dict[Key, Row]:
    """Rows by model, context and cache."""
    with (HERE / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return {(r["model"], r["after"], r["cache"]): r for r in csv.DictReader(file)}


def stamp() -> Stamp:
    return Stamp(FIT, files_digest(FILES))


def speeds() -> str:
    measured, lines = read("rows"), []
    for key, row in read("predictions").items():
        predicted = float(row["predicted"])
        span = f"{float(row['p10']):,.4g} to {float(row['p90']):,.4g}"
        if key not in measured:
            lines.append((*key, f"{predicted:,.4g}", span, None, None))
            continue
        speed = 1e6 / float(measured[key]["step_us"])
        off = f"{100 * (predicted / speed - 1):+.1f} %"
        lines.append((*key, f"{predicted:,.4g}", span, f"{speed:,.1f}", off))
    return markdown_table(SPEEDS, lines)


def losses() -> str:
    """What a step takes longer after 32,000 tokens; the bytes of it at the measured read
    ceiling.
    """
    measured, predicted, lines = read("rows"), read("predictions"), []
    for model, after, cache in measured:
        short, long = ((model, at, cache) for at in (SHORT, LONG))
        if after != SHORT or long not in measured:
            continue
        steps = [float(measured[key]["step_us"]) for key in (short, long)]
        moved = [float(predicted[key]["floor_us"]) for key in (short, long)]
        more, of_bytes = steps[1] - steps[0], moved[1] - moved[0]
        lines.append(
            (
                *(model, cache, f"{steps[0]:,.1f}", f"{steps[1]:,.1f}", f"{more:,.1f}"),
                f"{of_bytes:,.1f} ({100 * of_bytes / more:.0f} %)",
                f"{more - of_bytes:,.1f} ({100 * (1 - of_bytes / more):.0f} %)",
            )
        )
    return markdown_table(LOSSES, lines)


def divided() -> str:
    """A cache on all ranks, and its positions divided over them."""
    with (HERE / "split.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = ("positions", "attention_us", "floor_us")
    return markdown_table(
        DIVIDED, [[f"{int(v):,}" if k in counts else v for k, v in row.items()] for row in rows]
    )


def chart() -> Bars:
    predicted, errors = read("predictions"), {}
    for key, row in read("rows").items():
        model, after, cache = key
        error = float(predicted[key]["predicted"]) * float(row["step_us"]) / 1e6 - 1
        errors[f"{model}, {int(after):,}, {cache}"] = error
    return errors_chart(list(errors), {"error": list(errors.values())})


def main() -> None:
    bodies = {"speeds": speeds(), "losses": losses(), "divided": divided()}
    write_page(HERE, stamp(), bodies, chart())


if __name__ == "__main__":
    main()
