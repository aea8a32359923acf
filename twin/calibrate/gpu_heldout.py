"""Engine runs on a GPU that no number is fitted to: real models, and what a user may change about
them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from twin.calibrate.heldout import HeldOut
from twin.hardware.types import Node
from twin.kernel.defaults import default_options
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.types import Execution, HandOffKind, LateParts

TOKENS = 160  # decoded and timed per repeat
REPEATS = 2
# slots in flight, and rings of what a block holds: written out, so that a run means the same when
# defaults change
WINDOW = 3
ROOM = 16  # positions for the steps that are not counted
SHORT = 48  # positions before them
LONGER = 1500
LONG = 4096  # prompts from this length on are read once
KIB = 2**10


def gpu_held_out(node: Node) -> list[HeldOut]:
    """The runs of `twin validate` on one GPU of `node`."""
    blocks = node.device.blocks
    llama, qwen, lanes = (
        load_model("llama-3.2-1b"),
        load_model("qwen3-8b"),
        load_model("laneformer-2b"),
    )
    coder, half = load_model("qwen2.5-coder-1.5b"), qwen2_half()

    def run(
        name: str,
        spec: ModelSpec,
        ring: int,
        splits: int,
        prompt: int = SHORT,
        *,
        traced: bool = False,
        **chosen: Any,
    ) -> HeldOut:
        chosen = {
            "blocks": blocks,
            "ring_slots": ring,
            "window_slots": WINDOW,
            "attention_splits": splits,
            **chosen,
        }
        chosen = {"late_parts": LateParts.EACH, "lane_stagger_ns": 0, **chosen}
        chosen = {
            "context": prompt + TOKENS // 2,
            "max_context": prompt + TOKENS + ROOM,
            "prompt_chunk": 1,
            **chosen,
        }
        return HeldOut(
            name,
            spec,
            default_options(spec, node, **chosen),
            prompt,
            TOKENS,
            1 if prompt >= LONG else REPEATS,
            traced,
        )

    few = blocks // 8 * 8  # a multiple of the lanes
    return [
        run("llama-1b", llama, 12, 8, traced=True),
        run("llama-1b-counter", llama, 12, 8, handoff=HandOffKind.COUNTER),
        run("llama-1b-grid", llama, 12, 8, handoff=HandOffKind.GRID),
        run("llama-1b-graph", llama, 12, 8, execution=Execution.GRAPH),
        run("llama-1b-b96", llama, 12, 8, blocks=96),
        run("llama-1b-window12", llama, 12, 8, window_slots=12),
        run("llama-1b-slot8K", llama, 24, 8, slot_bytes=8 * KIB, window_slots=2 * WINDOW),
        run("llama-1b-half-ring", llama, 6, 8),
        run("llama-1b-1500-s2", llama, 12, 2, LONGER),
        run("llama-1b-4k", llama, 12, 8, LONG),
        run("laneformer-2b", lanes, 11, 8, traced=True, blocks=few),
        run("laneformer-2b-grid", lanes, 11, 8, blocks=few, handoff=HandOffKind.GRID),
        run("laneformer-2b-b104", lanes, 11, 8, blocks=104),
        run("laneformer-2b-reduced", lanes, 11, 8, blocks=few, late_parts=LateParts.REDUCED),
        run(
            "laneformer-2b-staggered",
            lanes,
            13,
            8,
            blocks=few,
            late_parts=LateParts.REDUCED,
            window_slots=5,
            lane_stagger_ns=7000,
            traced=True,
        ),
        run("qwen3-8b-1k", qwen, 11, 16, 1024 - TOKENS // 2, traced=True),
        run("qwen3-8b-b124", qwen, 11, 8, blocks=124),
        run("qwen2.5-1.5b-1k", coder, 11, 16, 1024, traced=True),
        run("qwen2-0.5b", half, 12, 8, traced=True),
        run("qwen2-0.5b-1k", half, 12, 16, 1024),
    ]


def several_held_out(node: Node) -> list[HeldOut]:
    """The runs of `twin validate` on several GPUs: narrow and wide models, lanes, and the shapes of
    these as a Llama; each in a short and a longer context.

    Options are the defaults, as users get them; a record holds them written out.
    """
    lanes = replace(load_model("laneformer-2b"), dtype=DType.FP16)
    windows = (0,) * lanes.layers
    alike = replace(lanes, name="laneformer-2b-llama", family="llama", lanes=None, windows=windows)
    models = {
        "llama-1b": load_model("llama-3.2-1b"),
        "qwen3-8b": load_model("qwen3-8b"),
        "laneformer-2b": lanes,
        "laneformer-2b-llama": alike,
    }

    def run(name: str, spec: ModelSpec, prompt: int) -> HeldOut:
        options = default_options(
            spec,
            node,
            context=prompt + TOKENS // 2,
            max_context=prompt + TOKENS + ROOM,
            prompt_chunk=1,
        )
        return HeldOut(name, spec, options, prompt, TOKENS, REPEATS)

    return [
        run(f"{name}-g{node.gpus}{suffix}", spec, prompt)
        for name, spec in models.items()
        for suffix, prompt in (("", SHORT), ("-1500", LONGER))
    ]


@lru_cache(maxsize=1)
def qwen2_half() -> ModelSpec:
    """The shape of Qwen2-0.5B: narrow matrices, 14 query heads on 2 KV heads."""
    base = load_model("qwen2.5-coder-1.5b")
    return replace(
        base,
        name="qwen2-0.5b",
        layers=24,
        hidden=896,
        heads=14,
        kv_heads=2,
        head_dim=64,
        ffn=4864,
        windows=(0,) * 24,
    )
