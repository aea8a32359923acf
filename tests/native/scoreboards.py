"""Does a kernel's machine code give memory back to copies while loads from it are still under way?
No sanitizer sees that.

A load from shared memory holds one of its warp's six scoreboards until its result is there, and
what waits for that scoreboard comes after it. An arrival at a barrier waits by itself for no load:
where nobody has used the results yet, it may be performed first, and the copy that it lets in
overwrites what they read. Here every path to such an arrival is followed.

Two things are taken over from ptxas 13.0, which relies on them: loads of a warp from shared memory
answer in order (it gives one no scoreboard where it waits for that of a later one), and a fence
holds its scoreboard until all earlier loads have answered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from studies.common.cuda_lines import Kernel, Place
from tests.native.disassembly import SIZE, Instruction, Program

# parts of mangled names: after these, copies may write what this warp has read
GIVING = ("4Ring7release", "4Ring5leave")
# arrivals that let nobody write: at `go` and `done`, and for bytes to come
OTHERS = ("4Core5begin", "10keep_house", "13expect_copies")
# load weights, cached keys and values from a slot
TAKING = (
    "14load_shared_at",
    "9load_near",
    *(f"10CodedPieceILi{loads}EE4load" for loads in (2, 4, 8)),
    "E3dotINS_6CodingI",  # of Fragments
)


@dataclass(frozen=True, slots=True)
class Load:
    """One that may be under way."""

    at: int
    alone: bool  # it has a scoreboard of its own
    answered_by: int  # scoreboards, as bits: a wait for any of them tells that it has answered


Loads = frozenset[Load]


@dataclass(frozen=True, slots=True)
class Arrival:
    at: int  # bytes from the kernel's start
    function: str  # mangled: one of GIVING
    caller: Place  # where it is called
    # loads of the ring that it may overtake
    pending: tuple[int, ...]


def arrivals(program: Program, kernel: Kernel) -> list[Arrival]:
    """Every arrival that gives memory back to copies."""
    if program.code[-1].at + SIZE != len(kernel.code):
        raise ValueError(
            f"the listing ends at {program.code[-1].at:#x}, the kernel has {len(kernel.code)} bytes"
        )
    before = _under_way(program)
    found = []
    for number, one in enumerate(program.code):
        if not one.name.startswith("SYNCS.ARRIVE"):
            continue
        places = kernel.places(one.at)
        depth, function = _giver(places)
        if not function:
            continue
        under_way = before[number]
        if under_way is None:
            raise ValueError(f"nothing leads to the arrival at {one.at:#x}")
        pending = {load.at for load in _waited(one, under_way) if from_ring(kernel, load.at)}
        found.append(Arrival(one.at, function, places[depth + 1], tuple(sorted(pending))))
    return found


def _giver(places: tuple[Place, ...]) -> tuple[int, str]:
    """Which function an arrival gives memory back for, and how deep in it; an empty name: it gives
    none.
    """
    for depth, place in enumerate(places):
        for function in GIVING:
            if function in place.function:
                return depth, function
    # the kernel itself: the generation is over
    at_left = [place.function for place in places[1:]] == [""]
    if not at_left and not any(other in place.function for other in OTHERS for place in places):
        raise ValueError(
            f"an arrival in {places}: say in scoreboards.py whether it lets copies write"
        )
    return 0, ""


def from_ring(kernel: Kernel, at: int) -> bool:
    """Does the load at byte `at` read a slot of the ring? One from nobody knows where does."""
    places = kernel.places(at)
    return not places or any(any(name in place.function for name in TAKING) for place in places)


def is_load(one: Instruction) -> bool:
    return one.name.startswith("LDS")


def _under_way(program: Program) -> list[Loads | None]:
    """Loads that may be under way when an instruction's turn comes; None where nothing leads."""
    before: list[Loads | None] = [None] * len(program.code)
    before[0] = frozenset()
    again = [0]
    while again:
        number = again.pop()
        here = before[number]
        assert here is not None
        after = _after(program.code[number], here)
        for other in program.next[number]:
            known = before[other]
            if known is None or not after <= known:
                before[other] = after if known is None else known | after
                again.append(other)
    return before


def _after(one: Instruction, loads: Loads) -> Loads:
    loads = _waited(one, loads)
    if is_load(one):
        if one.result and not one.guard:
            loads = frozenset(
                load if load.alone else replace(load, answered_by=load.answered_by | one.result)
                for load in loads
            )
        return loads | {Load(one.at, bool(one.result), one.result)}
    if one.name.startswith("MEMBAR") and not one.guard:
        return frozenset(
            replace(load, answered_by=load.answered_by | one.result | one.read) for load in loads
        )
    return loads


def _waited(one: Instruction, loads: Loads) -> Loads:
    return (
        frozenset(load for load in loads if not load.answered_by & one.waits)
        if one.waits
        else loads
    )
