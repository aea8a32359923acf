"""The zoo: public dense models, and what is measured of each of them."""

from __future__ import annotations

from dataclasses import replace

from studies.common.rows import cut
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.types import Plan
from twin.schedule.options import plan_for

PROMPT, TOKENS, WARMUP = 32, 128, 8  # tokens; the first of those decoded are not timed
NAMES = (  # by size
    "smollm2-360m",
    "qwen2.5-0.5b",
    "qwen3-0.6b",
    "gemma-3-1b",
    "tinyllama-1.1b",
    "llama-3.2-1b",
    "deepseek-coder-1.3b",
    "qwen2.5-1.5b",
    "falcon3-1b",
    "smollm2-1.7b",
    "qwen3-1.7b",
    "gemma-2-2b",
    "qwen2.5-3b",
    "smollm3-3b",
    "llama-3.2-3b",
    "falcon3-3b",
    "phi-4-mini",
    "qwen3-4b",
    "yi-1.5-6b",
    "deepseek-coder-6.7b",
    "llama-2-7b",
    "mistral-7b",
    "qwen2.5-7b",
    "olmo-2-7b",
    "falcon3-7b",
    "ministral-8b",
    "llama-3.1-8b",
    "qwen3-8b",
    "granite-3.1-8b",
    "internlm3-8b",
    "mistral-nemo-12b",
    "llama-2-13b",
    "qwen3-14b",
    "qwen2.5-14b",
    "phi-4",
)


def shapes() -> list[ModelSpec]:
    """Each with weights in BF16, whatever it was published in."""
    return [replace(load_model(name), dtype=DType.BF16) for name in NAMES]


def timed_plan(spec: ModelSpec, node: Node) -> Plan:
    """Default options, BF16, for a prompt of PROMPT tokens and TOKENS after it."""
    return plan_for(spec, node, **wanted())


def wanted() -> dict[str, int]:
    """Positions at the step that is timed, and in all."""
    return {"context": PROMPT + TOKENS // 2, "max_context": PROMPT + TOKENS + WARMUP}


def checked_plan(spec: ModelSpec, node: Node) -> Plan:
    """The same layers, two of them, with a vocabulary that a NumPy reference multiplies soon."""
    return plan_for(cut(spec), node, context=PROMPT, max_context=64)
