"""Predicts every row, with intervals: `python studies/few-bits/predict.py`.

Writes predictions.json beside itself, once: it was committed before any expert or weight of few
bits ran on a GPU. p10 to p90 are of draws of the nodes' numbers and of what decoding takes, each
divided by the errors that the node's fit was seen to make on engine runs of dense 16-bit models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rows import NODES, cells, spec_of, timed_plan  # noqa: E402, the folder is no package

from twin.calibrate import store  # noqa: E402
from twin.calibrate.known_error import known_error  # noqa: E402
from twin.calibrate.node import calibrated_node  # noqa: E402
from twin.errors import PlanError  # noqa: E402
from twin.sim import consume  # noqa: E402
from twin.sim.run import simulate  # noqa: E402
from twin.study.hardware import with_settings  # noqa: E402
from twin.study.interval import Draws, settings  # noqa: E402

FILE = HERE / "predictions.json"
DRAWS = Draws(8, 1)
LEVELS = (0.1, 0.5, 0.9)
# What decoding takes, of what prototypes took: these had no ring beside them and no second input
# type in their registers (judged)
DECODING = (0.8, 1.5)
TOP = 3  # causes that are named


def main() -> None:
    if FILE.exists():
        raise SystemExit(f"{FILE} is there: predictions are written once, before the runs")
    wanted = cells()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(wanted, pool.map(predicted, wanted), strict=True))
    fits = {}
    for node in NODES:
        device = calibrated_node(node).device.name
        kept = store.read_fit(device)
        fits[device] = kept and kept[1].get("run")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    made: dict[str, Any] = {"commit": commit, "fits": fits, "draws": DRAWS.count}
    made |= {"decoding": list(DECODING), "rows": {}}
    for (row, node, prompt), cell in found.items():
        made["rows"].setdefault(row, {}).setdefault(node, {})[str(prompt)] = cell
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{len(wanted)} cells predicted")


def predicted(cell: tuple[str, str, int]) -> dict[str, Any]:
    """Tokens/s with an interval, or why there is no plan."""
    name, node_name, prompt = cell
    node, spec = calibrated_node(node_name), spec_of(name)
    try:
        plan = timed_plan(spec, node, prompt)
    except PlanError as error:
        return {"refused": str(error)}
    result, speeds = simulate(plan, node), []
    with decoding(0.0):
        free = simulate(replace(plan, name=f"{plan.name}, decoded"), node)  # programs are kept
    for one, factor in zip(settings(node, DRAWS), factors(), strict=True):
        with decoding(factor):
            speeds.append(1 / simulate(plan, with_settings(node, one)).step_s)
    known = known_error(node)
    assert known is not None
    seen = [speed / (1 + error) for speed in speeds for error in known.errors.values()]
    p10, p50, p90 = (float(level) for level in np.quantile(seen, LEVELS))
    causes = sorted(result.attribution_ps.items(), key=lambda one: -one[1])[:TOP]
    return {
        "nominal": 1 / result.step_s,
        "p10": p10,
        "p50": p50,
        "p90": p90,
        "floor": 1 / result.floor_s,
        "without_decoding": 1 / free.step_s,
        "bytes": result.bytes_per_step,
        "limits": {cause: round(share / result.step_ps, 3) for cause, share in causes},
    }


def factors() -> list[float]:
    """Of decoding, one for each draw: one stratum each, on a logarithmic scale."""
    random = np.random.default_rng(DRAWS.seed)
    at = (random.permutation(DRAWS.count) + random.random(DRAWS.count)) / DRAWS.count
    low, high = np.log(DECODING)
    return [float(factor) for factor in np.exp(low + at * (high - low))]


@contextmanager
def decoding(factor: float) -> Iterator[None]:
    """The same twin with decoding that takes so many times as long."""
    tables = (consume.UNPACK, consume.DECODED_UNPACK)
    before = [dict(table) for table in tables]
    for table in tables:
        table.update({name: factor * ratio for name, ratio in table.items()})
    try:
        yield
    finally:
        for table, kept in zip(tables, before, strict=True):
            table.update(kept)


if __name__ == "__main__":
    main()
