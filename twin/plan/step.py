"""One decode step, stage by stage: the embedding, the layers, the head."""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.models.spec import LaneHead
from twin.plan.builder import Builder
from twin.plan.feeds import feed
from twin.plan.mixers import mixer
from twin.plan.partition import cut, scatter, spread
from twin.plan.streams import enter, landed
from twin.plan.types import ITEM_WORDS, Parts, Read, Sampling, Shard, Span, StageKind, Value, partial_words

CANDIDATE = 2  # logit and index


def step(b: Builder, *, layered: bool) -> None:
    """`layered`: the model's layers are described one by one, or a step handles several tokens; else they are dense and alike."""
    _embed(b)
    residual: list[Read] = []
    for layer in range(b.spec.layers):
        residual = _layer(b, layer, residual) if layered else _dense_layer(b, layer, residual)
    if b.spec.hyper:
        residual = enter(b, "head_hyper", -1, residual)
    _head(b, residual)
    if b.options.sampling is Sampling.FULL:  # the token comes from the last stage, which is known only now
        b.values[0] = replace(b.values[0], stage=len(b.stages) - 1)


def _embed(b: Builder) -> None:
    """The sampled token of the previous step arrives by value only when one block samples for all."""
    reads: tuple[Read, ...] = ()
    if b.options.sampling is Sampling.FULL:
        owned = ((0, 1), *[(1, 1)] * (b.blocks - 1))
        token = b.value("token", 0, 0, elements=1, pushed=False, owned=owned)  # value 0
        reads = (replace(b.whole(token), previous_step=True),)
    vector = b.options.tokens * b.shard.hidden
    b.stage(StageKind.EMBED, -1, reads=reads, publishes=None, vector=vector, operations=("embedding",))


def _layer(b: Builder, layer: int, residual: list[Read]) -> list[Read]:
    """residual += mixer(norm(residual)); residual += feed(norm(residual)), with hyper-connections around both."""
    parts = b.spec.layer(layer)
    mixed = mixer(b, layer, parts.mixer, enter(b, "attn_hyper", layer, residual))
    fed = feed(b, layer, parts.feed, enter(b, "ffn_hyper", layer, landed(b, layer, mixed)))
    return landed(b, layer, fed)


def _dense_layer(b: Builder, layer: int, residual: list[Read]) -> list[Read]:
    shard = b.shard
    q, kv = shard.heads * shard.head_dim, shard.kv_heads * shard.head_dim
    qkv = b.project(
        StageKind.QKV, layer, reads=residual, outputs=q + 2 * kv, cols=shard.hidden, vector=2 * shard.hidden,
        operations=("add_norm", "qkv_proj", "rope_append"),
    )  # fmt: skip
    partials = _attention(b, layer, qkv)
    o = b.project(
        StageKind.O_PROJ, layer, reads=[b.whole(partials)], outputs=shard.hidden, cols=q, vector=q,
        operations=("o_proj",), pushed=b.exchanged(layer),
    )  # fmt: skip
    act = b.project(
        StageKind.GATE_UP, layer, reads=b.residual(StageKind.O_PROJ, layer, o), outputs=shard.ffn, cols=shard.hidden,
        unit=2, vector=2 * shard.hidden, operations=("add_norm", "gate_up_proj", "silu_mul"),
    )  # fmt: skip
    b.sum_late_parts(layer)
    down = b.project(
        StageKind.DOWN, layer, reads=[b.whole(act)], outputs=shard.hidden, cols=shard.ffn, vector=0,
        operations=("down_proj",), pushed=b.exchanged(layer),
    )  # fmt: skip
    return b.residual(StageKind.DOWN, layer, down)


def _attention(b: Builder, layer: int, qkv: Value) -> Value:
    shard = b.shard
    count = shard.kv_heads * b.kv.splits
    items = scatter(count, b.blocks)
    width = partial_words(shard.heads // shard.kv_heads, shard.head_dim, b.kv.dtype)
    width += -width % ITEM_WORDS
    owned = tuple((lo * width, hi * width) for lo, hi in items)
    value = b.value("attention", layer, len(b.stages), elements=count * width, pushed=False, owned=owned)
    reads = [Read(qkv.id, Parts.OWN, tuple(_item_spans(shard, b.kv.splits, span) for span in items))]
    if b.spec.qk_norm and b.spec.variant.whole_qk_norm:
        heads = (0, (shard.heads + shard.kv_heads) * shard.head_dim)
        reads.append(Read(qkv.id, Parts.OWN, tuple((heads,) if lo < hi else () for lo, hi in items)))
    b.stage(
        StageKind.ATTENTION, layer, reads=reads, publishes=value.id, vector=0, operations=("attention", "combine"),
        items=items, window=b.spec.windows[layer],
    )  # fmt: skip
    return value


def _head(b: Builder, residual: list[Read]) -> None:
    spec, shard = b.spec, b.shard
    if spec.lanes is not None and spec.lanes.head is not LaneHead.VOCABULARY:
        owned = spread(shard.hidden, b.blocks)
        value = b.value("lane_mean", 0, len(b.stages), elements=shard.hidden, pushed=True, owned=owned)
        b.stage(
            StageKind.LANE_MEAN,
            -1,
            reads=residual,
            publishes=value.id,
            vector=2 * b.options.tokens * shard.hidden,
            operations=("add_norm",),
        )
        residual = [b.whole(b.collected(value))]
    full = b.options.sampling is Sampling.FULL
    if full and shard.vocab < b.blocks:  # a block without logits tells nobody how far it is
        raise PlanError(f"the vocabulary has {shard.vocab} rows per rank for {b.blocks} blocks: use fewer blocks or sampling=greedy")
    owned = spread(shard.vocab, b.blocks, b.shift)
    stored = spec.end_weights()[-1].format if spec.stored else None
    matrix = cut(rows=shard.vocab, cols=shard.hidden, unit=1, owned=owned, options=b.options, format=stored)
    published = owned if full else tuple((CANDIDATE * block, CANDIDATE * (block + 1)) for block in range(b.blocks))
    elements = shard.vocab if full else CANDIDATE * b.blocks
    name = "logits" if full else "candidates"
    value = b.value(name, 0, len(b.stages), elements=elements, pushed=b.ranks > 1, owned=published)
    b.stage(
        StageKind.LM_HEAD, -1, reads=residual, publishes=value.id, matrix=matrix, vector=2 * b.options.tokens * shard.hidden,
        operations=("add_norm", "lm_head"),
    )  # fmt: skip
    everything = b.whole(b.collected(value))
    if full:
        everything = replace(everything, spans=(everything.spans[0], *[()] * (b.blocks - 1)))
    b.stage(StageKind.SAMPLE, -1, reads=(everything,), publishes=0 if full else None, vector=0, operations=("sample",))


def _item_spans(shard: Shard, splits: int, items: Span) -> tuple[Span, ...]:
    """The elements of q, k and v that a block's items use, one span per vector, merged over neighbouring heads."""
    if items[0] == items[1]:
        return ()
    first, last = items[0] // splits, (items[1] - 1) // splits
    group = shard.heads // shard.kv_heads * shard.head_dim
    k = shard.heads * shard.head_dim
    v = k + shard.kv_heads * shard.head_dim
    one = shard.head_dim
    return (
        (first * group, (last + 1) * group),
        (k + first * one, k + (last + 1) * one),
        (v + first * one, v + (last + 1) * one),
    )
