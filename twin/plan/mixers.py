"""The stages of a layer's mixer on one rank: attention in its kinds, recurrent states, and short
convolutions.

Heads are sharded over the ranks; what all heads share (latents, one key-value head, an indexer)
every rank computes and keeps itself.
"""

from __future__ import annotations

from functools import lru_cache

from twin.models.mixers import (
    CompressedAttention,
    GroupedAttention,
    LatentAttention,
    Mixer,
    NoMixer,
    Recurrence,
    ShortConvolution,
)
from twin.plan.attending import (
    Weights,
    attend,
    attend_items,
    output_projection,
    read_by_items,
    scan_of,
)
from twin.plan.attention import ITEM_WORDS, Attention, partial_words
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.compressed import compressed
from twin.plan.convolution import convolution
from twin.plan.latent import latent
from twin.plan.matrix import Span
from twin.plan.recurrent import recurrence
from twin.plan.residuals import stored, vector
from twin.plan.spans import kv_share, scatter, share
from twin.plan.types import Parts, Read, Value


def mixer(b: Builder, layer: int, kind: Mixer, reads: list[Read]) -> Value | None:
    """The layer's mixer from its norm to its output projection, whose partial sums it returns;
    None of a layer without one.
    """
    weights = {w.name: w for w in b.spec.layer_weights(layer)}
    match kind:
        case GroupedAttention():
            return _grouped(b, layer, kind, weights, reads)
        case LatentAttention():
            return latent(b, layer, kind, weights, reads)
        case Recurrence():
            return recurrence(b, layer, kind, weights, reads)
        case ShortConvolution():
            return convolution(b, layer, kind, weights, reads)
        case CompressedAttention():
            return compressed(b, layer, kind, weights, reads)
        case NoMixer():
            return None


def _grouped(
    b: Builder, layer: int, kind: GroupedAttention, weights: Weights, reads: list[Read]
) -> Value:
    heads, dim = share(b.spec.name, b.ranks, "attention heads", kind.heads), kind.head_dim
    kv_heads = kv_share(b.spec.name, b.ranks, kind.kv_heads)
    q, gate = heads * dim, heads * dim if kind.output_gate else 0
    made = q + (1 if kind.values_are_keys and b.attentions else 2) * kv_heads * dim
    which = b.heads_of(kind)
    qkv = b.rows(
        StageKind.QKV,
        layer,
        [Piece(made + gate, b.shard.hidden, stored(b, weights["q"]))],
        reads=reads,
        vector=vector(b, reads),
        operations=("add_norm", "qkv_proj", "rope_append"),
        heads=which,
    )
    own = b.attentions[which] if b.attentions else None
    if own:
        partials = _attend_cache(b, layer, own, qkv, kind)
    else:
        partials = _attend_scan(b, layer, kind, qkv, heads=heads, kv_heads=kv_heads)
    gated = [b.span(qkv, made, made + gate)] if gate else []
    # in the last layer the proof needs what blocks say that scan: nothing follows that would
    last = layer + 1 == b.spec.layers
    scanned = scanned_first(own, kind.window, b.blocks) if own and not last else ()
    reads = [b.whole(partials), *gated]
    return output_projection(
        b, layer, weights["o"], reads, q, vector=q + gate, scanned=scanned, heads=which
    )


def _attend_cache(
    b: Builder, layer: int, own: Attention, qkv: Value, kind: GroupedAttention
) -> Value:
    """As the kernel does it: a block reads the heads of its items, side by side, and publishes
    partial outputs in whole loads.
    """
    items, splits = scatter(own.items_of(kind.window), b.blocks), own.splits_of(kind.window)
    width = partial_words(own.group, own.head_dim, b.options.kv_dtype)
    reads = [Read(qkv.id, Parts.OWN, _spans_of_heads(own, splits, items))]
    if kind.whole_qk_norm:
        normed = (0, (own.heads + own.kv_heads) * own.head_dim)
        reads.append(
            Read(qkv.id, Parts.OWN, tuple((normed,) if lo < hi else () for lo, hi in items))
        )
    return attend(
        b,
        layer,
        items,
        reads,
        width + -width % ITEM_WORDS,
        window=kind.window,
        heads=b.heads_of(kind),
    )


@lru_cache(maxsize=64)
def scanned_first(own: Attention, window: int, blocks: int) -> tuple[Span, ...]:
    """Of each block its items, if a short context fills one of them: (i, i) of the others."""
    splits = own.splits_of(window)
    filled = own.together if own.first_pages else splits
    return tuple(
        (lo, hi) if any(item % splits < filled for item in range(lo, hi)) else (lo, lo)
        for lo, hi in scatter(own.items_of(window), blocks)
    )


@lru_cache(maxsize=256)  # layers that are alike share them
def _spans_of_heads(
    own: Attention, splits: int, items: tuple[Span, ...]
) -> tuple[tuple[Span, ...], ...]:
    return tuple(_head_spans(own, splits, span) for span in items)


def _head_spans(own: Attention, splits: int, items: Span) -> tuple[Span, ...]:
    """The elements of q, k and v that a block's items use, one span per vector, merged over
    neighbouring heads.
    """
    if items[0] == items[1]:
        return ()
    first, last, one = items[0] // splits, (items[1] - 1) // splits + 1, own.head_dim
    k, v = own.heads * one, (own.heads + own.kv_heads) * one
    values = () if own.values_are_keys else ((v + first * one, v + last * one),)
    return (
        (first * own.group * one, last * own.group * one),
        (k + first * one, k + last * one),
        *values,
    )


def _attend_scan(
    b: Builder, layer: int, kind: GroupedAttention, qkv: Value, *, heads: int, kv_heads: int
) -> Value:
    """A cache of the layer's own."""
    dim, group = kind.head_dim, heads // kv_heads
    q, kv = heads * dim, kv_heads * dim
    scan = scan_of(
        b,
        kind,
        heads=kv_heads,
        group=group,
        entry_bytes=2 * dim * b.options.kv_dtype.bytes,
        dim=dim,
        share=kind.kv_heads / kv_heads,
    )
    items = scatter(scan.items, b.blocks)
    # (where its heads start, elements of one's share)
    vectors = ((0, group * dim), (q, dim), (q + kv, dim))

    def used(item: int) -> list[Span]:
        head = item // scan.splits % scan.heads
        return [(start + head * size, start + (head + 1) * size) for start, size in vectors]

    return attend_items(b, layer, scan, items, [read_by_items(scan, items, qkv, used)], dim)
