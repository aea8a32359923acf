"""The engine on AMD GPUs. Needs ROCm, hip-python and clang. It has never run on a device: tests run
it on a runtime library of their own, whose GPU interprets the kernel's machine code.
"""

from __future__ import annotations

import ctypes

from twin.engine.cuda import WATCHDOG_S, CudaEngine, new_launch
from twin.engine.gpu import Shape
from twin.engine.hip_build import HipReport, architecture, cached_code_object
from twin.engine.hip_driver import open_hip
from twin.engine.hip_gpu import HipGpu
from twin.engine.places import Places
from twin.engine.session import Session
from twin.errors import EngineError
from twin.kernel.header import Control
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.schedule.strips import THREADS

__all__ = ["HipEngine"]


class HipEngine(CudaEngine):
    """A resident plan and its weights on one AMD GPU, or on several that see each other's memory.

    Memory, waiting and leaving are those of every GPU (CudaEngine).
    """

    _gpus: list[HipGpu]  # type: ignore[assignment]  # HipGpu is a Gpu
    report: HipReport  # type: ignore[assignment]

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
        """As CudaEngine's. `places`: of the last run's blocks."""
        Session.__init__(self, plan, trace=trace, watchdog_s=watchdog_s)
        if not plan.options.resident:
            raise EngineError(
                f"execution={plan.options.execution.value}: AMD GPUs run resident kernels only; "
                "plan with execution=resident"
            )
        driver = open_hip()
        wanted, here = plan.options.gpus, driver.count()
        if device + wanted > here:
            raise EngineError(
                f"gpus={wanted}: this computer has {here} AMD GPUs; plan with fewer, or run where "
                "they are"
            )
        self._gpus = [HipGpu(driver, device + n, peers=wanted > 1) for n in range(wanted)]
        for gpu in self._gpus:
            architecture(gpu.about.arch, gpu.name)
        self.report = cached_code_object(plan, self._gpus[0].about.arch, trace=trace)
        self._kernels = {}  # its kernel begins with a prompt's passes
        self.places: list[Places] = []
        self._given = {}
        try:
            self._prepare(weights, random_streams)
        except BaseException:
            self._close()
            raise

    def _prepare(self, weights: Weights | None, random_streams: int | None) -> None:
        shape = Shape(
            blocks=self.plan.ranks // len(self._gpus) * self.plan.blocks,
            threads=THREADS,
            shared_bytes=0,
            static_bytes=self.report.lds_bytes,
        )
        for gpu in self._gpus:
            gpu.hold()
            gpu.use()
            gpu.load(self.report.code_object, shape)
            gpu.open_cuda_streams()
        for gpu in self._gpus:
            for other in self._gpus:
                if gpu is not other:
                    gpu.see(other)
        self._gpus[0].use()
        self._control = Control.from_address(self._gpus[0].pin(ctypes.sizeof(Control), run=0))
        self._controls = [self._control] * len(self._gpus)  # all of them report there
        # each GPU is given a copy with its own words
        self._launch = new_launch(self.plan.options)
        self._upload(weights, packed=random_streams is None)
        if random_streams is not None:
            self.fill_random(random_streams)

    # ---- one run ---------------------------------------------------------------------------------

    def _join(self) -> None:
        super()._join()
        self.places = [Places(tuple(int(die) for die in gpu.dies())) for gpu in self._gpus]

    def _close(self) -> None:
        if hasattr(self, "_control") and any(gpu.usable for gpu in self._gpus):
            self._control = Control.from_buffer_copy(self._control)  # what it said stays readable
        failed: list[EngineError] = []
        for gpu in self._gpus:
            try:
                gpu.close()
            except EngineError as error:
                failed.append(error)
        if failed:
            raise failed[0]
