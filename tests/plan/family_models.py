"""Tiny models of every family, small enough to run word by word."""

from __future__ import annotations

from twin.models.feeds import DenseFeed, ExpertFeed, Feed
from twin.models.formats import FP8_BLOCK, MXFP4, Formats, Role, format_named
from twin.models.layers import HyperConnections, Layer
from twin.models.mixers import (
    CompressedAttention,
    DeltaNet,
    GroupedAttention,
    LatentAttention,
    Mixer,
)
from twin.models.spec import DType, ModelSpec, Rope

HIDDEN = 32
# the kernel has no biases in layers with output gates, so plans of it are simulated only
GROUPED = GroupedAttention(
    heads=4, kv_heads=2, head_dim=8, window=16, sinks=True, output_gate=True, qkv_bias=True
)
LATENT = LatentAttention(heads=4, q_rank=16, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
DIRECT = LatentAttention(heads=4, q_rank=0, kv_rank=16, nope_dim=8, rope_dim=8, value_dim=8)
DELTA = DeltaNet(key_heads=4, key_dim=8, value_heads=4, value_dim=8, conv=4)
WINDOW = CompressedAttention(
    heads=4, head_dim=16, rope_dim=8, q_rank=16, o_groups=4, o_rank=8, window=16
)
ALL = CompressedAttention(
    heads=4, head_dim=16, rope_dim=8, q_rank=16, o_groups=4, o_rank=8, window=16, ratio=16
)
CHOSEN = CompressedAttention(
    heads=4,
    head_dim=16,
    rope_dim=8,
    q_rank=16,
    o_groups=4,
    o_rank=8,
    window=16,
    ratio=4,
    index_heads=4,
    index_dim=32,
    top_k=4,
)
DENSE = DenseFeed(width=64)
EXPERTS = ExpertFeed(experts=8, top_k=2, width=32)
SHARED = ExpertFeed(experts=8, top_k=2, width=32, shared_width=32, shared_gate=True)
HASHED = ExpertFeed(experts=8, top_k=2, width=32, shared_width=32, hashed=True)
MIXERS = {
    "grouped": GROUPED,
    "latent": LATENT,
    "direct": DIRECT,
    "delta": DELTA,
    "window": WINDOW,
    "compressed": ALL,
    "chosen": CHOSEN,
}
FEEDS = {"dense": DENSE, "experts": EXPERTS, "shared": SHARED, "hashed": HASHED}
PACKED = Formats(
    format_named("bf16"),
    ((Role.ATTENTION, FP8_BLOCK), (Role.SHARED, FP8_BLOCK), (Role.EXPERT, MXFP4)),
)


def family(
    *layers: tuple[Mixer, Feed], hyper: bool = False, stored: Formats | None = None
) -> ModelSpec:
    """A model of these layers."""
    return ModelSpec(
        name="tiny",
        family="test",
        layers=len(layers),
        hidden=HIDDEN,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=64,
        vocab=40,
        context=4096,
        norm_eps=1e-5,
        rope=Rope(1e4),
        windows=(0,) * len(layers),
        dtype=DType.BF16,
        layout=tuple(Layer(m, f) for m, f in layers),
        stored=stored,
        hyper=HyperConnections(residuals=2, iterations=3) if hyper else None,
    )
