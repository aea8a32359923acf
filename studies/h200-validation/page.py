"""Predicts the held-out runs on record again and writes this study's page:
`python studies/h200-validation/page.py`.
"""

from __future__ import annotations

from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.node import calibrated_node
from twin.calibrate.validate import StageCompared, Validation, compare
from twin.report.tables import percent
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
DEVICE = "h200-sxm"
# those that take more than 1 % of a step
KINDS = ("qkv", "attention", "o_proj", "gate_up", "down", "lm_head")
CLOSE = 0.10  # error of a kind of stage that the goal allows


def record() -> Path:
    """The newest engine runs of the device."""
    return sorted(store.runs_folder(DEVICE).glob("*-engine"))[-1]


def stamp() -> Stamp:
    return Stamp(fits_on_file(f"1x{DEVICE}"), files_digest(sorted(record().iterdir())))


def main() -> None:
    found = compare(calibrated_node(f"1x{DEVICE}"), store.read_run(record()), lambda message: None)
    errors = Series("error", tuple(run.error for run in found.runs))
    chart = Bars(
        tuple(run.name for run in found.runs),
        (errors,),
        "error of the predicted speed (right: the twin is too fast)",
    )
    write_page(HERE, stamp(), {"runs": runs(found), "stages": stages(found)}, chart)
    print(f"median {percent(found.median)}, worst {percent(abs(found.worst))}")


def runs(found: Validation) -> str:
    head = (
        "run",
        "blocks",
        "predicted, tokens/s",
        "measured, tokens/s",
        "error",
        "spread of repeats",
    )
    rows = [
        (
            run.name,
            run.options.blocks,
            f"{run.predicted_tokens_per_s:,.0f}",
            f"{run.measured_tokens_per_s:,.0f}",
            percent(run.error, signed=True),
            percent(run.spread),
        )
        for run in found.runs
    ]
    said = f"median error {percent(found.median)}, worst {percent(abs(found.worst))}"
    return (
        f"{markdown_table(head, rows)}\n\n"
        f"{len(rows)} runs: {said}. Fit: {found.fit}; runs: {record().name}."
    )


def stages(found: Validation) -> str:
    """Errors of spans: a kind of stage a row, a traced run a column."""
    shown = [one for one in found.stages if one.stage in KINDS]
    names = list(dict.fromkeys(one.run for one in shown))
    errors = {(one.stage, one.run): percent(one.error, signed=True) for one in shown}
    rows = [(kind, *(errors.get((kind, name)) for name in names)) for kind in KINDS]
    return f"{markdown_table(('stage', *names), rows)}\n\n{_close(shown)} Fit: {found.fit}."


def _close(shown: list[StageCompared]) -> str:
    close = sum(abs(one.error) <= CLOSE for one in shown)
    return (
        f"{close} of {len(shown)} kinds of stages lie within {CLOSE:.0%}; above 0 the twin is too "
        "slow."
    )


if __name__ == "__main__":
    main()
