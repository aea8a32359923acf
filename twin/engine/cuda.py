"""The engine on one NVIDIA GPU: all ranks of the plan share it. Needs the driver and cuda-python, and no toolkit."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.engine.cuda_build import CompileReport, compile_cubin, threads
from twin.engine.session import Generation, Session, address, kv_bytes, probability_floats, probe_seconds, random_chunk
from twin.errors import EngineError, ToolchainError
from twin.kernel import layout as plan_layout
from twin.kernel.header import MAX_RANKS, SENTINEL_WORD, Control, RankMemory, Request
from twin.kernel.layout import LINE_FLOATS, PAGE_BYTES, layout
from twin.plan.shards import Weights
from twin.plan.types import Execution, Plan

__all__ = ["CudaEngine", "Generation", "run_probe"]

WATCHDOG_S = 10.0
WAIT_S = 0.02  # between two looks for signals
NAP_S = 0.0002
LEAVE_S = 5.0  # a kernel that was told to end has this long
STEPS_AHEAD = 16  # graph launches queued beyond the oldest that has not ended: the device never waits for the host


class _Launch(ctypes.Structure):
    """The kernel's argument; cuda_main.cu checks its size. With the tables compiled in, the plan is empty."""

    _fields_ = (("plan", ctypes.c_uint8), ("ranks", RankMemory * MAX_RANKS), ("request", Request), ("control", ctypes.c_void_p))


