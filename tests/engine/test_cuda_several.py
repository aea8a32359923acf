"""The engine on several NVIDIA GPUs, compared with the reference; GPUs that are late or dead."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.small_engine import FULL, LLAMA, QWEN2, QWEN3, SEED, TOKENS
from tests.engine.test_cuda_engine import REASON, TOLERANCE, planned
from tests.engine.test_experts import routed
from twin.engine import cuda_build
from twin.engine.cuda import CudaEngine
from twin.engine.session import address
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.kernel.tables import layout
from twin.models.formats import format_named
from twin.models.quantized import requantized
from twin.models.spec import DType, Lanes, ModelSpec
from twin.plan.options import CollectiveKind, Common, Execution, HandOffKind, Sampling
from twin.plan.types import Plan
from twin.reference.step import Reference
from twin.schedule.choose import schedule_of
from twin.schedule.homes import Home

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


@pytest.mark.parametrize("common", Common)
def test_experts_of_two_gpus_are_those_of_one(common: Common) -> None:
    """Whoever has a router whole routes by all of it."""
    spec = routed()
    one, plan = planned(spec), of_gpus(spec, 2, common=common)
    reference = Reference(one, random_weights(spec, SEED, plan.options.weight_dtype))
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    with opened(plan) as engine:
        logits = engine.logits(TOKENS)
        assert np.abs(logits - wanted).max() / np.abs(wanted).max() < TOLERANCE[DType.FP16]


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
@pytest.mark.parametrize("name", ["fp8", "int8", "int4-g32", "mxfp4"])
def test_residuals_in_shared_memory_give_the_references_logits(
    name: str, execution: Execution
) -> None:
    """A launch a stage, too: what outlives a kernel is read from there."""
    spec = requantized(replace(WIDE[0], hidden=1600, ffn=8448), format_named(name))
    chosen = {"blocks": 6, "slot_bytes": 1168, "execution": execution}
    plan = of_gpus(spec, 2, weight_dtype=DType.BF16, **chosen)
    assert schedule_of(plan).warps.residual.home is Home.SHARED
    reference = Reference(plan, random_weights(spec, SEED, DType.BF16))
    wanted = np.stack([reference.step(token).copy() for token in TOKENS])
    with opened(plan) as engine:
        logits = engine.logits(TOKENS)
        assert np.abs(logits - wanted).max() / np.abs(wanted).max() < TOLERANCE[DType.BF16]
        assert (engine.logits(TOKENS) == logits).all()


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_cancel_ends_all_gpus_and_the_next_request_runs(gpus: int) -> None:
    with opened(of_gpus(WIDE[0], gpus, max_context=4096, kv_page=16)) as engine:
        first = engine.generate(TOKENS, max_tokens=4000, on_token=lambda token: engine.cancel())
        assert first.stop_reason == "cancelled"
        assert len(engine.generate(TOKENS, max_tokens=5).tokens) == 5


@pytest.mark.parametrize("gpus", [2, 4, 8])
@pytest.mark.parametrize("spec", [WIDE[0], LANED], ids=lambda spec: spec.name)
def test_all_ranks_end_a_step_with_the_same_bits(spec: ModelSpec, gpus: int) -> None:
    """Of lanes each has a residual of its own: the same on every number of GPUs."""
    plan = of_gpus(spec, gpus, blocks=8, execution=Execution.GRAPH)
    seen = []
    with opened(plan) as engine:
        for _ in range(2):
            engine.generate(TOKENS, max_tokens=20)
            seen.append(residuals(engine))
    assert (seen[0] == seen[1]).all()
    assert np.isfinite(seen[0].view(np.float32)).all()
    assert seen[0].any()
    each = seen[0] if spec.lanes else seen[0].reshape(1, -1, spec.hidden)
    assert all(len(np.unique(rank, axis=0)) == 1 for rank in each)


def residuals(engine: CudaEngine) -> NDArray[np.uint32]:
    """[ranks, blocks, hidden] as the last kernel left them, in bits."""
    plan = engine.plan
    assert plan.spec is not None
    found = np.zeros((plan.ranks, plan.blocks, layout(plan).sizes["state_floats"]), np.uint32)
    for rank in range(plan.ranks):
        gpu = engine._gpu_of(rank)
        gpu.use()
        gpu._call("cuMemcpyDtoH", address(found[rank]), engine._launch.ranks[rank].state,
                  found[rank].nbytes)  # fmt: skip
    return found[:, :, : plan.spec.hidden]


@pytest.mark.parametrize("handoff", [HandOffKind.SENTINEL, HandOffKind.COUNTER])
@pytest.mark.parametrize(("gpus", "late"), [(2, 0), (2, 1), (4, 2), (8, 7)])
def test_a_gpu_that_naps_at_random_changes_no_bit_of_chained_calls(
    monkeypatch: pytest.MonkeyPatch, gpus: int, late: int, handoff: HandOffKind
) -> None:
    """Dependents released before the store would read the layer before: plausible, and wrong."""
    plan = of_gpus(WIDE[0], gpus, handoff=handoff, prompt_chunk=16)
    with opened(plan) as engine:
        wanted, bits = engine.generate(TOKENS, max_tokens=40).tokens, engine.logits(TOKENS)
    monkeypatch.setattr(cuda_build, "FLAGS", (*cuda_build.FLAGS, f"-DTWIN_NAPS={late}"))
    with opened(plan) as engine:
        for _ in range(5):
            assert engine.generate(TOKENS, max_tokens=40).tokens == wanted
        assert (engine.logits(TOKENS) == bits).all()


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_gpu_that_never_runs_is_named_in_time_and_the_next_request_runs(
    monkeypatch: pytest.MonkeyPatch, gpus: int
) -> None:
    with opened(of_gpus(WIDE[0], gpus), watchdog_s=1.0) as engine:
        monkeypatch.setattr(engine._gpus[1], "launch", lambda *arguments, **more: None)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"waited 0\.5 s for GPU 1 of it to"):
            engine.generate(TOKENS, max_tokens=5)
        assert time.monotonic() - began < 5
        monkeypatch.undo()
        assert len(engine.generate(TOKENS, max_tokens=5).tokens) == 5


def test_more_gpus_than_there_are_are_refused() -> None:
    plan = planned(WIDE[0], gpus=8, collective=CollectiveKind.PUSH)
    with pytest.raises(EngineError, match="this computer has"):
        CudaEngine(plan, random_weights(WIDE[0], SEED, DType.FP16), device=here())
