"""Compiles the monokernel for an AMD GPU with clang alone, without ROCm. The result has never run
on a device.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from twin.data import data_dir
from twin.errors import ToolchainError
from twin.kernel.header import header
from twin.plan.types import Plan
from twin.toolchain import run_compiler

CANDIDATES = ("clang-19", "clang-20", "clang-21", "clang")
OLDEST = 17  # the first that knows gfx942
FLAGS = (
    "-x",
    "hip",
    "--cuda-device-only",
    "-nogpulib",
    "-nogpuinc",
    "-nostdinc",
    "--no-gpu-bundle-output",
    "-mcode-object-version=5",
    "-O3",
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Rpass-analysis=kernel-resource-usage",
    # A function that is called keeps the block's state, and a copy of the launch, in scratch
    # memory.
    "-mllvm",
    "-amdgpu-early-inline-all=true",
    "-mllvm",
    "-amdgpu-function-calls=false",
    "-mllvm",
    "-disable-machine-licm",  # what it keeps from stage to stage spills other registers
)


@dataclass(frozen=True, slots=True)
class HipReport:
    """What the compiler said, and the code object."""

    arch: str
    vgprs: int  # per thread
    vgpr_spills: int
    scratch_bytes: int  # per thread: spilled registers and arrays that no register holds
    lds_bytes: int  # per block, all of it static: the driver asks for no more
    code_object: bytes


def clang() -> str:
    """A clang that can compile for AMD GPUs; older ones do not know the MI300X."""
    for candidate in CANDIDATES:
        found = shutil.which(candidate)
        if found and _version(found) >= OLDEST:
            return found
    raise ToolchainError(
        f"no clang from {OLDEST} on ({', '.join(CANDIDATES)} not found): install clang-19 and "
        "lld-19 (Debian: apt-get install clang-19 lld-19)"
    )


def _version(compiler: str) -> int:
    """Its major version; 0 when it does not say."""
    said = re.search(r"version (\d+)", run_compiler([compiler, "--version"]))
    return int(said[1]) if said else 0


def compile_code_object(plan: Plan, arch: str = "gfx942") -> HipReport:
    """Code object of a resident plan, with its tables compiled in."""
    if plan.options.prompt_chunk > 1:
        raise ToolchainError(
            f"prompt_chunk={plan.options.prompt_chunk}: HIP reads prompts token by token; plan "
            "with prompt_chunk=1"
        )
    source = data_dir("native") / "platform" / "hip_main.hip"
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "plan.h").write_text(header(plan), encoding="utf-8")
        output = folder / "kernel.hsaco"
        said = run_compiler(
            [
                clang(),
                *FLAGS,
                f"--offload-arch={arch}",
                f"-I{folder}",
                str(source),
                "-o",
                str(output),
            ]
        )
        warnings = [line for line in said.splitlines() if "warning:" in line]
        if warnings:
            raise ToolchainError(f"clang warned about the kernel for {arch}: {warnings[0]}")
        return HipReport(
            arch,
            vgprs=_number(said, "VGPRs"),
            vgpr_spills=_number(said, "VGPRs Spill"),
            scratch_bytes=_number(said, r"ScratchSize \[bytes/lane\]"),
            lds_bytes=_number(said, r"LDS Size \[bytes/block\]"),
            code_object=output.read_bytes(),
        )


def _number(said: str, field: str) -> int:
    found = re.search(rf"remark:\s+{field}: (\d+)", said)
    if not found:
        raise ToolchainError(f"clang's report lacks {field}: {said[:500]!r}")
    return int(found[1])
