"""The AMD engine on a runtime library without a GPU: hip-python calls it as it calls ROCm's. Which
calls are made, what a kernel is given, what is said and given back when one of them fails.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from tests.engine import code_object
from tests.engine.hip_runtime import (
    COMPUTE_UNITS,
    ILLEGAL_ADDRESS,
    OUT_OF_MEMORY,
    Runtime,
    Started,
    answers_at_once,
    arguments_after,
    installed,
    runs_until_aborted,
)
from tests.engine.small_engine import LLAMA, after_the_first, run_script
from tests.gfx942.small import small
from twin.engine import choose, hip
from twin.engine.cuda import GreedyLaunch
from twin.engine.hip import HipEngine
from twin.engine.hip_build import HipReport
from twin.engine.opening import plan_run
from twin.engine.weights import random_weights
from twin.errors import EngineError, ToolchainError
from twin.hardware.load import load_node
from twin.kernel.header import SENTINEL_WORD, Control
from twin.models.spec import DType
from twin.plan.options import CollectiveKind, Execution
from twin.plan.types import Plan
from twin.schedule.options import default_options

PROMPT, MADE = [1, 2, 3], [3, 4, 5, 6]
TWO: dict[str, Any] = {"gpus": 2, "collective": CollectiveKind.PUSH}
CODE = code_object.pretended(arguments_after(GreedyLaunch))

Opens = Callable[[Runtime], Runtime]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    """Makes a runtime the one that hip-python calls, and the compiler one that says what it
    compiles for.
    """

    def compiled(plan: Plan, arch: str, *, trace: bool) -> HipReport:
        return HipReport(
            arch, vgprs=1, vgpr_spills=0, scratch_bytes=0, lds_bytes=1, code_object=CODE
        )

    monkeypatch.setattr(hip, "cached_code_object", compiled)
    with ExitStack() as stack:
        yield lambda runtime: stack.enter_context(installed(runtime))


def opened(**chosen: Any) -> HipEngine:
    plan = small(**chosen)
    assert plan.spec is not None
    return HipEngine(plan, random_weights(plan.spec, 1, DType.FP16))


# ---- what a session calls ------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_session_generates_and_gives_everything_back(install: Opens, gpus: int) -> None:
    runtime = install(Runtime(gpus=gpus))
    with opened(**(TWO if gpus > 1 else {})) as engine:
        for _ in range(2):
            assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert (runtime.held, runtime.handles, runtime.mistakes) == ({}, {}, [])


def test_a_session_calls_the_runtime_in_this_order(install: Opens) -> None:
    runtime = install(Runtime())
    with opened() as engine:
        opening = len(runtime.calls)
        engine.generate(PROMPT, max_tokens=4)
    names = [name for name, _ in _runs(runtime.names())]
    assert names[:8] == [
        "hipInit",
        "hipGetDeviceCount",
        "hipDeviceGet",
        "hipGetDeviceProperties",
        "hipSetDevice",
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    ]
    run = [name for name in runtime.names()[opening:] if not name.startswith("hipHost")]
    at = run.index("hipModuleLaunchCooperativeKernel")
    assert run[at - 3 : at] == ["hipMemsetD32Async"] * 2 + ["hipSetDevice"]
    assert run[at + 1 : at + 3] == ["hipStreamQuery"] * 2
    assert run.count("hipModuleLaunchCooperativeKernel") == 1
    assert run[-1] == "hipModuleUnload"


def _runs(names: list[str]) -> list[tuple[str, int]]:
    """Names with how often each stands in a row."""
    found: list[tuple[str, int]] = []
    for name in names:
        if found and found[-1][0] == name:
            found[-1] = (name, found[-1][1] + 1)
        else:
            found.append((name, 1))
    return found


def test_a_kernel_is_given_its_ranks_its_words_and_clean_memory(install: Opens) -> None:
    """On each GPU: peers' memory, an abort word of its own, sentinels in what is exchanged."""
    seen: list[Started] = []

    def looks(started: Any) -> int:
        for one in started:
            launch, memory = one.launch, one.launch.ranks[one.first_rank]
            held = {
                name: runtime.of(getattr(memory, name))
                for name, _ in memory._fields_
                if getattr(memory, name)
            }
            assert {held[name].device for name in held} == {one.device}
            assert [held[name].kind for name in ("exchange", "counters")] == ["fine", "fine"]
            assert [held[name].kind for name in ("stream", "kv")] == ["device", "device"]
            assert (held["exchange"].array.view(np.uint32) == SENTINEL_WORD).all()
            assert not held["counters"].array.any()
            assert runtime.of(launch.control).kind == "host"
            abort = runtime.of(launch.request.abort)
            assert (abort.kind, abort.device) == ("fine", one.device)
            prompt = (ctypes.c_int32 * launch.request.forced).from_address(launch.request.prompt)
            assert list(prompt) == PROMPT
            assert (one.dies == -1).all()
            assert (one.reported == -1).all()
            assert runtime.of(one.reported.ctypes.data).device == one.device
            one.reported[:] = 0  # as blocks leave them
        seen.extend(started)
        return answers_at_once(started)

    runtime = install(Runtime(gpus=2, kernel=looks))
    with opened(**TWO) as engine:
        plan = engine.plan
        for _ in range(2):
            engine.generate(PROMPT, max_tokens=4)
    assert [(one.device, one.first_rank) for one in seen] == [(0, 0), (1, 1)] * 2
    assert {(one.blocks, one.threads) for one in seen} == {(plan.blocks, 512)}
    assert runtime.seen == {(0, 1), (1, 0)}


