"""Latent attention: heads attend one cached latent, which all ranks keep."""

from __future__ import annotations

from twin.models.mixers import LatentAttention
from twin.models.weight import Weight
from twin.plan.attending import (
    Weights,
    alike,
    attend_items,
    head_out,
    heads_of,
    output_projection,
    queries_of,
    read_by_items,
    scan_of,
)
from twin.plan.builder import Builder, Piece
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import scatter, share, spread
from twin.plan.types import Parts, Read, Span, StageKind, Value


def latent(
    b: Builder, layer: int, kind: LatentAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, query = (
        share(b.spec.name, b.ranks, "attention heads", kind.heads),
        kind.nope_dim + kind.rope_dim,
    )
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
        queries, first = queries_of(b, layer, [(weights["q_b"], heads * query)], latent, rows[0]), 0
    absorbed = _absorb(b, layer, kind, weights["k_up"], queries, first, heads)
    scan = scan_of(
        b,
        kind,
        heads=1,
        group=heads,
        entry_bytes=kind.latent_dim * b.options.kv_dtype.bytes,
        dim=kind.latent_dim,
        share=1,
    )
    items = scatter(scan.items, b.blocks)
    rotated = [
        (first + head * query + kind.nope_dim, first + (head + 1) * query) for head in range(heads)
    ]
    newest = (sum(rows) - rows[-1], sum(rows))
    used: dict[int, list[Span]] = {absorbed.id: [(0, absorbed.elements)]}
    for value, spans in ((queries, rotated), (latent, [newest])):
        used.setdefault(value.id, []).extend(spans)
    seen = [
        read_by_items(scan, items, b.values[value], alike(spans)) for value, spans in used.items()
    ]
    partials = attend_items(b, layer, scan, items, seen, kind.kv_rank)
    carried = head_out(b, layer, weights["v_up"], partials, scan, kind.kv_rank, heads)
    return output_projection(b, layer, weights["o"], [b.whole(carried)], heads * kind.value_dim)


def _absorb(
    b: Builder,
    layer: int,
    kind: LatentAttention,
    weight: Weight,
    queries: Value,
    first: int,
    heads: int,
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
    )