class CudaEngine(Session):
    """A plan and its weights on one GPU.

    `resident`: one cooperative launch for the whole generation. `graph`: the stages of a step are the kernels of one CUDA
    graph, launched once a step. The other executions are the host's alone.
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

        `random_streams`: a seed; the matrices are filled on the device instead of packed, for runs whose numbers do not matter.
        """
        super().__init__(plan, trace=trace, watchdog_s=watchdog_s)
        if plan.options.gpus > 1:
            raise EngineError(f"gpus={plan.options.gpus}: this engine runs a plan on one GPU; plan with gpus=1")
        if plan.options.execution is Execution.STREAM:
            raise EngineError("execution=stream runs on the host only; plan with execution=resident or graph")
        self._cuda = _driver()
        self.report: CompileReport = compile_cubin(plan, trace=trace)
        self._pinned: dict[int, list[int]] = {0: [], 1: []}  # host memory that the device sees: of the engine, of the present run
        self._scratch: list[int] = []  # device memory of the present run
        self._allocated: list[int] = []
        self._open = False
        self._device = self._call("cuDeviceGet", device)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._open = True
        try:
            self._prepare(weights, random_streams)
        except BaseException:
            self._close()
            raise

    def _prepare(self, weights: Weights | None, random_streams: int | None) -> None:
        self._call("cuCtxSetCurrent", self._context)
        self._module = self._call("cuModuleLoadData", self.report.cubin)
        self._kernel = self._call("cuModuleGetFunction", self._module, b"twin_kernel")
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call("cuFuncSetAttribute", self._kernel, attribute, self.report.shared_bytes)
        self._grid = self.plan.ranks * self.plan.blocks
        self._check_residency()
        self._stream = self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._control = Control.from_address(self._pin(ctypes.sizeof(Control), run=0))
        self._side = self._call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._one = self._pin(4, run=0)
        ctypes.c_int.from_address(self._one).value = 1
        self._abort = self._allocate(4)
        self._launch = _Launch(control=ctypes.addressof(self._control))
        self._streams: list[int] = []
        self._cleared: list[tuple[int, int, int]] = [(self._abort, 1, 0)]  # (address, words, value) that a run starts from
        self._upload(weights, packed=random_streams is None)
        if random_streams is not None:
            self.fill_random(random_streams)

    def _check_residency(self) -> None:
        """All blocks must run at once: one that waits for an unstarted one would wait forever."""
        wide = threads(self.plan)
        fit = self._call("cuOccupancyMaxActiveBlocksPerMultiprocessor", self._kernel, wide, self.report.shared_bytes)
        count = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        multiprocessors = self._call("cuDeviceGetAttribute", count, self._device)
        if fit * multiprocessors < self._grid:
            raise EngineError(
                f"{self._grid} blocks of {wide} threads and {self.report.shared_bytes} bytes of shared memory cannot be resident: "
                f"{multiprocessors} multiprocessors hold {fit} each; plan with blocks={fit * multiprocessors} or a smaller ring"
            )

    # ---- memory ---------------------------------------------------------------------------------------------

    def _upload(self, weights: Weights | None, *, packed: bool) -> None:
        """The memory of all ranks; packed one rank at a time, so the host holds one copy at most."""
        plan, sizes = self.plan, layout(self.plan).sizes
        stream_bytes = int(sizes["stream_pages"]) * PAGE_BYTES
        exchange, counters = int(sizes["exchange_floats"]), int(sizes["counters"]) * LINE_FLOATS
        state = 0 if plan.options.execution is Execution.RESIDENT else plan.blocks * int(sizes["state_floats"])
        table = plan_layout.embedding(plan, weights).reshape(-1).view(np.uint8) if weights is not None else np.zeros(1, np.uint8)
        embedding = self._copied(table)
        for rank in range(plan.ranks):
            memory = self._launch.ranks[rank]
            stream = self._allocate(stream_bytes)
            self._streams.append(stream)
            if weights is not None and packed:
                self._pack(weights, rank, stream)
            if weights is not None:
                memory.constants = self._copied(plan_layout.pack_constants(plan, weights, rank))
            memory.stream, memory.embedding = stream, embedding
            memory.exchange, memory.counters = self._allocate(exchange * 4), self._allocate(counters * 4)
            memory.kv, memory.probabilities = self._allocate(kv_bytes(plan)), self._allocate(probability_floats(plan) * 4)
            memory.prompt = self._allocate(int(sizes["prompt_floats"]) * 4)
            memory.state = self._allocate(state * 4) if state else None
            self._cleared += [(memory.exchange, exchange, SENTINEL_WORD), (memory.counters, counters, 0)]
            if state:
                self._cleared.append((memory.state, state, 0))

    def _pack(self, weights: Weights, rank: int, stream: int) -> None:
        host = np.zeros(int(layout(self.plan).sizes["stream_pages"]) * PAGE_BYTES, np.uint8)
        plan_layout.pack(self.plan, weights, rank, host)
        self._call("cuMemcpyHtoD", stream, address(host), host.nbytes)

    def fill_random(self, seed: int) -> None:
        """A chunk from the host, doubled on the device until each stream is full."""
        chunk = random_chunk(self.plan, seed)
        size = int(layout(self.plan).sizes["stream_pages"]) * PAGE_BYTES
        for stream in self._streams:
            made = min(size, chunk.nbytes)
            self._call("cuMemcpyHtoD", stream, address(chunk), made)
            while made < size:
                more = min(made, size - made)
                self._call("cuMemcpyDtoD", stream + made, stream, more)
                made += more
        self._call("cuCtxSynchronize")

    def _allocate(self, size: int) -> int:
        made = int(self._call("cuMemAlloc", max(16, size)))
        self._allocated.append(made)
        self._call("cuMemsetD8", made, 0, max(16, size))
        return made

    def _copied(self, array: NDArray[Any]) -> int:
        made = self._allocate(array.nbytes)
        self._call("cuMemcpyHtoD", made, address(array), array.nbytes)
        return made

    def _pin(self, size: int, *, run: int) -> int:
        """Page-locked host memory, at the same address on the device."""
        flags = self._cuda.CU_MEMHOSTALLOC_DEVICEMAP | self._cuda.CU_MEMHOSTALLOC_PORTABLE
        made = int(self._call("cuMemHostAlloc", max(16, size), flags))
        self._pinned[run].append(made)
        seen = int(self._call("cuMemHostGetDevicePointer", made, 0))
        if seen != made:
            raise EngineError(f"page-locked memory lies at {made:#x} on the host and {seen:#x} on the device: unified addressing is needed")
        ctypes.memset(made, 0, max(16, size))
        return made

    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        region = (ctypes.c_uint8 * max(1, size)).from_address(self._pin(size, run=1))
        return np.ctypeslib.as_array(region)[:size].view(dtype).reshape(shape)

    def _give(self, array: NDArray[Any]) -> int:
        self._scratch.append(self._copied(array))
        return self._scratch[-1]

    def _forget_run(self) -> None:
        """Give the last run's memory back."""
        for at in self._pinned[1]:
            self._call("cuMemFreeHost", at)
        for at in self._scratch:
            self._allocated.remove(at)
            self._call("cuMemFree", at)
        self._pinned[1], self._scratch = [], []

    # ---- one run --------------------------------------------------------------------------------------------

    def _abort_address(self) -> int:
        return self._abort

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        if not self._open:
            raise EngineError("the engine is closed: make a new one")
        self._call("cuCtxSetCurrent", self._context)
        self._forget_run()
        return super()._request(prompt, steps, stop)

    def _start(self, request: Request) -> None:
        for at, words, value in self._cleared:
            self._call("cuMemsetD32Async", at, value, words, self._stream)
        ctypes.memset(ctypes.addressof(self._control), 0, ctypes.sizeof(Control))
        self._launch.request = request
        self._told_to_leave = 0.0
        self._steps_left = 0
        self._ends: list[Any] = []
        if self.plan.options.execution is Execution.RESIDENT:
            self._launch_kernel(0, len(self.plan.stages), cooperative=True)
        else:
            if request.read:  # the passes' barriers need all blocks at once
                self._launch_kernel(0, 0, cooperative=True)
            self._graph = self._capture()
            self._steps_left = request.steps
        self._queue_steps()

    def _launch_kernel(self, first: int, last: int, *, cooperative: bool) -> None:
        """All steps, or stages first..last-1 of the step that each block has reached, which -1 stands for."""
        numbers = [ctypes.c_int(n) for n in (0, 0 if cooperative else -1, first, last)]
        arguments = (ctypes.c_void_p * 5)(ctypes.addressof(self._launch), *(ctypes.addressof(n) for n in numbers))
        config = self._cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads(self.plan), 1, 1
        config.sharedMemBytes, config.hStream = self.report.shared_bytes, self._stream
        if cooperative:
            attribute = self._cuda.CUlaunchAttribute()
            attribute.id = self._cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.attrs, config.numAttrs = [attribute], 1
        self._call("cuLaunchKernelEx", config, self._kernel, ctypes.addressof(arguments), 0)

    def _capture(self) -> Any:
        """One step as a graph: kernel after kernel."""
        self._call("cuStreamBeginCapture", self._stream, self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        for stage in range(len(self.plan.stages)):
            self._launch_kernel(stage, stage + 1, cooperative=False)
        captured = self._call("cuStreamEndCapture", self._stream)
        graph = self._call("cuGraphInstantiate", captured, 0)
        self._call("cuGraphDestroy", captured)
        return graph

    def _queue_steps(self) -> None:
        """Graph execution: keep the device supplied, until a stop token, a failure or a cancel ends the run."""
        running = not self._control.abort and not self._control.status
        self._steps_left = self._steps_left if running else 0
        while self._ends and self._done("cuEventQuery", self._ends[0]):
            self._call("cuEventDestroy", self._ends.pop(0))
        while self._steps_left and len(self._ends) < STEPS_AHEAD:
            self._call("cuGraphLaunch", self._graph, self._stream)
            self._ends.append(self._call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            self._call("cuEventRecord", self._ends[-1], self._stream)
            self._steps_left -= 1

    def _wait(self, told: int) -> bool:
        end = time.monotonic() + WAIT_S
        while True:
            self._queue_steps()
            if not self._steps_left and self._done("cuStreamQuery", self._stream):
                return True
            self._check_leaving()
            if self._control.emitted > told or time.monotonic() > end:
                return False
            time.sleep(NAP_S)

    def _join(self) -> None:
        self._steps_left = 0
        while not self._done("cuStreamQuery", self._stream):
            self._check_leaving()
            time.sleep(NAP_S)
        self._call("cuStreamSynchronize", self._side)
        for event in self._ends:
            self._call("cuEventDestroy", event)
        self._ends = []
        if self.plan.options.execution is Execution.GRAPH:
            self._call("cuGraphExecDestroy", self._graph)

    def _check_leaving(self) -> None:
        """A kernel that was told to end and stays cannot be ended: only the end of the process frees the device."""
        if not self._control.abort:
            return
        now = time.monotonic()
        if not self._told_to_leave:  # by a copy engine: no multiprocessor is free
            self._call("cuMemcpyHtoDAsync", self._abort, self._one, 4, self._side)
        self._told_to_leave = self._told_to_leave or now
        if now - self._told_to_leave > LEAVE_S:
            self._open = False
            raise EngineError(
                f"the kernel did not end {LEAVE_S:g} s after it was told to; end this process to free the GPU, and report this"
            )

    # ---- the driver -----------------------------------------------------------------------------------------

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._forget_run()
        for at in self._allocated:
            self._call("cuMemFree", at)
        self._allocated = []
        if hasattr(self, "_stream"):
            self._call("cuStreamDestroy", self._stream)
        if hasattr(self, "_side"):
            self._call("cuStreamDestroy", self._side)
        if hasattr(self, "_module"):
            self._call("cuModuleUnload", self._module)
        if hasattr(self, "_control"):
            self._control = Control.from_buffer_copy(self._control)  # what it said stays readable
        for at in self._pinned[0]:
            self._call("cuMemFreeHost", at)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """A driver call; its error becomes an EngineError with the error's name."""
        error, *values = getattr(self._cuda, name)(*arguments)
        if int(error):
            raise EngineError(f"{name} failed: {error.name}")
        return values[0] if len(values) == 1 else tuple(values)

    def _done(self, name: str, what: Any) -> bool:
        error = getattr(self._cuda, name)(what)[0]
        if error == self._cuda.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(error):
            self._open = False  # every later call would fail alike and hide this error
            raise EngineError(f"the kernel failed: {name} says {error.name}; this process cannot use the GPU any more, report this")
        return True


def run_probe(plan: Plan, *, steps: int, warmup: int, weights_seed: int = 0) -> NDArray[np.float64]:
    """Seconds of each of `steps` steps of a probe on the GPU, after `warmup` steps; the slowest block counts."""
    return probe_seconds(plan, lambda: CudaEngine(plan, None), steps=steps, warmup=warmup, weights_seed=weights_seed)


def _driver() -> Any:
    """cuda-python's driver module, initialised."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainError("cuda-python is not installed: pip install cuda-python") from error
    try:
        result = driver.cuInit(0)[0]
    except RuntimeError as error:  # the binding without the driver's library
        raise EngineError(f"no NVIDIA driver can be loaded ({error}); run on a computer with an NVIDIA GPU") from error
    if int(result):
        raise EngineError(f"cuInit failed: {result.name}; run on a computer with an NVIDIA GPU")
    return driver