def test_exchanged_words_of_one_gpu_stay_in_its_caches(install: Opens) -> None:
    runtime = install(Runtime())
    with opened():
        assert len(runtime.calls_of("hipExtMallocWithFlags")) == 1, "the abort word alone"


def test_where_the_blocks_ran_is_what_they_said(install: Opens) -> None:
    install(Runtime())
    with opened(blocks=16) as engine:
        engine.generate(PROMPT, max_tokens=4)
        (places,) = engine.places
    assert places.dies == tuple(block % 8 for block in range(16))
    assert places.round_robin
    places.check(8)


# ---- the end of a run ----------------------------------------------------------------------------


def test_a_cancelled_run_tells_every_gpu_to_leave(install: Opens) -> None:
    def begins(started: Any) -> int:
        Control.from_address(started[0].launch.control).emitted = 1
        return runs_until_aborted(started)

    runtime = install(Runtime(gpus=2, kernel=begins))
    with opened(**TWO) as engine:
        made = engine.generate(PROMPT, max_tokens=4, on_token=after_the_first(engine.cancel))
        assert made.stop_reason == "cancelled"
        runtime.kernel = answers_at_once
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert (runtime.held, runtime.mistakes) == ({}, [])


def test_a_kernel_that_does_not_leave_is_reported(
    install: Opens, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twin.engine import cuda

    monkeypatch.setattr(cuda, "LEAVE_S", 0.01)

    def stays(started: Any) -> int:
        Control.from_address(started[0].launch.control).abort = 1
        return 600

    install(Runtime(kernel=stays))
    engine = opened()
    with pytest.raises(EngineError, match=r"did not end 0.01 s after the request"):
        engine.generate(PROMPT, max_tokens=4)
    with pytest.raises(EngineError, match="closed"):
        engine.generate(PROMPT, max_tokens=4)


def test_the_watchdogs_report_is_passed_on(install: Opens) -> None:
    def hangs(started: Any) -> int:
        control = Control.from_address(started[0].launch.control)
        control.status, control.hung_value, control.hung_part, control.abort = 3, 0, 0, 1
        return runs_until_aborted(started)

    runtime = install(Runtime(kernel=hangs))
    with opened() as engine, pytest.raises(EngineError, match=r"watchdog: Rank\[0\].Block\[0\]"):
        engine.generate(PROMPT, max_tokens=4)
    assert (runtime.held, runtime.mistakes) == ({}, [])


# ---- calls that fail -----------------------------------------------------------------------------

OPENING = (
    "hipInit",
    "hipGetDeviceCount",
    "hipDeviceGet",
    "hipGetDeviceProperties",
    "hipSetDevice",
    "hipModuleLoadData",
    "hipModuleGetFunction",
    "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
    "hipStreamCreateWithFlags",
    "hipHostMalloc",
    "hipHostGetDevicePointer",
    "hipExtMallocWithFlags",
    "hipDeviceCanAccessPeer",
    "hipDeviceEnablePeerAccess",
    "hipMalloc",
    "hipMemsetD8",
    "hipMemcpyHtoD",
)
ONCE = ("hipInit", "hipGetDeviceCount")  # of a session
RUNNING = (
    "hipSetDevice",
    "hipMalloc",
    "hipHostMalloc",
    "hipMemcpyHtoD",
    "hipMemsetD32Async",
    "hipModuleLaunchCooperativeKernel",
    "hipStreamSynchronize",
)
CLOSING = ("hipFree", "hipStreamDestroy", "hipModuleUnload", "hipHostFree")


@pytest.mark.parametrize(
    ("name", "nth"),
    [(name, nth) for name in OPENING for nth in ((1,) if name in ONCE else (1, 2))],
)
def test_a_refusal_while_opening_names_the_call_and_nothing_is_held(
    install: Opens, name: str, nth: int
) -> None:
    runtime = install(Runtime(gpus=2))
    runtime.refuse(name, nth=nth)
    with pytest.raises(
        EngineError, match=rf"{name} failed: hipErrorUnknown \(code 999\); report this"
    ):
        opened(**TWO)
    assert (runtime.held, runtime.handles, runtime.mistakes) == ({}, {}, [])
    with opened(**TWO) as engine:
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("name", RUNNING)
def test_a_refusal_during_a_request_ends_that_request_alone(
    install: Opens, name: str, nth: int
) -> None:
    runtime = install(Runtime(gpus=2, kernel=runs_or_leaves))
    with opened(**TWO) as engine:
        engine.generate(PROMPT, max_tokens=4)  # whose memory does for a request as large
        runtime.refuse(name, nth=nth)
        with pytest.raises(EngineError, match=rf"{name} failed: hipErrorUnknown \(code 999\)"):
            engine.generate(PROMPT * 4, max_tokens=20)
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert (runtime.held, runtime.handles, runtime.mistakes) == ({}, {}, [])


def test_a_request_takes_the_memory_of_the_one_before(install: Opens) -> None:
    runtime = install(Runtime())
    with opened() as engine:
        engine.generate(PROMPT, max_tokens=4)
        before = len(runtime.calls)
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    again = runtime.names()[before:]
    assert not {"hipMalloc", "hipHostMalloc"} & {*again}
    assert "hipHostFree" not in again[: again.index("hipStreamSynchronize")]


def runs_or_leaves(started: Any) -> int:
    """A GPU without its peer waits until the host aborts."""
    return answers_at_once(started) if len(started) == 2 else runs_until_aborted(started)


@pytest.mark.parametrize("name", CLOSING)
def test_a_refusal_while_closing_keeps_nothing_else(install: Opens, name: str) -> None:
    runtime = install(Runtime(gpus=2))
    engine = opened(**TWO)
    runtime.refuse(name)
    with pytest.raises(EngineError, match=rf"{name} failed"):
        engine.close()
    kept = len(runtime.held) + len(runtime.handles)
    assert (kept, runtime.mistakes) == (1, []), "what could not be given back"
    engine.close()


def test_memory_that_is_not_there_is_said_with_what_to_do(install: Opens) -> None:
    runtime = install(Runtime())
    runtime.refuse("hipMalloc", OUT_OF_MEMORY)
    with pytest.raises(
        EngineError, match=r"hipErrorOutOfMemory \(code 2\); end other programs on this GPU"
    ):
        opened()


def test_a_kernel_that_fails_closes_the_engine(install: Opens) -> None:
    install(Runtime(kernel=lambda started: ILLEGAL_ADDRESS))
    with opened() as engine:
        with pytest.raises(
            EngineError,
            match=r"the kernel failed: hipStreamQuery failed: hipErrorIllegalAddress \(code 700\); "
            r"this process",
        ):
            engine.generate(PROMPT, max_tokens=4)
        with pytest.raises(EngineError, match="closed"):
            engine.generate(PROMPT, max_tokens=4)


def test_an_error_that_is_newer_than_the_binding_is_said(install: Opens) -> None:
    runtime = install(Runtime())
    runtime.refuse("hipModuleLoadData", 4711)
    with pytest.raises(EngineError, match=r"hipModuleLoadData failed: 4711 .*; install the hip-"):
        opened()


# ---- what is not here ----------------------------------------------------------------------------


def test_a_computer_without_an_amd_gpu_is_refused_with_the_reason(install: Opens) -> None:
    install(Runtime(gpus=0))
    with pytest.raises(
        EngineError, match=r"hipInit failed: hipErrorNoDevice \(code 100\); run on a computer with"
    ):
        choose.amd_gpus()


def test_without_hip_python_the_package_to_install_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(ToolchainError, match="pip install hip-python"):
        choose.amd_gpus()


def test_without_rocm_the_refusal_wants_its_folder() -> None:
    """In a process of its own: hip-python keeps the library that it has found."""
    pytest.importorskip("hip", reason="hip-python is not installed (extra 'amd')")
    script = """
from twin.engine.hip_driver import open_hip
from twin.errors import EngineError
try:
    open_hip().count()
except EngineError as error:
    print(error)
"""
    said = run_script(script).stdout
    if not said:
        pytest.skip("ROCm is installed here")
    assert "AMD" in said
    assert "LD_LIBRARY_PATH" in said or "run on a computer with an AMD GPU" in said


@pytest.mark.parametrize("arch", [b"gfx90a:sramecc+:xnack-", b"gfx950", b"gfx1100"])
def test_another_architecture_is_refused_with_what_is_supported(
    install: Opens, arch: bytes
) -> None:
    runtime = install(Runtime(arch=arch))
    said = (
        rf"AMD Instinct Fake is {arch.decode().split(':')[0]}, and the kernel is written for gfx942"
    )
    for ask in (
        opened,
        choose.amd_gpus,
        lambda: choose.check_present(load_node("1xmi300x").device),
    ):
        with pytest.raises(EngineError, match=said):
            ask()
    assert "hipModuleLoadData" not in runtime.names()


def test_the_gpu_that_is_here_is_the_one_that_is_named(install: Opens) -> None:
    install(Runtime())
    choose.check_present(load_node("1xmi300x").device)
    with pytest.raises(
        EngineError, match=r"mi325x has 304 compute units of gfx942 and .* GB. Here GPU 0 is AMD"
    ):
        choose.check_present(load_node("1xmi325x").device)


def test_gpus_that_are_not_here_are_counted(install: Opens) -> None:
    install(Runtime())
    with pytest.raises(EngineError, match="gpus=2: this computer has 1 AMD GPUs"):
        opened(**TWO)


def test_gpus_that_do_not_see_each_other_are_refused(install: Opens) -> None:
    runtime = install(Runtime(gpus=2, peers=False))
    with pytest.raises(EngineError, match="0 cannot see the memory of 1"):
        opened(**TWO)
    assert not runtime.held


def test_blocks_that_cannot_all_be_resident_are_refused(install: Opens) -> None:
    runtime = install(Runtime(fit=0))
    with pytest.raises(EngineError, match=f"cannot be resident: {COMPUTE_UNITS} compute units"):
        opened()
    assert not runtime.held


def test_kernels_for_each_stage_are_refused() -> None:
    with pytest.raises(EngineError, match="execution=graph: AMD GPUs run resident kernels only"):
        HipEngine(small(execution=Execution.GRAPH), None)


def test_plans_read_prompts_token_by_token() -> None:
    node = load_node("1xmi300x")
    plan = plan_run(LLAMA, node, {"blocks": 4}, positions=8, greedy=True)
    assert plan.options.prompt_chunk == default_options(LLAMA, node, blocks=4).prompt_chunk == 1
    assert LLAMA.context
