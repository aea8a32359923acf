"""What the twin says of chains of stages that no kernel has, written before any of them runs:
`python -m studies.chains.predict` makes predictions.csv. A slow machine takes a quarter of an hour.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path

from studies.chains import variants
from twin.calibrate.node import calibrated_node
from twin.cost.lowering import compile_plan
from twin.cost.program import Program
from twin.files import write
from twin.hardware.override import with_number
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.options import Residual, RouterInput
from twin.plan.types import Plan
from twin.schedule.options import plan_for
from twin.sim.executor import run
from twin.sim.machine import Machine
from twin.sim.prepare import Prepared

FILE = Path(__file__).with_name("predictions.csv")
HEAD = ("model", "node", "after", "chain", "us", "tokens_per_s", "more")
NODE = "1xh200-sxm"
MODELS = (
    *("gpt-oss-20b", "gpt-oss-120b"),
    *("qwen3-30b-a3b@fp8-128x128", "qwen3-coder-next@fp8-128x128"),
)
AFTER = (32, 4096)
STEPS = 2
# GPUs of which one block, or one for each peer, gathers what its GPU needs: a slice of the residual
# of each block, summed and shared within the GPU
SEVERAL = {"llama-3.2-1b": (2, 4, 8), "qwen3-8b": (2,), "gpt-oss-120b": (2, 4)}
GATHERING = {"as it is": Residual.REPLICATED, "shared gathering": Residual.SLICED}
CODES = {"gpt-oss": "kernel.fp4", "qwen3": "kernel.fp8"}
FASTER = "x1.2"  # low-bit products


def main() -> None:
    text = io.StringIO()
    table = csv.DictWriter(text, HEAD, lineterminator="\n")
    table.writeheader()
    for row in rows():
        table.writerow(row)
    write({FILE: text.getvalue()})


def rows() -> Iterator[dict[str, object]]:
    node = calibrated_node(NODE)
    for model in MODELS:
        for after in AFTER:
            yield from _of_one(model, node, after)
    for model, counts in SEVERAL.items():
        for gpus in counts:
            yield from _of_several(model, gpus)


def _of_one(model: str, node: Node, after: int) -> Iterator[dict[str, object]]:
    plan = plan_for(load_model(model), node, context=after, router_input=RouterInput.WHOLE)
    device = node.device
    program = compile_plan(plan, device, steps=STEPS)
    today = seconds(plan, node, program)
    split = variants.k_split(program, device)
    chains = {
        "as it is": program,
        "own router": variants.own_router(program, device),
        "K-split": split,
        "both": variants.own_router(split, device),
        "paired splits": variants.paired_splits(program, device, _half(plan, node)),
    }
    for name, chain in chains.items():
        took = seconds(plan, node, chain)
        yield _row(model, node, after, name, took, today)
    path = next(path for start, path in CODES.items() if model.startswith(start))
    faster = with_number(node, f"{path}_bytes_per_s", FASTER)
    took = seconds(plan, faster, compile_plan(plan, faster.device, steps=STEPS))
    yield _row(model, node, after, f"products {FASTER}", took, today)


def _half(plan: Plan, node: Node) -> Program:
    """The same plan with half the splits of cached heads."""
    assert plan.spec is not None
    splits = max(1, plan.kernel_attention().splits // 2)
    half = plan_for(plan.spec, node, context=plan.options.context, attention_splits=splits)
    return compile_plan(half, node.device, steps=STEPS)


def _of_several(model: str, gpus: int) -> Iterator[dict[str, object]]:
    """Shared gathering is a plan option, simulated only: a sliced residual."""
    node, spec = calibrated_node(f"{gpus}xh200-sxm"), load_model(model)
    today = 0.0
    for name, residual in GATHERING.items():
        plan = plan_for(spec, node, context=AFTER[0], residual=residual)
        took = seconds(plan, node, compile_plan(plan, node.device, steps=STEPS))
        today = today or took
        yield _row(model, node, AFTER[0], name, took, today)


def seconds(plan: Plan, node: Node, program: Program) -> float:
    """Of the last step."""
    machine = Machine(plan, node, steps=STEPS, keep_all=False, program=program)
    run(machine, Prepared(program))
    ends = [max(block.ended[step] for block in machine.blocks) for step in range(STEPS)]
    return (ends[-1] - ends[-2]) / 1e12


def _row(
    model: str, node: Node, after: int, chain: str, took: float, today: float
) -> dict[str, object]:
    speed = 1 / took
    return {
        "model": model,
        "node": node.name,
        "after": after,
        "chain": chain,
        "us": f"{1e6 * took:.1f}",
        "tokens_per_s": f"{speed:.1f}",
        "more": f"{today / took - 1:.4f}",
    }


if __name__ == "__main__":
    main()
