"""Runs the zoo on this computer's GPU: `python studies/zoo/measure.py NODE --out FILE`.

Each shape: a model of its layers is compared with the FP32 reference, then the whole one is timed;
three runs must give the same tokens. Needs no simulator. What is done is kept after every shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from shapes import PROMPT, TOKENS, WARMUP, checked_plan, shapes, timed_plan

from twin.bench.ahead import made_ahead
from twin.bench.measure import check_logits, reference_logits
from twin.calibrate.node import calibrated_node
from twin.engine.choose import compile_all, gpu_conditions, open_engine, open_random
from twin.engine.weights import random_weights
from twin.errors import TwinError
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.proof.prove import prove

REPEATS, SEED, CHECKED = 3, 1, 3
KEPT = 10**6  # tensors of a small model: all of them
PREPARING = 4  # models at once, ahead of the one that runs


def prepared(small: Plan) -> tuple[Weights, NDArray[Any]]:
    """Weights of a small model, all kept, and the reference's logits of its first tokens."""
    assert small.spec is not None
    weights = random_weights(small.spec, SEED, small.options.weight_dtype, keep=KEPT)
    return weights, reference_logits(small, weights, first_tokens(small.spec))


def first_tokens(spec: ModelSpec) -> list[int]:
    return [(7 + 13 * at) % spec.vocab for at in range(CHECKED)]


def measured(
    spec: ModelSpec, node: Node, small: Plan, plan: Plan, made: tuple[Weights, NDArray[Any]]
) -> dict[str, Any]:
    """Seconds of a step (median), of each repeat, of the prompt; the largest relative difference of
    logits.
    """
    weights, wanted = made
    with open_engine(node.device, small, weights) as engine:
        difference = check_logits(engine, small, weights, first_tokens(small.spec), wanted)
    prompt = [(7 + 13 * at) % spec.vocab for at in range(PROMPT)]
    with open_random(node.device, plan, SEED) as engine:
        runs = [engine.generate(prompt, max_tokens=TOKENS) for _ in range(REPEATS + 1)][1:]
    if any(run.tokens != runs[0].tokens for run in runs):
        return {"failed": "the runs gave different tokens"}
    steps = [float(statistics.median(run.step_ns[WARMUP:])) * 1e-9 for run in runs]
    return {
        "step_s": statistics.median(steps),
        "runs_s": steps,
        "prompt_s": runs[0].prompt_ns * 1e-9,
        "logit_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("node")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    node, began = calibrated_node(args.node), time.monotonic()
    made: dict[str, Any] = {}
    plans: dict[str, tuple[ModelSpec, Plan, Plan]] = {}
    for spec in shapes():
        try:
            plans[spec.name] = spec, checked_plan(spec, node), timed_plan(spec, node)
            for plan in plans[spec.name][1:]:
                prove(plan)
        except TwinError as error:
            plans.pop(spec.name, None)
            made[spec.name] = {"failed": str(error)}
    both = [plan for _, *two in plans.values() for plan in two]
    refused = compile_all(node.device, both, lambda said: print(said, file=sys.stderr, flush=True))
    smalls = made_ahead(prepared, [small for _, small, _ in plans.values()], PREPARING)
    each = zip(plans.items(), smalls, strict=True)
    for at, ((name, (spec, small, plan)), (_, ready)) in enumerate(each):
        why = refused.get(2 * at) or refused.get(2 * at + 1)
        try:
            made[name] = (
                {"failed": why} if why else measured(spec, node, small, plan, ready.result())
            )
        except TwinError as error:
            made[name] = {"failed": str(error)}
        print(f"{time.monotonic() - began:5.0f} s  {name}: {made[name]}", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps(
                {"node": args.node, "conditions": gpu_conditions(), "shapes": made}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
