"""The engine on this computer's CPU: the monokernel with one OS thread per block, all ranks in one
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.engine.filling import coded_pieces
from twin.engine.generation import Generation
from twin.engine.session import (
    Session,
    address,
    random_pattern,
)
from twin.errors import EngineError
from twin.kernel.draft_head import packed_head
from twin.kernel.header import SENTINEL_WORD, Control, RankMemory, Request, header
from twin.kernel.packing import embedding, pack
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.plan.options import Execution
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS
from twin.toolchain import build_host

__all__ = ["Generation", "HostEngine"]

HUGE_PAGE_BYTES = 2 * 2**20
WAIT_US = 20_000  # between two looks for signals
WATCHDOG_S = 30.0


class HostEngine(Session):
    """A plan and its weights on this computer's cores."""

    gives_logits = True

    def __init__(
        self,
        plan: Plan,
        weights: Weights | None,
        *,
        sanitize: str | None = None,
        trace: bool = False,
        watchdog_s: float = WATCHDOG_S,
    ) -> None:
        """Without weights (probes), the streams are filled with random numbers."""
        super().__init__(plan, trace=trace, watchdog_s=watchdog_s)
        self._library = _load(
            build_host(header(plan, embedded=False, trace=trace), sanitize=sanitize)
        )
        self._image = layout(plan).image()
        self._control = Control()
        self._workers = plan.ranks * plan.blocks
        self._memory = _Arenas(plan, weights)
        self._progress = np.zeros(self._workers * self._library.twin_progress_bytes(), np.uint8)
        self._blocks = _arena(
            self._workers * self._library.twin_block_floats(address(self._image)) * 4
        ).view(np.float32)
        self._cores = np.array(
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [], np.int32
        )
        self._launches = np.array(
            [_launches(plan, stage.operations) for stage in plan.stages], np.int32
        )
        self._kept: list[Any] = []  # arrays of the present run, which the device holds pointers to
        self._engine: int | None = self._library.twin_open(
            address(self._image),
            self._memory.ranks,
            ctypes.byref(self._control),
            address(self._progress),
            address(self._blocks),
            address(self._cores),
            len(self._cores),
            address(self._launches),
        )

    def _close(self) -> None:
        if self._engine is not None:
            self._library.twin_close(self._engine)
            self._engine = None

    # ---- one run ---------------------------------------------------------------------------------

    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        made = np.zeros(shape, dtype)
        self._kept.append(made)
        return made

    def _give(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return address(array)

    def _write_constants(self, at: int, vector: NDArray[np.float32]) -> None:
        self._memory.write_constants(at, vector)

    def fill_random(self, seed: int) -> None:
        self._memory.fill(seed)

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        self._kept = []
        return super()._request(prompt, steps, stop)

    def _start(self, request: Request) -> None:
        if self._engine is None:
            raise EngineError("the engine is closed: make a new one")
        self._forget()
        error = self._library.twin_start(self._engine, ctypes.byref(request))
        if error:
            raise EngineError(
                f"{self._workers} threads cannot be started ({os.strerror(error)}): use fewer "
                "blocks"
            )

    def _wait(self, seen: int) -> bool:
        return bool(self._library.twin_wait(self._engine, seen, WAIT_US))

    def _join(self) -> None:
        self._library.twin_join(self._engine)
        worker = self._library.twin_overrun(self._engine)
        if worker >= 0:
            rank, block = divmod(worker, self.plan.blocks)
            raise EngineError(
                f"Rank[{rank}].Block[{block}] wrote beyond its memory, so no result of this run "
                "counts; report this plan"
            )

    def _forget(self) -> None:
        """Everything that a run leaves behind: hand-offs, counters, progress. Old cache positions
        are never read.
        """
        self._memory.clear()
        ctypes.memset(ctypes.byref(self._control), 0, ctypes.sizeof(Control))
        self._progress[:] = 0
        self._blocks[:] = 0


class _Arenas:
    """The memory of all ranks."""

    def __init__(self, plan: Plan, weights: Weights | None) -> None:
        made = layout(plan)
        self.plan = plan
        self._exchange_floats, self._counters = (
            int(made.sizes["exchange_floats"]),
            int(made.sizes["counters"]),
        )
        self.ranks = (RankMemory * plan.ranks)()
        self._streams, self._exchange, self._counts, self._kept = [], [], [], []
        self.caches: list[NDArray[np.uint8]] = []  # of each rank
        self.constants: list[NDArray[np.float32]] = []  # of each rank; none without weights
        self.prompts: list[NDArray[np.uint8]] = []  # of each rank
        table = embedding(plan, weights) if weights is not None else np.zeros(1, np.uint8)
        self._kept.append(table)
        for rank, memory in enumerate(self.ranks):
            stream = _arena(made.weights.pages * PAGE_BYTES)
            constants = np.zeros(1, np.float32)
            if weights is not None:
                pack(plan, made.weights, weights, rank, stream)
                constants = _aligned(made.constants.pack(weights, rank))
                self.constants.append(constants)
            exchange = _arena(self._exchange_floats * 4).view(np.int32)
            counters = _arena(self._counters * LINE_FLOATS * 4).view(np.int32)
            kv, logits_buffers = _arena(made.cache_bytes), _arena(made.logits_buffers_floats * 4)
            self._streams.append(stream)
            self._exchange.append(exchange)
            self._counts.append(counters)
            prompt = _arena(int(made.sizes["prompt_floats"]) * 4)
            if weights is not None and "draft_vocab" in made.sizes:
                for first, part in packed_head(plan, made.sizes, weights):
                    prompt[4 * first : 4 * first + part.size] = part
            self._kept += [constants, logits_buffers]
            self.prompts.append(prompt)
            self.caches.append(kv)
            memory.prompt = address(prompt)
            memory.stream, memory.embedding, memory.constants = (
                address(stream),
                address(table),
                address(constants),
            )
            memory.exchange, memory.counters = address(exchange), address(counters)
            memory.kv, memory.logits_buffers = address(kv), address(logits_buffers)

    def clear(self) -> None:
        for exchange, counters in zip(self._exchange, self._counts, strict=True):
            exchange.view(np.uint32)[:] = SENTINEL_WORD
            counters[:] = 0

    def write_constants(self, at: int, vector: NDArray[np.float32]) -> None:
        for constants in self.constants:
            constants[at : at + vector.size] = vector.reshape(-1)

    def fill(self, seed: int) -> None:
        pattern = random_pattern(self.plan, seed)
        for stream in self._streams:
            for lo in range(0, len(stream), len(pattern)):
                stream[lo : lo + len(pattern)] = pattern[: len(stream) - lo]
            for piece in coded_pieces(self.plan, seed):
                stream[piece.at : piece.at + piece.size] = np.resize(piece.content, piece.size)


def _launches(plan: Plan, operations: tuple[str, ...]) -> int:
    """Kernels launched for a stage."""
    return len(operations) if plan.options.execution is Execution.LAUNCHES else 1


def _arena(size: int) -> NDArray[np.uint8]:
    """Zeroed memory on a huge page's border, on huge pages where the system has them."""
    try:
        # Private: shared anonymous memory, Python's default, gets no huge pages, and a stream of
        # small ones lost a third of the bandwidth on two cores.
        region = mmap.mmap(
            -1, max(1, size) + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise EngineError(
            f"{size / 1e9:.1f} GB of memory cannot be had ({error.strerror}): choose a smaller "
            "model or max_context"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(region, np.uint8)
    start = -whole.ctypes.data % HUGE_PAGE_BYTES
    return whole[start : start + size]


def _aligned(values: NDArray[np.float32]) -> NDArray[np.float32]:
    out = _arena(values.nbytes).view(np.float32)
    out[:] = values
    return out


def _load(path: os.PathLike[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.twin_block_floats.argtypes, library.twin_block_floats.restype = [pointer], ctypes.c_long
    library.twin_progress_bytes.argtypes, library.twin_progress_bytes.restype = [], ctypes.c_long
    library.twin_open.argtypes = [
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        pointer,
        number,
        pointer,
    ]
    library.twin_open.restype = pointer
    library.twin_start.argtypes, library.twin_start.restype = [pointer, pointer], number
    library.twin_wait.argtypes, library.twin_wait.restype = [pointer, number, number], number
    library.twin_join.argtypes, library.twin_join.restype = [pointer], None
    library.twin_overrun.argtypes, library.twin_overrun.restype = [pointer], number
    library.twin_close.argtypes, library.twin_close.restype = [pointer], None
    return library
