"""The pieces that a step's plan is put together from: stages, their values and buffers, and who
reads what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from twin.errors import PlanError
from twin.frozen import frozen
from twin.models.formats import Format
from twin.models.mixers import GroupedAttention
from twin.models.spec import LaneHead, Lanes, ModelSpec
from twin.plan.attention import Attention, Scan
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.coding import Coding
from twin.plan.matrix import Matrix, Routed, Span
from twin.plan.options import CollectiveKind, LateParts, Options
from twin.plan.spans import spread, spread_unevenly, step_of
from twin.plan.types import Buffer, Parts, Read, Shard, Stage, Value

# a whole step lies between two uses: one copy is enough
ONCE_PER_STEP = ("lane_mean", "logits", "candidates", "token")
# the engine's blocks publish something of every stage of rows but of these
FEW_ROWS = (StageKind.ROUTER, StageKind.DELTA_GATES, StageKind.SHARED_UP, StageKind.HYPER)
# partial sums of all ranks
EXCHANGED = tuple(kind.value for kind, row in ROWS.items() if row.summed)


@frozen
class Piece:
    """Weights of one rank that make `outputs` elements of `unit` rows each."""

    outputs: int
    cols: int
    format: Format | None = None
    unit: int = 1

    def matrix(self, owned: tuple[Span, ...]) -> Matrix:
        """Its weights, of which the blocks own these rows; the schedule cuts them into tiles."""
        return Matrix(self.unit * self.outputs, self.cols, self.unit, 0, 0, owned, self.format)


@lru_cache(maxsize=1024)
def _rows(owned: tuple[Span, ...], first: int, last: int, unit: int) -> tuple[Span, ...]:
    """The blocks' rows of the matrix that makes outputs first..last-1, `unit` rows each."""
    return tuple(
        (unit * (min(max(lo, first), last) - first), unit * (min(max(hi, first), last) - first))
        for lo, hi in owned
    )


