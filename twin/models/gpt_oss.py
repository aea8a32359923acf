"""GPT-OSS: windows in every other layer, attention sinks, biases everywhere, clamped SwiGLU experts
stored in MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping

from twin.models.config import Config, rope
from twin.models.feeds import ExpertFeed
from twin.models.formats import Role
from twin.models.layered import check_experts, feed_of, kinds_of_layers, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.spec import ModelSpec

_MODULES = {
    Role.ATTENTION: "model.layers.0.self_attn.q_proj",
    Role.EXPERT: "model.layers.0.mlp.experts.gate_up_proj",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    """The model that a Hugging Face `gpt_oss` configuration describes."""
    fields = Config(name, config)
    heads = fields.count("num_attention_heads")
    kv_heads, head_dim = fields.count("num_key_value_heads"), fields.count("head_dim")
    fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    kinds = kinds_of_layers(fields, "layer_types", (_SLIDING, _FULL)) or ()
    if not kinds:
        raise fields.refuse(
            "layer_types",
            f"a list of {_SLIDING} or {_FULL}",
            "take it from the model's config.json",
        )
    window, bias = fields.count("sliding_window"), fields.flag("attention_bias", True)
    experts = check_experts(fields, _experts(fields), "num_local_experts", "num_experts_per_tok")
    layers = layout(
        fields,
        lambda i: GroupedAttention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            window=window if kinds[i] == _SLIDING else 0,
            qkv_bias=bias,
            o_bias=bias,
            sinks=True,
        ),
        feed_of(fields, experts),
    )
    return layered(
        fields,
        family="gpt_oss",
        rope=rope(fields, theta=None, simulated=True),
        layout=layers,
        modules=_MODULES,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )


def _experts(config: Config) -> ExpertFeed:
    """Softmax over the chosen logits only, which equals renormalising; the router has a bias."""
    return ExpertFeed(
        experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.count("intermediate_size"),
        router_bias=True,
        bias=True,
        limit=config.real("swiglu_limit"),
    )
