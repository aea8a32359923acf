"""Gated DeltaNet and Mamba-2: a recurrent state for each value head."""

from __future__ import annotations

from twin.models.mixers import Mamba2, Recurring
from twin.plan.attending import Weights, output_projection, read_by_items
from twin.plan.attention import ITEM_WORDS, Scan
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.residuals import stored, vector
from twin.plan.spans import scatter, share
from twin.plan.types import Read, Value


def recurrence(
    b: Builder, layer: int, kind: Recurring, weights: Weights, reads: list[Read]
) -> Value:
    """On a rank: [queries][keys][values][output gate][write strength, of DeltaNet][decay], heads
    inside each.

    An item publishes its part of a head's output, gated and scaled, and a sum of squares: the norm
    over the head, or over several, is applied where all its items are read.
    """
    keys, values = (
        share(b.spec.name, b.ranks, "key heads", kind.key_heads),
        share(b.spec.name, b.ranks, "value heads", kind.value_heads),
    )
    k, v = keys * kind.key_dim, values * kind.value_dim
    rows = (2 * k + 2 * v, kind.steering * values)
    made, gates, first = _projected(b, layer, kind, weights, reads, rows)
    scan = _state(b, kind, values)
    items, columns = scatter(scan.items, b.blocks), scan.page
    per_key = values // keys

    def head_of(item: int) -> int:
        return item % (scan.heads * scan.splits) // scan.splits

    def used(item: int) -> list[Span]:
        head, split = head_of(item), item % scan.splits
        key, value = head // per_key * kind.key_dim, head * kind.value_dim + split * columns
        return [
            (key, key + kind.key_dim),
            (k + key, k + key + kind.key_dim),
            (2 * k + value, 2 * k + value + columns),
            (2 * k + v + value, 2 * k + v + value + columns),
        ]

    def steered(item: int) -> list[Span]:
        steps = range(first + head_of(item), first + kind.steering * values, values)
        return [(at, at + 1) for at in steps]

    if gates is made:
        seen = [read_by_items(scan, items, made, lambda item: used(item) + steered(item))]
    else:
        seen = [read_by_items(scan, items, made, used), read_by_items(scan, items, gates, steered)]
    width = columns + ITEM_WORDS
    owned = tuple((lo * width, hi * width) for lo, hi in items)
    out = b.value(
        "delta",
        layer,
        len(b.stages),
        elements=scan.items * width,
        pushed=False,
        owned=owned,
        words=b.options.draft + 1,
    )
    b.stage(
        StageKind.DELTA,
        layer,
        reads=seen,
        publishes=out.id,
        vector=0,
        operations=("conv", "state_update", "gated_norm"),
        items=items,
        scan=scan,
    )
    return output_projection(b, layer, weights["o"], [b.whole(out)], v, vector=v)


def _projected(
    b: Builder,
    layer: int,
    kind: Recurring,
    weights: Weights,
    reads: list[Read],
    rows: tuple[int, int],
) -> tuple[Value, Value, int]:
    """(projections, the value with what steers the states, its first element there). To the kernel
    a stage has one matrix: of two formats it makes two stages.
    """
    if isinstance(kind, Mamba2):
        matrix = weights["state_in"]
        made = b.rows(
            StageKind.DELTA_IN,
            layer,
            [Piece(sum(rows), matrix.cols, stored(b, matrix))],
            reads=reads,
            vector=vector(b),
            operations=("add_norm", "in_proj"),
        )
        return made, made, rows[0]
    pieces = [
        Piece(count, weights[name].cols, stored(b, weights[name]))
        for name, count in zip(("qkvz", "ba"), rows, strict=True)
    ]
    alike = pieces[0].format is None and pieces[1].format is None
    if b.attention and alike:
        pieces = [Piece(sum(rows), pieces[0].cols)]
    separate = pieces.pop() if b.attention and not alike else None
    made = b.rows(
        StageKind.DELTA_IN,
        layer,
        pieces,
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "qkvz_proj", "ba_proj"),
    )
    if separate is None:
        return made, made, rows[0]
    gates = b.rows(
        StageKind.DELTA_GATES,
        layer,
        [separate],
        reads=(),
        vector=b.shard.hidden,
        operations=(),
    )
    return made, gates, 0


def state_splits(kind: Recurring, states: int, blocks: int) -> int:
    """Items of one state, where `blocks` blocks have `states` of them."""
    most = max(1, blocks // states)
    cuts = (d for d in range(1, min(most, kind.value_dim) + 1) if kind.value_dim % d == 0)
    return max(d for d in cuts if d == 1 or kind.value_dim // d % ITEM_WORDS == 0)


def _state(b: Builder, kind: Recurring, heads: int) -> Scan:
    """The recurrent state of `heads` value heads, cut along the value dimension into items of whole
    loads. Besides its state an item keeps the convolution's history of the channels that it uses.
    """
    sequences = b.options.batch
    splits = state_splits(kind, heads * sequences, b.blocks)
    rows = kind.value_dim // splits
    state, channel = 4 * kind.key_dim * rows, 4 * (2 * kind.key_dim + rows)
    history = (kind.conv - 1) * channel
    return Scan(
        sequences=sequences,
        heads=heads,
        group=1,
        entries=kind.value_dim,
        entry_bytes=4 * kind.key_dim,
        dim=kind.key_dim,
        splits=splits,
        page=rows,
        held_bytes=sequences * heads * splits * (state + history),
        extra_bytes=history,
        written_bytes=state + channel,
    )
