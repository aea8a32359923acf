"""Which engine runs a plan on a device, and whether that device is in this computer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from twin.engine.cuda import CudaEngine
from twin.engine.cuda_build import ARCHITECTURES, architecture, compile_kernels
from twin.engine.driver import open_driver
from twin.engine.gpu import Gpu
from twin.engine.hip import HipEngine
from twin.engine.hip_build import architecture as hip_architecture
from twin.engine.hip_build import cached_code_object
from twin.engine.hip_driver import open_hip
from twin.engine.host import HostEngine
from twin.engine.peers import find
from twin.engine.session import Session
from twin.engine.standin import StandIn
from twin.engine.weights import random_weights
from twin.errors import EngineError, TwinError
from twin.hardware.types import HOST, Device
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.workers import end_with_parent

# relative difference of memory sizes up to which a GPU is taken for the device: what drivers show
# programs is less than their total, and on some parts error correction takes a sixteenth
ALIKE = 0.15
UNITS = ("multiprocessors", "compute units")  # of NVIDIA, of AMD
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")  # likewise
SMI_FIELDS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "temperature.gpu",
    "power.draw",
)
SMI_TIMEOUT_S = 20.0
ROCM_SMI = ("rocm-smi", "--showproductname", "--showclocks", "--showpower", "--showtemp", "--json")


@dataclass(frozen=True, slots=True)
class Found:
    """A GPU of this computer, as its driver describes it."""

    name: str
    isa: str  # what the compiler calls it
    blocks: int  # multiprocessors
    memory_bytes: int


def open_engine(
    device: Device,
    plan: Plan,
    weights: Weights | None,
    *,
    random_streams: int | None = None,
    trace: bool = False,
) -> Session:
    """An engine of `device` with the plan's weights loaded; a probe has none.

    `random_streams`: a seed; a GPU fills the matrices itself and takes only vectors and the
    embedding from `weights`. Raises EngineError when the device is not here or no engine knows it.
    """
    first = place(device, plan.options.gpus)
    if device.nvidia or device.amd:
        engine = CudaEngine if device.nvidia else HipEngine
        return engine(plan, weights, random_streams=random_streams, trace=trace, device=first)
    return HostEngine(plan, weights, trace=trace)


def open_random(device: Device, plan: Plan, seed: int, *, trace: bool = False) -> Session:
    """An engine of a model's plan with random weights."""
    assert plan.spec is not None, f"{plan.name} is a probe: it has no weights"
    dtype = plan.options.weight_dtype
    if device.nvidia or device.amd:
        return open_engine(
            device, plan, StandIn(plan.spec, seed, dtype), random_streams=seed, trace=trace
        )
    return open_engine(device, plan, random_weights(plan.spec, seed, dtype), trace=trace)


def check_present(device: Device, gpus: int = 1) -> None:
    """Raises EngineError unless the engine can use so many of `device` here and now."""
    place(device, gpus)


def place(device: Device, gpus: int = 1) -> int:
    """Which GPU of this computer is the first of so many like `device`; 0 for its CPU. Raises
    EngineError where they are not here, ToolchainError without the driver's binding.
    """
    if device.isa == HOST:
        return 0
    if not (device.nvidia or device.amd):
        raise EngineError(
            f"{device.name}: the engine runs on this computer's CPU (1xhost), on NVIDIA GPUs "
            "(1xh200) and on AMD's MI300X (1xmi300x); simulate it instead"
        )
    found = nvidia_gpus() if device.nvidia else amd_gpus()
    alike = {n for n, one in enumerate(found) if _is(one, device)}
    starts = [n for n in sorted(alike) if alike.issuperset(range(n, n + gpus))]
    if starts:
        return starts[0]
    if device.nvidia and alike and gpus > 1:
        find(open_driver(), min(alike), gpus)  # says which is missing or unlike
    wanted = f"{device.memory.capacity_bytes.value / 1e9:.0f} GB"
    here = "; ".join(
        f"GPU {n} is {one.name} with {one.blocks} of {one.isa} and {one.memory_bytes / 1e9:.0f} GB"
        for n, one in enumerate(found)
    )
    raise EngineError(
        f"{device.name} has {device.blocks} {UNITS[device.amd]} of {device.isa} and {wanted}. "
        f"Here {here}: name one of these (`twin hardware` lists what can be named), or show the "
        f"right ones in {VISIBLE[device.amd]}"
    )


