"""What all kinds of attention are put together from: scans, who reads what, projections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twin.models.mixers import CompressedAttention, GroupedAttention, LatentAttention
from twin.models.weight import Weight
from twin.plan.attention import Scan, partial_words
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.residuals import stored
from twin.plan.spans import spread
from twin.plan.types import Parts, Read, Value

ENTRIES_PER_SPLIT = 128  # as measured for keys and values (POSITIONS_PER_SPLIT)

Weights = dict[str, Weight]


def scan_of(
    b: Builder,
    kind: GroupedAttention | LatentAttention | CompressedAttention,
    *,
    heads: int,
    group: int,
    entry_bytes: int,
    dim: int,
    share: float,
    pending: int = 0,
    chosen: bool = False,
    divided: int = 1,
    splits: int | None = None,
) -> Scan:
    """The cache of a softmax attention on one rank, which holds 1 / `share` of it. `pending`: bytes
    read besides the entries. `divided`: ranks that divide the entries; the most that one has.
    `splits`: those of the engine's attention.
    """
    options, page = b.options, b.options.kv_page
    capacity = -(-kind.positions(options.max_context) // divided)
    wanted = min(-(-capacity // ENTRIES_PER_SPLIT), -(-capacity // page))
    windowed = isinstance(kind, GroupedAttention) and kind.window
    given = splits or (options.window_splits if windowed else None) or options.attention_splits
    splits = given or max(1, min(b.blocks // (heads * options.batch), wanted))
    items = options.batch * heads * splits
    element = b.options.kv_dtype.bytes
    written = kind.traffic(options.context, element).written_bytes * options.tokens / share
    return Scan(
        sequences=options.batch,
        heads=heads,
        group=group,
        entries=-(-kind.positions(options.context) // divided),
        entry_bytes=entry_bytes,
        dim=dim,
        splits=splits,
        page=page,
        held_bytes=round(options.batch * kind.held_bytes(options.max_context, element) / share),
        extra_bytes=round(options.batch * pending / items),
        written_bytes=round(written / items),
        chosen=chosen,
    )


def alike(spans: list[Span]) -> Callable[[int], list[Span]]:
    """For `_seen`: every item uses the same."""
    return lambda item: spans


def read_by_items(
    scan: Scan,
    items: tuple[Span, ...],
    value: Value,
    used: Callable[[int], list[Span]],
    *,
    of_one: bool = False,
) -> Read:
    """What the items of each block read of `value`; `used(item)` gives the spans of one item.
    `of_one`: an element is of one sequence.
    """
    per_sequence = scan.heads * scan.splits
    sequences = tuple(
        (hi - 1) // per_sequence - lo // per_sequence + 1 if lo < hi else 0 for lo, hi in items
    )
    spans = tuple(
        merged_spans(span for item in range(lo, hi) for span in used(item)) for lo, hi in items
    )
    return Read(
        value.id,
        Parts.ALL if value.pushed else Parts.OWN,
        spans,
        sequences=None if of_one else sequences,
    )


def merged_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Ascending, disjoint."""
    made: list[Span] = []
    for lo, hi in sorted(set(spans)):
        if made and lo <= made[-1][1]:
            made[-1] = (made[-1][0], max(hi, made[-1][1]))
        else:
            made.append((lo, hi))
    return tuple(made)


def queries_of(
    b: Builder,
    layer: int,
    pieces: list[Piece],
    latent: Value,
    rank: int,
    *,
    pushed: bool = False,
) -> Value:
    """Queries (a rank's rows) from the compressed ones, the first `rank` elements of `latent`."""
    return b.rows(
        StageKind.QUERY,
        layer,
        pieces,
        reads=[b.span(latent, 0, rank)],
        vector=b.options.tokens * rank,
        operations=("q_norm", "q_proj", "rope"),
        pushed=pushed,
    )


def attend_items(
    b: Builder, layer: int, scan: Scan, items: tuple[Span, ...], reads: list[Read], dim: int
) -> Value:
    """Of each item: outputs of the group's query heads, running maxima, sums of exponentials."""
    return attend(
        b, layer, items, reads, partial_words(scan.group, dim, b.options.kv_dtype), scan=scan
    )


def attend(
    b: Builder,
    layer: int,
    items: tuple[Span, ...],
    reads: list[Read],
    width: int,
    *,
    scan: Scan | None = None,
    window: int = 0,
    heads: int = 0,
) -> Value:
    """A stage that publishes `width` words of each item."""
    owned = tuple((lo * width, hi * width) for lo, hi in items)
    value = b.value(
        "attention",
        layer,
        len(b.stages),
        elements=owned[-1][1],
        pushed=False,
        owned=owned,
        words=b.options.draft + 1,
    )
    b.stage(
        StageKind.ATTENTION,
        layer,
        reads=reads,
        publishes=value.id,
        vector=0,
        operations=("attention", "combine"),
        items=items,
        scan=scan,
        window=window,
        heads=heads,
    )
    return value


def head_out(
    b: Builder, layer: int, weight: Weight, partials: Value, scan: Scan, dim: int, groups: int
) -> Value:
    """Combine the splits of all heads of a group (a head, or several side by side) and carry them
    through the group's own matrix.
    """
    outputs, heads = weight.rows // weight.groups * groups, scan.group // groups
    width, one = (partial_words(count, dim, b.options.kv_dtype) for count in (scan.group, heads))
    spans = tuple(
        merged_spans(
            (item * width + group * one, item * width + (group + 1) * one)
            for item in range(scan.items)
            for group in heads_of(span, outputs // groups)
        )
        for span in spread(outputs, b.blocks, b.shift)
    )
    return b.rows(
        StageKind.HEAD_OUT,
        layer,
        [Piece(outputs, weight.cols, stored(b, weight))],
        reads=[Read(partials.id, Parts.ALL if partials.pushed else Parts.OWN, spans)],
        vector=b.options.tokens * heads * dim,
        operations=("head_out",),
    )


def output_projection(
    b: Builder,
    layer: int,
    weight: Weight,
    reads: list[Read],
    cols: int,
    *,
    vector: int = 0,
    scanned: tuple[Span, ...] = (),
    heads: int = 0,
) -> Value:
    """The output projection's rows over this rank's columns. `scanned`: items of the blocks that
    scan before it.
    """
    return b.rows(
        StageKind.O_PROJ,
        layer,
        [Piece(b.shard.hidden, cols, stored(b, weight))],
        reads=reads,
        vector=b.options.tokens * vector,
        operations=("o_proj",),
        scanned=scanned,
        heads=heads,
    )


def heads_of(span: Span, size: int) -> range:
    """The equal parts of `size` elements that a span touches."""
    return range(span[0] // size, -(-span[1] // size)) if span[0] < span[1] else range(0)
