"""One GPU of a session: its context, the kernel's module, its CUDA streams, and the memory that the
session has there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.engine.driver import Driver
from twin.engine.session import address
from twin.errors import EngineError

# graph launches queued beyond the oldest that has not ended: the device never waits for the host
STEPS_AHEAD = 16
STEPS = "twin_kernel"  # the name of every platform's kernel that makes steps
LEAST_BYTES = 16  # of an allocation: the driver has none of zero
# of page-locked memory that former runs had and the next ones may take: more than any run needs
# but for logits of whole prompts
MOST_SPARE_BYTES = 2**26


@dataclass(frozen=True, slots=True)
class Shape:
    """What every launch of a session's kernel has alike."""

    blocks: int
    threads: int  # of a block
    shared_bytes: int  # of a block, requested at its launch
    static_bytes: int = 0  # of a block, on top; the code says so


class Spares:
    """Memory of former runs, in powers of two, for the next ones: a driver takes 0.1 to 1 ms for
    each piece of page-locked memory, and a request has half a dozen.
    """

    def __init__(self) -> None:
        self.held_bytes = 0
        self._sizes: dict[int, int] = {}  # by address, also of those in use
        self._free: dict[int, list[int]] = {}  # by size

    @staticmethod
    def rounded(size: int) -> int:
        """To a power of two; what is too large to be kept stays what it is."""
        return size if size > MOST_SPARE_BYTES else 1 << max(LEAST_BYTES, size - 1).bit_length()

    def take(self, size: int) -> int | None:
        """One of `rounded(size)` bytes, if there is one."""
        found = self._free.get(self.rounded(size))
        if not found:
            return None
        self.held_bytes -= self.rounded(size)
        return found.pop()

    def made(self, at: int, size: int) -> None:
        """A new one, of `rounded(size)` bytes."""
        self._sizes[at] = self.rounded(size)

    def give(self, at: int) -> None:
        size = self._sizes[at]
        self.held_bytes += size
        self._free.setdefault(size, []).append(at)

    def drop(self) -> int | None:
        """The largest one, which the caller returns to the driver; None: there is none."""
        size = max((size for size, found in self._free.items() if found), default=None)
        if size is None:
            return None
        self.held_bytes -= size
        at = self._free[size].pop()
        del self._sizes[at]
        return at


