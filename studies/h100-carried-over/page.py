"""Sets the committed predictions beside the records of an H100: `python studies/h100-carried-over/page.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twin.calibrate import store
from twin.report.blocks import Stamp, markdown_table
from twin.report.study_page import write_page
from twin.study.inputs import files_digest
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions.json"
RUNS, PROBES = "2026-11-22T232135-engine", "2026-11-22T232025-probes"
Row = tuple[str, float, float]  # name, predicted and measured seconds of a step


def stamp() -> Stamp:
    """The fit is the one that the predictions were made with, before anything was measured."""
    records = [store.runs_folder("h100-sxm") / name / "samples.csv" for name in (RUNS, PROBES)]
    return Stamp(_guessed()["fit"].rpartition(" ")[2], files_digest([PREDICTIONS, *records]))


def main() -> None:
    guessed = _guessed()
    runs, probes = rows(guessed["runs_step_s"], RUNS), rows(guessed["probes_step_s"], PROBES)
    errors = Series("error", tuple(error(row) for row in runs))
    chart = Bars(tuple(row[0] for row in runs), (errors,), "error of the predicted speed (right: the twin is too fast)")
    write_page(HERE, stamp(), {"runs": runs_table(runs), "probes": probes_table(probes)}, chart)
    print(f"held-out runs: {summary(runs)}\nprobes: {summary(probes)}")


def _guessed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return found


def rows(guessed: dict[str, float], folder: str) -> list[Row]:
    samples = store.read_run(store.runs_folder("h100-sxm") / folder).samples
    return [(name, step, statistics.median(samples[name])) for name, step in guessed.items() if name in samples]


def error(row: Row) -> float:
    """Of the speed, positive where the twin is too fast."""
    return row[2] / row[1] - 1.0


def summary(found: Sequence[Row]) -> str:
    errors = [error(row) for row in found]
    fast = sum(e > 0 for e in errors)
    return (
        f"median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, mean {statistics.mean(errors):+.1%}, "
        f"{fast} of {len(errors)} too fast"
    )


def runs_table(found: Sequence[Row]) -> str:
    head = ("held-out run", "predicted, us", "measured, us", "error of the speed")
    cells = [(row[0], f"{row[1] * 1e6:,.0f}", f"{row[2] * 1e6:,.0f}", f"{error(row):+.1%}") for row in found]
    return f"{markdown_table(head, cells)}\n\n{len(found)} runs: {summary(found)}. Fit: {stamp().fit}; runs: {RUNS}."


def probes_table(found: Sequence[Row]) -> str:
    kinds: dict[str, list[Row]] = {}
    for row in found:
        kinds.setdefault(row[0].split("-")[0], []).append(row)
    cells = []
    for kind, members in kinds.items():
        errors = [error(row) for row in members]
        worst = max(members, key=lambda row: abs(error(row)))
        middle = statistics.median(map(abs, errors))
        cells.append((kind, len(members), f"{statistics.mean(errors):+.1%}", f"{middle:.1%}", f"{error(worst):+.1%} ({worst[0]})"))
    table = markdown_table(("probes", "count", "mean error", "median", "worst"), cells)
    return f"{table}\n\n{len(found)} probes: {summary(found)}. Fit: {stamp().fit}; probes: {PROBES}."


if __name__ == "__main__":
    main()
