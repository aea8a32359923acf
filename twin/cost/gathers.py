"""What the blocks of a stage read and publish: sizes, and what a gather costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from twin.cost.causes import COLLECTIVE, HAND_OFF, SAMPLING
from twin.cost.program import Publication, ReadWork
from twin.cost.routing import Chosen
from twin.cost.terms import FP32_BYTES, nearer_ps
from twin.cost.wiring import part_count
from twin.frozen import frozen
from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix, Span, routed_share
from twin.plan.options import Exchanged
from twin.plan.types import SUMS_PITCH, SUMS_TOGETHER, Parts, Read, Stage, Value
from twin.schedule.types import Schedule


def shares(matrix: Matrix, blocks: int, block: int, experts: Chosen) -> Iterator[tuple[Span, int]]:
    """A block's elements of each chosen expert when all blocks divide them, stacked; and the tokens
    that chose it.
    """
    width = matrix.rows // matrix.unit
    lo, hi = routed_share(width * len(experts), blocks, block, matrix.share_step)
    for expert in range(lo // width, -(-hi // width)) if lo < hi else ():
        yield (max(lo - expert * width, 0), min(hi - expert * width, width)), experts[expert]


@frozen
class Gathered:
    """What a read takes of a block."""

    words: int  # that it loads
    ps: int
    rounds: int = 0  # of loads that follow each other beyond the first one


class Gathers(ABC):
    """Reads and publications of a schedule; what they have in common is worked out once."""

    def __init__(self, schedule: Schedule, device: Device) -> None:
        self.schedule, self.plan, self.device = schedule, schedule.plan, device
        # words that all blocks publish of chosen experts
        self.totals: dict[tuple[int, Chosen], int] = {}

    def of(self, stage: Stage, block: int, experts: Chosen) -> tuple[ReadWork, ...]:
        """Without those of which this block reads nothing."""
        if stage.kind is StageKind.COLLECTIVE:
            return ()
        return tuple(
            self._read(stage, read, block, experts) for read in stage.reads if read.spans[block]
        )

    def publication(self, stage: Stage, block: int, experts: Chosen) -> Publication | None:
        plan = self.plan
        if stage.publishes is None:
            return None
        value = plan.values[stage.publishes]
        lo, hi = value.owned[block]
        if lo == hi:
            return None
        divided = stage.routed is not None and not stage.matrices[0].owned
        words = self._shared_words(stage, block, experts) if divided else (hi - lo) * value.words
        if value.summed:
            words = self._summed_words(value)
        return Publication(
            size=words * FP32_BYTES,
            pushed=value.pushed and plan.ranks > 1 and stage.kind is not StageKind.COLLECTIVE,
        )

    def splits(self, stage: Stage, read: Read) -> int:
        """Of the attention whose partial outputs a stage combines; 0 of anything else that it
        reads.
        """
        producer = self.plan.stages[self.plan.values[read.value].stage]
        if stage.kind is not StageKind.O_PROJ or producer.kind is not StageKind.ATTENTION:
            return 0
        if producer.scan:
            return producer.scan.splits
        # others hold no position yet
        pages = self.plan.options.context // self.plan.options.kv_page + 1
        return self.plan.attention_of(producer).splits_below(pages, producer.window)

    def _read(self, stage: Stage, read: Read, block: int, experts: Chosen) -> ReadWork:
        plan, value = self.plan, self.plan.values[read.value]
        words = self._words(read, value, block, experts) * part_count(plan, value, read.parts)
        remote = value.pushed and read.parts is not Parts.OWN and plan.ranks > 1
        cause = SAMPLING if stage.kind is StageKind.SAMPLE else COLLECTIVE if remote else HAND_OFF
        loaded = self._gathered(stage, read, words)
        near = plan.options.exchanged is Exchanged.PER_IO_DIE and not remote
        nearer = nearer_ps(self.device) if near else 0
        return ReadWork(
            read.previous_step,
            loaded.words * FP32_BYTES,
            loaded.ps - loaded.rounds * nearer,
            loaded.rounds,
            cause,
            nearer,
        )

    @abstractmethod
    def _gathered(self, stage: Stage, read: Read, words: int) -> Gathered:
        """What it takes of a block to gather so many words."""

    def _words(self, read: Read, value: Value, block: int, experts: Chosen) -> int:
        """FP32 words of one rank's part that a block reads."""
        producer = self.plan.stages[value.stage]
        if producer.routed and producer.publishes == value.id and not producer.matrices[0].owned:
            key = (producer.matrices[0].rows, experts)
            if key not in self.totals:
                self.totals[key] = sum(
                    self._shared_words(producer, other, experts)
                    for other in range(self.plan.blocks)
                )
            return self.totals[key]
        if value.summed:
            return self._summed_words(value)
        words = sum(hi - lo for lo, hi in read.spans[block]) * value.words
        return (
            words
            if read.sequences is None
            else words * read.sequences[block] // self.plan.options.batch
        )

    def _summed_words(self, value: Value) -> int:
        """Of the sectors that hold sums: every block adds to all of them, and reads all."""
        return value.elements // SUMS_PITCH * 2 * SUMS_TOGETHER

    def _shared_words(self, stage: Stage, block: int, experts: Chosen) -> int:
        """What a block publishes of the chosen experts' rows: a word a token, and at least one, so
        that readers learn of the block.
        """
        parts = shares(stage.matrices[0], self.plan.blocks, block, experts)
        return max(1, sum((hi - lo) * tokens for (lo, hi), tokens in parts))
