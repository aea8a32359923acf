"""All shipped models on all nodes that hold them, at full size, by both executors: see README.md.
Resumes what it has begun.

python studies/fast-simulator/agree.py agree.csv --seconds 1200
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

from twin.data import data_dir
from twin.errors import TwinError
from twin.hardware.load import load_node
from twin.kernel.defaults import plan_for
from twin.models.load import load_model
from twin.plan.types import Execution, HandOffKind, Plan
from twin.sim.executor import Executor
from twin.sim.run import simulate

WAYS = (
    {"handoff": HandOffKind.SENTINEL},
    {"handoff": HandOffKind.COUNTER},
    {"handoff": HandOffKind.GRID},
    {"execution": Execution.GRAPH},
)
TRACED = (0, 1)  # blocks of each GPU whose traces are compared, beside the results
HEADER = ("model", "node", "way", "equal", "step_us", "simpy_s", "compiled_s", "refused")


def stems(kind: str) -> list[str]:
    return sorted(path.stem for path in (data_dir("hwmodels") / kind).glob("*.yaml"))


def cases() -> list[tuple[str, str, int]]:
    """The smallest first; the way changes from case to case, so that all ways meet all models and
    all devices.
    """
    devices = [name for name in stems("nodes") if name != "host"]
    names = sorted(stems("models"), key=lambda name: load_model(name).streamed_parameters)
    pairs = [
        (model, f"{gpus}x{device}") for gpus in (1, 8) for model in names for device in devices
    ]
    return [(model, node, number % len(WAYS)) for number, (model, node) in enumerate(pairs)]


def compare(model: str, on: str, way: int) -> tuple[object, ...]:
    name = next(iter(WAYS[way].values())).value
    node = load_node(on)
    try:
        plan = plan_for(load_model(model), node, **WAYS[way])
    except TwinError as error:
        return model, on, name, "", "", "", "", str(error)
    seconds, outcomes = [], []
    for executor in (Executor.SIMPY, Executor.COMPILED):
        started = time.process_time()
        outcomes.append(_outcome(plan, on, executor))
        seconds.append(time.process_time() - started)
    step = outcomes[0][0].step_ps / 1e6
    return (
        model,
        on,
        name,
        outcomes[0] == outcomes[1],
        f"{step:.3f}",
        f"{seconds[0]:.2f}",
        f"{seconds[1]:.2f}",
        "",
    )


def _outcome(plan: Plan, on: str, executor: Executor):  # type: ignore[no-untyped-def]
    result = simulate(plan, load_node(on), executor=executor, trace=True, blocks=TRACED)
    assert result.executor == executor.value
    return result, result.trace


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=1200)
    args = parser.parse_args()
    rows = list(csv.reader(args.output.open())) if args.output.exists() else [HEADER]
    known = {tuple(row[:2]) for row in rows}
    end = time.perf_counter() + args.seconds
    for model, on, way in cases():
        if (model, on) in known or time.perf_counter() > end:
            continue
        rows.append(tuple(map(str, compare(model, on, way))))
        print(*rows[-1], flush=True)
        with args.output.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


if __name__ == "__main__":
    main()
