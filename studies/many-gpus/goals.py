"""What is in the way of the goals of two H200 and two H100, by the twin:
`python studies/many-gpus/goals.py` writes the table of goals.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from many_gpus import ROWS

from studies.common.blocks import Stamp, filled, markdown_table
from studies.common.foretold import QUICK_HOP, QUICK_STAGES, fit_of
from studies.common.inputs import files_digest
from twin.calibrate.node import calibrated_node
from twin.files import write
from twin.hardware.override import with_numbers

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from predict import RAN, TWO_H200, _step  # noqa: E402  beside this file

PAGE = HERE / "goals.md"
# what ran last of each node
MEASURED = {TWO_H200: HERE / f"changed-{TWO_H200}.json", RAN: HERE / f"measured-{RAN}.json"}
# tokens/s that were aimed at; of Llama-3.1-70B a share of the floor, of experts nothing
GOALS: dict[str, dict[str, int]] = {
    "laneformer-2b, delay 2": {TWO_H200: 1900, RAN: 1400},
    "its shapes as a Llama": {TWO_H200: 1750, RAN: 1300},
    "llama-3.2-1b": {TWO_H200: 2900, RAN: 2200},
    "qwen3-8b": {TWO_H200: 560, RAN: 410},
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


def lines(name: str) -> list[tuple[str, ...]]:
    """Of each row that ran on the node: how far it came, and what would bring it further."""
    node, made = calibrated_node(name), []
    found = json.loads(MEASURED[name].read_text(encoding="utf-8"))["row"]
    ceiling = node.gpus * node.device.memory.ceiling_bytes_per_s.value
    for row in (row for row in ROWS if row.name in found):
        step, _ = _step(row, node)
        speed, floor = (
            found[row.name]["tokens_per_s"],
            ceiling / found[row.name]["bytes_per_step"],
        )
        gains = []
        for changes in WHAT_IF.values():
            gains.append(f"{step / _step(row, with_numbers(node, changes))[0] - 1:+.1%}")
        goal = GOALS.get(row.name, {}).get(name)
        made.append(
            (
                *(row.name, name.removesuffix("-sxm")),
                *(f"{speed:,.0f}", f"{goal:,}" if goal else "", f"{floor:,.0f}"),
                f"{speed / floor:.2f}",
                f"{goal / floor:.2f}" if goal else "",
                f"{1 / step / speed - 1:+.1%}",
                *gains,
            )
        )
        print(*made[-1], flush=True)
    return made


def main() -> None:
    made = [line for name in MEASURED for line in lines(name)]
    head = (
        "row", "node", "measured, tokens/s", "goal", "floor", "measured / floor", "goal / floor",
        "twin's error", *WHAT_IF,
    )  # fmt: skip
    fits = (fit_of(of) for name in MEASURED for of in (name, calibrated_node(name).device.name))
    stamp = Stamp("+".join(fits), files_digest(MEASURED.values()))
    text = filled(PAGE.read_text(encoding="utf-8"), lambda block: markdown_table(head, made), stamp)
    write({PAGE: text})


if __name__ == "__main__":
    main()
