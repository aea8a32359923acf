"""No arrival that lets a copy into the ring overtakes loads from there: by machine code, because no
tool that watches a run sees it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from _pytest.mark import ParameterSet

from studies.common.cuda_lines import Kernel, Place, Row, read_kernel
from tests.native.disassembly import Program, disassembled, find_nvdisasm, read
from tests.native.scoreboards import GIVING, arrivals, from_ring, is_load
from tests.native.test_device_builds import BUILDS, H200, NAMES, planned
from twin.engine.cuda_build import compile_cubin
from twin.errors import ToolchainError
from twin.plan.types import Plan

RELEASE, _ = GIVING
NVDISASM = find_nvdisasm()


def also_spilling(build: ParameterSet | tuple[str, str]) -> ParameterSet:
    """A build of test_device_builds, without what is expected of its spills."""
    values, marks = (build.values, build.marks) if isinstance(build, ParameterSet) else (build, ())
    return pytest.param(
        *values, marks=[mark for mark in marks if getattr(mark, "name", "") == "slow"]
    )


needs_nvdisasm = pytest.mark.skipif(
    NVDISASM is None,
    reason="no nvdisasm: pip install nvidia-cuda-nvdisasm (the extra 'test' does), or install the "
    "CUDA toolkit",
)


def compiled(plan: Plan) -> tuple[Program, Kernel]:
    """The machine code of a plan's kernel; skips without a compiler."""
    try:
        cubin = compile_cubin(plan, lines=True).cubin
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    assert NVDISASM
    return disassembled(NVDISASM, cubin), read_kernel(cubin)


@pytest.mark.few(2)
@needs_nvdisasm
@pytest.mark.parametrize(("model", "name"), [also_spilling(build) for build in BUILDS])
def test_memory_is_given_back_when_its_loads_have_answered(model: str, name: str) -> None:
    program, kernel = compiled(planned(model, H200, **NAMES[name]))
    found = arrivals(program, kernel)
    assert RELEASE in {arrival.function for arrival in found}
    assert sum(from_ring(kernel, one.at) for one in program.code if is_load(one)) >= 8
    assert [arrival for arrival in found if arrival.pending] == []


@needs_nvdisasm
def test_prefetched_weights_need_their_fence() -> None:
    """Without it, as the kernel once was, sums were wrong on an H200 with six or more slots in
    flight.
    """
    program, kernel = compiled(planned("llama-3.2-1b", H200))
    fences = {
        one.at
        for one in program.code
        if any("leave_to_copies" in place.function for place in kernel.places(one.at))
    }
    without = tuple(
        replace(one, name="NOP", result=0, read=0, waits=0) if one.at in fences else one
        for one in program.code
    )
    found = [
        arrival for arrival in arrivals(replace(program, code=without), kernel) if arrival.pending
    ]
    assert any("take_plain" in arrival.caller.function for arrival in found)
    # later arrivals of the same stages may overtake them, too
    loads = {load for arrival in found for load in arrival.pending}
    assert all(any("prefetch" in place.function for place in kernel.places(load)) for load in loads)


# ---- the analysis, on kernels of a few instructions ----------------------------------------------


LOAD, LAST = "LDS.128 R4, [R2]", "LDS.128 R8, [R2+0x10]"
GIVE = "@!P0 SYNCS.ARRIVE.TRANS64.ART0 RZ, [R0+URZ], R5"
EXIT = "EXIT"


