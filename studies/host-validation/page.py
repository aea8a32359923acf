"""Writes this study's page from validation.json: `python studies/host-validation/page.py`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest
from studies.common.study_page import write_page
from twin.report.tables import percent
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
RESULT = HERE / "validation.json"  # of `twin validate host --json`


def stamp() -> Stamp:
    """The fit is that of the computer that was measured, and is not kept."""
    return Stamp(json.loads(RESULT.read_text(encoding="utf-8"))["fit"], files_digest([RESULT]))


def main() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    runs = found["runs"]
    head = (
        "run",
        "blocks per GPU",
        "predicted, tokens/s",
        "measured, tokens/s",
        "error",
        "spread of rounds",
    )
    rows = [
        (
            run["name"],
            run["blocks"],
            f"{run['predicted_tokens_per_s']:,.0f}",
            f"{run['measured_tokens_per_s']:,.0f}",
            percent(run["error"], signed=True),
            percent(run["measured_spread"]),
        )
        for run in runs
    ]
    sizes = [abs(run["error"]) for run in runs]
    said = (
        f"{len(runs)} runs: median error {percent(statistics.median(sizes))}, worst "
        f"{percent(max(sizes))}. Fit: {found['fit']}."
    )
    errors = Series("error", tuple(run["error"] for run in runs))
    chart = Bars(
        tuple(run["name"] for run in runs),
        (errors,),
        "error of the predicted speed (right: the twin is too fast)",
    )
    write_page(HERE, stamp(), {"runs": f"{markdown_table(head, rows)}\n\n{said}"}, chart)


if __name__ == "__main__":
    main()
