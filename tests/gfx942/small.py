"""A small model whose kernel the interpreter runs in a second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.engine.small_engine import LLAMA
from tests.gfx942.code import MI300X
from twin.models.spec import DType, ModelSpec
from twin.plan.options import Options, Placement
from twin.plan.types import Plan
from twin.schedule.plans import build
from twin.schedule.strips import STRIP_BYTES

SPEC = replace(
    LLAMA, layers=2, windows=(0, 5), hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=101
)


STRIPS = 2  # of a wave, if a test says nothing else
# FP32 vectors of its down projections' input exceed local memory
NARROW = replace(SPEC, ffn=16128)


def strips(count: int) -> dict[str, int]:
    """A ring of so many."""
    slots = count * STRIP_BYTES // 1024
    return {"ring_slots": slots, "window_slots": slots}


def small(spec: ModelSpec = SPEC, **chosen: Any) -> Plan:
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 64,
        "kv_page": 4,
        "slot_bytes": 1024,
        **strips(STRIPS),
        "blocks": 4,
        "placement": Placement.FLAT,
        "weight_dtype": DType.FP16,
        "kv_dtype": DType.FP16,
    }
    return build(spec, Options(**(base | chosen)), MI300X)
