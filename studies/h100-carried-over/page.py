"""Sets the committed predictions beside the records of an H100, and both beside its own fit, which
came later.

`python studies/h100-carried-over/page.py`; the errors of its own fit are those that
`twin validate 1xh100` kept.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.calibrate.packed import unpacked
from twin.hardware.types import Number
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions.json"
NODE = "1xh100-sxm"
RUNS, PROBES = "2026-11-24T032254-engine", "2026-11-22T232025-probes"
Row = tuple[str, float, float]  # name, predicted and measured seconds of a step


def stamp() -> Stamp:
    """Two fits: the one that the predictions were made with, before anything was measured, and the
    H100's own.
    """
    runs = store.runs_folder(NODE)
    records = [unpacked(runs / name) / store.SAMPLES for name in (RUNS, PROBES)]
    files = [PREDICTIONS, *records, store.fit_file(NODE), store.held_out_file(NODE)]
    return Stamp(f"{_first()}+{_own()[1]['run']}", files_digest(files))


def main() -> None:
    guessed = _guessed()
    own = own_errors()
    # those of kernels that are no more have none
    runs = [row for row in rows(guessed["runs_step_s"], RUNS) if row[0] in own]
    probes = rows(guessed["probes_step_s"], PROBES)
    before = Series("by the H200's fit", tuple(error(row) for row in runs))
    after = Series("by the H100's own", tuple(own[row[0]] for row in runs))
    chart = Bars(
        tuple(row[0] for row in runs),
        (before, after),
        "error of the predicted speed (right: the twin is too fast)",
    )
    write_page(HERE, stamp(), {"runs": runs_table(runs), "probes": probes_table(probes)}, chart)
    print(
        f"held-out runs: {summary([error(row) for row in runs])}\n"
        f"by its own fit: {summary([own[row[0]] for row in runs])}"
    )


def own_errors() -> dict[str, float]:
    """Of the speed of each held-out run, by the fit of the H100's own probes."""
    known = known_error(calibrated_node(NODE))
    if known is None or known.node != NODE or known.record != RUNS:
        raise SystemExit(
            f"no errors of the fit of {NODE} on file for {RUNS}: run `twin validate {NODE} "
            "--from` that record first"
        )
    return dict(known.errors)


def own_probes() -> dict[str, float]:
    """Errors of the speed of the probes that its own fit was made from."""
    return {name: math.exp(-left) - 1.0 for name, left in _own()[1]["residuals"].items()}


def _own() -> tuple[dict[str, Number], dict[str, Any]]:
    found = store.read_fit(NODE)
    if found is None:
        raise SystemExit(f"no fit of {NODE}: run `twin calibrate {NODE} --from` its probes first")
    return found


def _first() -> str:
    """The fit that the predictions were made with."""
    return str(_guessed()["fit"]).rpartition(" ")[2]


def _guessed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return found


def rows(guessed: dict[str, float], folder: str) -> list[Row]:
    samples = store.read_run(store.runs_folder(NODE) / folder).samples
    return [
        (name, step, statistics.median(samples[name]))
        for name, step in guessed.items()
        if name in samples
    ]


def error(row: Row) -> float:
    """Of the speed, positive where the twin is too fast."""
    return row[2] / row[1] - 1.0


def summary(errors: Sequence[float]) -> str:
    fast = sum(e > 0 for e in errors)
    return (
        f"median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, "
        f"mean {statistics.mean(errors):+.1%}, {fast} of {len(errors)} too fast"
    )


def runs_table(found: Sequence[Row]) -> str:
    own = own_errors()
    head = (
        "held-out run",
        "predicted, us",
        "measured, us",
        "error of the speed",
        "by the H100's own fit",
    )
    cells = [
        (
            row[0],
            f"{row[1] * 1e6:,.0f}",
            f"{row[2] * 1e6:,.0f}",
            f"{error(row):+.1%}",
            f"{own[row[0]]:+.1%}",
        )
        for row in found
    ]
    before, after = summary([error(row) for row in found]), summary([own[row[0]] for row in found])
    return (
        f"{markdown_table(head, cells)}\n\n{len(found)} runs ({RUNS}).\n\n"
        f"- By the H200's fit ({_first()}): {before}.\n"
        f"- By the H100's own fit ({_own()[1]['run']}): {after}."
    )


def probes_table(found: Sequence[Row]) -> str:
    own, kinds = own_probes(), dict[str, list[Row]]()
    for row in found:
        kinds.setdefault(row[0].split("-")[0], []).append(row)
    cells = []
    for kind, members in kinds.items():
        errors = [error(row) for row in members]
        worst = max(members, key=lambda row: abs(error(row)))
        middle = statistics.median(map(abs, errors))
        after = statistics.median(abs(own[row[0]]) for row in members)
        said = (
            f"{statistics.mean(errors):+.1%}",
            f"{middle:.1%}",
            f"{error(worst):+.1%} ({worst[0]})",
            f"{after:.1%}",
        )
        cells.append((kind, len(members), *said))
    table = markdown_table(
        ("probes", "count", "mean error", "median", "worst", "median by the H100's own fit"), cells
    )
    return (
        f"{table}\n\n{len(found)} probes ({PROBES}), by the H200's fit ({_first()}): "
        f"{summary([error(row) for row in found])}."
    )


if __name__ == "__main__":
    main()
