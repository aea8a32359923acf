"""A CUDA driver without a GPU: it records its calls, its device memory is the host's, and its
kernel a function of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

from twin.engine.cuda import GreedyLaunch, Launch
from twin.kernel.header import Control

# what it was launched with, and the words that it answers in
Kernel = Callable[[Any, Control], None]
HOPPER = (9, 0)
MULTIPROCESSORS = 132
MEMORY_BYTES = 141 * 10**9


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704
    CUDA_ERROR_UNKNOWN = 999


def answers_at_once(launch: Any, control: Control) -> None:
    """Token n is 3 + n; every step takes a microsecond."""
    request = launch.request
    made = request.steps - request.forced + 1
    control.started = 1000
    if request.tokens:
        (ctypes.c_int32 * made).from_address(request.tokens)[:] = range(3, 3 + made)
    if request.stamps:
        (ctypes.c_uint64 * request.steps).from_address(request.stamps)[:] = range(
            2000, 2000 + 1000 * request.steps, 1000
        )
    control.emitted = made


class FakeDriver:
    """What of cuda-python's `driver` module the engine uses."""

    CUresult = CUresult
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="multiprocessors",
    )
    CUdevice_P2PAttribute = SimpleNamespace(
        CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED="atomics"
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="shared")
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
    CUlaunchAttributeID = SimpleNamespace(CU_LAUNCH_ATTRIBUTE_COOPERATIVE=2)
    CUlaunchConfig = SimpleNamespace
    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2

    def __init__(
        self,
        *,
        capability: tuple[int, int] = HOPPER,
        gpus: int = 1,
        kernel: Kernel = answers_at_once,
        launch: type[Launch] = GreedyLaunch,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []  # (name, arguments)
        self.refuse: dict[str, CUresult] = {}  # calls that fail, by name
        # memory that nobody has given back, by its address
        self.held: dict[int, np.ndarray[Any, Any]] = {}
        self._answers = {
            "major": capability[0],
            "minor": capability[1],
            "multiprocessors": MULTIPROCESSORS,
        }
        self._gpus, self._kernel, self._launch, self._handles = gpus, kernel, launch, 0

    @staticmethod
    def CUlaunchAttribute() -> Any:
        return SimpleNamespace(value=SimpleNamespace())

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.refuse:
                return (self.refuse[name], None)
            return (CUresult.CUDA_SUCCESS, *self._answer(name, arguments))

        return call

    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        own = getattr(self, f"_{name}", None)
        if own is not None:
            answer: tuple[Any, ...] = own(*arguments)
            return answer
        if any(
            word in name
            for word in ("Create", "Retain", "Load", "GetFunction", "EndCapture", "Instantiate")
        ):
            self._handles += 1
            return (f"{name}-{self._handles}",)
        return ()

    def _cuDeviceGetCount(self) -> tuple[int]:
        return (self._gpus,)

    def _cuDeviceGet(self, index: int) -> tuple[int]:
        return (index,)

    def _cuDeviceGetName(self, size: int, device: int) -> tuple[bytes]:
        return (b"NVIDIA Fake\0".ljust(size, b"\0"),)

    def _cuDeviceTotalMem(self, device: int) -> tuple[int]:
        return (MEMORY_BYTES,)

    def _cuDeviceGetAttribute(self, which: str, device: int) -> tuple[int]:
        return (self._answers[which],)

    def _cuDeviceCanAccessPeer(self, device: int, other: int) -> tuple[int]:
        return (1,)

    def _cuDeviceGetP2PAttribute(self, which: str, device: int, other: int) -> tuple[int]:
        return (1,)

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: Any) -> tuple[int]:
        return (1,)

    def _cuMemAlloc(self, size: int) -> tuple[int]:
        made = np.zeros(size, np.uint8)
        self.held[made.ctypes.data] = made
        return (made.ctypes.data,)

    def _cuMemHostAlloc(self, size: int, flags: int) -> tuple[int]:
        return self._cuMemAlloc(size)

    def _cuMemHostGetDevicePointer(self, at: int, flags: int) -> tuple[int]:
        return (at,)

    def _cuMemFree(self, at: int) -> tuple[()]:
        del self.held[at]
        return ()

    _cuMemFreeHost = _cuMemFree

    def _cuMemcpyHtoD(self, to: int, at: int, size: int) -> tuple[()]:
        ctypes.memmove(to, at, size)
        return ()

    _cuMemcpyDtoD = _cuMemcpyDtoH = _cuMemcpyHtoD

    def _cuLaunchKernelEx(self, config: Any, kernel: Any, arguments: int, extra: int) -> tuple[()]:
        launch = self._launch.from_address(ctypes.c_void_p.from_address(arguments).value or 0)
        first, last = (
            ctypes.c_int.from_address(
                ctypes.c_void_p.from_address(arguments + 8 * n).value or 0
            ).value
            for n in (3, 4)
        )
        if last > first:
            self._kernel(launch, Control.from_address(launch.control))
        return ()
