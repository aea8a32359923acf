"""DeepSeek-V4's attention: cached entries are compressed, an indexer chooses among them."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from twin.models.mixers import CompressedAttention
from twin.models.weight import Weight
from twin.plan.attending import (
    ENTRIES_PER_SPLIT,
    Weights,
    alike,
    attend_items,
    head_out,
    output_projection,
    queries_of,
    read_by_items,
    scan_of,
)
from twin.plan.attention import Scan
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.compressed_shards import FIRST, divided, divides_entries
from twin.plan.matrix import Span
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import scatter, share
from twin.plan.types import Read, Value


def compressed(
    b: Builder, layer: int, kind: CompressedAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, dim = share(b.spec.name, b.ranks, "attention heads", kind.heads), kind.head_dim
    groups = share(b.spec.name, b.ranks, "output groups", kind.o_groups)
    names, others = divided(b.spec, kind) if b.attention else (FIRST, ())
    first = [weights[name] for name in names if name in weights]
    latent = b.rows(
        StageKind.LATENT,
        layer,
        _pieces(b, [(w, common_rows(b, w.rows)) for w in first]),
        reads=reads,
        vector=vector(b),
        operations=(
            "add_norm",
            "latent_proj",
            "norm_rope_append",
            *(("compress",) if kind.ratio else ()),
        ),
        pushed=pushes_common(b),
    )
    made = latent  # what becomes entries and their keys
    if others:
        made = b.rows(
            StageKind.COMPRESS,
            layer,
            _pieces(b, [(weights[name], weights[name].rows) for name in others]),
            reads=(),
            vector=b.shard.hidden,
            operations=(),
        )
    ends = _ends(b, [weights[name] for name in others] or first)
    low = _ends(b, first)["q_a"]
    # from here on the indexer's elements
    indexed = ends["compress_gate"] if kind.top_k else made.elements
    projected = [(weights["q_b"], heads * dim)] + [
        (w, w.rows if divides_entries(b.options, b.ranks, kind) else common_rows(b, w.rows))
        for w in (weights.get("index_q"),)
        if w
    ]
    queries = queries_of(b, layer, _pieces(b, projected), latent, low)
    scores = None
    if kind.top_k and kind.entries(_reach(b)):
        scores = _index(
            b,
            layer,
            kind,
            (queries, (heads * dim, queries.elements)),
            (made, (indexed, made.elements)),
        )
    scan = scan_of(
        b,
        kind,
        heads=1,
        group=heads,
        entry_bytes=kind.entry_bytes,
        dim=dim,
        share=1,
        pending=kind.pending_bytes,
        chosen=scores is not None,
        splits=b.attention.splits if b.attention else None,
    )
    items = scatter(scan.items, b.blocks)
    # without entries to choose from, all is only kept
    mine = (0, heads * dim if scores else queries.elements)
    end = indexed if scores else made.elements
    kept = [(latent, (low, latent.elements)), (made, (0, end))] if others else [(made, (low, end))]
    seen = [
        read_by_items(scan, items, value, alike([span])) for value, span in [(queries, mine), *kept]
    ]
    if scores is not None:
        each = scores.elements // b.options.batch
        seen.append(
            read_by_items(
                scan,
                items,
                scores,
                lambda item: [(item // scan.splits * each, (item // scan.splits + 1) * each)],
                of_one=True,
            )
        )
    partials = attend_items(b, layer, scan, items, seen, dim)
    grouped = head_out(b, layer, weights["o_a"], partials, scan, dim, groups)
    return output_projection(b, layer, weights["o"], [b.whole(grouped)], groups * kind.o_rank)


def _ends(b: Builder, weights: list[Weight]) -> dict[str, int]:
    """Where in what a rank publishes each one's elements end."""
    ends = accumulate(common_rows(b, w.rows) for w in weights)
    return dict(zip((w.name for w in weights), ends, strict=True))


def _pieces(b: Builder, weights: list[tuple[Weight, int]]) -> list[Piece]:
    """Of each weight so many rows; the engine's stages have one matrix."""
    made = [Piece(rows, w.cols, stored(b, w)) for w, rows in weights]
    if b.attention is None:
        return made
    return [replace(made[0], outputs=sum(piece.outputs for piece in made))]


def _reach(b: Builder) -> int:
    """Positions that a step's entries stand for: the engine's plans serve all contexts."""
    return b.options.max_context if b.attention else b.options.context


def _index(
    b: Builder,
    layer: int,
    kind: CompressedAttention,
    queries: tuple[Value, Span],
    keys: tuple[Value, Span],
) -> Value:
    """[sequences][entries] scores: every index head against every compressed key, weighed and
    added.

    Ranks that share divide the heads, whose sums readers add, or where entries are many the
    entries.
    """
    entries, heads, sequences = kind.entries(_reach(b)), kind.index_heads, b.options.batch
    if divides_entries(b.options, b.ranks, kind):
        entries = common_rows(b, entries)
    else:
        heads = common_rows(b, heads)
    splits = max(1, min(b.blocks // sequences, -(-entries // ENTRIES_PER_SPLIT)))
    page = -(-entries // splits)
    splits = -(-entries // page)
    scan = Scan(
        sequences=sequences,
        heads=1,
        group=heads,
        entries=entries,
        entry_bytes=kind.key_bytes,
        dim=kind.index_dim,
        splits=splits,
        page=page,
        held_bytes=0,
    )
    items = scatter(scan.items, b.blocks)
    edges = [
        sequence * entries + split * page
        for sequence in range(sequences)
        for split in range(splits)
    ] + [sequences * entries]
    owned = tuple((edges[lo], edges[hi]) for lo, hi in items)
    value = b.value(
        "index",
        layer,
        len(b.stages),
        elements=edges[-1],
        pushed=pushes_common(b),
        owned=owned,
        words=b.options.draft + 1,
    )
    seen = [read_by_items(scan, items, used, alike([span])) for used, span in (queries, keys)]
    b.stage(
        StageKind.INDEX,
        layer,
        reads=seen,
        publishes=value.id,
        vector=0,
        operations=("index_score", "top_k"),
        items=items,
        scan=scan,
    )
    return b.collected(value)
