"""Experts and low-bit weights on one GPU: the rows of studies/few-bits, their plans, and their
runs.

The twin predicts and a GPU runs the same plans. Each row: a model of its layers is compared with
the NumPy reference, its logits and tokens over five runs bit by bit; then the whole model is timed,
where all repeats must give the same tokens. What is done is kept after every row, and a row that is
in the file is passed by. Needs no simulator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.common.rows import (
    CHECK,
    Ready,
    alike,
    checked,
    cut,
    first_tokens,
    keep,
    repeated,
    rows_in_turn,
    step_ns,
)
from twin.engine.choose import gpu_conditions
from twin.errors import TwinError
from twin.files import MOST_RECORD_BYTES, read_json
from twin.hardware.types import Node
from twin.kernel.room import check_room
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for

NODES = ("1xh200-sxm", "1xh100-sxm")
PROMPTS = (32, 4096)  # tokens before those that are timed
TOKENS, WARM_UP = 128, 8  # decoded; the first of them are not timed
CHECKED, CHECKED_CONTEXT = 4, 64  # positions that the reference computes, and in all
PREPARING = 3  # small models at once, ahead of the row that runs


@dataclass(frozen=True, slots=True)
class Row:
    """A model in a stored format; `goal` in tokens/s of 128 tokens after 32, by node with one."""

    name: str
    model: str
    goal: dict[str, int]


ROWS: Sequence[Row] = (
    Row("gpt-oss-20b MXFP4", "gpt-oss-20b", {"1xh200-sxm": 950, "1xh100-sxm": 720}),
    Row("gpt-oss-120b MXFP4", "gpt-oss-120b", {"1xh200-sxm": 750}),
    Row("qwen3-30b-a3b BF16", "qwen3-30b-a3b", {"1xh200-sxm": 560}),
    Row("qwen3-30b-a3b FP8", "qwen3-30b-a3b@fp8-128x128", {"1xh200-sxm": 850}),
    Row("qwen3-8b FP8", "qwen3-8b@fp8-128x128", {"1xh200-sxm": 540}),
    Row("qwen3-8b INT4", "qwen3-8b@int4-g128", {"1xh200-sxm": 850}),
    Row("llama-3.2-1b INT8", "llama-3.2-1b@int8", {"1xh200-sxm": 2400}),
    Row("llama-3.2-1b FP8", "llama-3.2-1b@fp8", {"1xh200-sxm": 2400}),
    Row("mixtral-8x7b BF16", "mixtral-8x7b", {}),
    Row("qwen3-coder-next FP8", "qwen3-coder-next@fp8-128x128", {}),
)


def study() -> Path:
    """The study's folder."""
    return Path(__file__).resolve().parent


def cells() -> list[tuple[str, str, int]]:
    """(row, node, prompt)."""
    return [(row.name, node, prompt) for row in ROWS for node in NODES for prompt in PROMPTS]


def spec_of(name: str) -> ModelSpec:
    return load_model(next(row.model for row in ROWS if row.name == name))


# ---- plans ---------------------------------------------------------------------------------------


def timed_plan(spec: ModelSpec, node: Node, prompt: int) -> Plan:
    """Default options, at the middle one of the timed positions, proven. Raises PlanError where the
    node has no room.
    """
    wanted = {"context": prompt + TOKENS // 2, "max_context": prompt + TOKENS + WARM_UP}
    plan = plan_for(spec, node, **wanted)
    check_room(plan, node)
    prove(plan)
    return plan


def checked_plan(spec: ModelSpec, node: Node) -> Plan:
    """The same kinds of layers, two of them with a few experts each."""
    plan = plan_for(cut(spec), node, context=CHECKED_CONTEXT // 2, max_context=CHECKED_CONTEXT)
    prove(plan)
    return plan


def plans_of(name: str, node: Node) -> dict[str, Plan]:
    """By what they are for. Raises TwinError where the node has no room."""
    spec = spec_of(name)
    made = {CHECK: checked_plan(spec, node)}
    return made | {str(prompt): timed_plan(spec, node, prompt) for prompt in PROMPTS}


# ---- runs ----------------------------------------------------------------------------------------


def timed(node: Node, plan: Plan, prompt: int) -> dict[str, Any]:
    """Tokens/s of the median step of each repeat. The prompt is read once: repeats must give the
    tokens of the first run.
    """
    assert plan.spec is not None
    read = first_tokens(plan.spec.vocab, prompt)
    first, *runs = repeated(node.device, plan, read, TOKENS, reuse=True)
    if not alike([first, *runs]):
        return {"failed": "the runs gave different tokens"}
    samples = [1e9 / step_ns(run, WARM_UP) for run in runs]
    return {
        "tokens_per_s": statistics.median(samples),
        "samples": samples,
        "bytes": plan.bytes_per_step(),
        "prompt_s": first.prompt_ns * 1e-9,
    }


def measured(node: Node, row: Ready) -> dict[str, Any]:
    """What a row's plans give; a refusal is a finding."""
    found: dict[str, Any] = {}
    for what, plan in row.plans.items():
        try:
            if what in row.refused:
                found[what] = {"failed": row.refused[what]}
            elif what == CHECK:
                found[what] = checked(node.device, row.small.result())
            else:
                found[what] = timed(node, plan, int(what))
        except TwinError as error:
            found[what] = {"failed": str(error)}
    return found


def run_rows(
    node: Node, out: Path, show: Callable[[str], None], names: Sequence[str] = ()
) -> dict[str, Any]:
    """All rows, or those of these names; what is in the file already is passed by."""
    began = time.monotonic()
    kept: dict[str, Any] = {}
    if out.is_file():
        kept = read_json(out, MOST_RECORD_BYTES)["rows"]
    plans: dict[str, dict[str, Plan]] = {}
    wanted = names or [row.name for row in ROWS]
    for name in (name for name in wanted if name not in kept):
        try:
            plans[name] = plans_of(name, node)
        except TwinError as error:
            kept[name] = {"failed": str(error)}
    for row in rows_in_turn(node.device, plans, checked=CHECKED, ahead=PREPARING, show=show):
        kept[row.name] = measured(node, row)
        show(f"{time.monotonic() - began:5.0f} s  {row.name}: {kept[row.name]}")
        keep(out, {"node": node.name, "conditions": gpu_conditions(), "rows": kept})
    return kept