def pending(*listed: str, gives: str = RELEASE, takes: str = "14load_shared_atEj") -> list[int]:
    """Numbers of the loads that the one arrival may overtake. `W0` behind an instruction:
    scoreboard of its result; `R0`: of its operands; `?01`: it waits for these.
    """
    lines, rows, at = [".text.twin_kernel:"], [Row(0, Place("kernel.cuh", 1, ""), 0)], 0
    for one in listed:
        if one.endswith(":"):
            lines.append(one)
            continue
        text, _, control = one.partition(" ; ")
        fields = {"W": 7, "R": 7, "?": 0}
        for field in control.split():
            fields[field[0]] = (
                sum(1 << int(board) for board in field[1:]) if field[0] == "?" else int(field[1:])
            )
        word = (fields["W"] << 5 | fields["R"] << 8 | fields["?"] << 11) << 41
        lines += [
            f"        /*{at:04x}*/                   {text} ;   /* 0x{0:016x} */",
            f"{'':40}/* 0x{word:016x} */",
        ]
        function = takes if "LDS" in text else gives if "ARRIVE" in text else ""
        rows += [
            Row(at, Place("kernel.cuh", 1, "caller"), 1),
            Row(at, Place("ring.cuh", 2, function), len(rows) + 1),
        ]
        at += 16
    (arrival,) = arrivals(read("\n".join(lines)), Kernel(bytes(at), tuple(rows)))
    assert arrival.caller == Place("kernel.cuh", 1, "caller")
    return [load // 16 for load in arrival.pending]


def test_an_arrival_waits_for_no_load_by_itself() -> None:
    assert pending(f"{LOAD} ; W0", GIVE, EXIT) == [0]
    assert pending(f"{LOAD} ; W0", f"{GIVE} ; ?0", EXIT) == []
    assert pending(f"{LOAD} ; W0", "FADD R3, R4, R4 ; ?0", GIVE, EXIT) == []
    assert pending(f"{LOAD} ; W0", "FADD R3, R9, R9 ; ?12345", GIVE, EXIT) == [0]
    assert pending(f"{LOAD} ; W0", f"{LAST} ; W1", "FADD R3, R8, R8 ; ?1", GIVE, EXIT) == [0]


def test_operands_that_have_been_read_are_no_result() -> None:
    assert pending(f"{LOAD} ; W0 R1", "FADD R3, R9, R9 ; ?1", GIVE, EXIT) == [0]


def test_a_load_without_a_scoreboard_answers_before_a_later_one() -> None:
    assert pending(LOAD, f"{LAST} ; W1", "FADD R3, R8, R8 ; ?1", GIVE, EXIT) == []
    assert pending(f"{LAST} ; W1", LOAD, "FADD R3, R8, R8 ; ?1", GIVE, EXIT) == [1]
    assert pending(LOAD, f"@P1 {LAST} ; W1", "FADD R3, R8, R8 ; ?1", GIVE, EXIT) == [0]


def test_a_fence_that_is_waited_for_is_behind_all_loads() -> None:
    loads = (f"{LOAD} ; W0", f"{LAST} ; W1")
    assert pending(*loads, "MEMBAR.ALL.CTA ; R5", "FENCE.VIEW.ASYNC.S ; W2 ?5", GIVE, EXIT) == []
    assert pending(*loads, "MEMBAR.ALL.CTA ; R5", GIVE, EXIT) == [0, 1]
    assert pending(*loads, "@P0 MEMBAR.ALL.CTA ; R5", "NOP ; ?5", GIVE, EXIT) == [0, 1]
    assert pending("MEMBAR.ALL.CTA ; R5", *loads, "NOP ; ?5", GIVE, EXIT) == [1, 2]


def test_every_path_counts() -> None:
    skipped = ("@P1 BRA `(.L_x_1)", "FADD R3, R4, R4 ; ?0", ".L_x_1:", GIVE, EXIT)
    assert pending(f"{LOAD} ; W0", *skipped) == [0]
    again = (".L_x_1:", GIVE, f"{LOAD} ; W0", "@P1 BRA `(.L_x_1)", EXIT)
    assert pending(*again) == [1]
    table = (
        'BRX R6 -0x20 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*)',
        ".L_x_1:",
        "NOP ; ?0",
        ".L_x_2:",
        GIVE,
        EXIT,
    )
    assert pending(f"{LOAD} ; W0", *table) == [0]
    never = ("BRA `(.L_x_1)", f"{LOAD} ; W0", ".L_x_1:", GIVE, EXIT)
    assert pending(*never) == []


def test_a_function_returns_behind_its_call() -> None:
    called = ("CALL.REL.NOINC `($divide)", GIVE, EXIT, "$divide:")
    assert pending(f"{LOAD} ; W0", *called, "NOP ; ?0", "RET.REL.NODEC R2 `(twin_kernel)") == []
    assert pending(f"{LOAD} ; W0", *called, "NOP", "RET.REL.NODEC R2 `(twin_kernel)") == [0]


def test_loads_from_elsewhere_may_be_under_way() -> None:
    elsewhere = "_ZN4twin5Chunk4loadEv"
    assert pending(f"{LOAD} ; W0", GIVE, EXIT, takes=elsewhere) == []


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        ("BRX R6 -0x20", "names no targets"),
        ("JMP 0x100", "nobody knows where it leads"),
        ("BSYNC B0", "nobody knows where it leads"),
    ],
)
def test_jumps_to_nowhere_known_are_refused(listed: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        pending(listed, GIVE, EXIT)
    with pytest.raises(ValueError, match="nothing leads to"):
        pending(EXIT, GIVE)


def test_an_arrival_that_nobody_knows_is_refused() -> None:
    with pytest.raises(ValueError, match=r"say in scoreboards\.py"):
        pending(f"{LOAD} ; W0", GIVE, EXIT, gives="_ZN4twin4Ring4lendEji")
