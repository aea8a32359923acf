"""Sets the first predictions next to the record and the fit in force:
`python studies/h200-changes/page.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.experiment import Experiment
from twin.calibrate.node import calibrated_node
from twin.calibrate.validate import compare
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
DEVICE, PREDICTIONS = "h200-sxm", HERE / "predictions.json"
BASE = "resident, sentinel"
CHANGES = {  # model: (held-out run, the beginning of the change's name), the base first
    "llama-3.2-1b": {
        "llama-1b": BASE,
        "llama-1b-grid": "sentinel -> grid",
        "llama-1b-half-ring": "ring",
        "llama-1b-b96": "132 -> 96",
        "llama-1b-graph": "resident -> graph",
    },
    "laneformer-2b": {"laneformer-2b": BASE, "laneformer-2b-grid": "sentinel -> grid"},
}
WAYS = ("predicted first", "by the fit", "measured")


@dataclass(frozen=True, slots=True)
class Line:
    """us a token by each of WAYS, and of the model without the change."""

    model: str
    change: str
    us: tuple[float, ...]
    base_us: tuple[float, ...]

    def changed(self, way: int) -> float:
        return self.us[way] / self.base_us[way] - 1

    def cell(self, way: int) -> str:
        changed = "" if self.change == BASE else f" ({self.changed(way):+.1%})"
        return f"{self.us[way]:,.0f}{changed}"


def record() -> Path:
    return sorted(store.runs_folder(DEVICE).glob("*-engine"))[-1]


def stamp() -> Stamp:
    files = (PREDICTIONS, record() / store.SAMPLES)
    return Stamp(fits_on_file(f"1x{DEVICE}"), digest(file.read_bytes() for file in files))


def main() -> None:
    run = store.read_run(record())
    wanted = [name for names in CHANGES.values() for name in names]
    few = replace(run, samples={name: run.samples[name] for name in wanted}, stages=())
    found = compare(calibrated_node(f"1x{DEVICE}"), few, lambda message: None)
    rows = list(lines({one.name: one for one in found.runs}))
    columns = {
        "model": "{r.model}",
        "change": "{r.change}",
        "predicted first, us": lambda row: row.cell(0),
        "by the fit, us": lambda row: row.cell(1),
        "measured, us": lambda row: row.cell(2),
    }
    table = f"{table_of(rows, columns, texts=2)}\n\nFit: {stamp().fit}; measured: {record().name}."
    changed = [row for row in rows if row.change != BASE]
    series = (Series(way, tuple(row.changed(at) for row in changed)) for at, way in enumerate(WAYS))
    names = tuple(f"{row.model}: {row.change}" for row in changed)
    chart = Bars(names, tuple(series), "change of the time of a token")
    write_page(HERE, stamp(), {"changes": table}, chart)


def lines(runs: Mapping[str, Experiment]) -> Iterator[Line]:
    first = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rows"]
    for model, changes in CHANGES.items():
        base: tuple[float, ...] = ()
        for name, change in changes.items():
            said = next(key for key in first if key.startswith(f"{model} | {change}"))
            run = runs[name]
            seconds = (1 / run.predicted_tokens_per_s, run.measured_s)
            us = (first[said]["us_per_token"], *(1e6 * one for one in seconds))
            base = base or us
            yield Line(model, said.partition(" | ")[2], us, base)


if __name__ == "__main__":
    main()
