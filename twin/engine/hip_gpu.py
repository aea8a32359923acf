"""One AMD GPU of a session. HIP's calls are CUDA's with other names, so memory and streams are
those of every GPU; what differs is here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.engine.gpu import LEAST_BYTES, STEPS, Gpu
from twin.engine.hip_driver import HipDriver
from twin.errors import EngineError

NOT_REPORTED = 0xFFFFFFFF  # what a block has not said: -1


class HipGpu(Gpu):
    """Needs no context; knows its peers; reads from the kernel on which die each block ran."""

    UNITS = "compute units"

    def __init__(self, driver: HipDriver, index: int, *, peers: bool) -> None:
        """Looks only. `peers`: other GPUs write to its exchange memory."""
        super().__init__(driver, index)
        self.about = driver.about(index)
        self._peers = peers
        self._index = index
        self._left: list[EngineError] | None = None  # what failed while everything is given back

    @property
    def multiprocessors(self) -> int:
        return self.about.compute_units

    @property
    def name(self) -> str:
        return self.about.name

    @property
    def memory_bytes(self) -> int:
        return self.about.memory_bytes

    def hold(self) -> None:
        self._context = self._index
        self.usable = True

    def close(self) -> None:
        """Give everything back; a call that fails keeps none of the others from being made, and is
        reported afterwards.
        """
        self._left = []
        try:
            super().close()
        finally:
            left, self._left = self._left, None
        if left:
            raise left[0]

    def see(self, other: HipGpu) -> None:
        """From now on this GPU's kernel may read and write the other's memory. It is in use
        afterwards.
        """
        self.use()
        if not self._call("hipDeviceCanAccessPeer", self._index, other._index):
            raise EngineError(
                f"{self.name} {self._index} cannot see the memory of {other._index}: ranks on "
                "several GPUs push to each other; plan with gpus=1"
            )
        again = self._names.hipError_t.hipErrorPeerAccessAlreadyEnabled
        error = self._names.hipDeviceEnablePeerAccess(other._index, 0)[0]
        if int(error) and error != again:
            raise self._driver.failure("hipDeviceEnablePeerAccess", error)

    def open_cuda_streams(self) -> None:
        """As on every GPU, and room for what the kernel says of its blocks."""
        super().open_cuda_streams()
        self._dies = self.pin(4 * self._shape.blocks, run=0)
        self._reported = self.allocate(4 * self._shape.blocks)
        self.cleared.append((self._reported, self._shape.blocks, NOT_REPORTED))

    # ---- memory ----------------------------------------------------------------------------------

    def _allocate_written(self, size: int) -> int:
        return self.fine_grained(size)

    def fine_grained(self, size: int) -> int:
        """Device memory of zeros, of the session, whose words the host and other GPUs see while a
        kernel runs.
        """
        flag = self._names.hipDeviceMallocFinegrained
        made = int(self._call("hipExtMallocWithFlags", max(LEAST_BYTES, size), flag))
        self._allocated.append(made)
        self._call("cuMemsetD8", made, 0, max(LEAST_BYTES, size))
        return made

    def allocate_exchanged(self, size: int) -> int:
        """Fine-grained where peers push: a GPU's second-level caches keep other memory of its own,
        whatever another GPU writes there.
        """
        return self.fine_grained(size) if self._peers else self.allocate(size)

    def _host_alloc(self, size: int) -> int:
        """Page-locked host memory that no cache of the GPU keeps."""
        names = self._names
        flags = (
            names.hipHostMallocMapped | names.hipHostMallocPortable | names.hipHostMallocCoherent
        )
        return int(self._call("hipHostMalloc", size, flags))

    def dies(self) -> NDArray[np.int32]:
        """[blocks] the die (XCD) on which the last run's kernel said that each block ran."""
        region = (ctypes.c_int32 * self._shape.blocks).from_address(self._dies)
        return np.ctypeslib.as_array(region).copy()

    # ---- launches --------------------------------------------------------------------------------

    def clear(self) -> None:
        for at, words, value in self.cleared:
            signed = ctypes.c_int32(value).value
            self._call("hipMemsetD32Async", at, signed, words, self._cuda_stream)

    def launch(
        self, plan: int, numbers: Sequence[int], *, cooperative: bool, name: str = STEPS
    ) -> None:
        """The kernel, all blocks at once: its plan's address, the rank of its first block, where
        blocks say on which die they run, to the host and to each other. It is resident: it needs no
        other numbers.
        """
        first_rank = numbers[0]
        ctypes.memset(self._dies, 0xFF, 4 * self._shape.blocks)
        words = (
            ctypes.c_int(first_rank),
            ctypes.c_void_p(self._dies),
            ctypes.c_void_p(self._reported),
        )
        arguments = (ctypes.c_void_p * 4)(plan, *(ctypes.addressof(word) for word in words))
        self._call(
            "hipModuleLaunchCooperativeKernel",
            self._kernel,
            *(self._shape.blocks, 1, 1),
            *(self._shape.threads, 1, 1),
            self._shape.shared_bytes,
            self._cuda_stream,
            ctypes.addressof(arguments),
        )

    # ---- the runtime -----------------------------------------------------------------------------

    def _new_cuda_stream(self) -> Any:
        made = self._call("hipStreamCreateWithFlags", self._names.hipStreamNonBlocking)
        self._cuda_streams.append(made)
        return made

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return super()._call(name, *arguments)
        except EngineError as error:
            if self._left is None:
                raise
            self._left.append(error)
            return None
