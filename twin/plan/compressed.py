"""DeepSeek-V4's attention: cached entries are compressed, an indexer chooses among them."""

from __future__ import annotations

from twin.models.mixers import CompressedAttention
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
from twin.plan.builder import Builder, Piece
from twin.plan.residuals import common_rows, pushes_common, stored, vector
from twin.plan.spans import scatter, share
from twin.plan.types import Read, Scan, Span, StageKind, Value

# From this many on ranks divide an indexer's entries, below it its heads. In the twin,
# DeepSeek-V4-Flash on eight H200: at 128 positions (32 entries) dividing heads is 7 us a layer
# faster, at 131,072 (32,768 entries) 76 us slower; the two meet near 12,000 positions.
DIVIDED_ENTRIES = 3072


def compressed(
    b: Builder, layer: int, kind: CompressedAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, dim = share(b.spec.name, b.ranks, "attention heads", kind.heads), kind.head_dim
    groups = share(b.spec.name, b.ranks, "output groups", kind.o_groups)
    names = ("q_a", "kv", "compress_kv", "compress_gate", "index_kv", "index_gate", "index_heads")
    first = [weights[name] for name in names if name in weights]
    latent = b.rows(
        StageKind.LATENT,
        layer,
        [Piece(common_rows(b, w.rows), w.cols, stored(b, w)) for w in first],
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
    ends = {
        w.name: sum(common_rows(b, x.rows) for x in first[: at + 1]) for at, w in enumerate(first)
    }
    # from here on the indexer's elements
    indexed = ends["compress_gate"] if kind.top_k else latent.elements
    projected = [(weights["q_b"], heads * dim)] + [
        (w, w.rows if _divides_entries(b, kind) else common_rows(b, w.rows))
        for w in (weights.get("index_q"),)
        if w
    ]
    queries = queries_of(b, layer, projected, latent, ends["q_a"])
    scores = None
    if kind.top_k and kind.entries(b.options.context):
        scores = _index(
            b,
            layer,
            kind,
            (queries, (heads * dim, queries.elements)),
            (latent, (indexed, latent.elements)),
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
    )
    items = scatter(scan.items, b.blocks)
    # without entries to choose from, all is only kept
    mine = (0, heads * dim if scores else queries.elements)
    kept = (ends["q_a"], indexed if scores else latent.elements)
    seen = [
        read_by_items(scan, items, queries, lambda item: [mine]),
        read_by_items(scan, items, latent, lambda item: [kept]),
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
    return output_projection(b, layer, weights["o_b"], [b.whole(grouped)], groups * kind.o_rank)


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
    entries, heads, sequences = kind.entries(b.options.context), kind.index_heads, b.options.batch
    if _divides_entries(b, kind):
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


def _divides_entries(b: Builder, kind: CompressedAttention) -> bool:
    return pushes_common(b) and kind.entries(b.options.max_context) >= DIVIDED_ENTRIES