@dataclass(slots=True)
class Builder:
    """A step under construction; `shift` is where the longer spans start, so that over a step all
    blocks stream the same.
    """

    spec: ModelSpec
    options: Options
    ranks: int
    blocks: int
    shard: Shard
    # the kernel's, of each shape of heads; empty where it does not run the layers
    attentions: tuple[Attention, ...]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    shift: int = 0
    coding: Coding | None = None  # of a plan that the engine runs and whose weights are coded
    # what a layer's halves publish, by their last stage
    modules: dict[tuple[StageKind, int], Value] = field(default_factory=dict)
    # of late parts, by the value that they are parts of
    sums: dict[int, Value] = field(default_factory=dict)

    @property
    def attention(self) -> Attention | None:
        """Of the first layers; None where the kernel does not run them."""
        return self.attentions[0] if self.attentions else None

    def heads_of(self, kind: GroupedAttention) -> int:
        """Which of `attentions` a layer has."""
        return self.spec.head_shapes.index(kind.shape) if self.attentions else 0

    # ---- stages ----------------------------------------------------------------------------------

    def stage(
        self,
        kind: StageKind,
        layer: int,
        *,
        reads: Sequence[Read],
        publishes: int | None,
        vector: int,
        operations: tuple[str, ...],
        matrix: Matrix | None = None,
        more: tuple[Matrix, ...] = (),
        items: tuple[Span, ...] = (),
        window: int = 0,
        scan: Scan | None = None,
        routed: Routed | None = None,
        gate: int | None = None,
        kept: bool = False,
        heads: int = 0,
    ) -> None:
        self.stages.append(
            Stage(
                len(self.stages),
                kind,
                layer,
                tuple(reads),
                (),
                publishes,
                matrix,
                vector,
                operations,
                items,
                window,
                more,
                scan,
                routed,
                gate,
                kept,
                heads,
            )
        )

    def rows(
        self,
        kind: StageKind,
        layer: int,
        pieces: Sequence[Piece],
        *,
        reads: Sequence[Read],
        vector: int,
        operations: tuple[str, ...],
        pushed: bool = False,
        name: str = "",
        routed: Routed | None = None,
        gate: int | None = None,
        scanned: tuple[Span, ...] = (),
        heads: int = 0,
    ) -> Value:
        """A stage that multiplies one or more matrices with the same input; their elements follow
        each other in one value. `scanned`: items of the blocks, of which those that have some own
        `scanning_block_rows` rows where the plan says so.

        Of a kind that sums, ranks push their parts where others read them. The engine's blocks
        publish something each, but for kinds of FEW_ROWS and for blocks with items `scanned`; where
        only the twin runs a plan with fewer outputs than blocks, some own none.
        """
        outputs = sum(piece.outputs for piece in pieces)
        if self.attention and kind not in FEW_ROWS and outputs < self.blocks:
            raise PlanError(
                f"{kind.value} has {outputs} outputs per rank for {self.blocks} blocks: use at "
                f"most {outputs} blocks per rank"
            )
        pushed = pushed or (ROWS[kind].summed and self.exchanged(layer))
        owned = self.owned(outputs, scanned, pushed=pushed)
        self.shift = (self.shift + outputs // self._step(outputs, pushed)) % self.blocks
        matrix, *more = self.matrices(pieces, owned)
        value = self.value(
            name or kind.value,
            layer,
            len(self.stages),
            elements=outputs,
            pushed=pushed,
            owned=owned,
        )
        self.stage(
            kind,
            layer,
            reads=reads,
            publishes=value.id,
            vector=vector,
            operations=operations,
            matrix=matrix,
            more=tuple(more),
            routed=routed,
            gate=gate,
            heads=heads,
        )
        value = self.collected(value)
        if ROWS[kind].summed:
            self.modules[kind, layer] = value
        return value

    def owned(
        self, outputs: int, items: tuple[Span, ...] = (), *, pushed: bool
    ) -> tuple[Span, ...]:
        """The blocks' shares of the next stage's outputs."""
        rows = self.options.scanning_block_rows
        if rows is None or not any(lo < hi for lo, hi in items):
            return spread(outputs, self.blocks, self.shift, self._step(outputs, pushed))
        free = sum(lo == hi for lo, hi in items)
        most = outputs // self.blocks
        if rows > most:
            raise PlanError(
                f"scanning_block_rows={rows}: an equal share of {outputs} rows on {self.blocks} "
                f"blocks is {most}; use at most that many"
            )
        if free == 0:
            raise PlanError(
                f"scanning_block_rows={rows}: all {self.blocks} blocks scan, so no block takes "
                "their rows; use fewer attention_splits, or leave scanning_block_rows out"
            )
        return spread_unevenly(outputs, items, rows, self.shift)

    def _step(self, outputs: int, pushed: bool) -> int:
        alone = self.options.collective is CollectiveKind.PUSH and self.ranks == self.options.gpus
        return step_of(outputs, self.blocks) if pushed and alone else 1

    def matrices(self, pieces: Sequence[Piece], owned: tuple[Span, ...]) -> list[Matrix]:
        """Each piece's matrix; `owned` are the blocks' shares of all pieces' outputs one after the
        other.
        """
        made, first = [], 0
        for piece in pieces:
            last = first + piece.outputs
            made.append(piece.matrix(_rows(owned, first, last, piece.unit)))
            first = last
        return made

    def collected(self, value: Value) -> Value:
        """With a library collective a pushed value stays local and a stage of its own gathers
        it.
        """
        if not value.pushed or self.options.collective is not CollectiveKind.LIBRARY:
            return value
        local = replace(
            value, pushed=False, name=value.name + ".part", buffer=self._part_buffer(value)
        )
        self.values[value.id] = local
        stage = len(self.stages)
        gathered = replace(value, id=len(self.values), stage=stage)
        self.values.append(gathered)
        own = tuple((span,) if span[0] < span[1] else () for span in value.owned)
        layer = self.stages[-1].layer
        self.stage(
            StageKind.COLLECTIVE,
            layer,
            reads=[Read(local.id, Parts.OWN, own)],
            publishes=gathered.id,
            vector=0,
            operations=("all_reduce",),
        )
        return gathered

    def _part_buffer(self, value: Value) -> int:
        pushed = next(b for b in self.buffers.values() if b.id == value.buffer)
        return self.buffer(
            pushed.name + ".part",
            elements=pushed.elements,
            pushed=False,
            copies=pushed.copies,
            words=pushed.words,
        ).id

    # ---- values and buffers ----------------------------------------------------------------------

    def value(
        self,
        name: str,
        layer: int,
        stage: int,
        *,
        elements: int,
        pushed: bool,
        owned: tuple[Span, ...],
        words: int | None = None,
        summed: bool = False,
    ) -> Value:
        """`words` of an element: one a token unless given."""
        once = name in ONCE_PER_STEP
        exchanged = self.ranks > 1 and name in EXCHANGED
        copies = 1 if once else self._exchange_copies() if exchanged else self.options.copies
        words = self.options.tokens if words is None else words
        buffer = self.buffer(
            name, elements=elements, pushed=pushed or exchanged, copies=copies, words=words
        )
        suffix = "" if once else f"[{layer}]"
        value = Value(
            len(self.values),
            name + suffix,
            stage,
            buffer.id,
            layer % copies,
            elements,
            pushed,
            owned,
            words,
            summed,
        )
        self.values.append(value)
        return value

    def buffer(self, name: str, *, elements: int, pushed: bool, copies: int, words: int) -> Buffer:
        """The buffer of that name; layers of another size have one of their own."""
        if name in self.buffers and self.buffers[name].elements != elements:
            name = f"{name}.{elements}"
        if name not in self.buffers:
            self.buffers[name] = Buffer(
                len(self.buffers), name, elements, copies, self.ranks if pushed else 1, words
            )
        return self.buffers[name]

    def _exchange_copies(self) -> int:
        """Copies of a value that other ranks read `delay` layers later, and whose reset they learn
        of that much later still.
        """
        delay, lanes = self.options.delay or 0, self.spec.lanes
        copies = self.options.copies + 2 * delay
        if lanes and lanes.head is LaneHead.VOCABULARY:
            # LM_HEAD reads these layers' parts; other ranks learn of the reset only `delay` layers
            # into the next step.
            last = (self.spec.layers - 1, self.spec.layers - 1 - delay)
            while copies < self.spec.layers and any(layer % copies < delay for layer in last):
                copies += 1
        return copies

    # ---- reads -----------------------------------------------------------------------------------

    def whole(self, value: Value, *, residual: bool = False, parts: Parts | None = None) -> Read:
        """Every block reads every element that was written."""
        parts = parts or (Parts.ALL if value.pushed else Parts.OWN)
        return Read(value.id, parts, (((0, value.elements),),) * self.blocks, residual=residual)

    def span(self, value: Value, lo: int, hi: int) -> Read:
        """Every block reads elements lo..hi-1."""
        return Read(
            value.id, Parts.ALL if value.pushed else Parts.OWN, (((lo, hi),),) * self.blocks
        )

    def residual(self, layer: int, value: Value) -> list[Read]:
        """Which parts of this module's output, and of a delayed one, the next stage adds to the
        residual.
        """
        lanes = self.spec.lanes
        delay = self.options.delay or 0
        if not lanes or delay == 0:
            return [replace(self.whole(value, residual=True), scale=self.spec.variant.residual)]
        if layer < delay:
            if lanes.early_exchange:
                return [self.whole(value, residual=True)]
            own = self.whole(value, residual=True, parts=Parts.OWN)
            return [replace(own, scale=math.sqrt(lanes.count))]
        maker = self.stages[value.stage]
        kind = (
            self.stages[maker.index - 1].kind if maker.kind is StageKind.COLLECTIVE else maker.kind
        )
        # delivered late even if it was exchanged early, as in the published code
        past = self.modules[kind, layer - delay]
        summed = self.sums.get(past.id)
        late = (
            self.whole(summed, residual=True)
            if summed
            else self.whole(past, residual=True, parts=Parts.OTHERS)
        )
        return [self.whole(value, residual=True, parts=Parts.OWN), late]

    def sum_late_parts(self, layer: int) -> None:
        """Behind GATE_UP: the sums that the stage behind this layer's DOWN adds, and those that the
        next layer's GATE_UP adds.

        Parts of O_PROJ have had `delay` - 1 layers and GATE_UP to arrive, those of DOWN `delay`
        layers less DOWN. A reader waits for no sum: it waits for every block's DOWN anyway, or for
        what follows it, and a block publishes its sums before that. GATE_UP and DOWN stream the
        most weights of a layer, so a scheduler warp that polls and adds meanwhile keeps nobody
        waiting.
        """
        delay = self.options.delay or 0
        if self.options.late_parts is not LateParts.REDUCED or delay == 0:
            return
        if layer >= delay:
            self._sum(StageKind.DOWN, layer - delay)
        if delay <= layer + 1 < self.spec.layers:
            self._sum(StageKind.O_PROJ, layer + 1 - delay)

    def _sum(self, kind: StageKind, layer: int) -> None:
        """Each block sums the other ranks' parts of the elements that it owns, which nobody but
        itself resets.
        """
        past = self.modules[kind, layer]
        others = Read(
            past.id,
            Parts.OTHERS,
            tuple((span,) if span[0] < span[1] else () for span in past.owned),
        )
        summed = self.value(
            f"late_{kind.value}",
            layer,
            len(self.stages),
            elements=past.elements,
            pushed=False,
            owned=past.owned,
        )
        self.sums[past.id] = summed
        at = self.stages[-1].layer
        self.stage(
            StageKind.REDUCE,
            at,
            reads=(others,),
            publishes=summed.id,
            vector=0,
            operations=("add_late",),
        )

    def exchanged(self, layer: int) -> bool:
        """Does any other rank ever read this layer's partial sums?"""
        if self.ranks == 1:
            return False
        delay = self.options.delay or 0
        if delay == 0:
            return True
        lanes: Lanes = self.spec.lanes  # type: ignore[assignment]  # delay > 0 implies lanes
        if lanes.early_exchange and layer < delay:
            return True
        return layer + delay < self.spec.layers
