"""Compiles the monokernel for an NVIDIA GPU: nvcc where it is installed, else NVRTC, which needs no
toolkit.
"""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twin.data import data_dir
from twin.engine.driver import compiler_version, open_compiler
from twin.errors import EngineError, ToolchainError
from twin.kernel.header import header
from twin.plan.types import Plan
from twin.schedule.block import TEAM_WARPS, WARP
from twin.schedule.choose import schedule_of
from twin.schedule.warps import WARPS
from twin.toolchain import cache_dir, cached, content_key, native_sources, run_compiler, unsealed

SIDE_WARPS = 4  # a warp group: the scheduler, two loaders, and one that leaves at once
THREADS = WARP * (TEAM_WARPS + SIDE_WARPS)  # of a block
FLAGS = ("-std=c++17", "--ptxas-options=-v")
LINES = "-lineinfo"  # source lines of instructions; the code is the same
# what the kernel is written for, by compute capability; "a": its bulk copies
ARCHITECTURES = MappingProxyType({(9, 0): "sm_90a"})
HOPPER = ARCHITECTURES[9, 0]


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What the assembler said, and the device code."""

    arch: str
    compiler: str
    registers: int  # per thread
    stack_bytes: int  # per thread; 0 unless an array is indexed at run time
    spill_bytes: int  # stores and loads together
    shared_bytes: int  # dynamic, per block: what a launch must request
    cubin: bytes


def architecture(capability: tuple[int, int], name: str) -> str:
    """What the compiler calls a GPU, which `name` says to people. Raises EngineError for one that
    the kernel is not written for.
    """
    if capability in ARCHITECTURES:
        return ARCHITECTURES[capability]
    known = ", ".join(f"{major}.{minor} ({arch})" for (major, minor), arch in ARCHITECTURES.items())
    raise EngineError(
        f"{name} has compute capability {capability[0]}.{capability[1]}, and the kernel is written "
        f"for {known}, which H100 and H200 have: run on one of these or on the CPU (1xhost), or "
        "simulate this GPU"
    )


class Entry(Enum):
    """A kernel of a plan, by its name in cuda_main.cu."""

    STEPS = "twin_kernel"
    PASSES = "twin_passes"
    ROUNDS = "twin_rounds"  # the passes that verify drafts


def entries(plan: Plan) -> list[Entry]:
    """The kernels of a plan."""
    passes = plan.options.prompt_chunk > 1
    return [
        Entry.STEPS,
        *([Entry.PASSES] if passes else []),
        *([Entry.ROUNDS] if plan.options.lookup else []),
    ]


def compile_kernels(
    plan: Plan, arch: str = HOPPER, *, trace: bool = False
) -> dict[Entry, CompileReport]:
    """Device code of all of a plan's kernels, compiled at once."""
    found = entries(plan)
    with ThreadPoolExecutor(len(found)) as pool:
        jobs = {
            entry: pool.submit(
                compile_cubin, plan, arch, trace=trace and entry is Entry.STEPS, entry=entry
            )
            for entry in found
        }
        return {entry: job.result() for entry, job in jobs.items()}


def compile_cubin(
    plan: Plan,
    arch: str = HOPPER,
    *,
    trace: bool = False,
    lines: bool = False,
    entry: Entry = Entry.STEPS,
) -> CompileReport:
    """Device code of one of a plan's kernels, with its tables compiled in. Raises ToolchainError
    when no compiler is found or it refuses.

    With `lines` the same code says which source line each of its instructions is from
    (studies/common/cuda_lines.py).
    """
    WARPS.check_plan(plan)
    text = header(plan, trace=trace)
    nvcc = shutil.which("nvcc")
    flags = [
        *FLAGS,
        *([LINES] if lines else []),
        f"-DTWIN_SHARED_BYTES={schedule_of(plan).block_bytes}",
    ]
    flags += [] if entry is Entry.STEPS else [f"-D{entry.value.upper()}"]
    version = run_compiler([nvcc, "--version"]) if nvcc else compiler_version()
    target = (
        cache_dir() / f"cuda-{content_key([version, arch, *flags, text], native_sources())}.bin"
    )

    def build(folder: Path) -> Path:
        (folder / "plan.h").write_text(text, encoding="utf-8")
        cubin, said = (
            _by_nvcc(nvcc, arch, flags, folder) if nvcc else _by_nvrtc(arch, flags, folder)
        )
        made = folder / "made"
        # one file, so that one digest covers both
        made.write_bytes(json.dumps(_read_report(said)).encode() + b"\n" + cubin)
        return made

    kept = unsealed(cached(target, build))
    if kept is None:
        raise ToolchainError(
            f"{target}: another program changed it just now; run the command again"
        )
    report, _, cubin = kept.partition(b"\n")
    return CompileReport(
        arch,
        "nvcc" if nvcc else "NVRTC",
        **json.loads(report),
        shared_bytes=schedule_of(plan).block_bytes,
        cubin=cubin,
    )


def summary(report: CompileReport) -> dict[str, Any]:
    """The report without the code."""
    return {name: value for name, value in asdict(report).items() if name != "cubin"} | {
        "cubin_bytes": len(report.cubin)
    }


def _by_nvcc(nvcc: str, arch: str, flags: list[str], folder: Path) -> tuple[bytes, str]:
    source, output = data_dir("native") / "platform" / "cuda_main.cu", folder / "kernel.cubin"
    target = f"-gencode=arch={arch.replace('sm_', 'compute_')},code={arch}"
    said = run_compiler(
        [nvcc, *flags, target, "-cubin", f"-I{folder}", str(source), "-o", str(output)]
    )
    return output.read_bytes(), said


def _by_nvrtc(arch: str, flags: list[str], folder: Path) -> tuple[bytes, str]:
    nvrtc = open_compiler()
    platform = data_dir("native") / "platform"
    source = (platform / "cuda_main.cu").read_bytes()
    program = nvrtc.call("nvrtcCreateProgram", source, b"cuda_main.cu", 0, None, None)
    # NVRTC takes a generic lambda for a host function, which nvcc does not.
    options = [f"-arch={arch}", "-default-device", *flags, f"-I{folder}", f"-I{platform}"]
    compiled = nvrtc.succeeds(
        "nvrtcCompileProgram", program, len(options), [o.encode() for o in options]
    )
    log = bytearray(nvrtc.call("nvrtcGetProgramLogSize", program))
    nvrtc.call("nvrtcGetProgramLog", program, log)
    said = log.decode(errors="replace").rstrip("\0\n")
    if not compiled:
        raise ToolchainError(
            f"NVRTC refused the kernel for {arch}; report this with its output:\n{said[:2000]}"
        )
    cubin = bytearray(nvrtc.call("nvrtcGetCUBINSize", program))
    nvrtc.call("nvrtcGetCUBIN", program, cubin)
    return bytes(cubin), said


def _read_report(said: str) -> dict[str, int]:
    """Numbers from the assembler's verbose output."""
    found = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said
    )
    registers = re.search(r"Used (\d+) registers", said)
    if not found or not registers:
        raise ToolchainError(f"the assembler's report is not understood: {said[:500]!r}")
    stack, stores, loads = (int(group) for group in found.groups())
    return {"registers": int(registers[1]), "stack_bytes": stack, "spill_bytes": stores + loads}
