"""What is in the way of the goals of two H100, by the twin: `python studies/many-gpus/goals.py`
writes the table of goals.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from twin.calibrate.node import calibrated_node
from twin.files import write
from twin.hardware.override import with_numbers
from twin.report.blocks import Stamp, filled, markdown_table
from twin.study.foretold import QUICK_HOP, QUICK_STAGES, fit_of
from twin.study.inputs import files_digest
from twin.study.many_gpus import ROWS

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from predict import RAN, _step  # noqa: E402  beside this file

PAGE, MEASURED = HERE / "goals.md", HERE / f"measured-{RAN}.json"
# tokens/s that were aimed at on two H100; of Llama-3.1-70B a share of the floor, of GPT-OSS nothing
GOALS = {
    "laneformer-2b, delay 2": 1400.0,
    "its shapes as a Llama": 1300.0,
    "llama-3.2-1b": 2200.0,
    "qwen3-8b": 410.0,
}
HALF_BYTES = [("warps.gather_bytes_per_s", "x2")]
TOGETHER = [("link.spread_s", "0 s")]
ALL = [*HALF_BYTES, *QUICK_HOP, *TOGETHER, *QUICK_STAGES]
WHAT_IF = {
    "gathers of half the bytes": HALF_BYTES,
    "loaded hop x0.7": QUICK_HOP,
    "all words at once": TOGETHER,
    "stage and norm in half the time": QUICK_STAGES,
    "all four": ALL,
}


def main() -> None:
    node = calibrated_node(RAN)
    found = json.loads(MEASURED.read_text(encoding="utf-8"))["row"]
    ceiling = node.gpus * node.device.memory.ceiling_bytes_per_s.value
    lines = []
    for row in (row for row in ROWS if row.name in found):
        step, _ = _step(row, node)
        speed, floor = (
            found[row.name]["tokens_per_s"],
            ceiling / found[row.name]["bytes_per_step"],
        )
        gains = []
        for changes in WHAT_IF.values():
            gains.append(f"{step / _step(row, with_numbers(node, changes))[0] - 1:+.1%}")
        goal = GOALS.get(row.name)
        lines.append(
            (
                *(row.name, f"{speed:,.0f}", f"{goal:,.0f}" if goal else "", f"{floor:,.0f}"),
                f"{speed / floor:.2f}",
                f"{goal / floor:.2f}" if goal else "",
                f"{1 / step / speed - 1:+.1%}",
                *gains,
            )
        )
    head = (
        "row", "measured, tokens/s", "goal", "floor", "measured / floor", "goal / floor",
        "twin's error", *WHAT_IF,
    )  # fmt: skip
    stamp = Stamp(f"{fit_of(RAN)}+{fit_of(node.device.name)}", files_digest([MEASURED]))
    text = filled(
        PAGE.read_text(encoding="utf-8"), lambda block: markdown_table(head, lines), stamp
    )
    write({PAGE: text})


if __name__ == "__main__":
    main()
