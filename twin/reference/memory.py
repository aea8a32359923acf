"""The exchange memory of all ranks as the reference sees it: every element knows which publication
it holds.

The stamps make a wrong plan fail instead of computing with a stale value: a read must find this
step's publication, and under the sentinel protocol a publication must find its elements reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.errors import InvalidPlan
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.plan.types import Parts, Plan, Read, Reset, Value

Array = NDArray[Any]
Index = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _View:
    """What the blocks of a rank poll in a read."""

    read: Read  # kept, so that its identity stays its own
    parts: slice | Index
    seen: Mask | None  # [elements] that any block polls; None: all
    mask: Mask | None  # of each block, as broad as what it sees; None: all see everything


class Memory:
    """Exchange buffers, [ranks][copies][parts][elements] each, with one stamp per element (0: holds
    the sentinel).

    Where an element is a word of several numbers, these are a last axis; they are kept as computed,
    not rounded to their share of it.
    """

    def __init__(self, plan: Plan, dtype: type[np.floating[Any]]) -> None:
        self.plan = plan
        self.dtype = dtype
        shapes = [(plan.ranks, b.copies, b.parts, b.elements) for b in plan.buffers]
        numbers = {value.buffer: numbers_of(plan, value) for value in plan.values}
        kept = [
            (*shape, numbers[b.id]) if numbers.get(b.id, 1) > 1 else shape
            for shape, b in zip(shapes, plan.buffers, strict=True)
        ]
        self.data: list[Array] = [np.full(shape, np.nan, dtype) for shape in kept]
        self.stamps = [np.zeros(shape, np.int64) for shape in shapes]
        self._owners = [_owners(value) for value in plan.values]
        self._places = [_together(elements) for elements, _ in self._owners]
        # By identity: hashing the spans of a read takes longer than what is done with them.
        self._views: dict[tuple[int, int], _View] = {}

    def gather(self, read: Read, rank: int, step: int, reader: str) -> Array:
        """[n, parts, elements(, numbers)] that the blocks of `rank` see, NaN outside their spans; n
        is 1 when all see the same.
        """
        value = self.plan.values[read.value]
        view = self._views.get((id(read), rank)) or self._view(read, value, rank)
        at = (rank, value.copy, view.parts, slice(value.elements))
        unready = self.stamps[value.buffer][at] != self._stamp(value, step - read.previous_step)
        if view.seen is not None:
            unready &= view.seen
        if unready.any():
            part, element = (int(i[0]) for i in np.nonzero(unready))
            raise InvalidPlan(
                f"step {step}, {reader}: {value.name}[{element}], part "
                f"{self._parts(read, value, rank)[part]}, is not published on rank {rank}"
            )
        data: Array = self.data[value.buffer][at]
        if view.mask is None:
            return data[None].copy()
        return np.where(view.mask, data, self.dtype(np.nan))

    def publish(self, value: Value, rank: int, step: int, out: Array) -> None:
        """Each block writes the elements it owns from its row of `out` ([n, elements(,
        numbers)]).
        """
        owned, blocks = self._owners[value.id]
        elements = self._places[value.id]
        written = out[blocks, owned] if len(out) > 1 else out[0, elements]
        part = rank if value.pushed else 0
        for target in range(self.plan.ranks) if value.pushed else (rank,):
            stamps = self.stamps[value.buffer][target, value.copy, part]
            if self.plan.options.handoff.resets and stamps[elements].any():
                raise InvalidPlan(
                    f"step {step}: {value.name} is published on rank {target} before its copy "
                    f"{value.copy} was reset"
                )
            stamps[elements] = self._stamp(value, step)
            self.data[value.buffer][target, value.copy, part, elements] = written

    def reset(self, reset: Reset, rank: int) -> None:
        """Every block of `rank` sets what it owns, of every part, back to the sentinel."""
        value = self.plan.values[reset.value]
        elements = self._places[value.id]
        self.data[value.buffer][rank, value.copy, :, elements] = np.nan
        self.stamps[value.buffer][rank, value.copy, :, elements] = 0

    def copied(self) -> list[tuple[Array, Array]]:
        """Of every buffer, its elements and their stamps."""
        return [(a.copy(), b.copy()) for a, b in zip(self.data, self.stamps, strict=True)]

    def restore(self, copied: list[tuple[Array, Array]]) -> None:
        """Hold again what `copied` gave."""
        for own, kept in zip(zip(self.data, self.stamps, strict=True), copied, strict=True):
            for held, one in zip(own, kept, strict=True):
                held[...] = one

    def _stamp(self, value: Value, step: int) -> int:
        return step * len(self.plan.values) + value.id + 1

    def _parts(self, read: Read, value: Value, rank: int) -> list[int]:
        own = rank if value.pushed else 0
        if read.parts is Parts.OWN:
            return [own]
        ranks = range(self.plan.ranks if value.pushed else 1)
        return [part for part in ranks if read.parts is Parts.ALL or part != own]

    def _view(self, read: Read, value: Value, rank: int) -> _View:
        blocks = read.spans[:1] if len(set(read.spans)) == 1 else read.spans
        mask = np.zeros((len(blocks), value.elements), np.bool_)
        for row, spans in zip(mask, blocks, strict=True):
            for lo, hi in spans:
                row[lo:hi] = True
        seen = np.atleast_1d(mask.any(axis=0))
        numbers = self.data[value.buffer].ndim - 4  # axes behind the elements
        view = self._views[id(read), rank] = _View(
            read,
            _together(np.array(self._parts(read, value, rank), np.int64)),
            None if bool(seen.all()) else seen,
            None
            if len(mask) == 1 and mask.all()
            else mask.reshape(len(mask), 1, -1, *(1,) * numbers),
        )
        return view


def numbers_of(plan: Plan, value: Value) -> int:
    """How many numbers a word of this value holds: two 16-bit outputs of attention, else one."""
    return (
        2
        if plan.stages[value.stage].kind is StageKind.ATTENTION
        and plan.options.kv_dtype is not DType.FP32
        else 1
    )


def _together(numbers: Index) -> slice | Index:
    """A slice where they follow each other: NumPy takes it several times as fast."""
    first = int(numbers[0]) if len(numbers) else 0
    follow = np.array_equal(numbers, np.arange(first, first + len(numbers)))
    return slice(first, first + len(numbers)) if follow else numbers


def _owners(value: Value) -> tuple[Index, Index]:
    """(elements, their blocks), in block order."""
    elements = np.concatenate([np.arange(lo, hi) for lo, hi in value.owned])
    if len(np.unique(elements)) != len(elements):
        raise InvalidPlan(f"{value.name}: an element is published by two blocks")
    return elements, np.repeat(np.arange(len(value.owned)), [hi - lo for lo, hi in value.owned])
