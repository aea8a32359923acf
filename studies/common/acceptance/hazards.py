"""Judges what racecheck reports of the kernel: which pairs an mbarrier orders although the tool
does not follow it.

A bulk copy (cp.async.bulk) writes a slot of the ring; the tool holds it for a write by the loader's
thread and does not take the mbarrier that counts its bytes for an order between the two. So each
first read of a slot by another warp is reported. Nothing else is excused: both sides have to lie in
the functions named here, by the source lines in the report.

The tool does not find the line of some reads although the kernel's line table has it. Such a read
is looked up in the cubins that ran: in every one that agrees with all lines of its report, the
instruction has to be a load from shared memory in a function named here. A function that reads
other memory as well (`SHARED`) is looked up, too: it has to be inlined in one named here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from studies.common.cuda_lines import Kernel
from twin.data import data_dir

COPY = ("cuda.cuh", "bulk_copy")  # writes a slot; its bytes complete the slot's `full` barrier
# of a slot that is there, before an arrival at its `empty` barrier
READS = (
    ("cuda_activation.cuh", "load_shared_at"),
    ("cuda_cached.cuh", "load_near"),
    # by scans on the tensor cores
    ("cuda_copies.cuh", "load_matrices"),
    ("cuda_copies.cuh", "load_transposed"),
    # of low-bit codes and their scales
    ("cuda.cuh", "load_four"),
    ("cuda.cuh", "load_two"),
    ("cuda.cuh", "load_one"),
    ("cuda.cuh", "load_half"),
)
# reads an element from anywhere: cached keys and values that are narrower than a thread's piece,
# where `load_near` calls it
SHARED = ("cuda.cuh", "load_element")
LIMIT = "Maximum number of hazards reached"  # said by the tool, which then looks no further
# the opcodes, low twelve bits, of loads from shared memory (compute capability 7.0 to 9.0)
LDS, LDSM = 0x984, 0x83B
ACCESS = re.compile(
    r"(Read|Write) access at [^\n]*?\+0x([0-9a-f]+)(?: in (\S+):(\d+))?(?: \[(\d+) hazards\])?$",
    re.MULTILINE,
)
SUMMARY = re.compile(
    r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
)


@dataclass(frozen=True)
class Access:
    kind: str  # Read, Write
    at: str  # hexadecimal, in the kernel
    file: str  # empty without line information
    line: int

    def inside(self, place: tuple[str, str]) -> bool:
        return self.file == place[0] and self.line in lines_of(*place)

    def __str__(self) -> str:
        return f"{self.kind.lower()} at +0x{self.at}" + (
            f" ({self.file}:{self.line})" if self.file else " (no source line)"
        )


@dataclass(frozen=True)
class Verdict:
    ordered: int  # pairs of a bulk copy and a read of its slot
    others: tuple[str, ...]  # all other pairs
    unseen: int  # counted by the tool, but not displayed; and where it looked no further
    looked_up: int = 0  # accesses whose line the tool did not find, and the line table has

    @property
    def passed(self) -> bool:
        return not self.others and not self.unseen


def judged(said: str, kernels: Sequence[Kernel] = ()) -> Verdict | None:
    """The verdict on racecheck's whole output about these kernels; None when it has no summary."""
    counted = SUMMARY.search(said)
    if not counted:
        return None
    displayed, errors, warnings = (int(number) for number in counted.groups())
    stated = [_accesses(report) for report in said.split("reported between ")[1:]]
    known = [_looked_up(report, kernels) for report in stated]
    pairs = [(first, other) for first, *rest in known for other in rest]
    others = tuple(
        f"{first} and {other}" for first, other in pairs if not _copy_and_read(first, other)
    )
    looked_up = sum(
        before != after
        for one, other in zip(stated, known, strict=True)
        for before, after in zip(one, other, strict=True)
    )
    unseen = errors + warnings - displayed + said.count(LIMIT)
    return Verdict(len(pairs) - len(others), others, unseen, looked_up)


@cache
def lines_of(file: str, function: str) -> range:
    """Lines of a function's definition in native/platform. Raises ValueError when it has none: the
    names above are out of date.
    """
    source = (data_dir("native") / "platform" / file).read_text(encoding="utf-8").splitlines()
    starts = [
        i for i, line in enumerate(source, 1) if re.search(rf"__device__.*\b{function}\(", line)
    ]
    if len(starts) != 1:
        raise ValueError(
            f"{file} defines {function} {len(starts)} times instead of once; correct "
            "studies/common/acceptance/hazards.py"
        )
    depth, begun = 0, False
    for number, line in enumerate(source[starts[0] - 1 :], starts[0]):
        depth += line.count("{") - line.count("}")
        begun = begun or "{" in line
        if begun and depth == 0:
            return range(starts[0], number + 1)
    raise ValueError(f"{file}: {function} does not end")


def _copy_and_read(first: Access, other: Access) -> bool:
    write, read = sorted((first, other), key=lambda access: access.kind == "Read")
    return (
        (write.kind, read.kind) == ("Write", "Read")
        and write.inside(COPY)
        and any(read.inside(place) for place in READS)
    )


def _accesses(report: str) -> list[Access]:
    return [
        Access(kind, at, Path(file).name, int(line or 0))
        for kind, at, file, line, _ in ACCESS.findall(report)
    ]


def _looked_up(report: list[Access], kernels: Sequence[Kernel]) -> list[Access]:
    """The report, with the lines of its reads that the tool did not find. All its accesses are of
    one kernel.
    """
    fitting = [
        kernel
        for kernel in kernels
        if any(access.file for access in report) and all(_fits(access, kernel) for access in report)
    ]
    return [_wanted(access, fitting) if access.kind == "Read" else access for access in report]


def _wanted(access: Access, fitting: list[Kernel]) -> Access:
    """A read whose line the tool did not find, with its line; one in SHARED with that of the
    function that it is inlined in.
    """
    if not access.file:
        access = _read_in(access, fitting, 0)
    return _read_in(access, fitting, 1) if access.inside(SHARED) else access


def _fits(access: Access, kernel: Kernel) -> bool:
    places = kernel.places(int(access.at, 16))
    return bool(places) and (
        not access.file or (places[0].file, places[0].line) == (access.file, access.line)
    )


def _read_in(access: Access, fitting: list[Kernel], depth: int) -> Access:
    """With its line, `depth` functions out of the innermost, where all kernels agree on it and have
    a load from shared memory there.
    """
    at = int(access.at, 16)
    lines = {
        (place.file, place.line)
        for kernel in fitting
        if kernel.opcode(at) in (LDS, LDSM)
        for place in kernel.places(at)[depth : depth + 1]
    }
    if len(lines) != 1 or any(kernel.opcode(at) not in (LDS, LDSM) for kernel in fitting):
        return access
    ((file, line),) = lines
    return replace(access, file=file, line=line)
