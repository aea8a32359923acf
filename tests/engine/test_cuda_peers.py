"""What the CUDA engine asks of a driver of several GPUs, and what it does when one of them fails.

The driver is a pretended one: its kernels are functions that may keep a GPU busy until the host
aborts, as a kernel does that waits for another GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.fake_driver import CUresult, FakeDriver, answers_at_once
from tests.engine.small_engine import LLAMA
from tests.engine.test_cuda_driver import H200, MADE, PROMPT, Installs
from tests.engine.test_cuda_driver import install as install  # a fixture
from tests.engine.test_cuda_driver import planned as planned_for_one
from twin.engine import cuda
from twin.engine.cuda import CudaEngine
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.kernel.header import START_BARRIER, Control, Status
from twin.models.spec import DType
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Options
from twin.plan.peer_probes import over_gpus
from twin.plan.types import Plan
from twin.schedule.probe import exchange_probe

Act = Callable[["SeveralGpus", int, Any, Control], None]  # GPU, what it was launched with, answers


def answers(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
    if gpu == 0:
        answers_at_once(launch, control)


def waits(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
    """Until the host aborts."""
    fake.busy[gpu] = launch.request.abort


class SeveralGpus(FakeDriver):
    """Calls are of the GPU whose context is current."""

    def __init__(self, gpus: int = 2, act: Act = answers) -> None:
        super().__init__(gpus=gpus)
        self.act = act
        self.current = -1
        self.contexts: dict[str, int] = {}
        self.streams: dict[str, int] = {}
        self.launched: list[tuple[int, int, Any]] = []  # GPU, first rank, launch
        self.busy: dict[int, int] = {}  # until the word at that address is set
        self.broken: set[int] = set()
        self.alone: set[tuple[int, int]] = set()  # who does not reach whom
        self.without_atomics = False
        self.unlike: set[int] = set()
        self.opened: list[tuple[int, int]] = []
        self.enabled_before = False

    def _cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str]:
        self.contexts[f"context-{device}"] = device
        return (f"context-{device}",)

    def _cuCtxSetCurrent(self, context: str) -> tuple[()]:
        self.current = self.contexts[context]
        return ()

    def _cuStreamCreate(self, flags: int) -> tuple[str]:
        name = f"stream-{len(self.streams)}"
        self.streams[name] = self.current
        return (name,)

    def _cuDeviceGetName(self, size: int, device: int) -> tuple[bytes]:
        name = b"Another\0" if device in self.unlike else b"NVIDIA Fake\0"
        return (name.ljust(size, b"\0"),)

    def _cuDeviceCanAccessPeer(self, device: int, other: int) -> tuple[int]:
        return (int((device, other) not in self.alone),)

    def _cuDeviceGetP2PAttribute(self, which: str, device: int, other: int) -> tuple[int]:
        return (int(not self.without_atomics),)

    def cuCtxEnablePeerAccess(self, context: str, flags: int) -> tuple[Any, ...]:
        if self.enabled_before:
            return (CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,)
        self.opened.append((self.current, self.contexts[context]))
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxDisablePeerAccess(self, context: str) -> tuple[Any, ...]:
        self.opened.remove((self.current, self.contexts[context]))
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamQuery(self, stream: str) -> tuple[Any, ...]:
        self.calls.append(("cuStreamQuery", stream))
        gpu = self.streams[stream]
        if gpu in self.broken:
            return (CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        if gpu in self.busy and not ctypes.c_int.from_address(self.busy[gpu]).value:
            return (CUresult.CUDA_ERROR_NOT_READY,)
        self.busy.pop(gpu, None)
        return (CUresult.CUDA_SUCCESS,)

    def _cuMemcpyHtoDAsync(self, to: int, at: int, size: int, stream: str) -> tuple[()]:
        ctypes.memmove(to, at, size)
        return ()

    def _cuMemsetD32Async(self, at: int, value: int, words: int, stream: str) -> tuple[()]:
        ctypes.memset(at, 0, 4) if words == 1 else None
        return ()

    def _cuLaunchKernelEx(self, config: Any, kernel: Any, arguments: int, extra: int) -> tuple[()]:
        at = [ctypes.c_void_p.from_address(arguments + 8 * n).value or 0 for n in range(5)]
        first, last = (ctypes.c_int.from_address(at[n]).value for n in (1, 4))
        launch = cuda.GreedyLaunch.from_address(at[0])
        gpu = self.streams[config.hStream]
        self.launched.append((gpu, first, launch))
        if last:
            self.act(self, gpu, launch, Control.from_address(launch.control))
        return ()


def planned(gpus: int = 2, **chosen: Any) -> Plan:
    return planned_for_one(gpus=gpus, **({"collective": CollectiveKind.PUSH} | chosen))


def opened(plan: Plan | None = None) -> CudaEngine:
    return CudaEngine(plan or planned(), random_weights(LLAMA, 1, DType.FP16))


@pytest.mark.parametrize("gpus", [2, 4])
def test_every_gpu_is_launched_with_its_own_ranks_and_words(install: Installs, gpus: int) -> None:
    fake = SeveralGpus(gpus)
    install(fake)
    with opened(planned(gpus)) as engine:
        assert sorted(fake.opened) == [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
        assert [(gpu, first) for gpu, first, _ in fake.launched] == [(n, n) for n in range(gpus)]
        launches = [launch for _, _, launch in fake.launched]
        for word in (lambda one: one.control, lambda one: one.request.abort):
            assert len({word(launch) for launch in launches}) == gpus
        assert len({launch.request.prompt for launch in launches}) == gpus
        where = {tuple(rank.exchange for rank in launch.ranks[:gpus]) for launch in launches}
        assert len(where) == 1
        assert len(set(where.pop())) == gpus
    assert not fake.held
    assert not fake.opened


@pytest.mark.parametrize("execution", [Execution.RESIDENT, Execution.GRAPH])
def test_the_first_gpu_is_in_use_whenever_the_engine_is_not_at_work(
    install: Installs, execution: Execution
) -> None:
    """torch computes on the current GPU, which an engine must leave the first."""
    fake = SeveralGpus(2)
    install(fake)
    with opened(planned(execution=execution)) as engine:
        assert fake.current == 0
        engine.generate(PROMPT, max_tokens=4)
        assert fake.current == 0
        engine.fill_random(1)
        assert fake.current == 0
    assert fake.current == 0


def test_all_memory_is_cleared_before_the_first_launch_and_all_launched_before_a_wait(
    install: Installs,
) -> None:
    """A word pushed before its place is cleared is lost, and its reader waits forever."""
    fake = SeveralGpus(4)
    install(fake)
    with opened(planned(4)) as engine:
        fake.calls.clear()
        engine.generate(PROMPT, max_tokens=4)
    names = fake.names()
    launches = [at for at, name in enumerate(names) if name == "cuLaunchKernelEx"]
    settled = [at for at, name in enumerate(names) if name == "cuStreamSynchronize"][:4]
    cleared = [at for at, name in enumerate(names) if name == "cuMemsetD32Async"]
    assert len(launches) == 4
    assert max(cleared) < min(settled)
    assert max(settled) < min(launches)
    assert "cuStreamQuery" not in names[: max(launches)]


def test_graphs_of_several_gpus_are_fed_in_turn(install: Installs) -> None:
    """A host that filled the first GPU's queue would never launch what that one waits for."""
    fake = SeveralGpus(2)
    install(fake)
    with opened(planned(execution=Execution.GRAPH)) as engine:
        fake.calls.clear()
        fake.refuse["cuEventQuery"] = CUresult.CUDA_ERROR_NOT_READY  # no step ends meanwhile
        engine.generate(PROMPT, max_tokens=4)
    fed = [fake.streams[call[2]] for call in fake.calls if call[0] == "cuGraphLaunch"]
    assert fed == [0, 1] * 6


