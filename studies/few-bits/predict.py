"""Predicts every row, with intervals: `python studies/few-bits/predict.py`.

Adds the rows that predictions.json beside it lacks, each batch with its commit and fits. The first
batch was committed before any expert or weight of few bits ran on a GPU. p10 to p90 are of draws of
the nodes' numbers and of what decoding takes, each divided by the errors that the node's fit was
seen to make on engine runs of dense 16-bit models.
"""

from __future__ import annotations

import os
from collections.abc import Container
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from few_bits import NODES, cells, spec_of, timed_plan

from studies.common.foretold import DRAWS, add_rows, fit_of, limits, spread
from twin.calibrate.node import calibrated_node
from twin.cost import consume
from twin.errors import PlanError
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Kind, Node, Number
from twin.sim.run import simulate
from twin.study.hardware import with_settings
from twin.study.interval import settings

HERE = Path(__file__).resolve().parent
# What decoding takes, of what prototypes took: these had no ring beside them and no second input
# type in their registers (judged)
DECODING = (0.8, 1.5)
FREE = 1e-6  # decoding that takes no time


def main() -> None:
    add_rows(HERE, predictions)


def predictions(there: Container[str]) -> dict[str, Any]:
    """Of the rows that are not there."""
    wanted = [cell for cell in cells() if cell[0] not in there]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(wanted, pool.map(predicted, wanted), strict=True))
    devices = [calibrated_node(node).device.name for node in NODES]
    rows: dict[str, Any] = {}
    for (row, node, prompt), cell in found.items():
        rows.setdefault(row, {}).setdefault(node, {})[str(prompt)] = cell
    print(f"{len(wanted)} cells predicted")
    return {
        "fits": {device: fit_of(device) for device in devices},
        "draws": DRAWS.draws,
        "decoding": list(DECODING),
        "rows": rows,
    }


def predicted(cell: tuple[str, str, int]) -> dict[str, Any]:
    """Tokens/s with an interval, or why there is no plan."""
    name, node_name, prompt = cell
    node, spec = calibrated_node(node_name), spec_of(name)
    try:
        plan = timed_plan(spec, node, prompt)
    except PlanError as error:
        return {"refused": str(error)}
    result, speeds = simulate(plan, node), []
    free = simulate(plan, decoding(node, FREE))
    for one, factor in zip(settings(node, DRAWS), factors(), strict=True):
        drawn = decoding(with_settings(node, one), factor)
        speeds.append(1 / simulate(plan, drawn).step_s)
    return {
        "nominal": 1 / result.step_s,
        **spread(speeds, node),
        "floor": 1 / result.floor_s,
        "without_decoding": 1 / free.step_s,
        "bytes": result.bytes_per_step,
        "limits": limits(result.attribution_ps),
    }


def factors() -> list[float]:
    """Of decoding, one for each draw: one stratum each, on a logarithmic scale."""
    random = np.random.default_rng(DRAWS.seed)
    at = (random.permutation(DRAWS.draws) + random.random(DRAWS.draws)) / DRAWS.draws
    low, high = np.log(DECODING)
    return [float(factor) for factor in np.exp(low + at * (high - low))]


def decoding(node: Node, factor: float) -> Node:
    """The same twin with decoding that takes so many times as long."""
    known = numbers(node)
    slower = {}
    for rate in consume.RATES.values():
        value = known[f"device.warps.{rate}"].value / factor
        slower[f"warps.{rate}"] = Number(value, Kind.ASSUMED, "a draw", value, value)
    return apply_fit(node, slower)


if __name__ == "__main__":
    main()
