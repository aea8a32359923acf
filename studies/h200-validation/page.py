"""Predicts the held-out runs on record again and writes this study's page:
`python studies/h200-validation/page.py`.
"""

from __future__ import annotations

from pathlib import Path

from studies.common.blocks import Stamp, markdown_table, table_of
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import errors_chart, write_page
from twin.calibrate import store
from twin.calibrate.node import calibrated_node
from twin.calibrate.validate import Validation, compare

HERE = Path(__file__).resolve().parent
DEVICE = "h200-sxm"
# those that take more than 1 % of a step
KINDS = ("qkv", "attention", "o_proj", "gate_up", "down", "lm_head")
CLOSE = 0.10  # error of a kind of stage that the goal allows
COLUMNS = {
    "run": "{r.name}",
    "blocks": "{r.options.blocks}",
    "predicted, tokens/s": "{r.predicted_tokens_per_s:,.0f}",
    "measured, tokens/s": "{r.measured_tokens_per_s:,.0f}",
    "error": "{r.error:+.1%}",
    "spread of repeats": "{r.spread:.1%}",
}


def record() -> Path:
    """The newest engine runs of the device."""
    return sorted(store.runs_folder(DEVICE).glob("*-engine"))[-1]


def stamp() -> Stamp:
    return Stamp(fits_on_file(f"1x{DEVICE}"), files_digest(sorted(record().iterdir())))


def main() -> None:
    found = compare(calibrated_node(f"1x{DEVICE}"), store.read_run(record()), lambda message: None)
    chart = errors_chart([run.name for run in found.runs], {"error": found.every})
    said = f"median error {found.median:.1%}, worst {abs(found.worst):.1%}"
    runs = (
        f"{table_of(found.runs, COLUMNS)}\n\n{len(found.runs)} runs: {said}. Fit: {found.fit}; "
        f"runs: {record().name}."
    )
    write_page(HERE, stamp(), {"runs": runs, "stages": stages(found)}, chart)
    print(said)


def stages(found: Validation) -> str:
    """Errors of spans: a kind of stage a row, a traced run a column."""
    shown = [one for one in found.stages if one.stage in KINDS]
    names = list(dict.fromkeys(one.run for one in shown))
    errors = {(one.stage, one.run): f"{one.error:+.1%}" for one in shown}
    rows = [(kind, *(errors.get((kind, name)) for name in names)) for kind in KINDS]
    close = sum(abs(one.error) <= CLOSE for one in shown)
    return (
        f"{markdown_table(('stage', *names), rows)}\n\n{close} of {len(shown)} kinds of stages lie "
        f"within {CLOSE:.0%}; above 0 the twin is too slow. Fit: {found.fit}."
    )


if __name__ == "__main__":
    main()
