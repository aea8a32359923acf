"""Predict engine runs that were never fitted, run them, compare."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from twin.calibrate import store
from twin.calibrate.heldout import TOKENS, HeldOut, held_out
from twin.calibrate.measure import quiet
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.engine.weights import random_weights
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.hardware.override import apply_fit
from twin.hardware.types import Node
from twin.plan.build import build
from twin.plan.defaults import limits_of
from twin.plan.types import Plan
from twin.plan.validate import validate as prove
from twin.sim.run import simulate

REPEATS = 5
WARMUP_TOKENS = 4
SEED = 20261121


@dataclass(frozen=True, slots=True)
class Compared:
    """One held-out run: tokens per second predicted by the twin and measured on the engine."""

    name: str
    predicted_tokens_per_s: float
    measured_tokens_per_s: float
    spread: float  # (slowest - fastest repeat) / median
    blocks: int

    @property
    def error(self) -> float:
        """Relative, positive when the prediction is too fast."""
        return self.predicted_tokens_per_s / self.measured_tokens_per_s - 1.0


@dataclass(frozen=True, slots=True)
class Validation:
    device: str
    fit: str  # the probing run behind the fit
    runs: tuple[Compared, ...]

    @property
    def median_abs_error(self) -> float:
        return statistics.median(abs(r.error) for r in self.runs)

    @property
    def worst_abs_error(self) -> float:
        return max(abs(r.error) for r in self.runs)

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "name": r.name,
                "blocks": r.blocks,
                "predicted_tokens_per_s": r.predicted_tokens_per_s,
                "measured_tokens_per_s": r.measured_tokens_per_s,
                "error": r.error,
                "measured_spread": r.spread,
            }
            for r in self.runs
        ]
        return {
            "device": self.device,
            "fit": self.fit,
            "runs": rows,
            "median_abs_error": self.median_abs_error,
            "worst_abs_error": self.worst_abs_error,
        }


def calibrated_node(name: str) -> Node:
    """The node with its device's fit applied, where there is one made on this very processor."""
    node = load_node(name)
    found = store.read_fit(node.device.name)
    if found is None:
        return node
    numbers, meta = found
    if node.device.isa == "host" and meta.get("cpu") != store.cpu_name():
        return node  # another computer's fit says nothing about this one
    return Node(node.name, apply_fit(node.device, numbers), node.gpus, node.link)


def validate_host(progress: Callable[[str], None], *, repeats: int = REPEATS) -> Validation:
    """Predict first, then measure in rounds over all runs, then compare."""
    found = store.read_fit("host")
    if found is None:
        raise CalibrationError("no fit of host: run `twin calibrate host` first")
    runs = held_out()
    plans = [_plan(run) for run in runs]
    predicted = [_predict(run, plan) for run, plan in zip(runs, plans, strict=True)]
    seconds: list[list[float]] = [[] for _ in runs]
    with ExitStack() as stack:
        engines = []
        for run, plan in zip(runs, plans, strict=True):
            progress(f"held-out runs: preparing {run.name}")
            engines.append(stack.enter_context(HostEngine(plan, random_weights(run.spec, SEED, run.options.weight_dtype))))
        for turn in range(repeats):
            for at, (run, engine) in enumerate(zip(runs, engines, strict=True)):
                progress(f"held-out runs: round {turn + 1}/{repeats}, {at + 1}/{len(runs)} {run.name}")
                seconds[at].append(_measure(run, engine))
    compared = tuple(
        Compared(run.name, 1 / guess, 1 / statistics.median(took), (max(took) - min(took)) / statistics.median(took), run.options.blocks)
        for run, guess, took in zip(runs, predicted, seconds, strict=True)
    )
    _record(runs, seconds)
    return Validation("host", str(found[1].get("run")), compared)


def _record(runs: list[HeldOut], seconds: list[list[float]]) -> None:
    samples = {run.name: took for run, took in zip(runs, seconds, strict=True)}
    store.write_run("host", "engine", {**store.conditions(), "device": "host", "what": "held-out engine runs"}, samples)


def _plan(run: HeldOut) -> Plan:
    plan = build(run.spec, run.options, limits_of(load_node(f"{run.options.gpus}xhost")))
    prove(plan)
    return plan


def _predict(run: HeldOut, plan: Plan) -> float:
    return simulate(plan, calibrated_node(f"{run.options.gpus}xhost"), steps=2).step_s


def _measure(run: HeldOut, engine: HostEngine) -> float:
    """Quiet seconds of a decoded token."""
    prompt = [7 + position % 97 for position in range(run.prompt)]
    made = engine.generate(prompt, max_tokens=TOKENS + WARMUP_TOKENS, sampling=SamplingParams())
    return quiet(made.step_ns[WARMUP_TOKENS:]) * 1e-9
