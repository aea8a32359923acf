"""What the blocks of a stage read and publish: sizes, and what a gather costs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from twin.hardware.types import Device
from twin.kernel.experts import multiplied
from twin.kernel.teams import (
    WIDE_AT_ONCE,
    ffn_at_once,
    hidden_in_quads,
    parts_together,
    taken_ahead,
    teams_of,
    wide_ffn,
)
from twin.models.spec import DType
from twin.plan.catalogue import ROWS
from twin.plan.types import (
    Execution,
    HandOffKind,
    Matrix,
    Parts,
    Plan,
    Read,
    Span,
    Stage,
    StageKind,
    Value,
    routed_share,
)
from twin.sim import cost, tiles, vectors
from twin.sim.causes import COLLECTIVE, HAND_OFF, SAMPLING
from twin.sim.cost import FP32_BYTES
from twin.sim.program import Publication, ReadWork
from twin.sim.routing import Chosen
from twin.sim.wiring import part_count

# latencies of a round of splits into two column slices of a thread that holds weights: in 15 traced
# runs on an H200 such output projections took 0.1 to 0.2 us more for each round
CROWDED = 2
# of a split that is loaded and weighed, what another thread found, on the chip. With as much for
# both eight threads of 256 columns, four of 512 and two of 1,024 came out 0.7, 0.6 and 0.2 us too
# slow in traced runs
MET = 1 / 2


def polled(plan: Plan) -> bool:
    """Do blocks wait by looking at the data themselves?"""
    return (
        plan.options.handoff is HandOffKind.SENTINEL
        and plan.options.execution is Execution.RESIDENT
    )


def shares(matrix: Matrix, blocks: int, block: int, experts: Chosen) -> Iterator[tuple[Span, int]]:
    """A block's elements of each chosen expert when all blocks divide them, stacked; and the tokens
    that chose it.
    """
    width = matrix.rows // matrix.unit
    lo, hi = routed_share(width * len(experts), blocks, block, matrix.share_step)
    for expert in range(lo // width, -(-hi // width)) if lo < hi else ():
        yield (max(lo - expert * width, 0), min(hi - expert * width, width)), experts[expert]


class Gathers:
    """Reads and publications of a plan on a device; what they have in common is worked out once."""

    def __init__(self, plan: Plan, device: Device, by_keeper: list[bool]) -> None:
        """`by_keeper[stage]`: a warp that a block has to spare makes it."""
        self.plan, self.device, self.by_keeper = plan, device, by_keeper
        self.known: dict[tuple[int, int, int, float, float], int] = {}
        self.wide_ffn = device.warps is not None and plan.tokens == 1 and wide_ffn(plan)
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
        return self.plan.kernel_attention().splits_below(pages, producer.window)

    def _read(self, stage: Stage, read: Read, block: int, experts: Chosen) -> ReadWork:
        plan, value = self.plan, self.plan.values[read.value]
        words = self._words(read, value, block, experts) * part_count(plan, value, read.parts)
        words = self._of_filled(stage, read, words)
        remote = value.pushed and read.parts is not Parts.OWN and plan.ranks > 1
        cause = SAMPLING if stage.kind is StageKind.SAMPLE else COLLECTIVE if remote else HAND_OFF
        rounds = self._rounds(stage, read, words)
        loaded = self._loaded(stage, read, words)
        crowd = self._crowd(stage, read)
        weighed = self._weighed(stage, read)
        key = (words, rounds, loaded, crowd, weighed)
        if key not in self.known:
            self.known[key] = vectors.gather_cost(
                self.device,
                elements=words,
                rounds=rounds,
                loaded=loaded,
                blocks=plan.options.blocks,
                crowd=crowd,
                weighed=weighed,
            ).ps
        return ReadWork(read.previous_step, words * FP32_BYTES, self.known[key], rounds, cause)

    def _of_filled(self, stage: Stage, read: Read, words: int) -> int:
        """Of partial outputs those that are loaded, and a word of each item that holds nothing."""
        filled = self.splits(stage, read)
        producer = self.plan.stages[self.plan.values[read.value].stage]
        if self.device.warps is None or not filled or producer.scan:
            return words
        own = self.plan.kernel_attention()
        splits = own.splits_of(producer.window)
        return words * filled // splits + own.kv_heads * (splits - filled)

    def _loaded(self, stage: Stage, read: Read, words: int) -> int:
        """Bytes of sectors that a block of warps loads for a read.

        Of what it waits for it polls all that it asks for at once, and the loads that come too
        early hold up those that find everything.
        """
        plan, value = self.plan, self.plan.values[read.value]
        size = words * FP32_BYTES
        if self.device.warps is None:
            return 0
        splits = self.splits(stage, read)
        if splits:
            if stage.matrix is None:
                return size
            # a thread with two packs of a slice asks for each by itself
            aligned = min(cost.QUAD_BYTES, self._alignment(read))
            split = vectors.vector_bytes(
                stage.matrix, aligned=aligned, element=self._partial_bytes()
            )
            # threads that hold the same columns share the splits
            at_once = vectors.splits_together(stage.matrix) * split // vectors.sharers(stage.matrix)
            # of splits missing in the last one, its last again
            rounds = vectors.vector_rounds(stage.matrix, parts=1, splits=splits)
            return (rounds + polled(self.plan)) * at_once
        at_once = min(size, vectors.ROUND_BYTES)
        if ROWS[stage.kind].vector and stage.matrix:
            parts = part_count(plan, value, read.parts)
            matrix = self._multiplied(stage)
            whole = matrix.cols * value.words * parts
            each = (
                FP32_BYTES * matrix.cols
                if self.quads(stage)
                else vectors.vector_bytes(matrix, aligned=cost.QUAD_BYTES)
            )
            size = each * value.words * min(words, whole) // whole
            size, at_once = size * parts, size  # one part after the other
        waited_for = value.stage == max(plan.values[other.value].stage for other in stage.reads)
        return size + at_once if polled(self.plan) and waited_for else size

    def quads(self, stage: Stage) -> bool:
        """Does each thread gather four elements of its input that no other asks for
        (cuda_quads.cuh)?
        """
        return self.in_quads and stage.kind in self.plan.kinds_by_input["hidden"]

    @cached_property
    def in_quads(self) -> bool:
        """Is the residual narrow enough for that?"""
        plan = self.plan
        runs = self.device.warps is not None and plan.tokens == 1 and not plan.without_code()
        return runs and hidden_in_quads(plan)

    def _weighed(self, stage: Stage, read: Read) -> float:
        """Attention's splits times the column slices in which a thread weighs and adds them; those
        that it looks at once more, for nothing, take as long.
        """
        splits = self.splits(stage, read)
        if not splits or stage.matrix is None:
            return 0.0
        rounds = vectors.vector_rounds(stage.matrix, parts=1, splits=splits)
        sharers = vectors.sharers(stage.matrix)
        looked_at = rounds * vectors.splits_together(stage.matrix) / sharers
        if sharers > 1:  # each its share, and then what all of them found
            looked_at += sharers * MET
        return looked_at * vectors.vector_chunks(stage.matrix)

    def _multiplied(self, stage: Stage) -> Matrix:
        """As our kernel multiplies it for one token: chosen experts' columns side by side."""
        assert stage.matrix is not None
        wide = multiplied(self.plan, stage) if self.plan.tokens == 1 else None
        return wide or stage.matrix

    def _alignment(self, read: Read) -> int:
        """Bytes of one load of attention's partial outputs."""
        value = self.plan.values[read.value]
        producer = self.plan.stages[value.stage]
        if producer.scan:
            items = producer.scan.items
        else:
            items = self.plan.kernel_attention().items_of(producer.window)
        return vectors.partial_alignment(value.elements // items)

    def _partial_bytes(self) -> int:
        """Of an element of attention's partial outputs."""
        return FP32_BYTES if self.plan.options.kv_dtype is DType.FP32 else FP32_BYTES // 2

    def _crowd(self, stage: Stage, read: Read) -> float:
        """How often more than once the blocks of a rank ask for the same partial outputs at once,
        for each of the GPU's multiprocessors: of fewer splits than are looked at together they load
        the last one several times, all of them from the same few lines.
        """
        splits, producer = (
            self.splits(stage, read),
            self.plan.stages[self.plan.values[read.value].stage],
        )
        # nobody has measured those of other layers
        if self.device.warps is None or not splits or producer.scan:
            return 0.0
        at_once = vectors.parts_at_once(stage.matrix) / vectors.sharers(stage.matrix)
        return max(0.0, at_once / splits - 1) * self.plan.blocks / self.device.blocks

    def _rounds(self, stage: Stage, read: Read, words: int) -> int:
        """Of loads that follow each other beyond the first one."""
        plan = self.plan
        if self.device.warps is None:
            return 0
        if self.by_keeper[stage.index]:
            rounds = vectors.late_rounds(words // max(1, plan.ranks - 1))
        elif ROWS[stage.kind].vector:
            parts = part_count(plan, plan.values[read.value], read.parts)
            rounds = vectors.vector_rounds(
                stage.matrix,
                parts=parts,
                splits=self.splits(stage, read),
                together=self._parts_together(stage.matrix),
            )
            rounds *= self._latencies_of_a_round(stage)
            if stage.kind in plan.kinds_by_input["ffn"]:
                rounds += self._ffn_rounds - 1
        else:
            parts = part_count(plan, plan.values[read.value], read.parts)
            rounds = vectors.span_rounds(
                words // parts, parts=parts, at_once=self._parts_at_once, polled=polled(plan)
            )
        return rounds - 1

    @cached_property
    def _ffn_rounds(self) -> int:
        """In which threads gather a feed-forward's input that is too wide for registers, else 1."""
        if self.plan.tokens > 1 or not self.plan.limits.teams:
            return 1
        at_once = WIDE_AT_ONCE if self.wide_ffn else ffn_at_once(self.plan)
        return -(-teams_of(self.plan).ffn.portions // at_once)

    def _latencies_of_a_round(self, stage: Stage) -> int:
        """In which a thread gathers some of attention's splits."""
        if stage.kind is not StageKind.O_PROJ or stage.kind not in self._several:
            return 1
        team = stage.matrix and tiles.shaped_team(stage.matrix, self.plan.options.weight_dtype)
        return CROWDED if team and team.portions == 2 else 1

    @cached_property
    def _several(self) -> frozenset[StageKind]:
        if self.device.warps is None:
            return frozenset()
        ahead = taken_ahead(self.plan)
        return frozenset(kind for kind, one in ahead.items() if one.several)

    def _parts_together(self, matrix: Matrix | None) -> int:
        if matrix is None:
            return 1
        coded = matrix.pack > vectors.PACK_ELEMENTS
        return parts_together(self.plan, tiles.vector_portions(matrix), coded=coded)

    @property
    def _parts_at_once(self) -> int:
        """Of a span, as source_sum (cuda_vector.cuh)."""
        several = self.plan.options.gpus > 1 and self.plan.spec is not None
        return 1 if several else vectors.PARTS_AT_ONCE

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
        words = sum(hi - lo for lo, hi in read.spans[block]) * value.words
        return (
            words
            if read.sequences is None
            else words * read.sequences[block] // self.plan.options.batch
        )

    def _shared_words(self, stage: Stage, block: int, experts: Chosen) -> int:
        """What a block publishes of the chosen experts' rows: a word a token, and at least one, so
        that readers learn of the block.
        """
        parts = shares(stage.matrices[0], self.plan.blocks, block, experts)
        return max(1, sum((hi - lo) * tokens for (lo, hi), tokens in parts))
