"""The engine on several NVIDIA GPUs, beside the reference and beside one: what no run has seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import FULL, LLAMA, QWEN2, QWEN3, SEED, TOKENS
from tests.engine.test_cuda_engine import REASON, TOLERANCE, planned
from twin.engine.cuda import CudaEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.spec import DType, Lanes, ModelSpec
from twin.plan.types import CollectiveKind, Execution, HandOffKind, Plan, Sampling
from twin.reference.step import Reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(REASON), reason=REASON or "GPUs")]


def here() -> int:
    """GPUs of this computer."""
    if REASON:
        return 0
    from cuda.bindings import driver

    return int(driver.cuDeviceGetCount()[1])


def of_gpus(spec: ModelSpec, gpus: int, **chosen: Any) -> Plan:
    if here() < gpus:
        pytest.skip(f"{here()} GPUs, {gpus} are needed")
    return planned(spec, gpus=gpus, **({"collective": CollectiveKind.PUSH} | chosen))


def opened(plan: Plan, **more: Any) -> CudaEngine:
    assert plan.spec is not None
    return CudaEngine(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype), **more)


WIDE = [replace(spec, heads=16, kv_heads=8, ffn=128) for spec in (LLAMA, QWEN2, QWEN3)]
LANED = replace(
    LLAMA, name="lanes", family="laneformer", layers=6, windows=(0,) * 6, heads=16, kv_heads=8,
    ffn=128, lanes=Lanes(8, 2),
)  # fmt: skip
CHOICES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "counter": {"handoff": HandOffKind.COUNTER},
    "grid": {"handoff": HandOffKind.GRID},
    "graph": {"execution": Execution.GRAPH},
    "prompts": {"prompt_chunk": 16},
    "full": {"sampling": Sampling.FULL},
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("spec", [*WIDE, LANED], ids=lambda spec: spec.name)
def test_several_gpus_give_the_references_logits_and_the_same_tokens_every_time(
    spec: ModelSpec, gpus: int, name: str
) -> None:
    blocks = {"blocks": 8 if spec.lanes else 6}
    plan = of_gpus(spec, gpus, **blocks | CHOICES[name])
    reference = Reference(plan, random_weights(spec, SEED, plan.options.weight_dtype))
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    sampling = {"sampling": FULL} if plan.options.sampling is Sampling.FULL else {}
    with opened(plan) as engine:
        logits = engine.logits(TOKENS)
        worst = np.abs(logits - wanted).max() / np.abs(wanted).max()
        assert worst < TOLERANCE[DType.FP16]
        assert (engine.logits(TOKENS) == logits).all()
        made = [engine.generate(TOKENS, max_tokens=40, **sampling).tokens for _ in range(3)]
        assert made[0] == made[1] == made[2]


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_cancel_ends_all_gpus_and_the_next_request_runs(gpus: int) -> None:
    with opened(of_gpus(WIDE[0], gpus)) as engine:
        first = engine.generate(TOKENS, max_tokens=5, on_token=lambda token: engine.cancel())
        assert first.stop_reason == "cancelled"
        assert len(engine.generate(TOKENS, max_tokens=5).tokens) == 5


def test_more_gpus_than_there_are_are_refused() -> None:
    plan = planned(WIDE[0], gpus=8, collective=CollectiveKind.PUSH)
    with pytest.raises(EngineError, match="this computer has"):
        CudaEngine(plan, random_weights(WIDE[0], SEED, DType.FP16), device=here())
