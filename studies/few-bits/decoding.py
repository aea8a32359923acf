"""Fits what few-bit weights and experts cost a block of warps to engine runs on an H200, and leaves
each model out in turn.

Probes settle these numbers (`twin calibrate 1xh200 --groups decoding,routing`). Until a record of
them is on file, hwmodels/devices/h200-sxm.yaml holds what this script prints; it says how far the
law is from the runs. What the kernel's instructions say is kept: INT8, INT4 and whole numbers.
Takes some minutes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twin.calibrate import shape_record, store
from twin.calibrate.node import calibrated_node
from twin.errors import InvalidPlan
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Kind, Node, Number
from twin.kernel.defaults import plan_for
from twin.models.kind import stored_as
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.sim.run import simulate
from twin.study.few_bits import PROMPTS, ROWS, study, timed_plan

RECORDS = ("shapes-12-seed-27741-few-bits", "shapes-12-seed-90417-experts")
# models whose kernels spilled when they were timed, or had other tiles than their plans have
LEFT_OUT = ("s27741-05", "s27741-07", "s27741-09", "s27741-11", "s27741-12", "s90417-08")
# of the kernel of 2026-11-24, as CHANGELOG.md tells them: us of a step behind few positions
SINCE_US = {
    "s90417-05-short": 693.0,
    "s90417-09-short": 2071.0,
    "s90417-10-short": 517.0,
    "gpt-oss-20b-32": 1e6 / 659,
    "qwen3-8b@fp8-128x128-32": 1e6 / 450,
    "qwen3-8b@int4-g128-32": 1e6 / 628,
    "llama-3.2-1b@fp8-32": 1e6 / 1666,
    "llama-3.2-1b@int8-32": 1e6 / 1737,
}
# a public model's step is so much shorter since: of all positions as of few; of others the least
SINCE = 0.99
# a number as it enters a time (rates by their reciprocals), and the least that it may be
LEAST = {
    "warps.fp8_bytes_per_s": 1 / 90e9,
    "warps.fp4_bytes_per_s": 1 / 75e9,
    "warps.step_s": 0.0,
    "warps.settle_s": 0.0,
}
MOVED = 0.1  # of a number, for its slope


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    stored: str
    plan: Plan
    step_us: float

    @property
    def model(self) -> str:
        return self.name.rpartition("-")[0]

    @property
    def used(self) -> bool:
        return self.stored != "bf16" and not self.model.startswith(LEFT_OUT)


def runs(node: Node) -> Iterator[Run]:
    for name in RECORDS:
        record = shape_record.read(node, store.runs_folder(node.name) / name)
        samples, _ = shape_record.samples_of(record)
        for run in record.runs:
            step_us = SINCE_US.get(run.name, 1e6 * statistics.median(samples[run.name]))
            try:
                plan = run.plan(node.device.name)
            except InvalidPlan:  # its kernel needed less memory
                if run.name not in SINCE_US:
                    continue
                asked = {"context": run.options.context, "max_context": run.options.max_context}
                plan = plan_for(run.spec, node, **asked)
            yield Run(run.name, stored_as(run.spec), plan, step_us)
    rows = json.loads((study() / "changed-h200-sxm.json").read_text())["rows"]
    for row in (row for row in ROWS if row.name in rows):
        took = {prompt: 1e6 / rows[row.name][str(prompt)]["tokens_per_s"] for prompt in PROMPTS}
        since = SINCE_US.get(f"{row.model}-{PROMPTS[0]}", SINCE * took[PROMPTS[0]])
        spec = load_model(row.model)
        for prompt in PROMPTS:
            step_us = took[prompt] * since / took[PROMPTS[0]]
            plan = timed_plan(spec, node, prompt)
            yield Run(f"{row.model}-{prompt}", stored_as(spec), plan, step_us)


def predicted(found: list[Run], node: Node, costs: Mapping[str, float]) -> NDArray[np.float64]:
    values = {path: 1 / cost if "bytes" in path else cost for path, cost in costs.items()}
    trial = apply_fit(
        node, {path: Number(v, Kind.ASSUMED, "trial", v, v) for path, v in values.items()}
    )
    return 1e6 * np.array([simulate(run.plan, trial).step_s for run in found])


def solve(
    slopes: NDArray[np.float64], at_zero: NDArray[np.float64], wanted: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Least squares of relative errors; numbers that would be less than their least stay there."""
    least = np.array(list(LEAST.values()))
    held = np.zeros(len(least), bool)
    while True:
        rest = wanted - at_zero - slopes[:, held] @ least[held]
        free = np.linalg.lstsq(slopes[:, ~held] / wanted[:, None], rest / wanted, rcond=None)[0]
        values = least.copy()
        values[~held] = free
        if not (values < least * (1 - 1e-9)).any():
            return values
        held |= values < least


def errors(e: NDArray[np.float64]) -> str:
    return f"median {100 * np.median(np.abs(e)):.1f} %, worst {100 * np.abs(e).max():.1f} %"


def main() -> None:
    node = calibrated_node("1xh200")
    found = list(runs(node))
    wanted = np.array([run.step_us for run in found])
    used = np.array([run.used for run in found])
    known = {path: numbers(node)[f"device.{path}"].value for path in LEAST}
    costs = {path: 1 / value if "bytes" in path else value for path, value in known.items()}
    now = predicted(found, node, costs)
    slopes = np.stack(
        [
            (predicted(found, node, {**costs, path: (1 + MOVED) * cost}) - now) / (MOVED * cost)
            for path, cost in costs.items()
        ],
        axis=1,
    )
    at_zero = now - slopes @ np.array(list(costs.values()))
    fitted = solve(slopes[used], at_zero[used], wanted[used])
    for path, cost in zip(LEAST, fitted, strict=True):
        print(f"{path}: {1 / cost if 'bytes' in path else cost:.3g}")
    apart = at_zero + slopes @ fitted
    for model in {run.model for run in found if run.used}:
        own = np.array([run.model == model for run in found])
        others = solve(slopes[used & ~own], at_zero[used & ~own], wanted[used & ~own])
        apart[own] = at_zero[own] + slopes[own] @ others
    on_file, left_out = now / wanted - 1, apart / wanted - 1
    for run, one, other in zip(found, on_file, left_out, strict=True):
        note = "" if run.used else "  not fitted"
        print(f"{run.name:32} {run.stored:12} {100 * one:+6.1f} % {100 * other:+6.1f} %{note}")
    models = len({run.model for run in found if run.used})
    print(f"{used.sum()} runs of {models} models, numbers on file: {errors(on_file[used])}")
    print(f"each model left out: {errors(left_out[used])}")


if __name__ == "__main__":
    main()
