"""Predicts the rows and the all-reduces of 2, 4 and 8 GPUs, with intervals:
`python studies/many-gpus/predict.py [by-two-gpus | later | by-two-h200 | by-four-h200]`.

Writes predictions.json beside itself, once: it was committed before any run on several GPUs. Draws
of the nodes' numbers, each divided by the errors that the fit of one H200 was seen to make on
engine runs, give p10 to p90. Link numbers are on file, not fitted.

`by-two-gpus` writes predictions-by-two-gpus.json, of the nodes that did not run yet: with the links
that were fitted on two H100, and the errors that two H100 were seen to make. `later` adds the rows
that it lacks, each with its commit and fits. `by-two-h200` writes predictions-by-two-h200.json: of
four and eight H200, with the links and the errors of two. `by-four-h200` writes
predictions-by-four-h200.json: of the nodes that did not run yet, with what a further rank costs
four H200, and their errors.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from collections.abc import Container
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from many_gpus import BY_FOUR_H200, BY_TWO, BY_TWO_H200, KOG, ROWS, Row, spec_of

from studies.common.foretold import DRAWS, add_rows, fit_of, limits, spread, write_once
from twin.calibrate.node import calibrated_node
from twin.calibrate.peer_probes import peer_probes, reduce_seconds
from twin.errors import TwinError
from twin.hardware.floor import exchange_floor_s
from twin.hardware.types import Node
from twin.kernel.defaults import limits_of
from twin.models.spec import ModelSpec
from twin.sim.run import Result, simulate
from twin.study.case import Case
from twin.study.hardware import with_settings
from twin.study.interval import settings

HERE = Path(__file__).resolve().parent
DEVICES = ("h200-sxm", "h100-sxm")
NODES = tuple(f"{gpus}x{device}" for device in DEVICES for gpus in (2, 4, 8))
FITTED = "1xh200-sxm"  # whose held-out runs say how wrong the twin is
RAN = "2xh100-sxm"  # whose links are fitted, and whose runs say it in the second file
TWO_H200, LARGER_H200 = "2xh200-sxm", ("4xh200-sxm", "8xh200-sxm")
FOUR_H200, NOT_RUN = "4xh200-sxm", ("8xh200-sxm", "4xh100-sxm", "8xh100-sxm")
REDUCED_KIB = (6, 16)
DEPTHS = (4, 8)  # layers of a dense model that are simulated; the rest is proportional


def main() -> None:
    nodes = tuple(node for node in NODES if node != RAN)
    if sys.argv[1:] == ["later"]:
        add_rows(HERE, lambda there: predictions(nodes, RAN, there), BY_TWO)
    elif sys.argv[1:] == ["by-two-h200"]:
        write_once(HERE, lambda: predictions(LARGER_H200, TWO_H200), BY_TWO_H200)
    elif sys.argv[1:] == ["by-four-h200"]:
        write_once(HERE, lambda: predictions(NOT_RUN, FOUR_H200), BY_FOUR_H200)
    elif sys.argv[1:] == ["by-two-gpus"]:
        write_once(HERE, lambda: predictions(nodes, RAN), BY_TWO)
    else:
        write_once(HERE, lambda: predictions(NODES, FITTED))


def predictions(nodes: tuple[str, ...], judged: str, there: Container[str] = ()) -> dict[str, Any]:
    """Of the rows that are not `there`. `judged`: the node whose held-out runs say how wrong the
    twin is.
    """
    asked = [row for row in ROWS if row.name not in there]
    cells = [(row.name, node) for row in asked for node in nodes]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(partial(predicted_row, judged=judged), cells)
        rows = dict(zip(cells, found, strict=True))
        reduced = dict(zip(nodes, pool.map(predicted_reduce, nodes), strict=True))
    print(f"{len(cells)} cells predicted")
    return {
        "fits": {
            name: fit_of(name) for name in (*DEVICES, *([judged] if judged != FITTED else []))
        },
        "judged_by": judged,
        "draws": DRAWS.draws,
        "published": {f"{row}, {node}": speed for (row, node), speed in KOG.items()},
        "rows": {
            row.name: {node: rows[row.name, node] for node in nodes if rows[row.name, node]}
            for row in asked
        },
        "all_reduce": reduced,
    }


def predicted_row(cell: tuple[str, str], judged: str) -> dict[str, Any] | None:
    """None: the node does not hold the model."""
    row = next(row for row in ROWS if row.name == cell[0])
    node = calibrated_node(cell[1])
    try:
        Case(spec_of(row, HERE), node, _options(row)).check()
    except TwinError:
        return None
    step, causes = _step(row, node)
    speeds = [1 / _step(row, with_settings(node, one))[0] for one in settings(node, DRAWS)]
    interval = spread(speeds, calibrated_node(judged))
    return {"nominal": 1 / step, **interval, "limits": limits(causes)}


def _options(row: Row) -> dict[str, Any]:
    return {**row.options, "context": row.context}


def _step(row: Row, node: Node) -> tuple[float, dict[str, float]]:
    spec = spec_of(row, HERE)
    if spec.lanes or spec.layout or spec.layers <= 2 * DEPTHS[1]:
        whole = _simulated(spec, row, node)
        return whole.step_s, dict(whole.attribution_ps)
    few, many = (_simulated(_of_layers(spec, depth), row, node) for depth in DEPTHS)
    rest = (spec.layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    causes = {
        name: value + rest * (value - few.attribution_ps.get(name, 0))
        for name, value in many.attribution_ps.items()
    }
    return many.step_s + rest * (many.step_s - few.step_s), causes


def _of_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    return dataclasses.replace(spec, layers=layers, windows=spec.windows[:layers])


def _simulated(spec: ModelSpec, row: Row, node: Node) -> Result:
    return Case(spec, node, _options(row)).simulate()


def predicted_reduce(name: str) -> dict[str, Any]:
    """Microseconds of an all-reduce inside the kernel, by KiB, idle and under stream."""
    node = calibrated_node(name)
    probes = {probe.name: probe.plan for probe in peer_probes(limits_of(node), node.gpus)}
    found: dict[str, Any] = {"bound_us": exchange_floor_s(node) * 1e6}
    nodes = [node, *(with_settings(node, one) for one in settings(node, DRAWS))]
    for kib in REDUCED_KIB:
        names = [
            f"peer-{what}-g{node.gpus}"
            for what in (f"reduce-{kib}K", f"reduce-loaded-{kib}K", "stream")
        ]
        times = [{name: simulate(probes[name], each).step_s for name in names} for each in nodes]
        for loaded in (False, True):
            taken = [reduce_seconds(one, node.gpus, kib, loaded=loaded) * 1e6 for one in times]
            what = f"{kib} KiB {'under stream' if loaded else 'idle'}"
            found[what] = {"nominal": taken[0], "median": statistics.median(taken[1:])}
            found[what] |= {"low": min(taken[1:]), "high": max(taken[1:])}
    return found


if __name__ == "__main__":
    main()
