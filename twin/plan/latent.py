"""Latent attention: heads attend one cached latent, which all ranks keep, or of which each keeps
some positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from twin.models.mixers import LatentAttention
from twin.models.weight import Weight
from twin.plan.attending import (
    Weights,
    alike,
    attend_items,
    head_out,
    heads_of,
    merged_spans,
    output_projection,
    queries_of,
    read_by_items,
    scan_of,
)
from twin.plan.attention import PARTIAL_EXTRA, Scan, partial_words
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import LatentCache
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import scatter, share, spread
from twin.plan.types import Parts, Read, Value


def latent(
    b: Builder, layer: int, kind: LatentAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, query = (
        share(b.spec.name, b.ranks, "attention heads", kind.heads),
        kind.nope_dim + kind.rope_dim,
    )
    split = b.options.latent_cache is LatentCache.SPLIT
    pushed = pushes_common(b) and kind.q_rank > 0  # a rank's own queries are nobody else's
    names = [name for name in ("q_a", "kv_a") if name in weights]
    rows = [common_rows(b, weights[name].rows) if pushed else weights[name].rows for name in names]
    pieces = [
        Piece(count, weights[name].cols, stored(b, weights[name]))
        for name, count in zip(names, rows, strict=True)
    ]
    if not kind.q_rank:
        pieces.append(Piece(heads * query, weights["q"].cols, stored(b, weights["q"])))
    latent = b.rows(
        StageKind.LATENT,
        layer,
        pieces,
        reads=reads,
        vector=vector(b),
        operations=("add_norm", "latent_proj", "norm_rope_append"),
        pushed=pushed,
    )
    queries, first = latent, kind.latent_dim  # where the queries are, and from which element on
    if kind.q_rank:
        q_b = Piece(heads * query, weights["q_b"].cols, stored(b, weights["q_b"]))
        queries, first = queries_of(b, layer, [q_b], latent, rows[0], pushed=split), 0
    absorbed = _absorb(b, layer, kind, weights["k_up"], queries, first, heads, pushed=split)
    scan = scan_of(
        b,
        kind,
        heads=1,
        group=kind.heads if split else heads,
        entry_bytes=kind.latent_dim * b.options.kv_dtype.bytes,
        dim=kind.latent_dim,
        share=b.ranks if split else 1,
        divided=b.ranks if split else 1,
    )
    items = scatter(scan.items, b.blocks)
    turned = [
        (first + head * query + kind.nope_dim, first + (head + 1) * query) for head in range(heads)
    ]
    if split:  # of what other ranks push all is read: else nobody would know that it has arrived
        turned = [(0, queries.elements)]
    newest = (sum(rows) - rows[-1], sum(rows))
    used: dict[int, list[Span]] = {absorbed.id: [(0, absorbed.elements)]}
    for value, spans in ((queries, turned), (latent, [newest])):
        used.setdefault(value.id, []).extend(spans)
    seen = [
        read_by_items(scan, items, b.values[value], alike(spans)) for value, spans in used.items()
    ]
    partials = attend_items(b, layer, scan, items, seen, kind.kv_rank)
    if split:
        partials = _merged(b, layer, partials, scan, kind.kv_rank)
        scan = replace(scan, group=heads, splits=1)
    carried = head_out(b, layer, weights["v_up"], partials, scan, kind.kv_rank, heads)
    return output_projection(b, layer, weights["o"], [b.whole(carried)], heads * kind.value_dim)


def _merged(b: Builder, layer: int, partials: Value, scan: Scan, dim: int) -> Value:
    """[sequences][heads of a rank]: what this rank's positions say of a head, as one item says it.

    Every rank writes into each other one's memory what is of that one's heads. In an item the words
    of a head of each rank lie side by side, then their maxima and sums. So a block merges the same
    words for all ranks.
    """
    ranks, one = b.ranks, partial_words(1, dim, b.options.kv_dtype)
    heads = scan.group // ranks
    each, width = heads * one, scan.group * one
    owned = spread(scan.sequences * each, b.blocks)

    def used(lo: int, hi: int) -> Iterator[Span]:
        for sequence in range(lo // each, -(-hi // each)):
            first, last = max(lo - sequence * each, 0), min(hi - sequence * each, each)
            for item in range(sequence * scan.splits, (sequence + 1) * scan.splits):
                at = item * width
                yield at + ranks * first, at + ranks * last
                for head in heads_of((first, last), one):
                    end = at + ranks * one * (head + 1)
                    yield end - ranks * PARTIAL_EXTRA, end

    spans = tuple(merged_spans(used(lo, hi)) if lo < hi else () for lo, hi in owned)
    value = b.value(
        "merged",
        layer,
        len(b.stages),
        elements=scan.sequences * each,
        pushed=True,
        owned=owned,
        words=b.options.draft + 1,
    )
    b.stage(
        StageKind.MERGE,
        layer,
        reads=[Read(partials.id, Parts.OWN, spans)],
        publishes=value.id,
        vector=0,
        operations=("merge",),
    )
    return b.collected(value)


def _absorb(
    b: Builder,
    layer: int,
    kind: LatentAttention,
    weight: Weight,
    queries: Value,
    first: int,
    heads: int,
    *,
    pushed: bool,
) -> Value:
    """[heads][kv_rank]: each head's part without rotation, times its own [kv_rank, nope_dim]."""
    query, outputs = kind.nope_dim + kind.rope_dim, heads * kind.kv_rank
    spans = tuple(
        tuple(
            (first + head * query, first + head * query + kind.nope_dim)
            for head in heads_of(span, kind.kv_rank)
        )
        for span in spread(outputs, b.blocks, b.shift)
    )
    return b.rows(
        StageKind.ABSORB,
        layer,
        [Piece(outputs, kind.nope_dim, stored(b, weight))],
        reads=[Read(queries.id, Parts.OWN, spans)],
        vector=0,
        operations=("absorb_q",),
        pushed=pushed,
    )
