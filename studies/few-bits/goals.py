"""What is in the way of the goals of one H200 and one H100, by the twin:
`python studies/few-bits/goals.py` writes the tables of goals.md. Half a minute, no GPU.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from few_bits import ROWS, spec_of, timed_plan

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.foretold import QUICK_HOP, QUICK_STAGES, WhatIf, fit_of
from studies.common.inputs import files_digest
from twin.calibrate.node import calibrated_node
from twin.files import write
from twin.hardware.override import with_numbers
from twin.hardware.types import Node
from twin.sim.run import simulate

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from page import CHANGED, SHORT, changed_rows, of_node  # noqa: E402  beside this file
from predict import decoding  # noqa: E402
from streams import COLS, FORMATS, file_of, plans, share  # noqa: E402

PAGE = HERE / "goals.md"
HALF_DECODED = 0.5  # of decoding's time
WHAT_IF: dict[str, tuple[float, WhatIf]] = {  # decoding's time, and numbers of the node
    "decoding in half the time": (HALF_DECODED, []),
    "loaded hop x0.7": (1.0, QUICK_HOP),
    "stage and norm in half the time": (1.0, QUICK_STAGES),
    "all three": (HALF_DECODED, [*QUICK_HOP, *QUICK_STAGES]),
}


def changed(node: Node, factor: float, changes: WhatIf) -> Node:
    return with_numbers(decoding(node, factor) if factor != 1 else node, changes)


def streamed() -> str:
    """Shares of the read ceiling, as measured or, before that, as predicted."""
    names, lines = ("bf16", *FORMATS), []
    for device in CHANGED:
        node = calibrated_node(device)
        said = json.loads(file_of(node).read_text(encoding="utf-8"))
        made, rows = plans(node, said["asked"]), said["rows"]
        for cols in COLS:
            keys = [f"{name} {cols}" for name in names]
            timed = all("us" in rows[key] for key in keys)
            seconds = [rows[key]["us" if timed else "predicted_us"] / 1e6 for key in keys]
            parts = (
                f"{share(node, made[key], s):.2f}" for key, s in zip(keys, seconds, strict=True)
            )
            lines.append(
                (of_node(device), f"{cols:,}", "measured" if timed else "predicted", *parts)
            )
    return markdown_table(("node", "columns", "", *names), lines)


def goals() -> list[tuple[str, ...]]:
    """Of each row with a goal on a node: how far it comes, and what would bring it further."""
    lines = []
    for device, measured in ((node, changed_rows(node)) for node in CHANGED):
        node = calibrated_node(device)
        for row in (row for row in ROWS if device in row.goal and row.name in measured):
            plan = timed_plan(spec_of(row.name), node, int(SHORT))
            speed = measured[row.name][SHORT]["tokens_per_s"]
            result = simulate(plan, node)
            gains = [
                f"{result.step_s / simulate(plan, changed(node, *what)).step_s - 1:+.1%}"
                for what in WHAT_IF.values()
            ]
            floor, goal = 1 / result.floor_s, row.goal[device]
            lines.append(
                (
                    *(row.name, of_node(device), f"{speed:,.0f}", f"{goal:,}", f"{floor:,.0f}"),
                    *(f"{speed / floor:.2f}", f"{goal / floor:.2f}"),
                    f"{1 / result.step_s / speed - 1:+.1%}",
                    *gains,
                )
            )
            print(*lines[-1], flush=True)
    return lines


def main() -> None:
    head = (
        "row", "node", "measured, tokens/s", "goal", "floor", "measured / floor", "goal / floor",
        "twin's error", *WHAT_IF,
    )  # fmt: skip
    tables = {"goals": markdown_table(head, goals()), "streamed": streamed()}
    stamp = Stamp(
        "+".join(fit_of(calibrated_node(node).device.name) for node in CHANGED),
        files_digest([*CHANGED.values(), *sorted(HERE.glob("streamed-*.json"))]),
    )
    text = PAGE.read_text(encoding="utf-8")
    write({PAGE: filled(text, lambda block: tables[block.name], stamp)})


if __name__ == "__main__":
    main()
