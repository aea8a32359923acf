"""Who waits for whom, and which stages and blocks do the same: what a plan says before any hardware
is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.cost.causes import HAND_OFF, SAMPLING
from twin.cost.forms import Forms, Numbered
from twin.cost.terms import FP32_BYTES, SECTOR_BYTES
from twin.frozen import frozen
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import Exchanged
from twin.plan.types import Parts, Plan, Read, Stage, Value

KEPT = 16  # plans whose wiring is remembered
NOTHING_READ, NOTHING_TO_WAIT_FOR = -2, -1  # in the place of a channel
Ints = NDArray[np.int64]


@frozen
class Channel:
    """A wait group: everybody who needs the same elements of a value from the same ranks."""

    index: int
    value: int
    parts: Parts
    producers: tuple[int, ...]  # blocks of a rank, in order
    arrivals: int  # publications that complete it
    counted: bool  # arrivals queue at one counter
    cause: int  # of waiting for the own rank's part
    # of a link that a producer's elements fill, at most; 0 of a single producer
    sectors: int = 0
    near: bool = False  # do its readers find the words on their own I/O die?


@frozen
class Lists:
    """Of each block of a rank some channels: those of block b are channels[starts[b] : starts[b +
    1]].
    """

    starts: Ints
    channels: Ints

    def by_block(self) -> list[tuple[int, ...]]:
        channels, starts = self.channels.tolist(), self.starts.tolist()
        return [tuple(channels[a:b]) for a, b in pairwise(starts)]


@frozen
class Wires:
    """Of one stage, by block."""

    # in the order of the plan, without those of which the block reads nothing; NOTHING_TO_WAIT_FOR
    # is one of them
    reads: Lists
    own: Lists  # fed by its publication in its own rank
    others: Lists  # and in every other rank


@frozen
class BlockWires:
    """Of one stage and one block."""

    reads: tuple[int, ...]
    own: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Wiring:
    plan: Plan
    channels: tuple[Channel, ...]
    stages: tuple[Wires, ...]
    forms: Forms

    @cached_property
    def blocks(self) -> list[list[BlockWires]]:
        """[block][stage]"""
        lists = [
            [wires.reads.by_block(), wires.own.by_block(), wires.others.by_block()]
            for wires in self.stages
        ]
        return [
            [BlockWires(*(part[block] for part in parts)) for parts in lists]
            for block in range(self.plan.blocks)
        ]


@lru_cache(maxsize=KEPT)
def wire(plan: Plan) -> Wiring:
    """Remembered: of many machines for one plan only the first has to find it out."""
    numbered = Numbered()
    groups = _Channels(plan, numbered)
    reads = [groups.reads(stage) for stage in plan.stages]
    feeds = [groups.feeds(stage) for stage in plan.stages]
    stages = tuple(Wires(r, *fed) for r, fed in zip(reads, feeds, strict=True))
    return Wiring(plan, tuple(groups.all), stages, Forms(plan, numbered))


def tracked(plan: Plan, value: Value) -> bool:
    """Is the value waited for by itself? Barriers and kernel borders cover the rest."""
    if plan.options.resident:
        return not plan.options.handoff.meets
    return value.pushed and plan.stages[value.stage].kind is not StageKind.COLLECTIVE


def part_count(plan: Plan, value: Value, parts: Parts) -> int:
    """Ranks whose parts a read takes."""
    if not value.pushed:
        return 1
    return {Parts.OWN: 1, Parts.OTHERS: plan.ranks - 1, Parts.ALL: plan.ranks}[parts]


@frozen
class _Readers:
    """Of a read: the groups of blocks that its readers wait for, and which of them each block's is;
    -1: it reads nothing.
    """

    producers: tuple[int, ...]  # as they are numbered
    group: Ints  # [blocks]


class _Channels:
    """Collects wait groups; equal ones are shared."""

    def __init__(self, plan: Plan, numbered: Numbered) -> None:
        self.plan, self.numbered = plan, numbered
        self.all: list[Channel] = []
        # by the number of their producers
        self.known: dict[tuple[int, Parts], dict[int, Channel]] = {}
        self.producers: dict[tuple[int, ...], int] = {}  # numbered
        self.of_value: dict[int, list[Channel]] = {}
        # by how a value is owned and read: layers divide theirs alike
        self.readers: dict[tuple[int, int, int], _Readers] = {}
        self.fed: dict[tuple[tuple[int, ...], ...], Lists] = {}

    def reads(self, stage: Stage) -> Lists:
        table = np.empty((len(stage.reads), self.plan.blocks), np.int64)
        for row, read in zip(table, stage.reads, strict=True):
            row[:] = self._read(stage, read)
        read_by = (table.T != NOTHING_READ) & (stage.kind is not StageKind.COLLECTIVE)
        return Lists(np.concatenate([[0], np.cumsum(read_by.sum(axis=1))]), table.T[read_by])

    def feeds(self, stage: Stage) -> tuple[Lists, Lists]:
        """After all reads: channels of the own rank, and of the others."""
        channels = [] if stage.publishes is None else self.of_value.get(stage.publishes, [])
        own = [channel for channel in channels if channel.parts is not Parts.OTHERS]
        others = [channel for channel in channels if channel.parts is not Parts.OWN]
        return self._fed(own), self._fed(others)

    def _read(self, stage: Stage, read: Read) -> Any:
        """Channel of each block."""
        value = self.plan.values[read.value]
        readers = self._readers(value, read)
        if not tracked(self.plan, value):
            return np.where(readers.group < 0, NOTHING_READ, NOTHING_TO_WAIT_FOR)
        parts = read.parts if value.pushed else Parts.OWN
        known = self.known.setdefault((value.id, parts), {})
        if any(producers not in known for producers in readers.producers):
            self._add(known, value, parts, readers.producers)
        channels = [known[producers].index for producers in readers.producers]
        return np.array([*channels, NOTHING_READ], np.int64)[readers.group]

    def _readers(self, value: Value, read: Read) -> _Readers:
        key = (self.numbered(value.owned), value.elements, self.numbered(read.spans))
        if key not in self.readers:
            counted = not self.plan.options.handoff.resets
            known: dict[tuple[Span, ...], int] = {}
            groups: dict[int, int] = {}
            group = []
            for spans in read.spans:
                # a counter knows only that all have written
                where = ((0, value.elements),) if counted else spans
                if spans and where not in known:
                    known[where] = self.producers.setdefault(
                        _producers(value, where), len(self.producers)
                    )
                group.append(groups.setdefault(known[where], len(groups)) if spans else -1)
            self.readers[key] = _Readers(tuple(groups), np.array(group, np.int64))
        return self.readers[key]

    def _add(
        self, known: dict[int, Channel], value: Value, parts: Parts, numbers: Sequence[int]
    ) -> None:
        plan, producers = self.plan, list(self.producers)
        count = part_count(plan, value, parts)
        counted = not plan.options.handoff.resets
        cause = SAMPLING if plan.stages[value.stage].kind is StageKind.SAMPLE else HAND_OFF
        of_one = _sectors(value)
        near = plan.options.exchanged is Exchanged.PER_IO_DIE and parts is Parts.OWN
        for number in numbers:
            if number in known:
                continue
            blocks = producers[number]
            arrivals, sectors = len(blocks) * count, of_one if len(blocks) > 1 else 0
            known[number] = channel = Channel(
                len(self.all), value.id, parts, blocks, arrivals, counted, cause, sectors, near
            )
            self.all.append(channel)
            self.of_value.setdefault(value.id, []).append(channel)

    def _fed(self, channels: list[Channel]) -> Lists:
        key = tuple(channel.producers for channel in channels)
        if key not in self.fed:
            places = np.repeat(
                np.arange(len(channels)),
                np.array([len(channel.producers) for channel in channels], np.int64),
            )
            blocks = np.array(
                [block for channel in channels for block in channel.producers], np.int64
            )
            ends = np.cumsum(np.bincount(blocks, minlength=self.plan.blocks))
            self.fed[key] = Lists(
                np.concatenate([[0], ends]), places[np.argsort(blocks, kind="stable")]
            )
        known = self.fed[key]
        return Lists(
            known.starts,
            np.array([channel.index for channel in channels], np.int64)[known.channels],
        )


def _sectors(value: Value) -> int:
    size = FP32_BYTES * value.words * max(hi - lo for lo, hi in value.owned)
    return -(-size // SECTOR_BYTES)


def _producers(value: Value, spans: tuple[Span, ...]) -> tuple[int, ...]:
    lo, hi = np.array(value.owned, np.int64).T
    needed = np.zeros(len(lo), bool)
    for first, end in spans:
        needed |= (lo < end) & (first < hi)
    return tuple(np.flatnonzero(needed & (lo < hi)).tolist())
