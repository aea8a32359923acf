"""What the twin says of every shape of the zoo: `python studies/zoo/predict.py NODE ...`, before
the first measurement.

Writes predictions-DEVICE.json next to itself.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from shapes import shapes, timed_plan

from twin.calibrate.fitted import fit_of
from twin.calibrate.node import calibrated_node
from twin.calibrate.store import conditions
from twin.errors import TwinError
from twin.files import write
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
    names = [spec.name for spec in shapes()]
    for name in sys.argv[1:]:
        node = calibrated_node(name)
        with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = pool.map(partial(predicted, name), range(len(names)))
            made = dict(zip(names, found, strict=True))
        about = {"node": name, "fit": fit_of(node), "commit": conditions()["commit"]}
        text = json.dumps(about | {"shapes": made}, indent=1) + "\n"
        write({HERE / f"predictions-{node.device.name}.json": text})
        print("\n".join(f"{name} {shape} {said}" for shape, said in made.items()))


if __name__ == "__main__":
    main()
