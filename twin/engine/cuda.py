"""The engine on NVIDIA GPUs. Needs the driver and cuda-python, and no toolkit.

A session's GPUs are a list, of one process. Each has the ranks that the plan gives it, its own
launch, abort word and control words; a kernel reaches other GPUs' ranks by the addresses in its
launch. What the GPUs owe each other at a start and at an end is in docs/kernel.md, several GPUs.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.engine import peers
from twin.engine.cuda_build import (
    THREADS,
    CompileReport,
    Entry,
    architecture,
    compile_kernels,
)
from twin.engine.driver import open_driver
from twin.engine.filling import coded_pieces
from twin.engine.generation import Generation
from twin.engine.gpu import STEPS_AHEAD, Gpu, Shape
from twin.engine.session import (
    Session,
    random_pattern,
)
from twin.errors import EngineError
from twin.kernel.draft_head import packed_head
from twin.kernel.header import (
    MAX_RANKS,
    SENTINEL_WORD,
    Control,
    DraftingRequest,
    GreedyRequest,
    RankMemory,
    Request,
    Status,
)
from twin.kernel.packing import embedding, pack
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.plan.options import CollectiveKind, Execution, Options
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS

__all__ = ["CudaEngine", "Generation"]

WATCHDOG_S = 10.0
WAIT_S = 0.02  # between two looks for signals
NAP_S = 0.0002  # before the first token, and towards the end
# Between tokens: whoever shows them does so every few milliseconds (docs/server.md), and each look
# costs 40 us of a core.
LONG_NAP_S = 0.002
LEAVE_S = 5.0  # a kernel that has to end has this long
GIVEN = ("prompt", "stop", "chunks")  # of a request: arrays that each GPU has for itself
# what a GPU says of a failure
SAID = ("status", *(name for name, _ in Control._fields_ if name.startswith("hung_")))
FAILED = (Status.HUNG, Status.NO_TOKEN)


def _fields(request: type[GreedyRequest]) -> list[tuple[str, Any]]:
    return [
        ("plan", ctypes.c_uint8),
        ("ranks", RankMemory * MAX_RANKS),
        ("request", request),
        ("control", ctypes.c_void_p),
    ]


class GreedyLaunch(ctypes.Structure):
    """The argument of a greedy plan's kernel; cuda_main.cu checks its size. With the tables
    compiled in, the plan is empty.
    """

    _fields_ = _fields(GreedyRequest)


class DrawingLaunch(ctypes.Structure):
    """The same of a kernel that draws."""

    _fields_ = _fields(Request)


class DraftingLaunch(ctypes.Structure):
    """The same of a plan whose rounds verify drafts."""

    _fields_ = _fields(DraftingRequest)


Launch = GreedyLaunch | DrawingLaunch | DraftingLaunch


def new_launch(options: Options) -> Launch:
    if options.lookup:
        return DraftingLaunch()
    return DrawingLaunch() if options.draws else GreedyLaunch()


@dataclass(slots=True)
class Pace:
    """How long the host may nap: half the time to the last token at most, as fast as tokens came so
    far. The end of an answer is then no later for it.
    """

    most: int  # tokens of the run
    _began_s: float = 0.0  # when the first tokens were seen
    _first: int = 0  # how many they were

    def nap_s(self, seen: int, now_s: float) -> float:
        """`seen`: tokens so far."""
        if seen and not self._first:
            self._began_s, self._first = now_s, seen
        if seen <= self._first:  # no rate yet
            return NAP_S
        left_s = (now_s - self._began_s) / (seen - self._first) * (self.most - seen)
        return min(LONG_NAP_S, max(NAP_S, left_s / 2))


class CudaEngine(Session):
    """A plan and its weights on GPUs.

    `resident`: one cooperative launch for all steps. `graph`: the stages of a step are the kernels
    of one CUDA graph, launched once a step. A prompt's passes are a cooperative launch of their
    own, before either. The other executions are the host's alone.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Weights | None,
        *,
        trace: bool = False,
        watchdog_s: float = WATCHDOG_S,
        device: int = 0,
        random_streams: int | None = None,
    ) -> None:
        """Without weights (probes) the streams wait for `fill_random`.

        `device`: of the first GPU. `random_streams`: a seed; the matrices are filled on the device
        instead of packed, for runs whose numbers do not matter.
        """
        super().__init__(plan, trace=trace, watchdog_s=watchdog_s)
        self.gives_logits = plan.options.draws
        self.drafts_drawn = False  # the kernel draws them, but no GPU has been seen to
        collective = plan.options.collective
        if plan.options.gpus > 1 and collective is not CollectiveKind.PUSH:
            raise EngineError(
                f"collective={collective.value} with gpus={plan.options.gpus}: on NVIDIA GPUs the "
                "kernel itself pushes; plan with collective=push"
            )
        if plan.options.execution is Execution.LAUNCHES:
            raise EngineError(
                "execution=stream runs on the host only; plan with execution=resident or graph"
            )
        driver = open_driver()
        self._gpus = peers.find(driver, device, plan.options.gpus)
        peers.check_reach(plan, self._gpus)
        self._given: dict[int, list[int]] = {}  # by the first GPU's address, those of the others
        first = self._gpus[0]
        self._kernels: dict[Entry, CompileReport] = compile_kernels(
            plan, architecture(first.capability, first.name), trace=trace
        )
        self.report: CompileReport = self._kernels[Entry.STEPS]
        try:
            self._prepare(weights, random_streams)
        except BaseException:
            self._close()
            raise

    def _prepare(self, weights: Weights | None, random_streams: int | None) -> None:
        blocks = self.plan.ranks // len(self._gpus) * self.plan.blocks
        shape = Shape(blocks=blocks, threads=THREADS, shared_bytes=self.report.shared_bytes)
        for gpu in self._gpus:
            gpu.hold()
        peers.connect(self._gpus)
        self._controls: list[Control] = []
        for gpu in self._gpus:
            gpu.use()
            gpu.load(self.report.cubin, shape)
            for entry, report in self._kernels.items():
                if entry is not Entry.STEPS:
                    gpu.load_other(entry.value, report.cubin, shape)
            gpu.open_cuda_streams()
            self._controls.append(Control.from_address(gpu.pin(ctypes.sizeof(Control), run=0)))
        self._control = self._controls[0]  # of the GPU that hands tokens out
        # each GPU is given a copy with its own words
        self._launch = new_launch(self.plan.options)
        self._upload(weights, packed=random_streams is None)
        if random_streams is not None:
            self.fill_random(random_streams)
        self._first_in_use()

    def _first_in_use(self) -> None:
        """Other libraries of this process, such as torch, compute on the GPU that is in use."""
        if self._gpus[0].usable:
            self._gpus[0].use()

    # ---- memory ----------------------------------------------------------------------------------

    def _gpu_of(self, rank: int) -> Gpu:
        return self._gpus[rank // (self.plan.ranks // len(self._gpus))]

    def _upload(self, weights: Weights | None, *, packed: bool) -> None:
        """The memory of all ranks; packed one rank at a time, so the host holds one copy at
        most.
        """
        table = (
            embedding(self.plan, weights).reshape(-1).view(np.uint8)
            if weights is not None
            else np.zeros(1, np.uint8)
        )
        embeddings = {}
        for gpu in self._gpus:
            gpu.use()
            embeddings[gpu] = gpu.copied(table)
        for rank in range(self.plan.ranks):
            gpu = self._gpu_of(rank)
            gpu.use()
            memory = self._launch.ranks[rank]
            memory.stream, memory.embedding = gpu.allocate(self._stream_bytes()), embeddings[gpu]
            if weights is not None and packed:
                self._pack(weights, rank, gpu)
            if weights is not None:
                memory.constants = gpu.copied(layout(self.plan).constants.pack(weights, rank))
            self._allocate_work(gpu, memory, weights)

    def _allocate_work(self, gpu: Gpu, memory: RankMemory, weights: Weights | None) -> None:
        """What a rank computes in."""
        plan, made = self.plan, layout(self.plan)
        sizes = made.sizes
        exchange, counters = int(sizes["exchange_floats"]), int(sizes["counters"]) * LINE_FLOATS
        state = 0 if plan.options.resident else plan.blocks * int(sizes["state_floats"])
        memory.exchange = gpu.allocate_exchanged(exchange * 4)
        memory.counters = gpu.allocate_exchanged(counters * 4)
        memory.kv, memory.logits_buffers = (
            gpu.allocate(made.cache_bytes),
            gpu.allocate_exchanged(made.logits_buffers_floats * 4),
        )
        memory.prompt = gpu.allocate(int(sizes["prompt_floats"]) * 4)
        if weights is not None and "draft_vocab" in sizes:
            for first, part in packed_head(plan, sizes, weights):
                gpu.write(memory.prompt + 4 * first, np.ascontiguousarray(part))
        memory.state = gpu.allocate(state * 4) if state else None
        gpu.cleared += [(memory.exchange, exchange, SENTINEL_WORD), (memory.counters, counters, 0)]
        if state:
            gpu.cleared.append((memory.state, state, 0))

    def _write_constants(self, at: int, vector: NDArray[np.float32]) -> None:
        for rank in range(self.plan.ranks):
            if constants := self._launch.ranks[rank].constants:
                gpu = self._gpu_of(rank)
                gpu.use()
                gpu.write(constants + 4 * at, np.ascontiguousarray(vector))

    def _stream_bytes(self) -> int:
        """Of a rank."""
        return layout(self.plan).weights.pages * PAGE_BYTES

    def _pack(self, weights: Weights, rank: int, gpu: Gpu) -> None:
        host = np.zeros(self._stream_bytes(), np.uint8)
        pack(self.plan, layout(self.plan).weights, weights, rank, host)
        gpu.write(self._launch.ranks[rank].stream, host)

    def fill_random(self, seed: int) -> None:
        """A pattern from the host, doubled on the device until each stream is full; matrices of few
        bits from one layer of them.
        """
        pattern = random_pattern(self.plan, seed)
        for rank in range(self.plan.ranks):
            gpu, stream = self._gpu_of(rank), self._launch.ranks[rank].stream
            gpu.use()
            gpu.repeat(stream, pattern, self._stream_bytes())
            for piece in coded_pieces(self.plan, seed):
                gpu.repeat(stream + piece.at, piece.content, piece.size)
        for gpu in reversed(self._gpus):  # the first one is in use afterwards
            gpu.use()
            gpu.synchronize()

    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return self._gpus[0].zeros(shape, dtype)

    def _give(self, array: NDArray[Any]) -> int:
        at = []
        for gpu in reversed(self._gpus):  # the first one is in use afterwards
            gpu.use()
            at.append(gpu.lent(array))
        self._given[at[-1]] = at[::-1]
        return at[-1]

    # ---- one run ---------------------------------------------------------------------------------

    def _abort_address(self) -> int:
        return self._gpus[0].abort

    def _starts(self) -> NDArray[np.int64]:
        """GPUs have clocks of their own, and all of them note the moment when they met."""
        each = np.array([control.started for control in self._controls], np.int64)
        return np.repeat(each, self.plan.ranks // len(self._gpus))

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        if not all(gpu.usable for gpu in self._gpus):
            raise EngineError("the engine is closed: make a new one")
        for gpu in reversed(self._gpus):  # the first one is in use afterwards
            gpu.use()
            gpu.forget_run()
        return super()._request(prompt, steps, stop)

    def _start(self, request: Request) -> None:
        for gpu in self._gpus:
            gpu.use()
            gpu.clear()
        if len(self._gpus) > 1:  # a word pushed before it is cleared would be lost
            for gpu in self._gpus:
                gpu.use()
                gpu.settle()
        for control in self._controls:
            ctypes.memset(ctypes.addressof(control), 0, ctypes.sizeof(Control))
        self._launches = [self._launch_of(n, request) for n in range(len(self._gpus))]
        self._leaves_since = 0.0
        self._pace = Pace(request.steps - request.forced + 1)
        # the kernel waits for the host
        self._hurries = request.logit_rows > 0 or request.bias_rows > 1
        try:
            self._launch_all(request)
        except BaseException:
            self._control.abort = 1  # those that were launched wait for those that were not
            self._join()
            raise

    def _taken(self) -> None:
        taken = self._control.taken + 1
        for control in self._controls:
            control.taken = taken

    def _biased(self, given: int) -> None:
        for control in self._controls:
            control.biased = given

    def _launch_of(self, number: int, request: Request) -> Launch:
        """What a GPU's kernel is given: where all ranks lie, and words of its own."""
        own = type(self._launch).from_buffer_copy(self._launch)
        own.request = request
        own.request.abort = self._gpus[number].abort
        own.control = ctypes.addressof(self._controls[number])
        for name in GIVEN:
            at = getattr(request, name)
            if at is not None:
                setattr(own.request, name, self._given[at][number])
        return own

    def _launch_all(self, request: Request) -> None:
        """All GPUs, before any is waited for."""
        stages, ranks = len(self.plan.stages), self.plan.ranks // len(self._gpus)
        steps = [(-1, stage, stage + 1) for stage in range(stages)]  # -1: the step it has reached
        every = [
            (gpu, ctypes.addressof(launch), n * ranks)
            for n, (gpu, launch) in enumerate(zip(self._gpus, self._launches, strict=True))
        ]
        resident = self.plan.options.resident
        for gpu, plan, first in () if resident else every:
            gpu.use()
            gpu.capture(plan, [(first, *step) for step in steps], request.steps)
        drafts = isinstance(request, DraftingRequest) and request.drafts > 0
        reads = Entry.PASSES in self._kernels and request.read > request.kept
        for entry in [Entry.PASSES] * reads + [Entry.ROUNDS] * drafts:
            for gpu, plan, first in every:
                gpu.use()  # the barriers of passes, too, need all blocks at once
                gpu.launch(plan, (first, 0, 0, 0), cooperative=True, name=entry.value)
        for gpu, plan, first in every if resident and not drafts else ():
            gpu.use()
            gpu.launch(plan, (first, 0, 0, stages), cooperative=True)
        self._feed()

    def _feed(self) -> None:
        """Graph execution: until a stop token, a failure or a cancel ends the run. GPUs in turn, a
        step each: one whose queue is full of steps that wait for another GPU would keep the host
        from launching that one's.
        """
        running = not self._ended() and not self._control.status
        for ahead in range(1, 1 + STEPS_AHEAD) if len(self._gpus) > 1 else (STEPS_AHEAD,):
            for gpu in self._gpus:
                gpu.feed(running=running, ahead=ahead)

    def _ended(self) -> bool:
        """Does a GPU have to end, or did its kernel fail?"""
        return any(control.abort for control in self._controls)

    def _wait(self, seen: int) -> bool:
        end = time.monotonic() + WAIT_S
        # The driver is queried where the end may be, and where a nap brought no token.
        query = seen == 0 or seen >= self._pace.most or self._control.status != 0
        while True:
            self._feed()
            if self._control.emitted > seen:
                return False
            if query and self._idle():
                return True
            self._check_leaving()
            if time.monotonic() > end:
                return False
            time.sleep(self._nap_s(seen))
            query = True

    def _nap_s(self, seen: int) -> float:
        """Graphs are fed meanwhile, so a long nap is for resident kernels alone."""
        if self._hurries or not self.plan.options.resident:
            return NAP_S
        return self._pace.nap_s(seen, time.monotonic())

    def _idle(self) -> bool:
        """Queries every GPU, also those behind one that runs: it may wait for one that failed."""
        found = []
        for gpu in self._gpus:
            try:
                found.append(gpu.idle())
            except EngineError as error:
                if len(self._gpus) == 1:
                    raise
                raise EngineError(f"GPU {gpu.index} of {len(self._gpus)}: {error}") from error
        return all(found)

    def _join(self) -> None:
        """Of GPUs that failed nobody hears again; the others are awaited, and what one of them
        said of the failure is what is reported.
        """
        healthy = [gpu for gpu in self._gpus if gpu.usable]
        for gpu in healthy:
            gpu.drop_steps()
        while not all(gpu.idle() for gpu in healthy):
            self._check_leaving()
            time.sleep(NAP_S)
        for gpu in healthy:
            gpu.use()
            gpu.end_run()
        self._first_in_use()
        said = next((c for c in self._controls if tuple(Status)[int(c.status)] in FAILED), None)
        if said is not None and said is not self._control:
            for name in SAID:
                setattr(self._control, name, getattr(said, name))

    def _check_leaving(self) -> None:
        """A kernel that has to end and stays cannot be ended: only the end of the process
        frees the device.
        """
        if not self._ended():
            return
        now = time.monotonic()
        if not self._leaves_since:
            for gpu in self._gpus:
                if gpu.usable:
                    gpu.use()
                    gpu.tell_to_leave()
        self._leaves_since = self._leaves_since or now
        if now - self._leaves_since > LEAVE_S:
            for gpu in self._gpus:
                gpu.usable = False
            raise EngineError(
                f"the kernel did not end {LEAVE_S:g} s after the request; end this process to "
                "free the GPU, and report this"
            )

    def _close(self) -> None:
        if hasattr(self, "_control") and any(gpu.usable for gpu in self._gpus):
            self._control = Control.from_buffer_copy(self._control)  # what it said stays readable
        if all(gpu.usable for gpu in self._gpus):  # a context that failed takes no more calls
            for gpu in self._gpus:
                gpu.part()
        for gpu in reversed(self._gpus):  # none is in use that is gone, unless all are
            gpu.close()
