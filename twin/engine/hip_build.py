"""Compiles the monokernel for an AMD GPU with clang alone, without ROCm. The result has never run
on a device.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from twin.data import data_dir
from twin.errors import EngineError, ToolchainError
from twin.kernel.header import header
from twin.plan.types import Plan
from twin.schedule.local import LOCAL_BYTES, STATUS_BYTES, local_bytes
from twin.schedule.strips import THREADS, strips_of
from twin.toolchain import (
    cache_dir,
    cached,
    compiler_version,
    content_key,
    native_sources,
    run_compiler,
    unsealed,
)

CANDIDATES = ("clang-19", "clang-20", "clang-21", "clang")
ROCM = "/opt/rocm"  # unless ROCM_PATH names another folder: its compiler is the last candidate
ARCHITECTURES = ("gfx942",)  # what the kernel is written for
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
    f"-DTWIN_THREADS={THREADS}",
    f"-DTWIN_STATUS_BYTES={STATUS_BYTES}",
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
    lds_bytes: int  # per block, all of it static: the driver requests no more
    code_object: bytes


def architecture(arch: str, name: str) -> str:
    """What the compiler calls a GPU, which `name` says to people. Raises EngineError for one that
    the kernel is not written for.
    """
    if arch in ARCHITECTURES:
        return arch
    raise EngineError(
        f"{name} is {arch}, and the kernel is written for {', '.join(ARCHITECTURES)}, which MI300X "
        "and MI325X are: run on one of these or on the CPU (1xhost), or simulate this GPU"
    )


def definitions(plan: Plan) -> list[str]:
    """What the kernel's source is given next to its header."""
    return [f"-DTWIN_STRIPS={strips_of(plan)}", f"-DTWIN_BY_DIE={int(plan.numbered_by_die)}"]


def clang() -> str:
    """A clang that can compile for AMD GPUs; older ones do not know the MI300X."""
    rocm = str(Path(os.environ.get("ROCM_PATH") or ROCM) / "llvm" / "bin" / "clang")
    for candidate in (*CANDIDATES, rocm):
        found = shutil.which(candidate)
        if found and _version(found) >= OLDEST:
            return found
    raise ToolchainError(
        f"no clang from {OLDEST} on ({', '.join((*CANDIDATES, rocm))} not found): install clang-19 "
        "and lld-19 (Debian: apt-get install clang-19 lld-19)"
    )


def _version(compiler: str) -> int:
    """Its major version; 0 when it does not say."""
    said = re.search(r"version (\d+)", run_compiler([compiler, "--version"]))
    return int(said[1]) if said else 0


def check_runs(plan: Plan) -> None:
    """Raises ToolchainError for a plan that this platform's kernel cannot run."""
    if not plan.options.resident:
        raise ToolchainError(
            f"execution={plan.options.execution.value}: AMD GPUs run resident kernels only; plan "
            "with execution=resident"
        )
    if plan.options.prompt_chunk > 1:
        raise ToolchainError(
            f"prompt_chunk={plan.options.prompt_chunk}: HIP reads prompts token by token; plan "
            "with prompt_chunk=1"
        )
    vectors = local_bytes(plan)
    if vectors > LOCAL_BYTES - STATUS_BYTES:
        raise ToolchainError(
            f"{plan.name}: a block's vectors take {vectors} bytes, which exceed a compute unit's "
            f"local data share of {LOCAL_BYTES}: use more blocks or ranks"
        )


def cached_code_object(plan: Plan, arch: str, *, trace: bool = False) -> HipReport:
    """Code object of a resident plan, with its tables compiled in, unless the cache has it."""
    check_runs(plan)
    text = header(plan, trace=trace)
    defined = definitions(plan)
    key = content_key([compiler_version(clang()), arch, *FLAGS, *defined, text], native_sources())
    target = cache_dir() / f"hip-{key}.bin"

    def build(folder: Path) -> Path:
        report = _compiled(folder, text, arch, defined)
        said = {name: value for name, value in asdict(report).items() if name != "code_object"}
        made = folder / "made"
        # one file, so that one digest covers both
        made.write_bytes(json.dumps(said).encode() + b"\n" + report.code_object)
        return made

    kept = unsealed(cached(target, build))
    if kept is None:
        raise ToolchainError(
            f"{target}: another program changed it just now; run the command again"
        )
    said, _, code_object = kept.partition(b"\n")
    return HipReport(**json.loads(said), code_object=code_object)


def _compiled(folder: Path, text: str, arch: str, defined: list[str]) -> HipReport:
    source = data_dir("native") / "platform" / "hip_main.hip"
    (folder / "plan.h").write_text(text, encoding="utf-8")
    output = folder / "kernel.hsaco"
    target = [f"--offload-arch={arch}", f"-I{folder}", str(source), "-o", str(output)]
    said = run_compiler([clang(), *FLAGS, *defined, *target])
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
