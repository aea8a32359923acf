"""AMD's runtime without a GPU: hip-python itself calls a library of the tests (hip_stub.cpp), which
answers as this module says. Device memory is the host's, a kernel is a function of Python.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine import code_object
from twin import toolchain
from twin.engine.cuda import DrawingLaunch, GreedyLaunch, Launch
from twin.kernel.header import Control

HERE = Path(__file__).resolve().parent
OUT_OF_MEMORY, INVALID_VALUE, NO_DEVICE, INVALID_HANDLE = 2, 1, 100, 400
NOT_READY, ILLEGAL_ADDRESS, PEER_AGAIN, TOO_LARGE, UNKNOWN = 600, 700, 704, 720, 999
MEMORY_BYTES = 192 * 10**9
COMPUTE_UNITS = 304
FINE_GRAINED = 1  # hipDeviceMallocFinegrained
COHERENT = 0x40000000  # hipHostMallocCoherent
POISON = 0xA5  # of memory that nobody has written
# of hipDeviceProp_tR0600, in bytes from its start
NAME_AT, MEMORY_AT, UNITS_AT, ARCH_AT = 0, 288, 388, 1160
LAUNCHES: tuple[type[Launch], ...] = (GreedyLaunch, DrawingLaunch)


def arguments_after(launch: type[Launch]) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of the arguments of a kernel that is given such a launch."""
    size = ctypes.sizeof(launch)
    return (0, size), (size, 4), (size + 8, 8), (size + 16, 8)


Handler = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int64), ctypes.c_int
)


@dataclass(frozen=True)
class Started:
    """A launch, its arguments as the runtime has copied them."""

    device: int
    blocks: int
    threads: int
    stream: int
    image: bytes  # the code object
    arguments: NDArray[np.uint8]

    @property
    def layout(self) -> tuple[tuple[int, int], ...]:
        """(offset, bytes) of the arguments, as the code object says."""
        return code_object.arguments(self.image)

    @property
    def launch(self) -> Launch:
        """What the kernel is given: a plan that draws has more words than a greedy one."""
        size = self.layout[0][1]
        kind = next(one for one in LAUNCHES if ctypes.sizeof(one) == size)
        return kind.from_buffer(self.arguments)

    @property
    def first_rank(self) -> int:
        at = self.layout[1][0]
        return int(self.arguments[at : at + 4].view(np.int32)[0])

    @property
    def dies(self) -> NDArray[np.int32]:
        """[blocks] where the kernel says on which dies they run."""
        return self._words(2)

    @property
    def reported(self) -> NDArray[np.int32]:
        """[blocks] where blocks tell each other."""
        return self._words(3)

    def _words(self, argument: int) -> NDArray[np.int32]:
        at = self.layout[argument][0]
        where = int(self.arguments[at : at + 8].view(np.uint64)[0])
        return np.ctypeslib.as_array((ctypes.c_int32 * self.blocks).from_address(where))


@dataclass
class Held:
    """Memory that nobody has given back."""

    array: NDArray[np.uint8]
    kind: str  # "device", "fine" or "host"
    device: int


# what all GPUs were given since the last run; answers 0, NOT_READY, or how it failed
Kernel = Callable[[Sequence[Started]], int]


def answers_at_once(started: Sequence[Started]) -> int:
    """Token n is 3 + n; every step takes a microsecond; block b runs on die b % 8."""
    launch = started[0].launch
    request, control = launch.request, Control.from_address(launch.control)
    for one in started:
        one.dies[:] = np.arange(one.blocks) % 8
    made = request.steps - request.forced + 1
    control.started = 1000
    if request.block_stamps:  # of a probe
        workers = sum(one.blocks for one in started)
        stamps = (ctypes.c_uint64 * (request.steps * workers)).from_address(request.block_stamps)
        ends = 2000 + 1000 * np.arange(request.steps, dtype=np.uint64)
        np.ctypeslib.as_array(stamps)[:] = np.repeat(ends, workers)
    if request.tokens:
        (ctypes.c_int32 * made).from_address(request.tokens)[:] = range(3, 3 + made)
    if request.stamps:
        (ctypes.c_uint64 * request.steps).from_address(request.stamps)[:] = range(
            2000, 2000 + 1000 * request.steps, 1000
        )
    control.emitted = made
    return 0


