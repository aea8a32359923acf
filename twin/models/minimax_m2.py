"""MiniMax-M2: experts in every layer, whose choice has a bias of its own; all heads of q and of k
are normed together, and a part of each is rotated.

Layers that predict further tokens (MTP) are no part of the model.
"""

from __future__ import annotations

from dataclasses import replace

from twin.models import decoder
from twin.models.config import Config, rope, rotated
from twin.models.decoder import Tensor
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.layered import check_experts, feed_of, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import MIXTRAL
from twin.models.spec import ModelSpec

_THETA, _HEAD_DIM = 5000000.0, 128  # class defaults
_NAMES = Names(
    *("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2"),
    choice_bias="block_sparse_moe.e_score_correction_bias",
)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return decoder.tensors(spec, _NAMES)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `minimax_m2` configuration describes."""
    fields.unused("use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    fields.require("use_qk_norm", True, (True,), "queries and keys of this family are normed")
    fields.require("qk_norm_type", "per_layer", ("per_layer",), "all heads are normed together")
    fields.require("use_routing_bias", True, (True,), "the choice of experts has a bias")
    fields.require("scoring_func", "sigmoid", ("sigmoid",), "experts are scored by sigmoids")
    fields.require("shared_intermediate_size", 0, (0,), "this family has no shared expert")
    fields.require("sliding_window", None, (None,), "this family has full attention")
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    kinds = fields.get("attn_type_list", [1])
    if not isinstance(kinds, list) or set(kinds) != {1}:
        raise fields.refuse("attn_type_list", "1 in every layer: softmax attention")
    head_dim = fields.count("head_dim", _HEAD_DIM)
    attention = GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        whole_qk_norm=True,
    )
    experts = ExpertFeed(
        experts=fields.count("num_local_experts"),
        top_k=fields.count("num_experts_per_tok"),
        width=fields.count("intermediate_size"),
        scoring=Scoring.SIGMOID,
        choice_bias=True,
    )
    check_experts(fields, experts, "num_local_experts", "num_experts_per_tok")
    turned = rope(fields, theta=_THETA, simulated=True)
    share = fields.count("rotary_dim", head_dim) / head_dim
    return layered(
        fields,
        family="minimax_m2",
        rope=replace(turned, rotated=rotated(fields, head_dim, share)),
        layout=layout(fields, lambda i: attention, feed_of(fields, experts)),
        table=MIXTRAL,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )
