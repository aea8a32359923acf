"""Where a block stands: what never changes of it, and the pipes that what it exchanges passes."""

from __future__ import annotations

from dataclasses import dataclass

from twin.sim.memory import Package, Pipe
from twin.sim.slices import Slice

Binder = tuple[int, int, int]  # who published last (the number of a block), in which stage, when


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    number: int  # among the machine's blocks
    rank: int
    index: int  # in its rank
    gpu: int
    die: int
    name: str
    package: Package
    exchange: tuple[Pipe, ...]
    slice: Slice | None  # where it polls, if that occupies anything
    start: int  # ps by which its rank begins a step late
