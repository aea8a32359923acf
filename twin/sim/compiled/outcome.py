"""Runs a machine in compiled code and puts the outcome where SimPy would have left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

from twin.errors import TwinError
from twin.sim.block import Segment
from twin.sim.clock import beyond
from twin.sim.compiled import library
from twin.sim.compiled.lower import FlatProgram, Lowered, lower
from twin.sim.compiled.room import Room
from twin.sim.compiled.state import ERRORS, State
from twin.sim.gated import GatedRing
from twin.sim.machine import Machine

T = TypeVar("T", covariant=True)


class Ambiguous(TwinError):
    """The first GPU cannot stand for all: the whole machine can be run instead."""


def run(machine: Machine, flat: FlatProgram, room: Room | None = None) -> None:
    """As Machine.run. `flat` is the machine's program; the blocks' logs lie in `room`.

    Raises Unsupported or ToolchainError before anything has run; Ambiguous where the first GPU does
    not stand for all.
    """
    lowered = lower(machine, flat, room)
    library.run(lowered.state)
    _put_back(machine, lowered)
    error, stuck = (int(lowered.state.machine[name][0]) for name in ("error", "stuck"))
    low, high = (int(lowered.state.machine[name][0]) for name in ("beyond", "beyond_high"))
    match ERRORS[error]:
        case "DEADLOCK":
            raise machine.deadlock()
        case "STARVED":
            raise machine.blocks[stuck].ring.starved()
        case "BEYOND":
            raise beyond((high << 64) + low % 2**64)
        case "AMBIGUOUS":
            raise Ambiguous("GPUs may differ: each of them has to be simulated")
        case "SLOW":
            lowered.pipes[stuck].cost(flat.sizes[low])
            raise AssertionError("compiled code refused a transfer that its pipe knows")


def _put_back(machine: Machine, lowered: Lowered) -> None:
    state = lowered.state
    for pipe, size in zip(lowered.pipes, state.pipes["bytes"].tolist(), strict=True):
        pipe.bytes = size
    blocks = state.blocks[: len(machine.blocks)]  # without their schedulers
    step = blocks["step"].tolist()
    columns = (
        blocks[name].tolist() for name in ("issued", "freed", "limit", "consumed", "history")
    )
    for number, (block, issued, freed, limit, consumed, history) in enumerate(
        zip(machine.blocks, *columns, strict=True)
    ):
        block.ring.issued, block.ring.freed, block.ring.limit, block.consumed = (
            issued,
            freed,
            limit,
            consumed,
        )
        if isinstance(block.ring, GatedRing):
            there = state.there[
                number * block.ring.capacity : (number + 1) * block.ring.capacity
            ].tolist()
            block.ring.there = {slot: arrival for slot, arrival in there if slot >= 0}
        block.ended = state.ended[: step[number], number].tolist()
        block.log = _log(machine, state, number)
        if history >= 0:
            block.ring.history = [
                (a, b) for a, b in state.history[history : history + issued].tolist()
            ]


class _Lazy(Sequence[T]):
    """Items made where somebody looks at them: a path back through a step touches few of a
    million.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make(i) for i in range(*index.indices(self.length))]
        return self.make(range(self.length)[index])


def _log(machine: Machine, state: State, block: int) -> Sequence[Sequence[Sequence[Segment]]]:
    """[step][stage], as in Block."""
    kept_from, stages = int(state.machine["kept_from"][0]), len(machine.plan.stages)

    def of_step(step: int) -> Sequence[Sequence[Segment]]:
        first = ((step - kept_from) * len(machine.blocks) + block) * stages
        return _Lazy(
            stages if step >= kept_from else 0,
            lambda stage: _segments(state, int(state.logs[first + stage])),
        )

    return _Lazy(machine.steps, of_step)


def _segments(state: State, last: int) -> list[Segment]:
    found: list[Segment] = []
    while last >= 0:
        end, cause, (who, stage, at), last = state.segments[last].item()
        found.append((end, cause, (who, stage, at) if who >= 0 else None))
    found.reverse()
    return found
