"""GLM 4.5, 4.6 and 4.7 with experts: a few dense layers, then routed experts next to a shared one,
whose choice has a bias of its own; half of each head is rotated.

The draft layer (num_nextn_predict_layers) is no part of the model.
"""

from __future__ import annotations

from dataclasses import replace

from twin.models import decoder
from twin.models.config import Config, rope, rotated
from twin.models.decoder import Tensor
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import GLM_EXPERTS
from twin.models.spec import ModelSpec

_THETA, _SHARE = 10000.0, 0.5  # class defaults
_COUNT, _SAVED = "n_routed_experts", "num_local_experts"
_NAMES = Names(
    *("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    shared="mlp.shared_experts",
    choice_bias="mlp.gate.e_score_correction_bias",
)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return decoder.tensors(spec, _NAMES)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `glm4_moe` configuration describes."""
    fields.unused("num_nextn_predict_layers", "num_mtp_layers")
    fields.count("num_key_value_heads")  # must be there: left out it is not num_attention_heads
    heads, kv_heads, head_dim = grouped_heads(fields)
    attention = GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qkv_bias=fields.flag("attention_bias", False),
        qk_norm=fields.flag("use_qk_norm", False),
    )
    experts = check_experts(fields, _experts(fields), _COUNT, "num_experts_per_tok")
    feed = feed_of(fields, experts, first_dense=fields.whole("first_k_dense_replace", 1))
    turned = rope(fields, theta=_THETA, simulated=True)
    return layered(
        fields,
        family="glm4_moe",
        rope=replace(turned, rotated=rotated(fields, head_dim, _SHARE)),
        layout=layout(fields, lambda i: attention, feed),
        table=GLM_EXPERTS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )


def _experts(config: Config) -> ExpertFeed:
    count, groups = config.count(_COUNT), config.count("n_group", 1)
    if _SAVED in config and config.count(_SAVED) != count:
        raise config.refuse(_SAVED, f"the same as {_COUNT}, {count}", "remove one of the two")
    top_groups = config.count("topk_group", 1)
    if top_groups > groups:
        raise config.refuse("topk_group", f"up to n_group = {groups}", "correct one of the two")
    config.divides(_COUNT, count, "n_group", groups)
    width = config.count("moe_intermediate_size")
    return ExpertFeed(
        experts=count,
        top_k=config.count("num_experts_per_tok"),
        width=width,
        shared_width=config.whole("n_shared_experts", 1) * width,
        scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob", True),
        scaling=config.real("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=top_groups,
        choice_bias=True,
    )
