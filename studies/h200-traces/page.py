"""Simulates the recorded plan and writes this study's page:
`python studies/h200-traces/page.py`.
"""

from __future__ import annotations

from pathlib import Path

from studies.common.blocks import Stamp, table_of
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate.node import calibrated_node
from twin.report.recording import load
from twin.report.side_by_side import StageTimes, side_by_side
from twin.report.step import traced_blocks
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
RECORDED, NODE = HERE / "recorded" / "llama-3.2-1b.npz", "1xh200"


def difference(one: StageTimes) -> str | None:
    return None if one.difference is None else f"{one.difference:+.1%}"


COLUMNS = {
    "stage": "{r.kind}",
    "count": "{r.stages}",
    "wait, us": "{r.measured_wait_us:.2f}",
    "simulated wait": "{r.simulated_wait_us:.2f}",
    "work, us": "{r.measured_work_us:.2f}",
    "simulated work": "{r.simulated_work_us:.2f}",
    "span, us": "{r.measured_span_us:.2f}",
    "simulated span": "{r.simulated_span_us:.2f}",
    "difference": difference,
}


def stamp() -> Stamp:
    return Stamp(fits_on_file(NODE), files_digest([RECORDED]))


def main() -> None:
    recording = load(RECORDED)
    shown = traced_blocks(recording.plan.options.blocks)
    found = side_by_side(recording, calibrated_node(NODE), shown=shown, steps=2)
    chart = Bars(
        tuple(one.kind for one in found.stages),
        (
            Series("measured", tuple(one.measured_span_us for one in found.stages)),
            Series("simulated", tuple(one.simulated_span_us for one in found.stages)),
        ),
        "span of a stage, us",
        log=True,
    )
    said = (
        f"llama-3.2-1b, a step: {found.measured_step_us:,.1f} us measured, "
        f"{found.simulated_step_us:,.1f} simulated. Fit: {fits_on_file(NODE)}."
    )
    write_page(HERE, stamp(), {"stages": f"{table_of(found.stages, COLUMNS)}\n\n{said}"}, chart)


if __name__ == "__main__":
    main()
