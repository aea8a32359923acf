"""The zoo: public dense shapes of shapes.csv, and what is asked of each of them."""

from __future__ import annotations

import csv
from pathlib import Path

from twin.bench.rows import cut
from twin.hardware.types import Node
from twin.kernel.defaults import plan_for
from twin.models.load import from_config, load_model
from twin.models.spec import ModelSpec
from twin.plan.types import Plan

HERE = Path(__file__).resolve().parent
PROMPT, TOKENS, WARMUP = 32, 128, 8  # tokens; the first of those decoded are not timed
FURTHER: dict[str, dict[str, object]] = {"phi-4-mini": {"partial_rotary_factor": 0.75}}
NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
}


def shapes() -> list[ModelSpec]:
    """In the file's order: by size."""
    with (HERE / "shapes.csv").open(encoding="utf-8") as file:
        return [_spec(row) for row in csv.DictReader(file)]


def _spec(row: dict[str, str]) -> ModelSpec:
    """Of a row without numbers: that of hwmodels, whose family has more of them."""
    if not row["layers"]:
        return load_model(row["name"])
    config: dict[str, object] = {key: int(row[column]) for column, key in NUMBERS.items()}
    config |= {"model_type": row["model_type"], "tie_word_embeddings": row["tied"] == "1"}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
    config |= {"hidden_act": "silu", "torch_dtype": "bfloat16", "sliding_window": None}
    config |= FURTHER.get(row["name"], {})
    return from_config(config, row["name"])


def timed_plan(spec: ModelSpec, node: Node) -> Plan:
    """Default options, BF16, for a prompt of PROMPT tokens and TOKENS after it."""
    return plan_for(spec, node, **asked())


def asked() -> dict[str, int]:
    """Positions at the step that is timed, and in all."""
    return {"context": PROMPT + TOKENS // 2, "max_context": PROMPT + TOKENS + WARMUP}


def checked_plan(spec: ModelSpec, node: Node) -> Plan:
    """The same layers, two of them, with a vocabulary that a NumPy reference multiplies soon."""
    return plan_for(cut(spec), node, context=PROMPT, max_context=64)
