"""Judges what racecheck reports of the kernel: which pairs an mbarrier orders although the tool does not follow it.

A bulk copy (cp.async.bulk) writes a slot of the ring; the tool holds it for a write by the loader's thread and does not take the
mbarrier that counts its bytes for an order between the two. So each first read of a slot by another warp is reported. Nothing else
is excused: both sides have to lie in the functions named here, by the source lines in the report.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from twin.data import data_dir

COPY = ("cuda.cuh", "bulk_copy")  # writes a slot; its bytes complete the slot's `full` barrier
READS = (("cuda_vector.cuh", "load_shared_at"),)  # after a wait for the slot, before an arrival at its `empty` barrier
ACCESS = re.compile(r"(Read|Write) access at [^\n]*?\+0x([0-9a-f]+)(?: in (\S+):(\d+))?(?: \[(\d+) hazards\])?$", re.MULTILINE)
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?, (\d+) warnings?\)")


@dataclass(frozen=True)
class Access:
    kind: str  # Read, Write
    at: str  # hexadecimal, in the kernel
    file: str  # empty without line information
    line: int

    def inside(self, place: tuple[str, str]) -> bool:
        return self.file == place[0] and self.line in lines_of(*place)

    def __str__(self) -> str:
        return f"{self.kind.lower()} at +0x{self.at}" + (f" ({self.file}:{self.line})" if self.file else " (no source line)")


@dataclass(frozen=True)
class Verdict:
    ordered: int  # pairs of a bulk copy and a read of its slot
    others: tuple[str, ...]  # all other pairs
    unseen: int  # counted by the tool, but not displayed

    @property
    def passed(self) -> bool:
        return not self.others and not self.unseen


def judged(said: str) -> Verdict | None:
    """The verdict on racecheck's whole output; None when it has no summary."""
    counted = SUMMARY.search(said)
    if not counted:
        return None
    displayed, errors, warnings = (int(number) for number in counted.groups())
    pairs = [(first, other) for report in said.split("reported between ")[1:] for first, *rest in [_accesses(report)] for other in rest]
    others = tuple(f"{first} and {other}" for first, other in pairs if not _copy_and_read(first, other))
    return Verdict(len(pairs) - len(others), others, errors + warnings - displayed)


@cache
def lines_of(file: str, function: str) -> range:
    """Lines of a function's definition in native/platform. Raises ValueError when it has none: the names above are out of date."""
    source = (data_dir("native") / "platform" / file).read_text(encoding="utf-8").splitlines()
    starts = [i for i, line in enumerate(source, 1) if re.search(rf"__device__.*\b{function}\(", line)]
    if len(starts) != 1:
        raise ValueError(f"{file} defines {function} {len(starts)} times instead of once; correct studies/h200-acceptance/hazards.py")
    depth = 0
    for number, line in enumerate(source[starts[0] - 1 :], starts[0]):
        depth += line.count("{") - line.count("}")
        if depth == 0:
            return range(starts[0], number + 1)
    raise ValueError(f"{file}: {function} does not end")


def _copy_and_read(first: Access, other: Access) -> bool:
    write, read = sorted((first, other), key=lambda access: access.kind == "Read")
    return (write.kind, read.kind) == ("Write", "Read") and write.inside(COPY) and any(read.inside(place) for place in READS)


def _accesses(report: str) -> list[Access]:
    return [Access(kind, at, Path(file).name, int(line or 0)) for kind, at, file, line, _ in ACCESS.findall(report)]
