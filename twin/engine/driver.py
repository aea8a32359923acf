"""NVIDIA's libraries by cuda-python: every call is checked, and a failure names the call, the
error, its code and the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from twin.errors import EngineError, ToolchainError, TwinError

HERE = "run on a computer with an NVIDIA GPU"
LOST = "this process cannot use the GPU any more: start it again, and report this if it fails again"
NO_PEER = "plan with fewer GPUs: these do not reach each other's memory"
ADVICE = MappingProxyType(
    {
        "CUDA_ERROR_OUT_OF_MEMORY": "end other programs on this GPU, or plan with a smaller "
        "max_context or model",
        "CUDA_ERROR_NO_DEVICE": HERE,
        "CUDA_ERROR_INVALID_DEVICE": "name a GPU that nvidia-smi lists",
        "CUDA_ERROR_DEVICE_UNAVAILABLE": "another program has this GPU to itself: end that one",
        "CUDA_ERROR_NOT_INITIALIZED": LOST,
        "CUDA_ERROR_STUB_LIBRARY": "the toolkit's stub of libcuda is found before the driver's: "
        "take its folder (.../stubs) out of LD_LIBRARY_PATH",
        "CUDA_ERROR_NOT_PERMITTED": "the administrator forbids it for this user or container",
        "CUDA_ERROR_SYSTEM_NOT_READY": "start NVIDIA's Fabric Manager, which GPUs joined by "
        "NVSwitch wait for (systemctl start nvidia-fabricmanager, of the driver's version), and "
        "look at `nvidia-smi -q | grep -A 2 Fabric`",
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the computer, whose driver was updated "
        "while it ran; in a container start it again with the host's libcuda",
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take CUDA's forward-compatibility libcuda "
        "(/usr/local/cuda/compat) out of LD_LIBRARY_PATH, or update the host's driver",
        **dict.fromkeys(
            (
                "CUDA_ERROR_MPS_CONNECTION_FAILED",
                "CUDA_ERROR_MPS_RPC_FAILURE",
                "CUDA_ERROR_MPS_SERVER_NOT_READY",
            ),
            "start NVIDIA's Multi-Process Service anew (echo quit | nvidia-cuda-mps-control; "
            "nvidia-cuda-mps-control -d), or leave it: unset CUDA_MPS_PIPE_DIRECTORY",
        ),
        **dict.fromkeys(
            ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED"),
            "end other programs of NVIDIA's Multi-Process Service, or leave it: the engine takes "
            "a GPU whole",
        ),
        "CUDA_ERROR_MPS_CLIENT_TERMINATED": "another program of NVIDIA's Multi-Process Service "
        "failed and took this one with it: run without that service",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE": "a link between GPUs fails: use other GPUs (`nvidia-smi "
        "nvlink -e` counts errors)",
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "update the NVIDIA driver",
        "CUDA_ERROR_INVALID_IMAGE": "update the NVIDIA driver, which does not know the "
        "compiler's code",
        "CUDA_ERROR_NO_BINARY_FOR_GPU": "name the GPU of this computer as the node (`twin "
        "hardware` lists them)",
        "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE": "plan with fewer blocks or a smaller ring",
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": NO_PEER,
        "CUDA_ERROR_TOO_MANY_PEERS": NO_PEER,
        "CUDA_ERROR_ILLEGAL_ADDRESS": LOST,
        "CUDA_ERROR_LAUNCH_FAILED": LOST,
        "CUDA_ERROR_LAUNCH_TIMEOUT": LOST,
        "CUDA_ERROR_ECC_UNCORRECTABLE": "the GPU's memory is damaged: use another one",
    }
)
REPORT = "report this with the command that you ran"


@dataclass(frozen=True, slots=True)
class Library:
    """One module of cuda-python."""

    module: Any  # the binding: its names, except for the calls, are used as they are
    raises: type[TwinError]
    advice: Mapping[str, str]  # the next step, by an error's name; REPORT for others

    def call(self, name: str, *arguments: Any) -> Any:
        """The value of a call, a tuple where there are several, None where there is none. Raises
        `raises`.
        """
        error, *values = getattr(self.module, name)(*arguments)
        if int(error):
            raise self.failure(name, error)
        return values[0] if len(values) == 1 else tuple(values) or None

    def succeeds(self, name: str, *arguments: Any) -> bool:
        """Calls; whether it failed is the caller's to explain."""
        return not int(getattr(self.module, name)(*arguments)[0])

    def unless(self, expected: str, name: str, *arguments: Any) -> bool:
        """Calls; False where the error of that name came, which is none. Raises `raises`."""
        error = getattr(self.module, name)(*arguments)[0]
        if int(error) and getattr(error, "name", "") != expected:
            raise self.failure(name, error)
        return not int(error)

    def failure(self, name: str, error: Any) -> TwinError:
        said = str(getattr(error, "name", "error"))
        return self.raises(
            f"{name} failed: {said} (code {int(error)}); {self.advice.get(said, REPORT)}"
        )


class Driver(Library):
    """The CUDA driver."""

    def done(self, name: str, what: Any) -> bool:
        """Has an event or a CUDA stream ended? Raises EngineError for what failed meanwhile, such
        as the kernel.
        """
        error = getattr(self.module, name)(what)[0]
        if error == self.module.CUresult.CUDA_ERROR_NOT_READY:
            return False
        if int(error):
            raise EngineError(f"the kernel failed: {self.failure(name, error)}")
        return True


def open_driver() -> Driver:
    """The driver, initialised. Raises ToolchainError without cuda-python, EngineError without a
    driver.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise ToolchainError(
            "an NVIDIA GPU is reached through cuda-python, which is not installed: pip install "
            "cuda-python"
        ) from error
    opened = Driver(driver, EngineError, ADVICE)
    try:
        opened.call("cuInit", 0)
    except RuntimeError as error:  # the binding without the driver's library
        raise EngineError(f"no NVIDIA driver can be loaded ({error}); {HERE}") from error
    return opened


def open_compiler() -> Library:
    """NVRTC. Raises ToolchainError."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(
            "neither nvcc nor cuda-python is installed: pip install cuda-python, or install the "
            "CUDA toolkit"
        ) from error
    return Library(nvrtc, ToolchainError, MappingProxyType({}))


def compiler_version() -> str:
    """NVRTC's own. Raises ToolchainError."""
    try:
        return "nvrtc {}.{}".format(*open_compiler().call("nvrtcVersion"))
    except RuntimeError as error:  # cuda-python without the library it binds
        raise ToolchainError(
            f"NVRTC cannot be loaded ({error}): pip install nvidia-cuda-nvrtc-cu12"
        ) from error