def test_each_gpus_times_count_from_its_own_start(install: Installs) -> None:
    """Their clocks differ by more than a run takes."""

    def act(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
        control.started = 1000 * (1 + 5 * gpu)
        blocks = launch.request.block_stamps
        stamps = (ctypes.c_uint64 * (3 * 2 * 4)).from_address(blocks)
        for step in range(3):
            for block in range(4):
                stamps[(step * 2 + gpu) * 4 + block] = control.started + 10 * (step + 1) + block

    install(SeveralGpus(2, act))
    limits = dataclasses.replace(H200, blocks=4)
    options = Options(blocks=4, slot_bytes=1024, ring_slots=2, window_slots=2, copies=6)
    plan = over_gpus(exchange_probe(options, limits, elements=48, stages=6), 2)
    with CudaEngine(plan, None) as engine:
        assert engine.run_steps(3).tolist() == [13, 23, 33]


# ---- what is refused -----------------------------------------------------------------------------


def test_a_missing_gpu_is_named_with_how_many_there_are(install: Installs) -> None:
    install(SeveralGpus(2))
    with pytest.raises(EngineError, match=r"gpus=4 from GPU 0 on: this computer has 2; plan with"):
        opened(planned(4))


def test_gpus_of_two_kinds_are_refused(install: Installs) -> None:
    fake = SeveralGpus(2)
    fake.unlike = {1}
    install(fake)
    with pytest.raises(EngineError, match=r"GPU 0 is NVIDIA Fake with .* and GPU 1 Another with"):
        opened()


def test_gpus_that_do_not_reach_each_other_are_named_before_anything_is_held(
    install: Installs,
) -> None:
    fake = SeveralGpus(4)
    fake.alone = {(2, 1)}
    install(fake)
    with pytest.raises(EngineError, match=r"GPU 2 cannot reach the memory of GPU 1 \(no peer acc"):
        opened(planned(4))
    assert not fake.held
    assert "cuDevicePrimaryCtxRetain" not in fake.names()


@pytest.mark.parametrize("chosen", [{"handoff": HandOffKind.COUNTER}, {"prompt_chunk": 16}])
def test_counters_need_atomics_between_gpus_and_sentinels_do_not(
    install: Installs, chosen: dict[str, Any]
) -> None:
    fake = SeveralGpus(2)
    fake.without_atomics = True
    install(fake)
    with pytest.raises(EngineError, match="no atomic operations in the memory of GPU"):
        opened(planned(**chosen))
    with opened() as engine:
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE


def test_access_that_another_library_opened_stays_open(install: Installs) -> None:
    fake = SeveralGpus(2)
    fake.enabled_before = True
    install(fake)
    with opened() as engine:
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert not fake.opened  # nothing was closed that was not opened here


# ---- what fails while it runs --------------------------------------------------------------------


def test_a_gpu_that_cannot_be_launched_ends_those_that_wait_for_it(install: Installs) -> None:
    def act(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
        waits(fake, gpu, launch, control)
        fake.refuse["cuLaunchKernelEx"] = CUresult.CUDA_ERROR_UNKNOWN

    fake = SeveralGpus(2, act)
    install(fake)
    with opened() as engine:
        with pytest.raises(EngineError, match="cuLaunchKernelEx failed: CUDA_ERROR_UNKNOWN"):
            engine.generate(PROMPT, max_tokens=4)
        assert not fake.busy
        fake.refuse.clear()
        fake.act = answers
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE
    assert not fake.held


def test_a_gpu_that_dies_is_named_and_the_others_are_aborted(install: Installs) -> None:
    def act(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
        fake.broken.add(1)
        waits(fake, gpu, launch, control)

    fake = SeveralGpus(2, act)
    install(fake)
    with opened() as engine:
        with pytest.raises(
            EngineError, match=r"GPU 1 of 2: the kernel failed: .*ILLEGAL_ADDRESS \(code 700\)"
        ):
            engine.generate(PROMPT, max_tokens=4)
        assert 0 not in fake.busy
        with pytest.raises(EngineError, match="closed"):
            engine.generate(PROMPT, max_tokens=4)
    fake.broken.clear()
    fake.busy.clear()
    fake.act = answers
    with opened() as engine:  # the process goes on
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE


def fails_at(gpu_of_failure: int, *, value: int, part: int) -> Act:
    """That GPU's watchdog speaks, the others wait."""

    def act(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
        if gpu != gpu_of_failure:
            return waits(fake, gpu, launch, control)
        control.status = list(Status).index(Status.HUNG)
        control.hung_rank, control.hung_block, control.hung_stage = gpu, 5, 7
        control.hung_value, control.hung_part, control.hung_element = value, part, 3
        control.abort = 1
        return None

    return act


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (4, r"watchdog: Rank\[1\]\.Block\[5\] waited 10 s in .*, part 0, element 3; "),
        (START_BARRIER, r"GPU 1 of this plan waited 5 s for GPU 0 of it to start; end other"),
    ],
)
def test_what_a_later_gpus_watchdog_said_is_reported_and_the_next_request_runs(
    install: Installs, value: int, said: str
) -> None:
    fake = SeveralGpus(2, fails_at(1, value=value, part=0))
    install(fake)
    with opened() as engine:
        with pytest.raises(EngineError, match=said):
            engine.generate(PROMPT, max_tokens=4)
        assert not fake.busy
        fake.act = answers
        assert engine.generate(PROMPT, max_tokens=4).tokens == MADE


def test_a_gpu_that_does_not_leave_is_said_and_gives_the_process_back(
    install: Installs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "LEAVE_S", 0.05)

    def act(fake: SeveralGpus, gpu: int, launch: Any, control: Control) -> None:
        word = ctypes.c_int(0)  # nobody ever sets it
        fake.busy[gpu] = ctypes.addressof(word)
        fake.kept = word  # type: ignore[attr-defined]
        control.abort = 1

    install(SeveralGpus(2, act))
    with (
        opened() as engine,
        pytest.raises(EngineError, match=r"did not end 0\.05 s after the request"),
    ):
        engine.generate(PROMPT, max_tokens=4)
