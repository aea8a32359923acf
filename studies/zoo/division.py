"""What the divisions that `twin plan --search` names are expected to gain:
`python studies/zoo/division.py`.

Predicts every shape again and sets it beside predictions-DEVICE.json, which was made with the
standard division of commit 68ab295 and the same fit. Writes the table of division.md. Nothing here
is measured.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shapes import asked, shapes

from twin.calibrate.node import calibrated_node, following
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.kernel.defaults import plan_for
from twin.report.blocks import Stamp, filled, markdown_table
from twin.sim.division import choice
from twin.sim.run import simulate
from twin.study.inputs import files_digest, fits_on_file

HERE = Path(__file__).resolve().parent
TOLD = 0.005  # changes of a step's time from here on have a row
FITTED = "h200-sxm"
NODES = {"h200-sxm": "1xh200", "h100-sxm": "1xh100"}


def as_predicted(name: str) -> Node:
    """The node with the numbers of the first predictions: the H100 followed the H200's fit, before
    it had its own.
    """
    if name == FITTED:
        return calibrated_node(NODES[name])
    node = load_node(NODES[name])
    return replace(node, device=following(node.device))


def found(name: str, at: int) -> dict[str, Any]:
    spec, node = shapes()[at], as_predicted(name)
    chosen = choice(spec, node, asked())
    step_s = simulate(plan_for(spec, node, **{**dict(chosen.options), **asked()}), node).step_s
    return {"step_s": step_s, "options": dict(chosen.options), "reason": chosen.reason}


def told(now: dict[str, dict[str, Any]]) -> str:
    """The shapes whose predicted step changes."""
    said = {device: HERE / f"predictions-{device}.json" for device in NODES}
    before = {
        device: json.loads(file.read_text(encoding="utf-8"))["shapes"]
        for device, file in said.items()
    }
    lines, left = [], 0.0
    for name in before[FITTED]:
        times = {
            device: (before[device][name]["step_s"], now[device][name]["step_s"])
            for device in NODES
        }
        changes = [after / was - 1 for was, after in times.values()]
        if max(map(abs, changes)) < TOLD:
            left = max(left, *map(abs, changes))
            continue
        cells = [name]
        for device, (was, after) in times.items():
            options = (f"{key} {value}" for key, value in now[device][name]["options"].items())
            row = (f"{was * 1e6:,.0f}", f"{after * 1e6:,.0f}", f"{after / was - 1:+.1%}")
            cells += [*row, ", ".join(options) or "standard"]
        lines.append(cells)
    names = [device.partition("-")[0].upper() for device in NODES]
    head = [
        f"{what}, {name}"
        for name in names
        for what in ("before, us", "searched, us", "change", "found")
    ]
    rest = (
        f"Predicted. The times of the other {len(before[FITTED]) - len(lines)} shapes change by at "
        f"most {left:.1%}."
    )
    return f"{markdown_table(('shape', *head), lines)}\n\n{rest}"


def main() -> None:
    names, now = [spec.name for spec in shapes()], {}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for device in NODES:
            now[device] = dict(
                zip(names, pool.map(partial(found, device), range(len(names))), strict=True)
            )
    stamp = Stamp(
        fits_on_file("1xh200"),
        files_digest([HERE / f"predictions-{device}.json" for device in NODES]),
    )
    page, body = HERE / "division.md", told(now)
    page.write_text(
        filled(page.read_text(encoding="utf-8"), lambda _: body, stamp), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