class Gpu:
    """Memory is the session's, or the present run's and the next one's to take.

    `usable` ends with `close` and with the first failure of the kernel: every later call would fail
    alike and hide that one.
    """

    UNITS = "multiprocessors"

    def __init__(self, driver: Driver, index: int) -> None:
        """Looks only: nothing is held before `hold`."""
        self.usable = False
        self.index = index
        self._driver = driver
        self._names = driver.module
        self._device = driver.call("cuDeviceGet", index)
        # host memory that the device sees: of the session, of the present run
        self._pinned: dict[int, list[int]] = {0: [], 1: []}
        self._scratch: list[int] = []  # device memory of the present run
        self._spare_pinned, self._spare_scratch = Spares(), Spares()
        self._allocated: list[int] = []
        self._cuda_streams: list[Any] = []
        self._modules: list[Any] = []
        self._others: dict[str, Any] = {}  # kernels besides that of steps
        self._graph: Any = None
        self._ends: list[Any] = []
        self._steps_left = 0
        self._reached: list[Gpu] = []  # whose memory this session opened to it
        # (address, words, value) that a run starts from
        self.cleared: list[tuple[int, int, int]] = []

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, major and minor."""
        names = ("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        major, minor = (self._attribute(name) for name in names)
        return major, minor

    @property
    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    @property
    def name(self) -> str:
        found: bytes = self._call("cuDeviceGetName", 100, self._device)
        return found.split(b"\0")[0].decode()

    @property
    def memory_bytes(self) -> int:
        return int(self._call("cuDeviceTotalMem", self._device))

    def hold(self) -> None:
        """Take the context, which other libraries of this process share."""
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self.usable = True

    def use(self) -> None:
        """Calls of this thread are for this GPU."""
        self._call("cuCtxSetCurrent", self._context)

    # ---- other GPUs ------------------------------------------------------------------------------

    def reaches(self, other: Gpu) -> bool:
        """May this GPU write the other one's memory?"""
        return bool(self._call("cuDeviceCanAccessPeer", self._device, other._device))

    def counts_at(self, other: Gpu) -> bool:
        """Has it atomic operations there?"""
        kind = self._names.CUdevice_P2PAttribute
        native = kind.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        return bool(self._call("cuDeviceGetP2PAttribute", native, self._device, other._device))

    def reach(self, other: Gpu) -> None:
        """Open the other one's memory to this GPU, in whose context the caller is. Another library
        of this process may have done so, and will close it.
        """
        if self._driver.unless(
            "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "cuCtxEnablePeerAccess", other._context, 0
        ):
            self._reached.append(other)

    def part(self) -> None:
        """Close what `reach` opened, before any of the GPUs is closed."""
        self.use()
        while self._reached:
            self._call("cuCtxDisablePeerAccess", self._reached.pop()._context)

    def load(self, code: bytes, shape: Shape) -> None:
        """The kernel. All its blocks must run at once: one that waits for an unstarted one would
        wait forever.
        """
        self._kernel = self._function(code, STEPS.encode(), shape)

    def load_other(self, name: str, code: bytes, shape: Shape) -> None:
        """A kernel of a launch of its own, of the same shape."""
        self._others[name] = self._function(code, name.encode(), shape)

    def _function(self, code: bytes, name: bytes, shape: Shape) -> Any:
        self._shape = shape
        self._modules.append(self._call("cuModuleLoadData", code))
        function = self._call("cuModuleGetFunction", self._modules[-1], name)
        if shape.shared_bytes:
            limit = self._names.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call("cuFuncSetAttribute", function, limit, shape.shared_bytes)
        fit = int(
            self._call(
                "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                function,
                shape.threads,
                shape.shared_bytes,
            )
        )
        count = self.multiprocessors
        if fit * count < shape.blocks:
            raise EngineError(
                f"{shape.blocks} blocks of {shape.threads} threads and "
                f"{shape.shared_bytes + shape.static_bytes} bytes of shared memory cannot be "
                f"resident: {count} {self.UNITS} hold {fit} each; "
                f"plan with blocks={fit * count} or a smaller ring"
            )
        return function

    def open_cuda_streams(self) -> None:
        """One for the kernel, one for words that must reach it while it runs."""
        self._cuda_stream = self._new_cuda_stream()
        self._side = self._new_cuda_stream()
        self._one = self.pin(4, run=0)
        ctypes.c_int.from_address(self._one).value = 1
        self.abort = self._allocate_written(4)
        self.cleared.append((self.abort, 1, 0))

    def close(self) -> None:
        """Give everything back; the words that the kernel left in page-locked memory must have been
        read.
        """
        if not self.usable:
            return
        self.use()
        self.usable = False
        self.forget_run(most=0)
        for at in self._allocated:
            self._call("cuMemFree", at)
        self._allocated = []
        for cuda_stream in self._cuda_streams:
            self._call("cuStreamDestroy", cuda_stream)
        for module in self._modules:
            self._call("cuModuleUnload", module)
        for at in self._pinned[0]:
            self._call("cuMemFreeHost", at)
        self._call("cuDevicePrimaryCtxRelease", self._device)

    # ---- memory ----------------------------------------------------------------------------------

    def allocate(self, size: int) -> int:
        """Device memory of zeros, of the session."""
        made = int(self._call("cuMemAlloc", max(LEAST_BYTES, size)))
        self._allocated.append(made)
        self._call("cuMemsetD8", made, 0, max(LEAST_BYTES, size))
        return made

    def write(self, at: int, array: NDArray[Any], size: int | None = None) -> None:
        self._call("cuMemcpyHtoD", at, address(array), array.nbytes if size is None else size)

    def _allocate_written(self, size: int) -> int:
        """The same, of words that the host writes while a kernel runs."""
        return self.allocate(size)

    def allocate_exchanged(self, size: int) -> int:
        """The same, of words that GPUs exchange."""
        return self.allocate(size)

    def copied(self, array: NDArray[Any]) -> int:
        """Device memory that holds `array`, of the session."""
        made = self.allocate(array.nbytes)
        self.write(made, array)
        return made

    def lent(self, array: NDArray[Any]) -> int:
        """The same, of the present run."""
        at = self._spare_scratch.take(array.nbytes)
        if at is None:
            at = self.allocate(Spares.rounded(array.nbytes))
            self._spare_scratch.made(at, array.nbytes)
        self._scratch.append(at)
        self.write(at, array)
        return at

    def repeat(self, at: int, pattern: NDArray[np.uint8], size: int) -> None:
        """Fill `size` bytes with a pattern from the host, doubled on the device until they are
        full.
        """
        made = min(size, pattern.nbytes)
        self.write(at, pattern, made)
        while made < size:
            more = min(made, size - made)
            self._call("cuMemcpyDtoD", at + made, at, more)
            made += more

    def pin(self, size: int, *, run: int) -> int:
        """Page-locked host memory, at the same address on the device: of the session (0) or of the
        present run (1).
        """
        made = self._spare_pinned.take(size) if run else None
        if made is None:
            made = self._pinned_new(Spares.rounded(size) if run else max(LEAST_BYTES, size), run)
            if run:
                self._spare_pinned.made(made, size)
        else:
            self._pinned[run].append(made)
        ctypes.memset(made, 0, max(LEAST_BYTES, size))
        return made

    def _pinned_new(self, size: int, run: int) -> int:
        made = self._host_alloc(size)
        self._pinned[run].append(made)
        seen = int(self._call("cuMemHostGetDevicePointer", made, 0))
        if seen != made:
            raise EngineError(
                f"page-locked memory lies at {made:#x} on the host and {seen:#x} on the device: "
                "unified addressing is needed"
            )
        return made

    def _host_alloc(self, size: int) -> int:
        flags = self._names.CU_MEMHOSTALLOC_DEVICEMAP | self._names.CU_MEMHOSTALLOC_PORTABLE
        return int(self._call("cuMemHostAlloc", size, flags))

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """A page-locked array of the present run."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        region = (ctypes.c_uint8 * max(1, size)).from_address(self.pin(size, run=1))
        return np.ctypeslib.as_array(region)[:size].view(dtype).reshape(shape)

    def forget_run(self, most: int = MOST_SPARE_BYTES) -> None:
        """The last run's memory is the next one's to take, and the driver's beyond `most` bytes."""
        while self._pinned[1]:
            self._spare_pinned.give(self._pinned[1].pop())
        while self._scratch:
            self._spare_scratch.give(self._scratch.pop())
        while self._spare_pinned.held_bytes > most and (at := self._spare_pinned.drop()):
            self._call("cuMemFreeHost", at)

    # ---- launches --------------------------------------------------------------------------------

    def clear(self) -> None:
        """What a run starts from, before its first launch."""
        for at, words, value in self.cleared:
            self._call("cuMemsetD32Async", at, value, words, self._cuda_stream)

    def settle(self) -> None:
        """Until what `clear` requested is done."""
        self._call("cuStreamSynchronize", self._cuda_stream)

    def launch(
        self, plan: int, numbers: Sequence[int], *, cooperative: bool, name: str = STEPS
    ) -> None:
        """A kernel by its name: the address of its plan, then its other arguments, all of them
        32-bit integers.
        """
        words = [ctypes.c_int(n) for n in numbers]
        arguments = (ctypes.c_void_p * (1 + len(words)))(
            plan, *(ctypes.addressof(word) for word in words)
        )
        config = self._names.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._shape.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self._shape.threads, 1, 1
        config.sharedMemBytes, config.hStream = self._shape.shared_bytes, self._cuda_stream
        if cooperative:
            attribute = self._names.CUlaunchAttribute()
            attribute.id = self._names.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
            config.attrs, config.numAttrs = [attribute], 1
        kernel = self._kernel if name == STEPS else self._others[name]
        self._call("cuLaunchKernelEx", config, kernel, ctypes.addressof(arguments), 0)

    def capture(self, plan: int, numbers: Sequence[Sequence[int]], steps: int) -> None:
        """One step as a graph, kernel after kernel; `feed` launches it once for each of `steps`."""
        mode = self._names.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._cuda_stream, mode)
        for one in numbers:
            self.launch(plan, one, cooperative=False)
        captured = self._call("cuStreamEndCapture", self._cuda_stream)
        self._graph = self._call("cuGraphInstantiate", captured, 0)
        self._call("cuGraphDestroy", captured)
        self._steps_left = steps

    def feed(self, *, running: bool, ahead: int = STEPS_AHEAD) -> None:
        """Keep the device supplied with `ahead` steps, until the run ends."""
        if not self._steps_left and not self._ends:
            return
        self.use()  # events are made in it
        self._steps_left = self._steps_left if running else 0
        while self._ends and self._done("cuEventQuery", self._ends[0]):
            self._call("cuEventDestroy", self._ends.pop(0))
        while self._steps_left and len(self._ends) < ahead:
            self._call("cuGraphLaunch", self._graph, self._cuda_stream)
            flags = self._names.CUevent_flags.CU_EVENT_DISABLE_TIMING
            self._ends.append(self._call("cuEventCreate", flags))
            self._call("cuEventRecord", self._ends[-1], self._cuda_stream)
            self._steps_left -= 1

    def idle(self) -> bool:
        """Has it ended all that it was given, and is nothing left to give?"""
        return not self._steps_left and self._done("cuStreamQuery", self._cuda_stream)

    def drop_steps(self) -> None:
        """What `feed` has not launched stays so."""
        self._steps_left = 0

    def tell_to_leave(self) -> None:
        """By a copy engine: no multiprocessor is free."""
        self._call("cuMemcpyHtoDAsync", self.abort, self._one, 4, self._side)

    def end_run(self) -> None:
        """After `idle`."""
        self._call("cuStreamSynchronize", self._side)
        for event in self._ends:
            self._call("cuEventDestroy", event)
        self._ends = []
        if self._graph is not None:
            self._call("cuGraphExecDestroy", self._graph)
            self._graph = None

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    # ---- the driver ------------------------------------------------------------------------------

    def _new_cuda_stream(self) -> Any:
        made = self._call("cuStreamCreate", self._names.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._cuda_streams.append(made)
        return made

    def _attribute(self, name: str) -> int:
        which = getattr(self._names.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", which, self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        return self._driver.call(name, *arguments)

    def _done(self, name: str, what: Any) -> bool:
        try:
            return self._driver.done(name, what)
        except EngineError:
            self.usable = False
            raise
