"""AMD's runtime by hip-python: every call is checked, and a failure names the call, the error, its
code and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from twin.engine.driver import Driver
from twin.errors import EngineError, ToolchainError

HERE = "run on a computer with an AMD GPU"
INSTALL = (
    "install ROCm, or name the folder of its libamdhip64.so in LD_LIBRARY_PATH (usually "
    "/opt/rocm/lib)"
)
LOST = "this process cannot use the GPU any more: start it again, and report this if it fails again"
ADVICE = MappingProxyType(
    {
        "hipErrorOutOfMemory": "end other programs on this GPU, or plan with a smaller "
        "max_context or model",
        "hipErrorNoDevice": f"{HERE}, as a user who may open /dev/kfd (groups render and video)",
        "hipErrorInsufficientDriver": "update the amdgpu driver to what this ROCm needs",
        "hipErrorInvalidDevice": "name a GPU that rocminfo lists",
        "hipErrorNoBinaryForGpu": "name the GPU of this computer as the node (`twin hardware` "
        "lists them)",
        "hipErrorInvalidImage": "update ROCm, which does not know the compiler's code",
        "hipErrorCooperativeLaunchTooLarge": "plan with fewer blocks",
        "hipErrorPeerAccessUnsupported": "these GPUs do not see each other's memory: plan with "
        "gpus=1",
        "hipErrorECCNotCorrectable": "the GPU's memory is damaged: use another one",
        "hipErrorIllegalAddress": LOST,
        "hipErrorLaunchFailure": LOST,
        "hipErrorLaunchTimeOut": LOST,
    }
)


# HIP's calls are CUDA's with other letters before them, but for these; None: HIP needs no such call
NAMES: MappingProxyType[str, str | None] = MappingProxyType(
    {
        "cuMemAlloc": "hipMalloc",
        "cuMemFree": "hipFree",
        "cuMemFreeHost": "hipHostFree",
        "cuMemHostGetDevicePointer": "hipHostGetDevicePointer",
        "cuCtxSetCurrent": "hipSetDevice",
        "cuCtxSynchronize": "hipDeviceSynchronize",
        "cuOccupancyMaxActiveBlocksPerMultiprocessor": (
            "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"
        ),
        "cuDevicePrimaryCtxRetain": None,  # a device is its own context
        "cuDevicePrimaryCtxRelease": None,
    }
)


@dataclass(frozen=True, slots=True)
class About:
    """A GPU, as the runtime describes it."""

    name: str
    arch: str  # gfx942, without the features that follow it
    compute_units: int
    memory_bytes: int


class HipDriver(Driver):
    """The HIP runtime. Calls may have CUDA's names, so that GPUs of both kinds share their code."""

    def call(self, name: str, *arguments: Any) -> Any:
        known = hip_name(name)
        if known is None:
            return None
        try:
            return super().call(known, *arguments)
        except (AttributeError, RuntimeError) as error:  # hip-python or ROCm lacks the call
            raise EngineError(
                f"{known} cannot be called ({error}): install the hip-python of this ROCm's version"
            ) from error
        except ValueError as error:  # an error that is newer than hip-python
            raise EngineError(
                f"{known} failed: {error}; install the hip-python of this ROCm's version"
            ) from error

    def done(self, name: str, what: Any) -> bool:
        """Has a stream ended? Raises EngineError for what failed meanwhile, such as the kernel."""
        known = hip_name(name)
        assert known is not None, f"{name} has no answer"
        error = getattr(self.module, known)(what)[0]
        if error == self.module.hipError_t.hipErrorNotReady:
            return False
        if int(error):
            raise EngineError(f"the kernel failed: {self.failure(known, error)}")
        return True

    def count(self) -> int:
        """GPUs. Raises EngineError without one."""
        found = int(self.call("hipGetDeviceCount"))
        if not found:
            raise EngineError(f"the AMD driver sees no GPU; {HERE}")
        return found

    def about(self, device: int) -> About:
        said = self.module.hipDeviceProp_t()
        self.call("hipGetDeviceProperties", said, device)
        return About(
            name=said.name.decode(errors="replace"),
            arch=said.gcnArchName.decode(errors="replace").split(":")[0],
            compute_units=int(said.multiProcessorCount),
            memory_bytes=int(said.totalGlobalMem),
        )


def hip_name(name: str) -> str | None:
    """What HIP calls a call of CUDA's driver."""
    return NAMES.get(name, f"hip{name[2:]}" if name.startswith("cu") else name)


def open_hip() -> HipDriver:
    """The runtime, initialised. Raises ToolchainError without hip-python, EngineError without
    ROCm.
    """
    try:
        from hip import hip
    except ImportError as error:
        raise ToolchainError(
            "an AMD GPU is reached through hip-python, which is not installed: pip install "
            "hip-python"
        ) from error
    opened = HipDriver(hip, EngineError, ADVICE)
    try:
        said = hip.hipInit(0)[0]
    except RuntimeError as error:  # the binding without the library it binds
        raise EngineError(f"no AMD runtime can be loaded ({error}); {INSTALL}") from error
    if int(said):
        raise opened.failure("hipInit", said)
    return opened
