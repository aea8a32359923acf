"""What the twin says of every shape of the zoo: `python studies/zoo/predict.py NODE ...`, before
the first measurement.

Writes predictions-DEVICE.json beside itself.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from shapes import shapes, timed_plan

from studies.common.foretold import commit_of, fit_of
from twin.calibrate.node import calibrated_node
from twin.errors import TwinError
from twin.sim.run import simulate

HERE = Path(__file__).resolve().parent


def predicted(node: str, at: int) -> dict[str, object]:
    """Seconds of a step and of its floor, or why there is no plan."""
    spec, machine = shapes()[at], calibrated_node(node)
    try:
        plan = timed_plan(spec, machine)
    except TwinError as error:
        return {"refused": str(error)}
    result = simulate(plan, machine)
    return {
        "step_s": 1 / result.tokens_per_s,
        "floor_s": result.floor_s,
        "weights": plan.weight_bytes(),
    }


def main() -> None:
    commit = commit_of(HERE)
    names = [spec.name for spec in shapes()]
    for node in sys.argv[1:]:
        device = calibrated_node(node).device.name
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            made = dict(
                zip(names, pool.map(partial(predicted, node), range(len(names))), strict=True)
            )
        context = {
            "node": node,
            "fit": fit_of(device),
            "commit": commit,
        }
        (HERE / f"predictions-{device}.json").write_text(
            json.dumps(context | {"shapes": made}, indent=1) + "\n"
        )
        for name, said in made.items():
            print(node, name, said)


if __name__ == "__main__":
    main()
