"""Sets the committed predictions next to the records of an H100, and both next to its own fit,
which came later: `python studies/h100-carried-over/page.py`. The errors of its own fit are those
that `twin validate 1xh100` kept.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import files_digest
from studies.common.study_page import errors_chart, write_page
from twin.calibrate import store
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.calibrate.packed import unpacked

HERE = Path(__file__).resolve().parent
PREDICTIONS = HERE / "predictions.json"
NODE = "1xh100-sxm"
RUNS, PROBES = "2026-11-24T032254-engine", "2026-11-22T232025-probes"
GUESSED: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
FIRST = str(GUESSED["fit"]).rpartition(" ")[2]  # the fit that the predictions were made with


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a step; the error of the speed by the H100's own fit."""

    name: str
    predicted_s: float
    measured_s: float
    own: float

    @property
    def error(self) -> float:
        """Of the speed, positive where the twin is too fast."""
        return self.measured_s / self.predicted_s - 1.0


@dataclass(frozen=True, slots=True)
class Group:
    """Probes of one question."""

    name: str
    rows: tuple[Row, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(row.error for row in self.rows)

    @property
    def median(self) -> float:
        return statistics.median(abs(row.error) for row in self.rows)

    @property
    def own(self) -> float:
        return statistics.median(abs(row.own) for row in self.rows)

    @property
    def worst(self) -> Row:
        return max(self.rows, key=lambda row: abs(row.error))


RUN_COLUMNS = {
    "held-out run": "{r.name}",
    "predicted, us": lambda row: f"{row.predicted_s * 1e6:,.0f}",
    "measured, us": lambda row: f"{row.measured_s * 1e6:,.0f}",
    "error of the speed": "{r.error:+.1%}",
    "by the H100's own fit": "{r.own:+.1%}",
}
PROBE_COLUMNS = {
    "probes": "{r.name}",
    "count": lambda group: len(group.rows),
    "mean error": "{r.mean:+.1%}",
    "median": "{r.median:.1%}",
    "worst": "{r.worst.error:+.1%} ({r.worst.name})",
    "median by the H100's own fit": "{r.own:.1%}",
}


def own_fit() -> dict[str, Any]:
    """What the file of the H100's own fit says of it."""
    found = store.read_fit(NODE)
    if found is None:
        raise SystemExit(f"no fit of {NODE}: run `twin calibrate {NODE} --from` its probes first")
    return found[1]


def stamp() -> Stamp:
    """Two fits: the one that the predictions were made with, before anything was measured, and the
    H100's own.
    """
    runs = store.runs_folder(NODE)
    records = [unpacked(runs / name) / store.SAMPLES for name in (RUNS, PROBES)]
    files = [PREDICTIONS, *records, store.fit_file(NODE), store.held_out_file(NODE)]
    return Stamp(f"{FIRST}+{own_fit()['run']}", files_digest(files))


def own_errors() -> dict[str, float]:
    """Of the speed of each held-out run, by the fit of the H100's own probes; runs of superseded
    kernels have none.
    """
    known = known_error(calibrated_node(NODE))
    if known is None or known.node != NODE or known.record != RUNS:
        raise SystemExit(
            f"no errors of the fit of {NODE} on file for {RUNS}: run `twin validate {NODE} "
            "--from` that record first"
        )
    return dict(known.errors)


def rows(guessed: dict[str, float], folder: str, own: dict[str, float]) -> list[Row]:
    samples = store.read_run(store.runs_folder(NODE) / folder).samples
    return [
        Row(name, step_s, statistics.median(samples[name]), own[name])
        for name, step_s in guessed.items()
        if name in samples and name in own
    ]


def summary(errors: Sequence[float]) -> str:
    fast = sum(e > 0 for e in errors)
    return (
        f"median {statistics.median(map(abs, errors)):.1%}, worst {max(errors, key=abs):+.1%}, "
        f"mean {statistics.mean(errors):+.1%}, {fast} of {len(errors)} too fast"
    )


def main() -> None:
    runs = rows(GUESSED["runs_step_s"], RUNS, own_errors())
    residuals = {name: math.exp(-left) - 1.0 for name, left in own_fit()["residuals"].items()}
    probes = rows(GUESSED["probes_step_s"], PROBES, residuals)
    by_first, by_own = [row.error for row in runs], [row.own for row in runs]
    chart = errors_chart(
        [row.name for row in runs], {"by the H200's fit": by_first, "by the H100's own": by_own}
    )
    kinds: dict[str, list[Row]] = {}
    for row in probes:
        kinds.setdefault(row.name.split("-")[0], []).append(row)
    groups = [Group(name, tuple(some)) for name, some in kinds.items()]
    bodies = {
        "runs": f"{table_of(runs, RUN_COLUMNS)}\n\n{len(runs)} runs ({RUNS}).\n\n"
        f"- By the H200's fit ({FIRST}): {summary(by_first)}.\n"
        f"- By the H100's own fit ({own_fit()['run']}): {summary(by_own)}.",
        "probes": f"{table_of(groups, PROBE_COLUMNS)}\n\n{len(probes)} probes ({PROBES}), by the "
        f"H200's fit ({FIRST}): {summary([row.error for row in probes])}.",
    }
    write_page(HERE, stamp(), bodies, chart)
    print(f"held-out runs: {summary(by_first)}\nby its own fit: {summary(by_own)}")


if __name__ == "__main__":
    main()
