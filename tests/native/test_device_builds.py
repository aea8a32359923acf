"""The same sources compile for the GPUs; whoever lacks the compiler skips with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from twin.engine.cuda_build import compile_cubin
from twin.engine.hip_build import compile_code_object
from twin.errors import ToolchainError
from twin.models.load import load_model
from twin.models.spec import DType
from twin.plan.build import build
from twin.plan.types import CollectiveKind, Execution, HandOffKind, Limits, Options, Plan, Sampling

H200 = Limits(blocks=132, dies=1, on_chip_bytes=232448, memory_bytes=141 * 10**9, oversubscribe=False)
MI300X = Limits(blocks=304, dies=8, on_chip_bytes=65536, memory_bytes=192 * 10**9, oversubscribe=False)


def planned(model: str, limits: Limits, **chosen: Any) -> Plan:
    return build(load_model(model), Options(**({"blocks": limits.blocks} | chosen)), limits)


@pytest.mark.parametrize(
    ("model", "chosen"),
    [
        ("llama-3.2-1b", {}),
        ("laneformer-2b", {"gpus": 4, "collective": CollectiveKind.PUSH, "weight_dtype": DType.FP16}),
        pytest.param("llama-3.2-1b", {"execution": Execution.GRAPH, "sampling": Sampling.FULL}, marks=pytest.mark.slow),
        pytest.param("qwen3-8b", {"handoff": HandOffKind.COUNTER, "ring_slots": 6, "window_slots": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(getattr(x, "value", str(x)) for x in v.values()) or "default",
)
def test_the_kernel_compiles_for_hopper_without_spills(model: str, chosen: dict[str, Any]) -> None:
    try:
        report = compile_cubin(planned(model, H200, **chosen))
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert report.spill_bytes == 0
    assert report.registers <= 65536 // 416
    assert report.shared_bytes <= H200.on_chip_bytes
    assert report.cubin.startswith(b"\x7fELF")


def test_the_kernel_compiles_for_cdna3_without_spills() -> None:
    plan = planned(
        "laneformer-2b", MI300X, gpus=8, blocks=256, slot_bytes=4096, collective=CollectiveKind.PUSH, weight_dtype=DType.FP16
    )  # fmt: skip
    try:
        report = compile_code_object(plan)
    except ToolchainError as error:
        if not str(error).startswith("no clang"):
            raise
        pytest.skip(str(error))
    assert report.vgpr_spills == 0
    assert report.lds_bytes <= MI300X.on_chip_bytes
    assert report.code_object.startswith(b"\x7fELF")
