"""DeepSeek-V3 and Kimi-K2: latent attention, a few dense layers, then routed experts next to shared
ones.

Layers that only predict further tokens (num_nextn_predict_layers) are drafts, not part of the
model; a vision tower is not described.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.layered import check_experts, feed_of, layered, layout
from twin.models.mixers import LatentAttention
from twin.models.modules import LATENT
from twin.models.spec import ModelSpec, RopeStyle

_METHODS = ("noaux_tc", "greedy", "group_limited_greedy")


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `deepseek_v3` or `kimi_k2` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    fields.require(
        "rope_interleave", True, (True,), "rotation of neighbours is described in this family"
    )
    fields.require(
        "moe_layer_freq", 1, (1,), "experts in every layer after the dense ones are described"
    )
    # drafts; heads that latent attention does not have
    fields.unused("num_nextn_predict_layers", "num_key_value_heads", "head_dim", "qk_head_dim")
    attention = LatentAttention(
        heads=fields.count("num_attention_heads"),
        q_rank=fields.whole("q_lora_rank", 0),
        kv_rank=fields.count("kv_lora_rank"),
        nope_dim=fields.count("qk_nope_head_dim"),
        rope_dim=fields.count("qk_rope_head_dim"),
        value_dim=fields.count("v_head_dim"),
    )
    experts = check_experts(
        fields, deepseek_experts(fields), "n_routed_experts", "num_experts_per_tok"
    )
    feed = feed_of(fields, experts, first_dense=fields.whole("first_k_dense_replace", 0))
    return layered(
        fields,
        family=fields.text("model_type"),
        rope=rope(fields, theta=10000.0, style=RopeStyle.INTERLEAVED, simulated=True),
        layout=layout(fields, lambda i: attention, feed),
        table=LATENT,
        kv_heads=1,
        head_dim=attention.latent_dim,
        ffn=experts.width,
    )


def deepseek_experts(config: Config) -> ExpertFeed:
    """Routed experts with groups and an auxiliary-loss-free bias; the shared ones side by side."""
    scoring = config.text("scoring_func")
    if scoring not in {s.value for s in Scoring}:
        raise config.refuse("scoring_func", " or ".join(s.value for s in Scoring))
    width, shared = config.count("moe_intermediate_size"), config.whole("n_shared_experts", 0)
    config.require("topk_method", "noaux_tc", _METHODS, "other routers are not described")
    groups = config.count("n_group", 1)
    if config.count("topk_group", groups) > groups:
        raise config.refuse("topk_group", f"up to n_group = {groups}", "correct one of the two")
    config.divides("n_routed_experts", config.count("n_routed_experts"), "n_group", groups)
    return ExpertFeed(
        experts=config.count("n_routed_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=width,
        shared_width=shared * width,
        scoring=Scoring(scoring),
        renormalise=config.flag("norm_topk_prob", True),
        scaling=config.real("routed_scaling_factor", 1.0),
        groups=groups,
        top_groups=config.count("topk_group", groups),
        router_bias=config.text("topk_method", "noaux_tc") == "noaux_tc",
        limit=config.real("swiglu_limit") if "swiglu_limit" in config else None,
    )