def _is(found: Found, device: Device) -> bool:
    return (
        device.isa == found.isa
        and found.blocks == device.blocks
        and abs(found.memory_bytes / device.memory.capacity_bytes.value - 1) < ALIKE
    )


def nvidia_gpus() -> list[Found]:
    """The NVIDIA GPUs of this computer. Raises ToolchainError or EngineError where the engine can
    use none.
    """
    driver = open_driver()
    gpus = [Gpu(driver, n) for n in range(int(driver.call("cuDeviceGetCount")))]
    if not gpus:
        raise EngineError("the NVIDIA driver sees no GPU; run on a computer with one")
    if not any(gpu.capability in ARCHITECTURES for gpu in gpus):
        architecture(gpus[0].capability, gpus[0].name)
    return [Found(gpu.name, _isa(gpu), gpu.multiprocessors, gpu.memory_bytes) for gpu in gpus]


def _isa(gpu: Gpu) -> str:
    major, minor = gpu.capability
    return ARCHITECTURES.get(gpu.capability, f"compute capability {major}.{minor}")


def amd_gpus() -> list[Found]:
    """The AMD GPUs of this computer. Raises as `nvidia_gpus` does."""
    driver = open_hip()
    abouts = [driver.about(n) for n in range(driver.count())]
    for about in abouts[:1]:
        hip_architecture(about.arch, about.name)
    return [
        Found(about.name, about.arch, about.compute_units, about.memory_bytes) for about in abouts
    ]


def amd_conditions() -> dict[str, Any]:
    """Name, clocks, temperature and power of the first AMD GPU right now, as rocm-smi says them;
    empty without it.
    """
    try:
        said = subprocess.run(
            ROCM_SMI, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_S
        ).stdout
        found = json.loads(said)["card0"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return {}
    return {str(name): str(value) for name, value in found.items()}


def gpu_conditions() -> dict[str, Any]:
    """Name, driver, clocks, temperature and power of the GPU right now, as nvidia-smi says them;
    empty without it.
    """
    try:
        command = [
            "nvidia-smi",
            "--id=0",
            f"--query-gpu={','.join(SMI_FIELDS)}",
            "--format=csv,noheader",
        ]
        said = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=SMI_TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(
        zip(SMI_FIELDS, (word.strip() for word in said.splitlines()[0].split(",")), strict=True)
    )


def compile_all(
    device: Device, plans: Sequence[Plan], progress: Callable[[str], None], *, trace: bool = False
) -> dict[int, str]:
    """Compile the kernels of all plans on all cores, into the cache. The refusals, by position in
    `plans`.

    The host's kernels differ by types only and compile when they are first used.
    """
    if not (device.nvidia or device.amd) or device.isa is None or not plans:
        return {}
    refused = {}
    workers = min(len(plans), len(os.sched_getaffinity(0)))
    # a fork would inherit an initialised driver
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        running = {
            pool.submit(_compile, plan, device.isa, trace): at for at, plan in enumerate(plans)
        }
        for done, one in enumerate(as_completed(running), start=1):
            said = one.result()
            if said:
                refused[running[one]] = said
            progress(f"compiling kernels on {workers} cores: {done}/{len(plans)}")
    return refused


def compiled_in_turn(
    device: Device, plans: Sequence[Plan], progress: Callable[[str], None]
) -> Iterator[str]:
    """For each plan, in order and as soon as its kernel is in the cache: what the compiler refused,
    or nothing. Later ones are compiled meanwhile, on all cores but the one of the caller, who may
    run a kernel: a GPU's steps are timed by its own clock.
    """
    if not (device.nvidia or device.amd) or device.isa is None:
        yield from [""] * len(plans)
        return
    workers = max(1, min(len(plans), len(os.sched_getaffinity(0)) - 1))
    with ProcessPoolExecutor(workers, get_context("spawn"), end_with_parent) as pool:
        running = [pool.submit(_compile, plan, device.isa, False) for plan in plans]
        try:
            for one in running:
                if not one.done():
                    done = sum(other.done() for other in running)
                    progress(f"compiling kernels on {workers} cores: {done}/{len(plans)}")
                yield one.result()
        finally:
            for one in running:
                one.cancel()


def _compile(plan: Plan, arch: str, trace: bool) -> str:
    """In a process of its own: what the compiler refused, or nothing. The code stays in the
    cache.
    """
    compiler = compile_kernels if arch.startswith("sm_") else cached_code_object
    try:
        compiler(plan, arch, trace=trace)
    except TwinError as error:
        return str(error)
    return ""
