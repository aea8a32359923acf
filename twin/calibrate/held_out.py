"""The runs of `twin validate`, to which no number is fitted: models, and what a user may change
about them. Rings and windows of one GPU's are written out, so that a run means the same when
defaults change.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from twin.calibrate import experiment
from twin.calibrate.experiment import Experiment
from twin.calibrate.gpu_layers import chain_spec
from twin.errors import CalibrationError
from twin.hardware.types import HOST, Node
from twin.models.load import load_model
from twin.models.spec import DType, Lanes, ModelSpec
from twin.plan.options import CollectiveKind, Execution, HandOffKind, LateParts, Options, Placement
from twin.schedule.options import default_options, plan_for

TOKENS = 160  # decoded and timed per repeat on a GPU
REPEATS = 2
WINDOW = 3  # slots in flight
ROOM = 16  # positions for the steps that are not counted
SHORT = 48  # positions before them
LONGER = 1500
LONG = 4096  # prompts from this length on are read once
KIB = 2**10
FP16: dict[str, Any] = {"weight_dtype": DType.FP16, "kv_dtype": DType.FP16}
FP32: dict[str, Any] = {"weight_dtype": DType.FP32, "kv_dtype": DType.FP32}

# 9 M weights: in cache
TINY = chain_spec(
    "tiny", hidden=384, layers=4, heads=6, kv_heads=2, head_dim=64, ffn=1024, vocab=4096
)
# 44 M
SMALL = chain_spec(
    "small", hidden=768, layers=6, heads=12, kv_heads=4, head_dim=64, ffn=2048, vocab=8192
)
# 158 M: from memory
MEDIUM = chain_spec(
    "medium", hidden=1024, layers=12, heads=16, kv_heads=8, head_dim=64, ffn=2816, vocab=16384
)
# 85 M, many hand-offs
DEEP = chain_spec(
    "deep", hidden=512, layers=24, heads=8, kv_heads=8, head_dim=64, ffn=1536, vocab=4096
)
QWEN = replace(SMALL, name="qwen", family="qwen3", qk_norm=True, head_dim=128, heads=8, kv_heads=2)
LANES = replace(
    DEEP,
    name="lanes",
    family="laneformer",
    layers=12,
    lanes=Lanes(4, 2),
    windows=(128,) * 8 + (0,) * 4,
)


def held_out(node: Node) -> list[Experiment]:
    """The held-out runs of a node. Raises CalibrationError for several devices that have none."""
    if node.gpus > 1:
        if node.device.nvidia:
            return _several(node)
        raise CalibrationError(
            f"{node.name}: engine runs of several are defined for NVIDIA GPUs alone; draw shapes "
            f"with --shapes N --seed S, or name 1x{node.device.name}"
        )
    if node.device.isa == HOST:
        return _host()
    return _amd(node) if node.device.amd else _nvidia(node)


def _host() -> list[Experiment]:
    """Block counts 3 and 4 appear in no probe.

    At most two blocks share a core of the smallest computer (two cores): with four the twin was
    seen 48 % too fast, because blocks that poll in turn cost each other more than
    `sharing.switch_s` says.
    """

    def run(name: str, spec: ModelSpec, prompt: int = 16, **options: Any) -> Experiment:
        context = prompt + experiment.TOKENS // 2
        return Experiment(name, spec, Options(max_context=2048, context=context, **options), prompt)

    push = CollectiveKind.PUSH
    return [
        run("tiny-bf16-b2", TINY, blocks=2),
        run("tiny-fp16-b3", TINY, blocks=3, **FP16),
        run("small-fp32-b3", SMALL, blocks=3, **FP32),
        run("small-fp16-b1", SMALL, blocks=1, **FP16),
        run("small-bf16-b3", SMALL, blocks=3),
        run("small-bf16-b4", SMALL, blocks=4),
        run("medium-bf16-b2", MEDIUM, blocks=2),
        run("medium-fp16-b3", MEDIUM, blocks=3, **FP16),
        run("medium-bf16-b4-counter", MEDIUM, blocks=4, handoff=HandOffKind.COUNTER),
        run("deep-bf16-b3", DEEP, blocks=3),
        run("deep-bf16-b2-graph", DEEP, blocks=2, execution=Execution.GRAPH),
        run("qwen-bf16-b4-grid", QWEN, blocks=4, handoff=HandOffKind.GRID),
        run("medium-bf16-b2-long", MEDIUM, prompt=1200, blocks=2),
        run("small-bf16-2gpus-b1", SMALL, blocks=1, gpus=2, collective=push),
        run("lanes-bf16-2gpus-b2", LANES, blocks=2, gpus=2, collective=push),
    ]


def _run(
    node: Node, name: str, spec: ModelSpec, prompt: int, chosen: dict[str, Any], traced: bool
) -> Experiment:
    chosen = {
        "context": prompt + TOKENS // 2,
        "max_context": prompt + TOKENS + ROOM,
        "prompt_chunk": 1,
        **chosen,
    }
    options = (
        plan_for(spec, node, **chosen).options
        if node.device.amd
        else default_options(spec, node, **chosen)
    )
    return Experiment(name, spec, options, prompt, TOKENS, 1 if prompt >= LONG else REPEATS, traced)


def _nvidia(node: Node) -> list[Experiment]:
    """Of one GPU."""
    few = node.device.blocks // 8 * 8  # a multiple of the lanes
    llama, lanes, half = load_model("llama-3.2-1b"), load_model("laneformer-2b"), qwen2_half()
    qwen, coder = load_model("qwen3-8b"), load_model("qwen2.5-coder-1.5b")
    base = {
        "blocks": node.device.blocks,
        "window_slots": WINDOW,
        "late_parts": LateParts.EACH,
        "lane_stagger_ns": 0,
    }

    def run(
        name: str,
        spec: ModelSpec,
        ring: int,
        splits: int,
        prompt: int = SHORT,
        *,
        traced: bool = False,
        **chosen: Any,
    ) -> Experiment:
        chosen = {**base, "ring_slots": ring, "attention_splits": splits, **chosen}
        return _run(node, name, spec, prompt, chosen, traced)

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


def _amd(node: Node) -> list[Experiment]:
    """Of one GPU: models whose vectors fit a compute unit's local memory."""
    llama, lanes, half = load_model("llama-3.2-1b"), load_model("laneformer-2b"), qwen2_half()
    coder = load_model("qwen2.5-coder-1.5b")

    def run(
        name: str,
        spec: ModelSpec,
        splits: int,
        prompt: int = SHORT,
        *,
        traced: bool = False,
        **chosen: Any,
    ) -> Experiment:
        chosen = {"attention_splits": splits, "late_parts": LateParts.EACH, **chosen}
        return _run(node, name, spec, prompt, chosen, traced)

    return [
        run("llama-1b", llama, 8, traced=True),
        run("llama-1b-fp16", llama, 8, **FP16),
        run("llama-1b-counter", llama, 8, handoff=HandOffKind.COUNTER),
        run("llama-1b-grid", llama, 8, handoff=HandOffKind.GRID),
        run("llama-1b-b304", llama, 8, blocks=node.device.blocks),
        run("llama-1b-b96", llama, 8, blocks=96),
        run("llama-1b-1500-s2", llama, 2, LONGER),
        run("llama-1b-4k", llama, 8, LONG),
        run("laneformer-2b", lanes, 8, traced=True, **FP16),
        run("laneformer-2b-flat", lanes, 8, placement=Placement.FLAT, **FP16),
        run("laneformer-2b-grid", lanes, 8, handoff=HandOffKind.GRID, **FP16),
        run("laneformer-2b-b104", lanes, 8, blocks=104, **FP16),
        run("qwen2.5-1.5b-1k", coder, 16, 1024, traced=True),
        run("qwen2-0.5b", half, 8, traced=True),
        run("qwen2-0.5b-1k", half, 16, 1024),
    ]


def _several(node: Node) -> list[Experiment]:
    """Of several GPUs, by the default options: narrow and wide models, lanes, and the shapes of
    these as a Llama; each in a short and a longer context.
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
    return [
        _run(node, f"{name}-g{node.gpus}{suffix}", spec, prompt, {}, False)
        for name, spec in models.items()
        for suffix, prompt in (("", SHORT), ("-1500", LONGER))
    ]


@lru_cache(maxsize=1)
def qwen2_half() -> ModelSpec:
    """The shape of Qwen2-0.5B: narrow matrices, 14 query heads on 2 KV heads."""
    return replace(
        load_model("qwen2.5-coder-1.5b"),
        name="qwen2-0.5b",
        layers=24,
        hidden=896,
        heads=14,
        kv_heads=2,
        head_dim=64,
        ffn=4864,
        windows=(0,) * 24,
    )
