"""Writes this study's page from validation.json: `python studies/host-validation/page.py`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import files_digest
from studies.common.study_page import errors_chart, write_page

HERE = Path(__file__).resolve().parent
RESULT = HERE / "validation.json"  # of `twin validate host --json`
COLUMNS = {
    "run": "{r[name]}",
    "blocks per GPU": "{r[blocks]}",
    "predicted, tokens/s": "{r[predicted_tokens_per_s]:,.0f}",
    "measured, tokens/s": "{r[measured_tokens_per_s]:,.0f}",
    "error": "{r[error]:+.1%}",
    "spread of rounds": "{r[measured_spread]:.1%}",
}


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8"))
    return found


def stamp() -> Stamp:
    """The fit is that of the computer that was measured, and is not kept."""
    return Stamp(read()["fit"], files_digest([RESULT]))


def main() -> None:
    found = read()
    runs = found["runs"]
    sizes = [abs(run["error"]) for run in runs]
    said = (
        f"{len(runs)} runs: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}. "
        f"Fit: {found['fit']}."
    )
    chart = errors_chart([run["name"] for run in runs], {"error": [run["error"] for run in runs]})
    write_page(HERE, stamp(), {"runs": f"{table_of(runs, COLUMNS)}\n\n{said}"}, chart)


if __name__ == "__main__":
    main()
