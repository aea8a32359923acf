"""How much machine code each stage of a kernel is, and how much of it a layer walks through: an
instruction cache should hold that.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from studies.common.cuda_lines import Called, Kernel, read_kernel
from twin.engine.cuda_build import CompileReport
from twin.errors import ToolchainError

INSTRUCTION_BYTES = 16
# QKV and GATE_UP are from_residual; run_stage is what lies between stages; the last two are loops
# of side warps.
LAYER = (
    "from_residual",
    "attention",
    "o_proj",
    "down",
    "run_stage",
    "keep_house",
    "load_weights",
)
EXPERTS = ("route", "routed_down")  # of a layer that has some
# a prompt, a step; probes
ONCE = (
    "read_prompt",
    "embed",
    "lane_mean",
    "collective",
    "sample",
    "end_step",
    "stream",
    "exchange",
)
# Inlined into functions of LAYER, but executed once a step (what an LM head adds to from_residual
# among them) or never in a good run.
SELDOM = (
    "Core::best",
    "wins",
    "publish_zeros",
    "publish_summary",
    "summarize",
    "deliver",
    "passes_over",
    "Loader::drain",
    "report_hang",
    "leave_all",
)
LENGTH = re.compile(r"[1-9]\d*")


@dataclass(frozen=True, slots=True)
class CodeSize:
    """Bytes of machine code, executed or not. Of no stage: a launch's setup, and some 2 KiB of
    stages' code whose caller no row names.
    """

    kernel_bytes: int
    # by function, largest first, without SELDOM: LAYER, EXPERTS, ONCE, and those that are called
    # instead of inlined
    stage_bytes: dict[str, int]
    seldom_bytes: dict[str, int]  # by function of SELDOM, largest first, of all stages

    @property
    def layer_bytes(self) -> int:
        """What is executed in each layer: LAYER without SELDOM. A function that is called counts
        once, for the layer if not in ONCE.
        """
        return sum(size for name, size in self.stage_bytes.items() if name not in ONCE)


def code_size(report: CompileReport) -> CodeSize:
    """Of a kernel compiled with `lines`. Raises ToolchainError without line information, or where
    it is not understood.
    """
    return measured(read_kernel(report.cubin))


def measured(kernel: Kernel) -> CodeSize:
    """The same of a kernel that has been read."""
    if not kernel.rows:
        raise ToolchainError(
            "the kernel does not say where its instructions come from: compile it with lines=True"
        )
    stages: Counter[str] = Counter()
    seldom: Counter[str] = Counter()
    for at in range(0, len(kernel.code), INSTRUCTION_BYTES):
        names = _names(kernel, at)
        if rare := next((name for name in names if name in SELDOM), ""):
            seldom[rare] += INSTRUCTION_BYTES
        elif stage := next(
            (name for name in names if name in LAYER + EXPERTS + ONCE), _called_by_all(kernel, at)
        ):
            stages[stage] += INSTRUCTION_BYTES
    return CodeSize(len(kernel.code), dict(stages.most_common()), dict(seldom.most_common()))


@cache
def function_name(mangled: str) -> str:
    """`Core::best` of `_ZN4twin4Core4bestI...`: without namespace twin, up to the first template
    argument; of a lambda, who wrote it.

    Itanium C++ ABI, section 5.1. Empty for what is not mangled, or does not begin with an
    identifier.
    """
    if not mangled.startswith("_Z"):
        return ""
    rest = mangled[2:].lstrip("Z")  # local to a function
    # nested, and how a member function takes its object
    rest = rest[1:].lstrip("rVK") if rest.startswith("N") else rest
    names: list[str] = []
    while length := LENGTH.match(rest):
        end = length.end() + int(length[0])
        names.append(rest[length.end() : end])
        rest = rest[end:]
    return "::".join(names[1:] if names[:1] == ["twin"] else names)


def _called(kernel: Kernel, at: int) -> Called | None:
    return next((one for one in kernel.called if one.at <= at < one.end), None)


def _called_by_all(kernel: Kernel, at: int) -> str:
    """A function that stages call, if the instruction is of one."""
    called = _called(kernel, at)
    return function_name(called.function) if called else ""


def _names(kernel: Kernel, at: int) -> list[str]:
    """The functions of an instruction, innermost first; none where it is of the compiler's own (a
    slow division).
    """
    called = _called(kernel, at)
    if called and not function_name(called.function):
        return []
    names = [function_name(place.function) for place in kernel.places(at)]
    return [*names, function_name(called.function)] if called else names
