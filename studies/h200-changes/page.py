"""Sets the first predictions beside the record and today's fit:
`python studies/h200-changes/page.py`.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.node import calibrated_node
from twin.calibrate.validate import compare
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
DEVICE, PREDICTIONS = "h200-sxm", HERE / "predictions.json"
BASE = "resident, sentinel"
CHANGES = {  # model: (held-out run, the beginning of the change's name)
    "llama-3.2-1b": (
        ("llama-1b", BASE),
        ("llama-1b-grid", "sentinel -> grid"),
        ("llama-1b-half-ring", "ring"),
        ("llama-1b-b96", "132 -> 96"),
        ("llama-1b-graph", "resident -> graph"),
    ),
    "laneformer-2b": (("laneformer-2b", BASE), ("laneformer-2b-grid", "sentinel -> grid")),
}


def record() -> Path:
    return sorted(store.runs_folder(DEVICE).glob("*-engine"))[-1]


def stamp() -> Stamp:
    return Stamp(
        fits_on_file(f"1x{DEVICE}"),
        digest([PREDICTIONS.read_bytes(), (record() / "samples.csv").read_bytes()]),
    )


def main() -> None:
    first = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rows"]
    run = store.read_run(record())
    wanted = {name for pairs in CHANGES.values() for name, _ in pairs}
    few = dataclasses.replace(
        run, samples={name: took for name, took in run.samples.items() if name in wanted}, stages=()
    )
    fitted = {
        one.name: 1 / one.predicted_tokens_per_s
        for one in compare(calibrated_node(f"1x{DEVICE}"), few, lambda message: None).runs
    }
    rows = list(lines(first, fitted, run.samples))
    bodies = {"changes": table(rows)}
    changed = [row for row in rows if row[1] != BASE]
    names = tuple(f"{model}: {change}" for model, change, *_ in changed)
    series = tuple(
        Series(label, tuple(row[at][1] for row in changed))
        for label, at in (("predicted first", 2), ("by the fit", 3), ("measured", 4))
    )
    write_page(HERE, stamp(), bodies, Bars(names, series, "change of the time of a token"))


Time = tuple[float, float]  # seconds a token, and the change against the base
Line = tuple[str, str, Time, Time, Time]


def lines(
    first: dict[str, Any], fitted: dict[str, float], samples: store.Samples
) -> Iterator[Line]:
    """Model, change, and the three times: predicted first, by the fit on file, measured."""
    for model, pairs in CHANGES.items():
        base = pairs[0][0]
        for name, change in pairs:
            said, guess = next(
                (key, value)
                for key, value in first.items()
                if key.startswith(f"{model} | {change}")
            )
            took, began = statistics.median(samples[name]), statistics.median(samples[base])
            yield (
                model,
                said.partition(" | ")[2],
                (guess["us_per_token"] / 1e6, guess["change"]),
                (fitted[name], fitted[name] / fitted[base] - 1),
                (took, took / began - 1),
            )


def table(rows: list[Line]) -> str:
    head = ("model", "change", "predicted first, us", "by the fit, us", "measured, us")
    cells = [
        (
            model,
            change,
            *(f"{s * 1e6:,.0f}" + (f" ({c:+.1%})" if change != BASE else "") for s, c in times),
        )
        for model, change, *times in rows
    ]
    return (
        f"{markdown_table(head, cells, text_columns=2)}\n\n"
        f"Fit: {stamp().fit}; measured: {record().name}."
    )


if __name__ == "__main__":
    main()
