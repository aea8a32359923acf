"""The engine on this computer's CPU: the monokernel with one OS thread per block, all ranks in one process."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.engine.sampling import SamplingParams
from twin.engine.toolchain import build_host
from twin.errors import EngineError
from twin.plan import layout as plan_layout
from twin.plan.header import MAX_RANKS, Control, RankMemory, Request, Status, header
from twin.plan.layout import LINE_FLOATS, PAGE_BYTES, layout
from twin.plan.shards import Weights
from twin.plan.types import Execution, Plan, Sampling, StageKind

HUGE_PAGE_BYTES = 2 * 2**20
SENTINEL_WORD = -1  # as a signed integer: all bits set
WAIT_US = 20_000  # between two looks for signals
WATCHDOG_S = 30.0
PROBE_SCALE = 0.02  # spread of a probe's random weights
PROBE_CHUNK = 1 << 20  # random values made; the rest repeats them


@dataclass(frozen=True, slots=True)
class Generation:
    """What one run made, and how long each step took."""

    tokens: list[int]  # a stop token included
    step_ns: NDArray[np.int64]  # [tokens] duration of the step that generated each
    prompt_ns: int  # from the start to the step of the first token
    stop_reason: str  # "length", "stop" or "cancelled"
    trace: NDArray[np.int64] | None = None  # [steps][ranks][blocks][stages][inputs ready, finished] ns since the start


class HostEngine:
    """A plan and its weights, ready to generate. A context manager; not to be used by two threads at once."""

    def __init__(
        self, plan: Plan, weights: Weights | None, *, sanitize: str | None = None, trace: bool = False, watchdog_s: float = WATCHDOG_S
    ) -> None:
        """Without weights (probes), the streams are filled with random numbers."""
        if plan.ranks > MAX_RANKS:
            raise EngineError(f"{plan.ranks} ranks: the kernel addresses at most {MAX_RANKS}; use fewer GPUs or lanes")
        self.plan = plan
        self._trace = trace
        self._watchdog_ns = int(watchdog_s * 1e9)
        self._layout = layout(plan)
        self._library = _load(build_host(header(plan, embedded=False, trace=trace), sanitize=sanitize))
        self._image = plan_layout.image(plan)
        self._control = Control()
        self._workers = plan.ranks * plan.blocks
        self._memory = _Arenas(plan, weights)
        self._progress = np.zeros(self._workers * self._library.twin_progress_bytes(), np.uint8)
        self._blocks = _arena(self._workers * self._library.twin_block_floats(_pointer(self._image)) * 4).view(np.float32)
        self._cores = np.array(sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [], np.int32)
        self._launches = np.array([_launches(plan, stage.operations) for stage in plan.stages], np.int32)
        self._kept: list[Any] = []  # arrays of the present run, which the device holds pointers to
        self._engine: int | None = self._library.twin_open(
            _pointer(self._image), self._memory.ranks, ctypes.byref(self._control), _pointer(self._progress), _pointer(self._blocks),
            _pointer(self._cores), len(self._cores), _pointer(self._launches),
        )  # fmt: skip

    def __enter__(self) -> HostEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Release the device's state; the engine cannot run afterwards."""
        if self._engine is not None:
            self._library.twin_close(self._engine)
            self._engine = None

    def cancel(self) -> None:
        """End the present run at once, keeping what it generated. May be called from a signal handler or another thread."""
        self._control.abort = 1

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
        stop: Iterable[int] = frozenset(),
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Up to `max_tokens` tokens after `prompt`. Ctrl-C returns what was generated so far.

        Raises EngineError for a wrong request, and when the kernel hangs or finds no token to choose.
        """
        self._check(prompt, max_tokens)
        if not sampling.greedy and self.plan.options.sampling is Sampling.GREEDY:
            raise EngineError(
                f"temperature={sampling.temperature}: this plan samples greedily in every block; "
                "plan with sampling=full, or use temperature 0"
            )
        steps = len(prompt) + max_tokens - 1
        request = self._request(prompt, steps, stop)
        request.seed, request.temperature = sampling.seed, sampling.temperature
        request.top_k, request.top_p = min(sampling.top_k, 2**31 - 1), sampling.top_p
        tokens, stamps = np.zeros(steps, np.int32), np.zeros(steps, np.uint64)
        request.tokens, request.stamps = _pointer(tokens), _pointer(stamps)
        trace = self._trace_memory(request, steps)
        cancelled = self._run(request, tokens, on_token)
        made = self._control.emitted
        times = np.concatenate([[self._control.started], stamps[: len(prompt) - 1 + made]]).astype(np.int64)
        if trace is not None:
            trace = np.where(trace > 0, trace.astype(np.int64) - self._control.started, 0)[: len(prompt) - 1 + made]
        return Generation(
            tokens=[int(t) for t in tokens[:made]],
            step_ns=np.diff(times)[len(prompt) - 1 :],
            prompt_ns=int(times[len(prompt) - 1] - times[0]) if made else 0,
            stop_reason="stop" if self._status() is Status.STOP else "cancelled" if cancelled and made < max_tokens else "length",
            trace=trace,
        )

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """[len(tokens), vocab]: the logits after each of the given tokens."""
        self._check(tokens, 1)
        assert self.plan.spec is not None
        request = self._request(tokens, len(tokens), ())
        out = np.full((len(tokens), self.plan.spec.vocab), np.nan, np.float32)
        stamps = np.zeros(len(tokens), np.uint64)
        request.every_position, request.logits, request.stamps = 1, _pointer(out), _pointer(stamps)
        self._trace_memory(request, len(tokens))
        if self._run(request, np.zeros(0, np.int32), None):
            raise EngineError("cancelled before all positions were computed")
        return out

    def run_steps(self, steps: int) -> NDArray[np.int64]:
        """Probes: run, and return when the slowest block ended each step, [steps] in ns since the start."""
        request = self._request((), steps, ())
        stamps = np.zeros((steps, self._workers), np.uint64)
        checksums = np.zeros(self._workers, np.float32)
        request.block_stamps, request.checksums = _pointer(stamps), _pointer(checksums)
        request.temperature = 1.0  # a probe of the sampler draws from the whole vocabulary
        self._trace_memory(request, steps)
        if self._run(request, np.zeros(0, np.int32), None):
            raise EngineError(f"cancelled before all {steps} steps of {self.plan.name} were run")
        if not np.isfinite(checksums).all():
            raise EngineError(f"{self.plan.name}: a block computed {checksums}; report this")
        ends: NDArray[np.int64] = stamps.max(axis=1).astype(np.int64) - int(self._control.started)
        return ends

    # ---- one run --------------------------------------------------------------------------------------------

    def _check(self, prompt: Sequence[int], max_tokens: int) -> None:
        if self.plan.spec is None:
            raise EngineError(f"{self.plan.name} is a probe: it generates nothing; use run_probe")
        if not len(prompt):
            raise EngineError("the prompt is empty: give at least one token")
        for at, token in enumerate(prompt):
            if not 0 <= token < self.plan.spec.vocab:
                raise EngineError(f"prompt token {at} is {token}: must lie between 0 and {self.plan.spec.vocab - 1}")
        if max_tokens < 1:
            raise EngineError(f"max_tokens={max_tokens}: must be at least 1")
        limit = self.plan.options.max_context
        if len(prompt) + max_tokens > limit + 1:  # the last token is never read
            raise EngineError(
                f"{len(prompt)} prompt tokens and max_tokens={max_tokens} exceed max_context={limit}: "
                "shorten them, or plan a larger max_context"
            )

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        forced, stops = np.array(prompt, np.int32), np.array(sorted(stop), np.int32)
        self._kept = [forced, stops]
        request = Request(forced=len(forced), steps=steps, stop_count=len(stops), watchdog_ns=self._watchdog_ns, top_p=1.0)
        request.prompt, request.stop = _pointer(forced), _pointer(stops)
        return request

    def _trace_memory(self, request: Request, steps: int) -> NDArray[Any] | None:
        if not self._trace:
            return None
        trace = np.zeros((steps, self.plan.ranks, self.plan.blocks, len(self.plan.stages), 2), np.uint64)
        request.trace = _pointer(trace)
        self._kept.append(trace)
        return trace

    def _run(self, request: Request, tokens: NDArray[np.int32], on_token: Callable[[int], None] | None) -> bool:
        """Start all blocks and stay until they have left. True when the run was cancelled."""
        if self._engine is None:
            raise EngineError("the engine is closed: make a new one")
        self._forget()
        error = self._library.twin_start(self._engine, ctypes.byref(request))
        if error:
            raise EngineError(f"{self._workers} threads cannot be started ({os.strerror(error)}): use fewer blocks")
        told, cancelled = 0, False
        try:
            while True:
                try:
                    left = self._library.twin_wait(self._engine, told, WAIT_US)
                    emitted = self._control.emitted
                    while on_token and told < emitted:
                        told += 1
                        on_token(int(tokens[told - 1]))
                    told = emitted
                except KeyboardInterrupt:
                    cancelled = True
                    self.cancel()
                    continue
                if left and told == self._control.emitted:
                    break
        except BaseException:
            self.cancel()
            raise
        finally:
            self._library.twin_join(self._engine)
        self._raise_failure(request)
        return cancelled or bool(self._control.abort)

    def _forget(self) -> None:
        """Everything that a run leaves behind: hand-offs, counters, progress. Old cache positions are never read."""
        self._memory.clear()
        ctypes.memset(ctypes.byref(self._control), 0, ctypes.sizeof(Control))
        self._progress[:] = 0
        self._blocks[:] = 0

    def _status(self) -> Status:
        return tuple(Status)[int(self._control.status)]

    def _raise_failure(self, request: Request) -> None:
        control = self._control
        if self._status() is Status.NO_TOKEN:
            raise EngineError("the largest logit is not finite, no token can be chosen; check the weights")
        if self._status() is not Status.HUNG:
            return
        stage = self.plan.stages[control.hung_stage].name
        if control.hung_value < 0:
            what = "the grid barrier"
        else:
            what = f"{self.plan.values[control.hung_value].name}, part {control.hung_part}"
            what += f", element {control.hung_element}" if control.hung_element >= 0 else ", its counter"
        raise EngineError(
            f"watchdog: Rank[{control.hung_rank}].Block[{control.hung_block}] waited {request.watchdog_ns / 1e9:g} s in {stage} "
            f"at step {control.hung_step} for {what}; validate the plan, or raise watchdog_s on a slow computer"
        )


def run_probe(plan: Plan, *, steps: int, warmup: int, weights_seed: int = 0) -> NDArray[np.float64]:
    """Seconds of each of `steps` steps of a probe, after `warmup` steps; the slowest block counts."""
    if plan.spec is not None:
        raise EngineError(f"{plan.name} is a model's plan, not a probe: use HostEngine.generate")
    if steps < 1 or warmup < 0:
        raise EngineError(f"steps={steps}, warmup={warmup}: at least 1 step, at least 0 to warm up")
    with HostEngine(plan, None) as engine:
        engine._memory.fill(weights_seed)
        ends = engine.run_steps(warmup + steps)
    return np.diff(np.concatenate([[0], ends]))[warmup:] / 1e9


class _Arenas:
    """The memory of all ranks."""

    def __init__(self, plan: Plan, weights: Weights | None) -> None:
        made = layout(plan)
        self.plan = plan
        self._exchange_floats, self._counters = int(made.sizes["exchange_floats"]), int(made.sizes["counters"])
        self.ranks = (RankMemory * plan.ranks)()
        self._streams, self._exchange, self._counts, self._kept = [], [], [], []
        table = plan_layout.embedding(plan, weights) if weights is not None else np.zeros(1, np.uint8)
        self._kept.append(table)
        for rank, memory in enumerate(self.ranks):
            stream = _arena(int(made.sizes["stream_pages"]) * PAGE_BYTES)
            constants = np.zeros(1, np.float32)
            if weights is not None:
                plan_layout.pack(plan, weights, rank, stream)
                constants = _aligned(plan_layout.pack_constants(plan, weights, rank))
            exchange = _arena(self._exchange_floats * 4).view(np.int32)
            counters = _arena(self._counters * LINE_FLOATS * 4).view(np.int32)
            kv, probabilities = _arena(_kv_bytes(plan)), _arena(_probability_floats(plan) * 4)
            self._streams.append(stream)
            self._exchange.append(exchange)
            self._counts.append(counters)
            self._kept += [constants, kv, probabilities]
            memory.stream, memory.embedding, memory.constants = _pointer(stream), _pointer(table), _pointer(constants)
            memory.exchange, memory.counters = _pointer(exchange), _pointer(counters)
            memory.kv, memory.probabilities = _pointer(kv), _pointer(probabilities)

    def clear(self) -> None:
        for exchange, counters in zip(self._exchange, self._counts, strict=True):
            exchange[:] = SENTINEL_WORD
            counters[:] = 0

    def fill(self, seed: int) -> None:
        """Random weights for a probe: the values do not matter, but denormals would."""
        values = np.random.default_rng(seed).standard_normal(PROBE_CHUNK, np.float32) * np.float32(PROBE_SCALE)
        chunk = values.astype(plan_layout.STORAGE[self.plan.options.weight_dtype]).view(np.uint8)
        for stream in self._streams:
            for lo in range(0, len(stream), len(chunk)):
                stream[lo : lo + len(chunk)] = chunk[: len(stream) - lo]


def _kv_bytes(plan: Plan) -> int:
    stages = sum(s.kind is StageKind.ATTENTION for s in plan.stages)
    rows = stages * plan.shard.kv_heads * plan.kv.splits * plan.kv.item_positions
    return 2 * rows * plan.shard.head_dim * plan.kv.dtype.bytes


def _probability_floats(plan: Plan) -> int:
    """Logits of all ranks and their probabilities."""
    return 2 * plan.ranks * plan.shard.vocab if plan.options.sampling is Sampling.FULL else 0


def _launches(plan: Plan, operations: tuple[str, ...]) -> int:
    """Kernels launched for a stage."""
    return len(operations) if plan.options.execution is Execution.STREAM else 1


def _arena(size: int) -> NDArray[np.uint8]:
    """Zeroed memory on a huge page's border, on huge pages where the system has them."""
    try:
        region = mmap.mmap(-1, max(1, size) + HUGE_PAGE_BYTES)
    except OSError as error:
        raise EngineError(
            f"{size / 1e9:.1f} GB of memory cannot be had ({error.strerror}): choose a smaller model or max_context"
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


def _pointer(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _load(path: os.PathLike[str]) -> ctypes.CDLL:
    library = ctypes.CDLL(os.fspath(path))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.twin_block_floats.argtypes, library.twin_block_floats.restype = [pointer], ctypes.c_long
    library.twin_progress_bytes.argtypes, library.twin_progress_bytes.restype = [], ctypes.c_long
    library.twin_open.argtypes = [pointer, pointer, pointer, pointer, pointer, pointer, number, pointer]
    library.twin_open.restype = pointer
    library.twin_start.argtypes, library.twin_start.restype = [pointer, pointer], number
    library.twin_wait.argtypes, library.twin_wait.restype = [pointer, number, number], number
    library.twin_join.argtypes, library.twin_join.restype = [pointer], None
    library.twin_close.argtypes, library.twin_close.restype = [pointer], None
    return library
