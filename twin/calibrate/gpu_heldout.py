"""Engine runs on a GPU that no number is fitted to: real models, and what a user may change about them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from twin.calibrate.heldout import HeldOut
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.defaults import default_options
from twin.plan.types import Execution, HandOffKind

TOKENS = 160  # decoded and timed per repeat
REPEATS = 3
SHORT = 48  # positions before them
LONG = 4096  # prompts from this length on are read once
KIB = 2**10


def gpu_held_out(node: Node) -> list[HeldOut]:
    """The runs of `twin validate` on one GPU of `node`."""
    blocks = node.device.blocks
    llama, qwen, lanes = load_model("llama-3.2-1b"), load_model("qwen3-8b"), load_model("laneformer-2b")
    coder, half = load_model("qwen2.5-coder-1.5b"), qwen2_half()

    def run(name: str, spec: ModelSpec, prompt: int = SHORT, *, traced: bool = False, half_ring: bool = False, **chosen: Any) -> HeldOut:
        chosen = {"context": prompt + TOKENS // 2, "max_context": prompt + TOKENS, **chosen}
        options = default_options(spec, node, **chosen)
        if half_ring:
            slots = max(1, options.ring_slots // 2)
            options = replace(options, ring_slots=slots, window_slots=slots)
        return HeldOut(name, spec, options, prompt, TOKENS, 1 if prompt >= LONG else REPEATS, traced)

    return [
        run("llama-1b", llama, traced=True),
        run("llama-1b-counter", llama, handoff=HandOffKind.COUNTER),
        run("llama-1b-grid", llama, handoff=HandOffKind.GRID),
        run("llama-1b-graph", llama, execution=Execution.GRAPH),
        run("llama-1b-b96", llama, blocks=96),
        run("llama-1b-b132", llama, blocks=blocks),
        run("llama-1b-slot8K", llama, slot_bytes=8 * KIB),
        run("llama-1b-half-ring", llama, half_ring=True),
        run("llama-1b-1500", llama, 1500),
        run("llama-1b-1500-s8", llama, 1500, attention_splits=8),
        run("llama-1b-4k", llama, LONG),
        run("laneformer-2b", lanes, traced=True),
        run("laneformer-2b-grid", lanes, handoff=HandOffKind.GRID),
        run("laneformer-2b-graph", lanes, execution=Execution.GRAPH),
        run("laneformer-2b-b104", lanes, blocks=min(104, blocks)),
        run("qwen3-8b-1k", qwen, 1024 - TOKENS // 2, traced=True),
        run("qwen3-8b-b124", qwen, blocks=124),
        run("qwen2.5-1.5b", coder),
        run("qwen2.5-1.5b-1k", coder, 1024, traced=True),
        run("qwen2-0.5b", half),
        run("qwen2-0.5b-16k", half, 16 * KIB),
    ]


@lru_cache(maxsize=1)
def qwen2_half() -> ModelSpec:
    """The shape of Qwen2-0.5B: narrow matrices, 14 query heads on 2 KV heads."""
    base = load_model("qwen2.5-coder-1.5b")
    return replace(base, name="qwen2-0.5b", layers=24, hidden=896, heads=14, kv_heads=2, head_dim=64, ffn=4864, windows=(0,) * 24)
