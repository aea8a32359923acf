"""Mixtral: Mistral's attention, every layer with a few wide experts."""

from __future__ import annotations

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import MIXTRAL
from twin.models.spec import ModelSpec

_NAMES = Names("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return decoder.tensors(spec, _NAMES)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `mixtral` configuration describes."""
    heads, kv_heads, head_dim = grouped_heads(fields)
    attention = GroupedAttention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, window=fields.whole("sliding_window", 0)
    )
    experts = ExpertFeed(
        experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
    )
    check_experts(fields, experts, "num_local_experts", "num_experts_per_tok")
    return layered(
        fields,
        family="mixtral",
        rope=rope(fields, theta=1.0e6),
        table=MIXTRAL,
        layout=layout(fields, lambda i: attention, feed_of(fields, experts)),
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )
