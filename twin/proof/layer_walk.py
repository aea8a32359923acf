"""A layer's stages, taken piece by piece: matrices, scans of a cache, what blocks need of a value.

Shares no code with the builder. Sizes are those of one rank; a stage's reads are compared exactly,
its spans must hold what is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache

from twin.plan.attention import Scan
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import Common
from twin.plan.types import Parts, Stage, Value
from twin.proof.walk import Need, Walk, Wrong, partials_of, whole

Rows = list[tuple[int, str]]  # (outputs of a rank, the matrix that makes them)
CROSSING = (StageKind.O_PROJ, StageKind.DOWN, StageKind.SHARED_DOWN, StageKind.ROUTED_DOWN)


class LayerWalk:
    """Takes the stages of one layer; -1: those behind the last one."""

    def __init__(self, walk: Walk, index: int) -> None:
        self.walk, self.plan, self.index = walk, walk.plan, index
        self.ranks, self.options = walk.plan.ranks, walk.plan.options
        weights = walk.spec.end_weights() if index < 0 else walk.spec.layer_weights(index)
        self.weights = {w.name: w for w in weights}
        self.sharded = self.options.common is Common.SHARDED and self.ranks > 1
        self.pushed: set[int] = set()  # values of which every rank has computed a share for all

    def share(self, count: int) -> int:
        if count % self.ranks:
            raise Wrong(
                "the plan", f"{count} heads or columns of layer {self.index} on {self.ranks} ranks"
            )
        return count // self.ranks

    def common(self, rows: int) -> int:
        """Rows of one rank of what all ranks need."""
        return -(-rows // self.ranks) if self.sharded else rows

    def rows(
        self,
        kind: StageKind,
        reads: list[Need] | Callable[[tuple[Span, ...]], list[Need]],
        parts: Rows,
        *,
        cols: int = 0,
        unit: int = 1,
        common: bool = False,
    ) -> Value:
        """A stage of matrices whose outputs follow each other. `reads`: needs, or what gives them
        for the blocks' output spans.
        """
        stage = self.walk.peek(kind, self.index)
        outputs = sum(rows for rows, _ in parts)
        published = self.plan.values[stage.publishes].owned if stage.publishes is not None else ()
        needs = reads(published) if callable(reads) else reads
        shapes = [(unit * rows, cols or self.weights[name].cols, unit) for rows, name in parts]
        value = self.walk.take(kind, self.index, needs, elements=outputs, matrix=shapes)
        first = 0
        for matrix, (rows, name) in zip(stage.matrices, parts, strict=True):
            self.walk.check_stored(stage, matrix, self.weights[name])
            owned = _rows_of(value.owned, first, first + rows, unit)
            if matrix.owned != owned:
                block = next(
                    b
                    for b, (its, mine) in enumerate(zip(matrix.owned, owned, strict=True))
                    if its != mine
                )
                has = (
                    f"rows {matrix.owned[block]} of {name} but publishes elements "
                    f"{value.owned[block]}"
                )
                self.walk.say(stage, f"block {block} owns {has}, {unit} rows each")
            first += rows
        return self.gathered(value, common=common)

    def gathered(self, value: Value, *, common: bool) -> Value:
        """With a library collective a stage of its own gathers what other ranks need."""
        if common and self.sharded:
            value = self.walk.gathered(value)
            self.pushed.add(value.id)
            return value
        return (
            self.walk.gathered(value) if self.plan.stages[value.stage].kind in CROSSING else value
        )

    def all(self, value: Value) -> Need:
        if value.id in self.pushed:
            return Need(value, whole(self.plan, value.elements), Parts.ALL)
        return self.walk.all(value)

    def some(self, value: Value, span: Span) -> Need:
        """`span` of a value that all ranks need alike, of every rank's part if they share it."""
        return replace(self.all(value), spans=self.every(span))

    def every(self, *spans: Span) -> tuple[tuple[Span, ...], ...]:
        return (spans,) * self.plan.blocks

    def per_block(
        self, owned: tuple[Span, ...], size: int, spans: list[Span]
    ) -> tuple[tuple[Span, ...], ...]:
        """Of each block the spans of the heads whose `size` outputs it owns."""
        return tuple(
            tuple(
                spans[at]
                for at in range(len(spans))
                if lo < (at + 1) * size and at * size < hi and lo < hi
            )
            for lo, hi in owned
        )

    def scans(self, kind: StageKind, *, heads: int, group: int, entries: int) -> Stage:
        """The next stage, with the cache that it must scan."""
        stage = self.walk.peek(kind, self.index)
        scan = stage.scan
        if scan is None:
            raise Wrong(stage.name, "scans no cache")
        has = (scan.sequences, scan.heads, scan.group, scan.entries)
        wanted = (self.options.batch, heads, group, entries)
        if has != wanted:
            self.walk.say(
                stage,
                f"scans (sequences, heads, query heads each, entries) {has}, the model has "
                f"{wanted}",
            )
        return stage

    def entry_bytes(self, stage: Stage, size: int) -> None:
        if scan_of(stage).entry_bytes != size:
            self.walk.say(
                stage, f"entries of {scan_of(stage).entry_bytes} bytes, the model's have {size}"
            )

    def of_items(self, stage: Stage, value: Value, of: Callable[[int], Iterable[Span]]) -> Need:
        """What each block's items use of a value, and of how many sequences."""
        scan = scan_of(stage)
        each = scan.heads * scan.splits
        spans = tuple(
            tuple(sorted({span for item in range(*items) for span in of(item)}))
            for items in stage.items
        )
        sequences = tuple(len({item // each for item in range(*items)}) for items in stage.items)
        parts = Parts.ALL if value.id in self.pushed else Parts.OWN
        return Need(value, spans, parts, sequences=sequences)

    def attention(
        self, stage: Stage, needs: list[Need], width: int, *, items: int | None = None
    ) -> Value:
        """The stage that scans: its items' results, `width` elements each."""
        items = scan_of(stage).items if items is None else items
        value = self.walk.take(stage.kind, self.index, needs, elements=items * width)
        if value.owned != tuple((lo * width, hi * width) for lo, hi in stage.items):
            self.walk.say(
                stage, f"blocks do not publish the results of their items, {width} elements each"
            )
        return value

    def head_out(
        self,
        stage: Stage,
        partials: Value,
        name: str,
        groups: int,
        outputs: int,
        dim: int,
        *,
        merged: bool = False,
    ) -> Value:
        """Combined splits through a matrix for each group of heads. `merged`: every rank has made
        one of them for these heads.
        """
        scan = scan_of(stage)
        items, heads = (scan.sequences, groups) if merged else (scan.items, scan.group)
        width = partials_of(self.plan, heads, dim)
        part = width // groups

        def needs(owned: tuple[Span, ...]) -> list[Need]:
            mine = self.per_block(
                owned,
                outputs // groups,
                [(group * part, (group + 1) * part) for group in range(groups)],
            )
            spans = tuple(
                tuple(
                    (item * width + lo, item * width + hi)
                    for item in range(items)
                    for lo, hi in block
                )
                for block in mine
            )
            return [replace(self.all(partials), spans=spans)]

        return self.rows(StageKind.HEAD_OUT, needs, [(outputs, name)])


@lru_cache(maxsize=1024)
def _rows_of(owned: tuple[Span, ...], first: int, last: int, unit: int) -> tuple[Span, ...]:
    """The blocks' rows of a matrix that makes the elements first..last-1, `unit` rows each."""
    return tuple(
        (unit * (min(max(lo, first), last) - first), unit * (min(max(hi, first), last) - first))
        for lo, hi in owned
    )


def scan_of(stage: Stage) -> Scan:
    assert stage.scan is not None
    return stage.scan


def nth(index: int, size: int) -> Span:
    return index * size, (index + 1) * size
