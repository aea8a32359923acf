"""Runs the zoo on this computer's GPU: `python studies/zoo/measure.py NODE --out FILE`.

Each shape: a model of its layers is compared with the FP32 reference, then the whole one is timed;
three runs must give the same tokens. Needs no simulator. What is done is kept after every shape.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from shapes import PROMPT, TOKENS, WARMUP, checked_plan, shapes, timed_plan

from studies.common.rows import (
    CHECK,
    Ready,
    alike,
    first_tokens,
    keep,
    logit_difference,
    repeated,
    rows_in_turn,
    step_ns,
)
from twin.calibrate.node import calibrated_node
from twin.engine.choose import gpu_conditions
from twin.errors import TwinError
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove

CHECKED = 3  # positions of which the reference's logits are computed
# small models at once, ahead of the one that runs: NumPy keeps about two cores of each busy, and
# each takes some GB
PREPARING = min(8, max(1, (os.cpu_count() or 1) // 2))
WHOLE = "whole"  # what the timed plan is for


def plans_of(spec: ModelSpec, node: Node) -> dict[str, Plan]:
    """By what they are for, proven. Raises TwinError where there is no plan."""
    made = {CHECK: checked_plan(spec, node), WHOLE: timed_plan(spec, node)}
    for plan in made.values():
        prove(plan)
    return made


def measured(node: Node, row: Ready) -> dict[str, Any]:
    """Seconds of a step (median), of each repeat, of the prompt; the largest relative difference of
    logits. A refusal is a finding.
    """
    for why in row.refused.values():
        return {"failed": why}
    try:
        difference = logit_difference(node.device, row.small.result())
        return timed(node, row.plans[WHOLE]) | {"logit_difference": difference}
    except TwinError as error:
        return {"failed": str(error)}


def timed(node: Node, plan: Plan) -> dict[str, Any]:
    assert plan.spec is not None
    prompt = first_tokens(plan.spec.vocab, PROMPT)
    _, *runs = repeated(node.device, plan, prompt, TOKENS)
    if not alike(runs):
        return {"failed": "the runs gave different tokens"}
    steps = [step_ns(run, WARMUP) * 1e-9 for run in runs]
    return {
        "step_s": statistics.median(steps),
        "runs_s": steps,
        "prompt_s": runs[0].prompt_ns * 1e-9,
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
    plans: dict[str, dict[str, Plan]] = {}
    for spec in shapes():
        try:
            plans[spec.name] = plans_of(spec, node)
        except TwinError as error:
            made[spec.name] = {"failed": str(error)}
    turns = rows_in_turn(
        node.device,
        plans,
        checked=CHECKED,
        ahead=PREPARING,
        show=lambda said: print(said, file=sys.stderr, flush=True),
    )
    for row in turns:
        made[row.name] = measured(node, row)
        print(f"{time.monotonic() - began:5.0f} s  {row.name}: {made[row.name]}", flush=True)
        keep(args.out, {"node": args.node, "conditions": gpu_conditions(), "shapes": made})


if __name__ == "__main__":
    main()
