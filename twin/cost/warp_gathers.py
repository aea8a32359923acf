"""What a block of warps pays to gather the inputs of a stage."""

from __future__ import annotations

from twin.cost import terms, tiles, vectors
from twin.cost.gathers import Gathered, Gathers
from twin.cost.terms import FP32_BYTES
from twin.cost.wiring import part_count
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.models.spec import DType
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.matrix import Matrix
from twin.plan.types import Read, Stage, Value
from twin.schedule.teams import team_for
from twin.schedule.types import BlockOfWarps


class WarpGathers(Gathers):
    """Reads and publications of a schedule whose blocks are of warps."""

    def __init__(
        self, schedule: BlockOfWarps, device: Device, kernel: WarpKernel, by_scheduler: list[bool]
    ) -> None:
        """`by_scheduler[stage]`: a warp that a block has to spare makes it."""
        super().__init__(schedule, device)
        self.kernel, self.by_scheduler = kernel, by_scheduler
        self.known: dict[tuple[int, int, int, float, float], int] = {}
        plan, self.warps = self.plan, schedule.warps
        alone = plan.tokens == 1
        self.ffn_in_memory = alone and self.warps.ffn.in_memory
        # in which threads gather a feed-forward's input that is too wide for registers
        self.ffn_rounds = self.warps.ffn.rounds if alone else 1
        self.by_fours = alone and not plan.without_code() and schedule.by_fours

    def _gathered(self, stage: Stage, read: Read, words: int) -> Gathered:
        words = self._of_filled(stage, read, words)
        rounds = self._rounds(stage, read, words)
        if self.plan.values[read.value].summed:  # requested once the residual is there
            rounds += 1
        loaded = self._loaded(stage, read, words)
        crowd = self._crowd(stage, read)
        weighed = self._weighed(stage, read)
        key = (words, rounds, loaded, crowd, weighed)
        if key not in self.known:
            self.known[key] = vectors.gather_cost(
                self.device,
                self.kernel,
                rounds=rounds,
                loaded=loaded,
                blocks=self.plan.options.blocks,
                crowd=crowd,
                weighed=weighed,
            ).ps
        return Gathered(words, self.known[key], rounds)

    def by_fours_of(self, stage: Stage) -> bool:
        """Does each thread gather four elements of its input that no other loads
        (cuda_activation.cuh)?
        """
        return self.by_fours and self.plan.input_of(stage) == "hidden"

    def _of_filled(self, stage: Stage, read: Read, words: int) -> int:
        """Of partial outputs those that are loaded, and a word of each item that holds nothing."""
        filled = self.splits(stage, read)
        producer = self.plan.stages[self.plan.values[read.value].stage]
        if not filled or producer.scan:
            return words
        own = self.plan.attention_of(producer)
        splits = own.splits_of(producer.window)
        return words * filled // splits + own.kv_heads * (splits - filled)

    def _loaded(self, stage: Stage, read: Read, words: int) -> int:
        """Bytes of sectors that a block of warps loads for a read.

        Of what it waits for it polls all that it requests at once, and the loads that come too
        early hold up those that find everything.
        """
        plan, value = self.plan, self.plan.values[read.value]
        size = words * FP32_BYTES
        splits = self.splits(stage, read)
        if splits:
            if stage.matrix is None:
                return size
            # a thread with two vector loads of a slice makes each alone
            aligned = min(terms.QUAD_BYTES, self._alignment(read))
            split = vectors.vector_bytes(
                stage.matrix, aligned=aligned, element=self._partial_bytes()
            )
            # threads that hold the same columns share the splits
            at_once = vectors.splits_together(stage.matrix) * split // vectors.sharers(stage.matrix)
            # of splits missing in the last one, its last again
            rounds = vectors.vector_rounds(stage.matrix, parts=1, splits=splits)
            return (rounds + self.plan.options.polled) * at_once
        at_once = min(size, vectors.ROUND_BYTES)
        if ROWS[stage.kind].vector and stage.matrix:
            parts = part_count(plan, value, read.parts)
            matrix = self._multiplied(stage)
            whole = matrix.cols * value.words * parts
            each = (
                FP32_BYTES * matrix.cols
                if self.by_fours_of(stage)
                else vectors.vector_bytes(matrix, aligned=terms.QUAD_BYTES)
            )
            size = each * value.words * min(words, whole) // whole
            # one part after the other
            size, at_once = size * self._awaited(value, parts), size
        waited_for = value.stage == max(plan.values[other.value].stage for other in stage.reads)
        return size + at_once if self.plan.options.polled and waited_for else size

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
            looked_at += sharers * self.kernel.attention.found_ratio.value
        return looked_at * vectors.vector_chunks(stage.matrix)

    def _multiplied(self, stage: Stage) -> Matrix:
        """As our kernel multiplies it for one token: chosen experts' columns side by side."""
        assert stage.matrix is not None
        wide = self.schedule.matrices[stage.index] if self.plan.tokens == 1 else None
        return wide or stage.matrix

    def _alignment(self, read: Read) -> int:
        """Bytes of one load of attention's partial outputs."""
        value = self.plan.values[read.value]
        producer = self.plan.stages[value.stage]
        if producer.scan:
            items = producer.scan.items
        else:
            items = self.plan.attention_of(producer).items_of(producer.window)
        return vectors.partial_alignment(value.elements // items)

    def _partial_bytes(self) -> int:
        """Of an element of attention's partial outputs."""
        return FP32_BYTES if self.plan.options.kv_dtype is DType.FP32 else FP32_BYTES // 2

    def _crowd(self, stage: Stage, read: Read) -> float:
        """How often more than once the blocks of a rank load the same partial outputs at once,
        for each of the GPU's multiprocessors: of fewer splits than are looked at together they load
        the last one several times, all of them from the same few lines.
        """
        splits, producer = (
            self.splits(stage, read),
            self.plan.stages[self.plan.values[read.value].stage],
        )
        # those of other layers are not measured
        if not splits or producer.scan:
            return 0.0
        at_once = vectors.parts_at_once(stage.matrix) / vectors.sharers(stage.matrix)
        return max(0.0, at_once / splits - 1) * self.plan.blocks / self.device.blocks

    def _rounds(self, stage: Stage, read: Read, words: int) -> int:
        """Of loads that follow each other beyond the first one."""
        plan = self.plan
        if self.by_scheduler[stage.index]:
            rounds = vectors.late_rounds(words // max(1, plan.ranks - 1))
        elif ROWS[stage.kind].vector:
            value = plan.values[read.value]
            rounds = vectors.vector_rounds(
                stage.matrix,
                parts=self._awaited(value, part_count(plan, value, read.parts)),
                splits=self.splits(stage, read),
                together=self._parts_together(stage.matrix),
            )
            rounds *= self._latencies_of_a_round(stage)
            if plan.input_of(stage) == "ffn":
                rounds += self.ffn_rounds - 1
        else:
            parts = part_count(plan, plan.values[read.value], read.parts)
            rounds = vectors.span_rounds(
                words // parts, parts=parts, at_once=self._parts_at_once, polled=plan.options.polled
            )
        return rounds - 1

    def _awaited(self, value: Value, parts: int) -> int:
        """Of the ranks' parts of a vector those that a block loads when the last one has arrived.
        Of two it has its own by then (`gather_vector` in handoff.cuh).
        """
        return 1 if value.pushed and parts == self.plan.ranks == 2 else parts

    def _latencies_of_a_round(self, stage: Stage) -> int:
        """In which a thread gathers some of attention's splits."""
        prefetch = self.schedule.prefetch(stage)
        if stage.kind is not StageKind.O_PROJ or prefetch is None or not prefetch.several:
            return 1
        team = stage.matrix and team_for(stage.matrix, self.plan.options.weight_dtype)
        crowded = int(self.kernel.attention.crowded_rounds.value)
        return crowded if team and team.portions == 2 else 1

    def _parts_together(self, matrix: Matrix | None) -> int:
        if matrix is None:
            return 1
        coded = matrix.pack > vectors.PACK_ELEMENTS
        return self.warps.parts_together(tiles.vector_portions(matrix), coded=coded)

    @property
    def _parts_at_once(self) -> int:
        """Of a span, as source_sum (cuda_activation.cuh)."""
        several = self.plan.options.gpus > 1 and self.plan.spec is not None
        return 1 if several else vectors.PARTS_AT_ONCE
