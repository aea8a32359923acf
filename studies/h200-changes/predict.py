"""Predicts the four changes with the twin, before they are measured; see README.md.

python studies/h200-changes/predict.py studies/h200-changes/predictions.json
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from twin.bench.changes import BASE, CONTEXT, Case, cases
from twin.bench.shapes import NODE, Bench
from twin.calibrate import store
from twin.calibrate.validate import calibrated_node
from twin.hardware.types import Node
from twin.sim.run import simulate
from twin.study.parallel import each


def _simulated(work: tuple[Case, Node]) -> dict[str, Any]:
    case, node = work
    result = simulate(case.plan, node)
    options = case.plan.options
    about = {
        "blocks": options.blocks,
        "ring_slots": options.ring_slots,
        "slot_bytes": options.slot_bytes,
    }
    return {"us_per_token": result.step_s * 1e6, "stream_fraction": result.stream_fraction, **about}


def main(path: Path) -> None:
    node = calibrated_node(NODE)
    chosen = cases(Bench("cuda"))
    rows = {
        chosen[at].name: result
        for at, result in each(_simulated, [(case, node) for case in chosen])
    }
    rows = {case.name: rows[case.name] for case in chosen}  # in order, whoever was done first
    for case in chosen:
        base = rows[f"{case.model} | {BASE}"]["us_per_token"]
        rows[case.name]["change"] = rows[case.name]["us_per_token"] / base - 1
        print(
            f"{case.name:48} {rows[case.name]['us_per_token']:9.1f} us "
            f"{rows[case.name]['change']:+7.1%}"
        )
    fit = store.read_fit(node.device.name)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    about = {
        "node": NODE,
        "context": CONTEXT,
        "fit": fit[1].get("run") if fit else "none: numbers of hwmodels",
        "commit": commit,
    }
    path.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
