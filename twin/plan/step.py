"""One decode step, stage by stage: the embedding, the layers, the head."""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.models.spec import LaneHead
from twin.plan.builder import Builder, Piece
from twin.plan.catalogue import StageKind
from twin.plan.feeds import feed
from twin.plan.mixers import mixer
from twin.plan.options import Sampling
from twin.plan.residuals import enter, landed, stored, summed
from twin.plan.spans import spread
from twin.plan.types import Read

CANDIDATE = 2  # logit and index
SUMMARY = 4  # these, and the mass of a block's logits in two words


def step(b: Builder) -> None:
    """All stages, into the builder."""
    _embed(b)
    residual: list[Read] = []
    for layer in range(b.spec.layers):
        residual = _layer(b, layer, residual)
    if b.spec.hyper:
        residual = enter(b, "head_hyper", -1, residual)
    _head(b, residual)
    # the token comes from the last stage, which is known only now
    if b.options.sampling is Sampling.FULL:
        b.values[0] = replace(b.values[0], stage=len(b.stages) - 1)


def _embed(b: Builder) -> None:
    """The sampled token of the previous step arrives by value only when one block samples for
    all.
    """
    reads: tuple[Read, ...] = ()
    if b.options.sampling is Sampling.FULL:
        owned = ((0, 1), *[(1, 1)] * (b.blocks - 1))
        token = b.value("token", 0, 0, elements=1, pushed=False, owned=owned)  # value 0
        reads = (replace(b.whole(token), previous_step=True),)
    vector = b.options.tokens * b.shard.hidden
    b.stage(
        StageKind.EMBED, -1, reads=reads, publishes=None, vector=vector, operations=("embedding",)
    )


def _layer(b: Builder, layer: int, residual: list[Read]) -> list[Read]:
    """residual += mixer(norm(residual)); residual += feed(norm(residual)), with hyper-connections
    around both. What a layer lacks leaves the residual as it is.
    """
    parts = b.spec.layer(layer)
    mixed = mixer(b, layer, parts.mixer, enter(b, "attn_hyper", layer, residual))
    residual = residual if mixed is None else landed(b, layer, mixed)
    fed = feed(b, layer, parts.feed, enter(b, "ffn_hyper", layer, residual))
    return landed(b, layer, *fed) if fed else residual


def _head(b: Builder, residual: list[Read]) -> None:
    spec, shard = b.spec, b.shard
    if spec.lanes is not None and spec.lanes.head is not LaneHead.VOCABULARY:
        owned = spread(shard.hidden, b.blocks)
        value = b.value(
            "lane_mean", 0, len(b.stages), elements=shard.hidden, pushed=True, owned=owned
        )
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
        raise PlanError(
            f"the vocabulary has {shard.vocab} rows per rank for {b.blocks} blocks: use fewer "
            "blocks or sampling=greedy"
        )
    owned = spread(shard.vocab, b.blocks, b.shift)
    head = Piece(shard.vocab, shard.hidden, stored(b, spec.end_weights()[-1]))
    each, name = (SUMMARY, "summaries") if full else (CANDIDATE, "candidates")
    published = tuple((each * block, each * (block + 1)) for block in range(b.blocks))
    elements = each * b.blocks
    value = b.value(name, 0, len(b.stages), elements=elements, pushed=b.ranks > 1, owned=published)
    b.stage(
        StageKind.LM_HEAD,
        -1,
        reads=residual,
        publishes=value.id,
        matrix=head.matrix(owned),
        vector=summed(b, residual),
        operations=("add_norm", "lm_head"),
    )
    everything = b.whole(b.collected(value))
    if full:
        everything = replace(everything, spans=(everything.spans[0], *[()] * (b.blocks - 1)))
    b.stage(
        StageKind.SAMPLE,
        -1,
        reads=(everything,),
        publishes=0 if full else None,
        vector=0,
        operations=("sample",),
    )
