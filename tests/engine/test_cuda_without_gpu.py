"""What the CUDA engine refuses before it needs a GPU."""

from __future__ import annotations

import sys

import pytest

from tests.h200 import H200
from twin.engine.cuda import CudaEngine
from twin.errors import EngineError, ToolchainError
from twin.models.load import load_model
from twin.plan.options import CollectiveKind, Execution, Options
from twin.plan.types import Plan
from twin.schedule.plans import build


def planned(**chosen: object) -> Plan:
    return build(load_model("llama-3.2-1b"), Options(**({"blocks": 132} | chosen)), H200)  # type: ignore[arg-type]


def test_without_cuda_python_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(ToolchainError, match=r"pip install cuda-python"):
        CudaEngine(planned(), None)


def test_librarys_collectives_between_gpus_are_refused() -> None:
    plan = planned(gpus=2, collective=CollectiveKind.LIBRARY, execution=Execution.GRAPH)
    with pytest.raises(EngineError, match=r"collective=library with gpus=2: .* the kernel itself"):
        CudaEngine(plan, None)


def test_one_kernel_per_operation_is_refused() -> None:
    with pytest.raises(EngineError, match="execution=stream"):
        CudaEngine(planned(execution=Execution.LAUNCHES), None)
