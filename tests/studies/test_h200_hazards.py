"""What of racecheck's reports is excused: pairs of a bulk copy into the ring and a read of the
ring, by their source lines.

A read whose line the tool did not find is looked up in the kernel that the rest of its report fits.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from studies.common.acceptance import hazards, sanitizer
from studies.common.acceptance.sanitizer import sanitizer_plans, several_plans
from studies.common.cuda_lines import Kernel, Place, Row
from studies.common.shapes import Bench
from tests.native.scoreboards import arrivals
from tests.native.test_scoreboards import compiled, needs_nvdisasm

COPY = hazards.lines_of(*hazards.COPY)
READ = hazards.lines_of(*hazards.READS[0])
SUMMARY = "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)\n"


def report(*accesses: str) -> str:
    first, *rest = accesses
    others = "".join(f"=========     and {other} [8 hazards]\n" for other in rest)
    return f"========= Error: Race reported between {first}\n{others}========= \n"


def access(kind: str, offset: int, file: str, line: int) -> str:
    return f"{kind} access at twin_kernel+0x{offset:x} in /somewhere/native/platform/{file}:{line}"


COPIED = access("Write", 0x28140, "cuda.cuh", COPY[2])
TILE = access("Read", 0x10020, "cuda_activation.cuh", READ[2])
FLAG = access("Write", 0x22500, "cuda_main.cu", 219)


def test_a_copy_and_the_reads_of_its_slot_are_ordered() -> None:
    verdict = hazards.judged(
        report(COPIED, TILE, TILE) + report(TILE, COPIED) + SUMMARY.format(2, 2)
    )
    assert verdict == hazards.Verdict(ordered=3, others=(), unseen=0)
    assert verdict.passed


@pytest.mark.parametrize(
    "pair", [(COPIED, FLAG.replace("Write", "Read")), (FLAG, TILE), (COPIED, COPIED), (TILE, FLAG)]
)
def test_every_other_pair_fails(pair: tuple[str, str]) -> None:
    verdict = hazards.judged(report(COPIED, TILE) + report(*pair) + SUMMARY.format(2, 2))
    assert verdict is not None
    assert (verdict.ordered, len(verdict.others), verdict.passed) == (1, 1, False)


def test_reports_without_source_lines_or_not_shown_fail() -> None:
    bare = report("Write access at twin_kernel+0x28140", "Read access at twin_kernel+0x10020")
    verdict = hazards.judged(bare + SUMMARY.format(1, 3))
    assert verdict is not None
    assert verdict.others == (
        "write at +0x28140 (no source line) and read at +0x10020 (no source line)",
    )
    assert verdict.unseen == 2
    assert hazards.judged("========= COMPUTE-SANITIZER\n") is None


@needs_nvdisasm
@pytest.mark.slow
def test_a_slot_is_left_after_the_reads_that_are_excused() -> None:
    """In every plan that racecheck watches."""
    for plan in (*sanitizer_plans(Bench("cuda")), *several_plans(Bench("cuda"))):
        found = arrivals(*compiled(plan))
        assert found, plan.name
        assert [arrival for arrival in found if arrival.pending] == [], plan.name


# ---- reads whose line the tool did not find ------------------------------------------------------


LOST = "Read access at twin_kernel+0x60"
OTHER_LINE = Place("stages.cuh", 20, "")


def kernel(read: Place, *, opcode: int = hazards.LDS, copy: int = COPY[2]) -> Kernel:
    """Sixteen instructions: a bulk copy at 0x20, the report is about 0x60."""
    rows = [
        Row(0, OTHER_LINE, 0),
        Row(0x20, Place("cuda.cuh", copy, "bulk_copy"), 1),
        Row(0x30, OTHER_LINE, 0),
        Row(0x60, read, 1),
        Row(0x70, OTHER_LINE, 0),
    ]
    return Kernel(bytes(0x60) + opcode.to_bytes(16, "little") + bytes(0x90), tuple(rows))


HERE = Place("cuda_activation.cuh", READ[2], "load_shared_at")
SCANNED = Place(
    "cuda_copies.cuh", hazards.lines_of("cuda_copies.cuh", "load_transposed")[1], "load_transposed"
)
SHOWN = report(access("Write", 0x20, "cuda.cuh", COPY[2]), LOST) + SUMMARY.format(1, 1)


def test_a_read_without_a_line_is_looked_up_in_the_kernel_that_its_report_fits() -> None:
    for load in (kernel(HERE), kernel(SCANNED, opcode=hazards.LDSM)):
        verdict = hazards.judged(SHOWN, [load, kernel(OTHER_LINE, copy=COPY[3])])
        assert verdict == hazards.Verdict(ordered=1, others=(), unseen=0, looked_up=1)


@pytest.mark.parametrize(
    "kernels",
    [
        [],
        [kernel(HERE, copy=COPY[3])],  # another kernel than the report's
        [kernel(HERE, opcode=0x981)],  # no load from shared memory
        [kernel(OTHER_LINE)],
        [kernel(HERE), kernel(OTHER_LINE)],  # either may be the report's
        [kernel(HERE), kernel(HERE, opcode=0x981)],
        [Kernel(bytes(0x100), ())],
    ],
)
def test_a_read_that_nothing_shows_to_be_of_the_ring_fails(kernels: list[Kernel]) -> None:
    verdict = hazards.judged(SHOWN, kernels)
    assert verdict is not None
    assert (verdict.ordered, len(verdict.others), verdict.passed) == (0, 1, False)


def test_a_report_without_any_line_fits_no_kernel() -> None:
    bare = report("Write access at twin_kernel+0x20", LOST) + SUMMARY.format(1, 1)
    verdict = hazards.judged(bare, [kernel(HERE)])
    assert verdict is not None
    assert (verdict.looked_up, verdict.passed) == (0, False)


NEAR = hazards.lines_of("cuda_cached.cuh", "load_near")[3]
ELEMENT = hazards.lines_of(*hazards.SHARED)[2]


def of_element(caller: Place) -> Kernel:
    """At 0x60 an element is loaded, by a function that `caller` inlines."""
    rows = [
        Row(0, OTHER_LINE, 0),
        Row(0x20, Place("cuda.cuh", COPY[2], "bulk_copy"), 1),
        Row(0x60, caller, 1),
        Row(0x60, Place("cuda.cuh", ELEMENT, "load_element"), 3),
    ]
    return Kernel(bytes(0x60) + hazards.LDS.to_bytes(16, "little") + bytes(0x90), tuple(rows))


@pytest.mark.parametrize("stated", [LOST, access("Read", 0x60, "cuda.cuh", ELEMENT)])
def test_an_element_is_of_the_ring_only_where_a_scan_of_the_ring_loads_it(stated: str) -> None:
    said = report(access("Write", 0x20, "cuda.cuh", COPY[2]), stated) + SUMMARY.format(1, 1)
    near, other = (of_element(Place("cuda_cached.cuh", NEAR, "load_near")), of_element(OTHER_LINE))
    for kernels, passed in (([near], True), ([other], False), ([near, other], False), ([], False)):
        verdict = hazards.judged(said, kernels)
        assert verdict is not None
        assert verdict.passed is passed


def test_where_the_tool_stopped_looking_nothing_passes() -> None:
    said = f"========= Warning: {hazards.LIMIT}. ...\n" + SUMMARY.format(0, 0)
    verdict = hazards.judged(said)
    assert verdict is not None
    assert (verdict.unseen, verdict.passed) == (1, False)


def test_names_that_the_kernel_no_longer_has_are_an_error() -> None:
    with pytest.raises(ValueError, match="defines bulk_copies 0 times"):
        hazards.lines_of("cuda.cuh", "bulk_copies")


def test_kernels_without_source_lines_are_not_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept ones have none; those of `with_lines` keep a user's flags."""
    monkeypatch.setattr(sanitizer, "find", lambda: "compute-sanitizer")
    monkeypatch.setattr(sanitizer, "run_all", lambda bench, which: [[1]])
    monkeypatch.setattr(sanitizer, "PLANS", {"protocols": lambda bench: [None]})
    monkeypatch.setattr(sanitizer, "compile_kernels", lambda plan: {"": SimpleNamespace(cubin=b"")})
    monkeypatch.setattr(sanitizer, "read_kernel", lambda cubin: Kernel(cubin, ()))
    bench: Any = SimpleNamespace(device="cuda")
    with pytest.raises(sanitizer.NotRun, match="NVCC_APPEND_FLAGS=-lineinfo"):
        sanitizer.sanitize(bench, tmp_path)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ccbin g++")
    assert sanitizer.with_lines(tmp_path) == {
        "NVCC_APPEND_FLAGS": "-ccbin g++ -lineinfo",
        "XDG_CACHE_HOME": str(tmp_path.resolve()),
    }
