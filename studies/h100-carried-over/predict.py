"""Predicts every probe and every held-out run of an H100 from the H200's fit alone:
`python studies/h100-carried-over/predict.py`.

Writes predictions.json beside itself. Run it before the first measurement; afterwards `compare.py`
sets the records beside it.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from twin.calibrate import store
from twin.calibrate.engine_runs import held_out
from twin.calibrate.node import calibrated_node
from twin.calibrate.recipe import recipe_of
from twin.calibrate.simulated import simulated
from twin.kernel.defaults import limits_of
from twin.study.foretold import commit_of

DEVICE, FITTED = "h100-sxm", "h200-sxm"
HERE = Path(__file__).resolve().parent


def main() -> None:
    if store.read_fit(DEVICE) is not None:
        raise SystemExit(f"{DEVICE} has a fit of its own: these predictions would rest on it")
    fit = store.read_fit(FITTED)
    assert fit is not None
    node = calibrated_node(f"1x{DEVICE}")
    names = [probe.name for probe in recipe_of(node.device).probes(limits_of(node), False)]
    runs = [run.name for run in held_out(node)]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        probes = dict(zip(names, pool.map(probe_s, range(len(names)), chunksize=4), strict=True))
        steps = dict(zip(runs, pool.map(run_s, range(len(runs))), strict=True))
    made = {
        "device": DEVICE,
        "fit": f"{FITTED}: {fit[1].get('run')}",
        "commit": commit_of(HERE),
        "runs_step_s": steps,
        "probes_step_s": probes,
    }
    (HERE / "predictions.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{len(steps)} held-out runs and {len(probes)} probes predicted")


def probe_s(at: int) -> float:
    node = calibrated_node(f"1x{DEVICE}")
    return simulated(recipe_of(node.device).probes(limits_of(node), False)[at].plan, node).step_s


def run_s(at: int) -> float:
    node = calibrated_node(f"1x{DEVICE}")
    return simulated(held_out(node)[at].plan(DEVICE), node).step_s


if __name__ == "__main__":
    main()
