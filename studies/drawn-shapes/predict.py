"""Predicts the shapes that a seed drew for an H100 by the H200's fit alone: `MONOTWIN_CALIBRATION=F
python studies/drawn-shapes/predict.py`, where F/fits holds that fit and no other.

Writes predictions-h100-by-h200.json beside itself, before the first of the shapes runs.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path

from twin.calibrate import store
from twin.calibrate.drawn import drawn_runs
from twin.calibrate.heldout import HeldOut
from twin.calibrate.node import calibrated_node
from twin.sim.run import simulate
from twin.study.foretold import commit_of, fit_of

DEVICE, FITTED = "h100-sxm", "h200-sxm"
SHAPES, SEED = 24, 95029
HERE = Path(__file__).resolve().parent


def main() -> None:
    if store.read_fit(DEVICE) is not None:
        raise SystemExit(f"{DEVICE} has a fit of its own: these predictions would rest on it")
    names = [run.name for run in drawn()]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        steps = dict(zip(names, pool.map(run_s, range(len(names)), chunksize=4), strict=True))
    made = {
        "device": DEVICE,
        "fit": f"{FITTED}: {fit_of(FITTED)}",
        "commit": commit_of(HERE),
        "runs_step_s": steps,
    }
    (HERE / "predictions-h100-by-h200.json").write_text(
        json.dumps(made, indent=1) + "\n", encoding="utf-8"
    )
    print(f"{len(steps)} runs of {SHAPES} shapes predicted")


@cache
def drawn() -> list[HeldOut]:
    return drawn_runs(calibrated_node(f"1x{DEVICE}"), SHAPES, SEED)


def run_s(at: int) -> float:
    return simulate(drawn()[at].plan(DEVICE), calibrated_node(f"1x{DEVICE}")).step_s


if __name__ == "__main__":
    main()
