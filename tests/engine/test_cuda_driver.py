"""What the CUDA engine asks of a driver, by a driver that records it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.engine.fake_driver import CUresult, FakeDriver, answers_at_once
from tests.engine.small_engine import LLAMA
from tests.h200 import H200
from twin.engine import choose, cuda, cuda_build
from twin.engine.cuda import CudaEngine, DrawingLaunch
from twin.engine.cuda_build import ARCHITECTURES, CompileReport, Entry, architecture, entries
from twin.engine.driver import REPORT, open_driver
from twin.engine.session import LOGIT_ROWS
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.hardware.load import load_node
from twin.kernel.header import Control
from twin.models.spec import DType
from twin.plan.options import Execution, Options, Sampling
from twin.plan.types import Plan
from twin.schedule.plans import build

PROMPT, MADE = [1, 2, 3], [3, 4, 5, 6]

Installs = Callable[[FakeDriver], FakeDriver]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Installs:
    """Makes a driver the one that cuda-python binds, and the compiler one that says what it
    compiles for.
    """

    def use(fake: FakeDriver) -> FakeDriver:
        bindings = ModuleType("cuda.bindings")
        bindings.driver = fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        return fake

    def compiled(plan: Plan, arch: str, *, trace: bool) -> dict[Entry, CompileReport]:
        report = CompileReport(
            arch,
            "none",
            registers=1,
            stack_bytes=0,
            spill_bytes=0,
            shared_bytes=1024,
            cubin=b"code",
        )
        return dict.fromkeys(entries(plan), report)

    monkeypatch.setattr(cuda, "compile_kernels", compiled)
    return use


def planned(**chosen: Any) -> Plan:
    base: dict[str, Any] = {
        "context": 8,
        "max_context": 64,
        "kv_page": 4,
        "slot_bytes": 1024,
        "weight_dtype": DType.FP16,
        "kv_dtype": DType.FP16,
        "blocks": 6,
    }
    return build(LLAMA, Options(**(base | chosen)), H200)


def opened(**chosen: Any) -> CudaEngine:
    plan = planned(**chosen)
    return CudaEngine(plan, random_weights(LLAMA, 1, DType.FP16))


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_a_session_generates_and_gives_all_memory_back(
    install: Installs, execution: Execution
) -> None:
    fake = install(FakeDriver())
    with opened(execution=execution) as engine:
        for _ in range(2):
            assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert not fake.held
    for made, ended in (
        ("cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRelease"),
        ("cuModuleLoadData", "cuModuleUnload"),
        ("cuStreamCreate", "cuStreamDestroy"),
        ("cuEventCreate", "cuEventDestroy"),
        ("cuGraphInstantiate", "cuGraphExecDestroy"),
    ):
        assert fake.names().count(made) == fake.names().count(ended), made


def test_logits_come_in_pinned_rows_and_each_gpu_hears_that_they_were_taken(
    install: Installs,
) -> None:
    def draws(launch: Any, control: Control) -> None:
        """Each row holds its number."""
        answers_at_once(launch, control)
        rows, vocab = launch.request.logit_rows, LLAMA.vocab
        if not rows:
            return
        there = np.ctypeslib.as_array(
            (ctypes.c_float * (rows * vocab)).from_address(launch.request.logits)
        ).reshape(rows, vocab)
        there[:] = np.arange(rows)[:, None]
        assert control.taken == 0

    fake = install(FakeDriver(kernel=draws, launch=DrawingLaunch))
    heard = list[float]()
    with opened(sampling=Sampling.FULL) as engine:
        assert engine.gives_logits
        engine.generate(
            [1, 2, 3],
            max_tokens=LOGIT_ROWS,
            on_logits=lambda row: heard.append(float(row[0])),
        )
        assert [control.taken for control in engine._controls] == [LOGIT_ROWS]
        engine.generate([1, 2, 3], max_tokens=2)
        assert engine._control.taken == 0
    assert len(heard) == LOGIT_ROWS
    assert heard == [float((2 + n) % LOGIT_ROWS) for n in range(LOGIT_ROWS)]
    assert not fake.held
    with (
        opened() as engine,
        pytest.raises(EngineError, match="plan with sampling=full"),
    ):
        engine.generate([1], max_tokens=1, on_logits=lambda _: None)


def test_a_resident_generation_is_one_cooperative_launch_of_all_blocks(install: Installs) -> None:
    fake = install(FakeDriver())
    with opened() as engine:
        engine.generate(PROMPT, max_tokens=4)
    (config,) = [call[1] for call in fake.calls if call[0] == "cuLaunchKernelEx"]
    assert (config.gridDimX, config.sharedMemBytes, config.numAttrs) == (6, 1024, 1)


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_a_prompts_passes_are_a_launch_of_their_own(
    install: Installs, execution: Execution
) -> None:
    fake = install(FakeDriver())
    with opened(prompt_chunk=16, execution=execution) as engine:
        engine.generate(PROMPT, max_tokens=4)
    launches = [call[1] for call in fake.calls if call[0] == "cuLaunchKernelEx"]
    # all blocks at once: the passes, and resident steps
    together = [config for config in launches if getattr(config, "numAttrs", 0)]
    assert len(together) == (2 if execution is Execution.RESIDENT else 1)
    assert {(config.gridDimX, config.sharedMemBytes) for config in together} == {(6, 1024)}


@pytest.mark.parametrize(
    "name",
    [
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuModuleLoadData",
        "cuFuncSetAttribute",
        "cuStreamCreate",
    ],
)
def test_a_refusal_names_the_call_the_error_its_code_and_the_next_step(
    install: Installs, name: str
) -> None:
    fake = install(FakeDriver())
    fake.refuse[name] = CUresult.CUDA_ERROR_UNKNOWN
    with pytest.raises(
        EngineError, match=rf"{name} failed: CUDA_ERROR_UNKNOWN \(code 999\); report this"
    ):
        opened()
    assert not fake.held


def test_memory_that_is_not_there_is_said_with_what_to_do(install: Installs) -> None:
    fake = install(FakeDriver())
    fake.refuse["cuMemAlloc"] = CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(
        EngineError, match=r"CUDA_ERROR_OUT_OF_MEMORY \(code 2\); end other programs on this GPU"
    ):
        opened()
    assert fake.names()[-1] == "cuDevicePrimaryCtxRelease"


def test_a_kernel_that_fails_closes_the_engine(install: Installs) -> None:
    fake = install(FakeDriver())

    def fails(launch: Any, control: Control) -> None:
        answers_at_once(launch, control)
        fake.refuse["cuStreamQuery"] = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS

    fake._kernel = fails
    with opened() as engine:
        with pytest.raises(
            EngineError,
            match=r"the kernel failed: cuStreamQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS \(code "
            r"700\); this process",
        ):
            engine.generate(PROMPT, max_tokens=4)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(PROMPT, max_tokens=4)


def test_a_computer_without_a_gpu_is_refused_with_the_reason(install: Installs) -> None:
    fake = install(FakeDriver())
    fake.refuse["cuInit"] = CUresult.CUDA_ERROR_NO_DEVICE
    with pytest.raises(
        EngineError,
        match=r"cuInit failed: CUDA_ERROR_NO_DEVICE \(code 100\); run on a computer with an NVIDIA "
        r"GPU",
    ):
        open_driver()
    install(FakeDriver(gpus=0))
    with pytest.raises(EngineError, match="the NVIDIA driver sees no GPU"):
        choose.nvidia_gpus()


@pytest.mark.parametrize("code", [3, 34, 800, 802, 803, 804, 805, 806, 807, 808, 809, 810])
def test_what_keeps_a_driver_from_starting_has_a_cure(install: Installs, code: int) -> None:
    fake = install(FakeDriver())
    names = {3: "NOT_INITIALIZED", 34: "STUB_LIBRARY", 800: "NOT_PERMITTED"}
    names |= {802: "SYSTEM_NOT_READY", 803: "SYSTEM_DRIVER_MISMATCH"}
    names |= {804: "COMPAT_NOT_SUPPORTED_ON_DEVICE", 805: "MPS_CONNECTION_FAILED"}
    names |= {806: "MPS_RPC_FAILURE", 807: "MPS_SERVER_NOT_READY", 810: "MPS_CLIENT_TERMINATED"}
    names |= {808: "MPS_MAX_CLIENTS_REACHED", 809: "MPS_MAX_CONNECTIONS_REACHED"}
    results = IntEnum("CUresult", {f"CUDA_ERROR_{names[code]}": code})
    fake.refuse["cuInit"] = next(iter(results))  # type: ignore[assignment]
    with pytest.raises(EngineError, match=rf"code {code}") as refused:
        open_driver()
    assert REPORT not in str(refused.value)


def test_a_binding_without_its_library_is_refused_with_the_reason(install: Installs) -> None:
    class Unbound:
        def cuInit(self, flags: int) -> None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")

    install(Unbound())  # type: ignore[arg-type]
    with pytest.raises(
        EngineError, match=r"no NVIDIA driver can be loaded \(Failed to dlopen libcuda.so.1\)"
    ):
        open_driver()


# ---- the instruction set -------------------------------------------------------------------------


def test_the_compiler_targets_the_gpus_capability(install: Installs) -> None:
    install(FakeDriver(capability=(9, 0)))
    with opened() as engine:
        assert engine.report.arch == "sm_90a"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_capability_is_refused_with_what_is_supported(
    install: Installs, capability: tuple[int, int]
) -> None:
    fake = install(FakeDriver(capability=capability))
    said = (
        rf"NVIDIA Fake has compute capability {capability[0]}\.{capability[1]}, and the kernel is "
        r"written for 9\.0 \(sm_90a\)"
    )
    for ask in (
        opened,
        choose.nvidia_gpus,
        lambda: choose.check_present(load_node("1xh200").device),
    ):
        with pytest.raises(EngineError, match=said):
            ask()
    assert "cuDevicePrimaryCtxRetain" not in fake.names()


def test_the_gpu_that_is_here_is_the_one_that_is_named(install: Installs) -> None:
    install(FakeDriver())
    choose.check_present(load_node("1xh200").device)
    with pytest.raises(
        EngineError,
        match=r"h100-sxm has 132 multiprocessors of sm_90a and 8[06] GB. Here GPU 0 is NVIDIA Fake",
    ):
        choose.check_present(load_node("1xh100").device)


@pytest.mark.parametrize("node", ["1xh200", "1xh100"])
def test_the_hardware_model_of_a_supported_gpu_names_what_its_capability_gives(node: str) -> None:
    assert load_node(node).device.isa == architecture((9, 0), node) in ARCHITECTURES.values()


def test_both_compilers_target_the_same_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def compiler(command: list[str]) -> str:
        ran.extend(command)
        (tmp_path / "kernel.cubin").write_bytes(b"code")
        return ""

    monkeypatch.setattr(cuda_build, "run_compiler", compiler)
    cuda_build._by_nvcc("nvcc", "sm_90a", [*cuda_build.FLAGS], tmp_path)
    assert ran[:5] == [
        "nvcc",
        "-std=c++17",
        "--ptxas-options=-v",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-cubin",
    ]