def runs_until_aborted(started: Sequence[Started]) -> int:
    """It leaves once each GPU's own abort word is set."""
    words = [ctypes.c_int.from_address(one.launch.request.abort).value for one in started]
    return 0 if all(words) else NOT_READY


class Runtime:
    """What the library answers, and which calls it got."""

    def __init__(
        self,
        *,
        gpus: int = 1,
        arch: bytes = b"gfx942:sramecc+:xnack-",
        kernel: Kernel = answers_at_once,
        fit: int = 1,
        peers: bool = True,
        contents: bool = True,
    ) -> None:
        """`contents`: device memory holds what was written there. Without, it takes none of this
        computer's, and only the host's words are kept: for a kernel that reads nothing else.
        """
        self.calls: list[tuple[Any, ...]] = []  # (name, arguments)
        self.held: dict[int, Held] = {}
        self.handles: dict[int, tuple[str, int]] = {}  # streams and modules: kind, device
        self.seen: set[tuple[int, int]] = set()  # (device, peer) whose memory it may reach
        self.mistakes: list[str] = []  # what a real runtime need not notice
        self._refused: dict[str, tuple[int, int]] = {}
        self._gpus, self._arch, self.kernel = gpus, arch, kernel
        self._fit, self._peers, self._contents = fit, peers, contents
        self._device = 0
        self._started: list[Started] = []
        self._images: dict[int, bytes] = {}
        self._functions: dict[int, int] = {}  # its module

    def refuse(self, name: str, code: int = UNKNOWN, *, nth: int = 1) -> None:
        """The nth call of that name from now on fails, once."""
        self._refused[name] = (nth, code)

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def calls_of(self, name: str) -> list[tuple[Any, ...]]:
        return [tuple(arguments) for called, *arguments in self.calls if called == name]

    def of(self, address: int) -> Held:
        """The allocation in which an address lies."""
        return next(
            held for at, held in self.held.items() if at <= address < at + held.array.nbytes
        )

    def answer(self, name: str, arguments: list[int]) -> int:
        self.calls.append((name, *arguments))
        nth, code = self._refused.get(name, (0, 0))
        if nth:
            if nth == 1:
                del self._refused[name]
                return code
            self._refused[name] = (nth - 1, code)
        return int(getattr(self, f"_{name}")(*arguments))

    # ---- devices ---------------------------------------------------------------------------------

    def _hipInit(self, flags: int) -> int:
        return 0 if self._gpus else NO_DEVICE

    def _hipGetDeviceCount(self, out: int) -> int:
        ctypes.c_int.from_address(out).value = self._gpus
        return 0

    def _hipGetDeviceProperties(self, out: int, device: int) -> int:
        name = b"AMD Instinct Fake\0"
        ctypes.memmove(out + NAME_AT, name, len(name))
        ctypes.memmove(out + ARCH_AT, self._arch + b"\0", len(self._arch) + 1)
        ctypes.c_size_t.from_address(out + MEMORY_AT).value = MEMORY_BYTES
        ctypes.c_int.from_address(out + UNITS_AT).value = COMPUTE_UNITS
        return 0

    def _hipDeviceGet(self, out: int, device: int) -> int:
        ctypes.c_int.from_address(out).value = device
        return 0 if device < self._gpus else 101

    def _hipSetDevice(self, device: int) -> int:
        self._device = device
        return 0

    def _hipDeviceSynchronize(self) -> int:
        return 0

    def _hipDeviceCanAccessPeer(self, out: int, device: int, peer: int) -> int:
        ctypes.c_int.from_address(out).value = int(self._peers and device != peer)
        return 0

    def _hipDeviceEnablePeerAccess(self, peer: int, flags: int) -> int:
        if (self._device, peer) in self.seen:
            return PEER_AGAIN
        self.seen.add((self._device, peer))
        return 0

    # ---- code ------------------------------------------------------------------------------------

    def _handle(self, out: int, kind: str) -> int:
        made = 0x1000 + 16 * len(self.calls)
        self.handles[made] = (kind, self._device)
        ctypes.c_void_p.from_address(out).value = made
        return made

    def _hipModuleLoadData(self, out: int, image: int) -> int:
        (sections,) = struct.unpack("<Q", ctypes.string_at(image + 40, 8))
        size, count = struct.unpack("<HH", ctypes.string_at(image + 58, 4))
        self._images[self._handle(out, "module")] = ctypes.string_at(image, sections + size * count)
        return 0

    def _hipModuleGetFunction(self, out: int, module: int, name: int) -> int:
        if self.handles.get(module, ("", 0))[0] != "module":
            return INVALID_HANDLE
        if ctypes.string_at(name) != b"twin_kernel":
            return 500  # hipErrorNotFound
        made = module + 1
        self._functions[made] = module
        ctypes.c_void_p.from_address(out).value = made
        return 0

    def _hipModuleUnload(self, module: int) -> int:
        return 0 if self.handles.pop(module, None) else INVALID_HANDLE

    def _hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        self, out: int, function: int, threads: int, size: int
    ) -> int:
        ctypes.c_int.from_address(out).value = self._fit
        return 0

    # ---- memory ----------------------------------------------------------------------------------

    def _allocate(self, out: int, size: int, kind: str) -> int:
        if self._contents or kind == "host":
            array = np.full(size + 256, POISON, np.uint8)
        else:  # pages that nobody touches
            array = np.frombuffer(mmap.mmap(-1, size + 256), np.uint8)
        lead = -array.ctypes.data % 256
        array = array[lead : lead + size]
        self.held[array.ctypes.data] = Held(array, kind, self._device)
        ctypes.c_void_p.from_address(out).value = array.ctypes.data
        return 0

    def _hipMalloc(self, out: int, size: int) -> int:
        return self._allocate(out, size, "device")

    def _hipExtMallocWithFlags(self, out: int, size: int, flags: int) -> int:
        return self._allocate(out, size, "fine") if flags == FINE_GRAINED else INVALID_VALUE

    def _hipHostMalloc(self, out: int, size: int, flags: int) -> int:
        if not flags & COHERENT:
            self.mistakes.append("words of the host in memory that a GPU's caches may keep")
        return self._allocate(out, size, "host")

    def _free(self, at: int, host: bool) -> int:
        held = self.held.get(at)
        if held is None or (held.kind == "host") != host:
            self.mistakes.append(f"{at:#x} is given back, and is not held")
            return INVALID_VALUE
        if self._started:
            self.mistakes.append("memory is given back while a kernel runs")
        del self.held[at]
        return 0

    def _hipFree(self, at: int) -> int:
        return self._free(at, host=False)

    def _hipHostFree(self, at: int) -> int:
        return self._free(at, host=True)

    def _hipHostGetDevicePointer(self, out: int, at: int, flags: int) -> int:
        ctypes.c_void_p.from_address(out).value = at
        return 0

    def _inside(self, at: int, size: int) -> bool:
        inside = any(
            lo <= at and at + size <= lo + held.array.nbytes
            for lo, held in self.held.items()
            if held.kind != "host"
        )
        if not inside:
            self.mistakes.append(f"{size} bytes at {at:#x} are no device memory")
        return inside

    def _hipMemsetD8(self, to: int, value: int, count: int) -> int:
        if not self._inside(to, count):
            return INVALID_VALUE
        if self._contents:
            ctypes.memset(to, value, count)
        return 0

    def _hipMemsetD32Async(self, to: int, value: int, count: int, stream: int) -> int:
        if not self._inside(to, 4 * count) or not self._own(stream):
            return INVALID_VALUE
        if not self._contents:
            return 0
        region = np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(to))
        region[:] = value & 0xFFFFFFFF
        return 0

    def _hipMemcpyHtoD(self, to: int, at: int, size: int) -> int:
        if not self._inside(to, size):
            return INVALID_VALUE
        if self._contents:
            ctypes.memmove(to, at, size)
        return 0

    def _hipMemcpyDtoD(self, to: int, at: int, size: int) -> int:
        return self._hipMemcpyHtoD(to, at, size) if self._inside(at, size) else INVALID_VALUE

    def _hipMemcpyHtoDAsync(self, to: int, at: int, size: int, stream: int) -> int:
        return self._hipMemcpyHtoD(to, at, size)

    # ---- launches --------------------------------------------------------------------------------

    def _own(self, stream: int) -> bool:
        """Is it one of the device in use?"""
        own = self.handles.get(stream) == ("stream", self._device)
        if not own:
            self.mistakes.append(f"stream {stream:#x} is not one of device {self._device}")
        return own

    def _hipStreamCreateWithFlags(self, out: int, flags: int) -> int:
        self._handle(out, "stream")
        return 0

    def _hipStreamDestroy(self, stream: int) -> int:
        return 0 if self.handles.pop(stream, None) else INVALID_HANDLE

    def _hipModuleLaunchCooperativeKernel(
        self,
        function: int,
        blocks: int,
        blocks_y: int,
        blocks_z: int,
        threads: int,
        threads_y: int,
        threads_z: int,
        size: int,
        stream: int,
        arguments: int,
    ) -> int:
        module = self._functions.get(function, 0)
        if self.handles.get(module) != ("module", self._device) or not self._own(stream):
            return INVALID_HANDLE
        if blocks > self._fit * COMPUTE_UNITS:
            return TOO_LARGE
        if (blocks_y, blocks_z, threads_y, threads_z, size) != (1, 1, 1, 1, 0):
            return INVALID_VALUE
        started = Started(
            self._device, blocks, threads, stream, self._images[module], np.zeros(0, np.uint8)
        )
        packed = np.zeros(sum(started.layout[-1]), np.uint8)
        for n, (at, count) in enumerate(started.layout):
            where = ctypes.c_void_p.from_address(arguments + 8 * n).value
            assert where
            packed[at : at + count] = np.frombuffer(ctypes.string_at(where, count), np.uint8)
        self._started.append(replace(started, arguments=packed))
        return 0

    def _hipStreamQuery(self, stream: int) -> int:
        if not any(one.stream == stream for one in self._started):
            return 0
        said = self.kernel(self._started)
        if said != NOT_READY:
            self._started = []
        return said

    def _hipStreamSynchronize(self, stream: int) -> int:
        if any(one.stream == stream for one in self._started):
            self.mistakes.append("waits for a kernel without a look at the watchdog")
        return 0


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The stub, loaded before hip-python looks for the real library."""
    pytest.importorskip("hip", reason="hip-python is not installed (extra 'amd')")
    compiler = toolchain.host_compiler()
    source = HERE / "hip_stub.cpp"
    flags = ("-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,-soname,libamdhip64.so")
    key = toolchain.content_key([toolchain.compiler_version(compiler), *flags], [source])

    def build(folder: Path) -> Path:
        made = folder / "stub.so"
        toolchain.run_compiler([compiler, *flags, str(source), "-o", str(made)])
        return made

    target = toolchain.cached(toolchain.cache_dir() / f"hip-stub-{key}.so", build)
    made = ctypes.CDLL(str(target))
    made.stub_handler.argtypes = [Handler]
    opened = Path("/proc/self/maps").read_text(encoding="utf-8")
    if "libamdhip64" in opened:
        pytest.skip("this process uses the real runtime already")
    return made


@contextmanager
def installed(runtime: Runtime) -> Iterator[Runtime]:
    """hip-python's calls are `runtime`'s to answer."""
    failed: list[BaseException] = []

    def handle(name: bytes, arguments: Any, count: int) -> int:
        try:
            return runtime.answer(name.decode(), [int(arguments[n]) for n in range(count)])
        except BaseException as error:  # which ctypes would only print
            failed.append(error)
            return UNKNOWN

    handler = Handler(handle)
    library().stub_handler(handler)
    try:
        yield runtime
    finally:
        library().stub_handler(Handler(0))
    if failed:
        raise failed[0]
