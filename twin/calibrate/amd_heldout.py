"""Engine runs on an AMD GPU that no number is fitted to: models whose vectors fit a compute unit's
local memory, and what a user may change about them.
"""

from __future__ import annotations

from typing import Any

from twin.calibrate.gpu_heldout import LONG, REPEATS, ROOM, SHORT, TOKENS, qwen2_half
from twin.calibrate.heldout import HeldOut
from twin.hardware.types import Node
from twin.kernel.defaults import plan_for
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.types import HandOffKind, LateParts, Placement


def amd_held_out(node: Node) -> list[HeldOut]:
    """The runs of `twin validate` on one AMD GPU of `node`."""
    llama, lanes = load_model("llama-3.2-1b"), load_model("laneformer-2b")
    coder, half = load_model("qwen2.5-coder-1.5b"), qwen2_half()
    fp16: dict[str, Any] = {"weight_dtype": DType.FP16, "kv_dtype": DType.FP16}

    def run(
        name: str,
        spec: ModelSpec,
        splits: int,
        prompt: int = SHORT,
        *,
        traced: bool = False,
        **chosen: Any,
    ) -> HeldOut:
        chosen = {
            "attention_splits": splits,
            "late_parts": LateParts.EACH,
            "context": prompt + TOKENS // 2,
            "max_context": prompt + TOKENS + ROOM,
            "prompt_chunk": 1,
            **chosen,
        }
        options = plan_for(spec, node, **chosen).options
        return HeldOut(name, spec, options, prompt, TOKENS, _repeats(prompt), traced)

    return [
        run("llama-1b", llama, 8, traced=True),
        run("llama-1b-fp16", llama, 8, **fp16),
        run("llama-1b-counter", llama, 8, handoff=HandOffKind.COUNTER),
        run("llama-1b-grid", llama, 8, handoff=HandOffKind.GRID),
        run("llama-1b-b304", llama, 8, blocks=node.device.blocks),
        run("llama-1b-b96", llama, 8, blocks=96),
        run("llama-1b-1500-s2", llama, 2, 1500),
        run("llama-1b-4k", llama, 8, LONG),
        run("laneformer-2b", lanes, 8, traced=True, **fp16),
        run("laneformer-2b-flat", lanes, 8, placement=Placement.FLAT, **fp16),
        run("laneformer-2b-grid", lanes, 8, handoff=HandOffKind.GRID, **fp16),
        run("laneformer-2b-b104", lanes, 8, blocks=104, **fp16),
        run("qwen2.5-1.5b-1k", coder, 16, 1024, traced=True),
        run("qwen2-0.5b", half, 8, traced=True),
        run("qwen2-0.5b-1k", half, 16, 1024),
    ]


def _repeats(prompt: int) -> int:
    return 1 if prompt >= LONG else REPEATS
