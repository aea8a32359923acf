"""Simulates the recorded plan and writes this study's page:
`python studies/h200-traces/page.py`.
"""

from __future__ import annotations

from pathlib import Path

from studies.common.blocks import Stamp, markdown_table
from studies.common.inputs import files_digest, fits_on_file
from studies.common.study_page import write_page
from twin.calibrate.node import calibrated_node
from twin.report.recording import load
from twin.report.side_by_side import SideBySide, side_by_side
from twin.report.step import traced_blocks
from twin.report.tables import percent
from twin.study.outcome import Bars, Series

HERE = Path(__file__).resolve().parent
RECORDED, NODE = HERE / "recorded" / "llama-3.2-1b.npz", "1xh200"


def stamp() -> Stamp:
    return Stamp(fits_on_file(NODE), files_digest([RECORDED]))


def main() -> None:
    recording = load(RECORDED)
    found = side_by_side(
        recording, calibrated_node(NODE), shown=traced_blocks(recording.plan), steps=2
    )
    sides = (
        ("measured", [one.measured_span_us for one in found.stages]),
        ("simulated", [one.simulated_span_us for one in found.stages]),
    )
    names = tuple(one.kind for one in found.stages)
    chart = Bars(
        names,
        tuple(Series(label, tuple(values)) for label, values in sides),
        "span of a stage, us (logarithmic)",
        log=True,
    )
    write_page(HERE, stamp(), {"stages": table(found)}, chart)


def table(found: SideBySide) -> str:
    head = (
        "stage",
        "count",
        "wait, us",
        "simulated",
        "work, us",
        "simulated",
        "span, us",
        "simulated",
        "difference",
    )
    rows = [
        (
            one.kind,
            one.stages,
            f"{one.measured_wait_us:.2f}",
            f"{one.simulated_wait_us:.2f}",
            f"{one.measured_work_us:.2f}",
            f"{one.simulated_work_us:.2f}",
            f"{one.measured_span_us:.2f}",
            f"{one.simulated_span_us:.2f}",
            None if one.difference is None else percent(one.difference, signed=True),
        )
        for one in found.stages
    ]
    step = (
        f"a step: {found.measured_step_us:,.1f} us measured, {found.simulated_step_us:,.1f} "
        "simulated"
    )
    return f"{markdown_table(head, rows)}\n\nllama-3.2-1b, {step}. Fit: {fits_on_file(NODE)}."


if __name__ == "__main__":
    main()
