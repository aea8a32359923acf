"""Fits what decoding few-bit weights costs a block of warps (DECODED_UNPACK, WHOLE_S and STEP_S in
twin/sim/consume.py) to engine runs on an H200, and leaves each model out in turn.

Prints the numbers; whoever believes them writes them into that file. Takes some minutes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import shape_record, store
from twin.calibrate.node import calibrated_node
from twin.errors import InvalidPlan
from twin.hardware.types import Node
from twin.kernel.coded import TENSOR
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.sim import consume
from twin.sim.run import simulate
from twin.study.few_bits import PROMPTS, ROWS, study, timed_plan

RECORDS = ("shapes-12-seed-27741-few-bits", "shapes-12-seed-90417-experts")
# models whose kernels spilled when they were timed; Mixtral-like ones in FP8 and INT4 are left out
# to see how far the fit is from them
LEFT_OUT = ("s27741-05", "s27741-07", "s27741-09", "s27741-11", "s27741-12")
CHECKED = ("s90417-05", "s90417-08", "s90417-09", "s90417-10")
# the least that each may be: what the instructions of docs/kernel.md take, four a clock, beside
# BF16's fitted rate; of INT8 what its prototype took (UNPACK), because with less, as whole numbers
# take more, two models are told as well as with more
LEAST = {"int8": 0.64, "int4": 0.34, "fp8": 0.76, "fp4": 0.45, "whole": 0.0, "step": 0.0}
UNIT = {"whole": 1e-6, "step": 1e-6}
MOVED = 0.1  # of a number, for its slope
TURNS = 2


@dataclass(frozen=True, slots=True)
class Run:
    model: str
    code: str
    plan: Plan
    step_us: float

    @property
    def used(self) -> bool:
        return not self.model.startswith(LEFT_OUT + CHECKED)


def runs(node: Node) -> Iterator[Run]:
    for name in RECORDS:
        record = shape_record.read(node, store.runs_folder(node.name) / name)
        samples, _ = shape_record.samples_of(record)
        for run in record.runs:
            try:
                plan = run.plan(node.device.name)
            except InvalidPlan:  # its kernel needed less memory
                continue
            if code := code_of(plan):
                step_us = 1e6 * statistics.median(samples[run.name])
                yield Run(run.name.rpartition("-")[0], code, plan, step_us)
    rows = json.loads((study() / "changed-h200-sxm.json").read_text())["rows"]
    for row in ROWS:
        for prompt in PROMPTS:
            plan = timed_plan(load_model(row.model), node, prompt)
            if code := code_of(plan):
                step_us = 1e6 / rows[row.name][str(prompt)]["tokens_per_s"]
                yield Run(row.model.partition("@")[0], code, plan, step_us)


def code_of(plan: Plan) -> str:
    """The number that speaks of its format; empty for 16 bits."""
    names = {m.format.name for s in plan.stages for m in s.matrices if m.format}
    name = min(names, default="")
    return "fp4" if name in TENSOR else name.partition("-")[0]


def start() -> dict[str, float]:
    known = consume.DECODED_UNPACK
    ratios = {"int8": known["int8"], "int4": known["int4-g128"], "fp8": known["fp8"]}
    return {**ratios, "fp4": known["mxfp4"], "whole": consume.WHOLE_S, "step": consume.STEP_S}


def put(numbers: Mapping[str, float]) -> None:
    for name in consume.DECODED_UNPACK:
        consume.DECODED_UNPACK[name] = numbers["fp4" if name in TENSOR else name.partition("-")[0]]
    consume.WHOLE_S, consume.STEP_S = numbers["whole"], numbers["step"]


def predicted(found: list[Run], node: Node, numbers: Mapping[str, float]) -> NDArray[np.float64]:
    put(numbers)
    said = repr(sorted(numbers.items()))  # programs are kept by a plan's name
    times = [simulate(replace(r.plan, name=f"{r.plan.name} {said}"), node).step_s for r in found]
    return 1e6 * np.array(times)


def solve(
    slopes: NDArray[np.float64], at_zero: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares of relative errors; numbers that would be less than their least stay there."""
    least = np.array([LEAST[name] / UNIT.get(name, 1.0) for name in LEAST])
    held = np.zeros(len(least), bool)
    while True:
        rest = wanted - at_zero - slopes[:, held] @ least[held]
        free = np.linalg.lstsq(slopes[:, ~held] / wanted[:, None], rest / wanted, rcond=None)[0]
        values = least.copy()
        values[~held] = free
        if not (values < least - 1e-12).any():
            return values
        held |= values < least


def errors(e: NDArray[np.float64]) -> str:
    return f"median {100 * np.median(np.abs(e)):.1f} %, worst {100 * np.abs(e).max():.1f} %"


def main() -> None:
    node = calibrated_node("1xh200")
    found = list(runs(node))
    wanted = np.array([run.step_us for run in found])
    used = np.array([run.used for run in found])
    numbers = start()
    for _ in range(TURNS):
        base, columns = predicted(found, node, numbers), []
        for name, value in numbers.items():
            moved = predicted(found, node, {**numbers, name: (1 + MOVED) * value})
            columns.append((moved - base) / (MOVED * value) * UNIT.get(name, 1.0))
        slopes = np.stack(columns, axis=1)
        values = np.array([value / UNIT.get(name, 1.0) for name, value in numbers.items()])
        at_zero = base - slopes @ values
        fitted = solve(slopes[used], at_zero[used], wanted[used])
        numbers = {n: float(v) * UNIT.get(n, 1.0) for n, v in zip(numbers, fitted, strict=True)}
    print({name: float(f"{value:.3g}") for name, value in numbers.items()})
    known = (at_zero + slopes @ fitted) / wanted - 1
    apart = known.copy()
    for model in {run.model for run in found if run.used}:
        own = np.array([run.model == model for run in found])
        rest = used & ~own
        others = solve(slopes[rest], at_zero[rest], wanted[rest])
        apart[own] = (at_zero + slopes @ others)[own] / wanted[own] - 1
    for run, one, other in zip(found, known, apart, strict=True):
        note = "" if run.used else "  not fitted"
        print(f"{run.model:16} {run.code:5} {100 * one:+6.1f} % {100 * other:+6.1f} %{note}")
    print(f"fitted: {errors(known[used])}; each model left out: {errors(apart[used])}")


if __name__ == "__main__":
    main()
