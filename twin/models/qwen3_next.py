"""Qwen3-Next: three layers of gated DeltaNet for each of gated full attention; routed experts
beside a gated shared one.
"""

from __future__ import annotations

from collections.abc import Mapping

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.formats import Role
from twin.models.layered import check_experts, feed_of, kinds_of_layers, layered, layout
from twin.models.mixers import DeltaNet, GroupedAttention, Mixer
from twin.models.qwen2_moe import SHARED_MODULE, with_shared
from twin.models.qwen3_moe import MODULES, dense_layers
from twin.models.spec import ModelSpec

_MODULES = MODULES | {
    Role.ATTENTION: "model.layers.0.linear_attn.in_proj_qkvz",
    Role.SMALL: "model.layers.0.linear_attn.in_proj_ba",
    Role.SHARED: SHARED_MODULE,
}
_LINEAR, _FULL = "linear_attention", "full_attention"


def from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    """The model that a Hugging Face `qwen3_next` configuration describes."""
    fields = Config(name, config)
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    full, linear = _full(fields), _linear(fields)
    kinds = _kinds(fields)
    mixers: dict[str, Mixer] = {_FULL: full, _LINEAR: linear}
    experts = check_experts(fields, with_shared(fields), "num_experts", "num_experts_per_tok")
    feed = feed_of(
        fields,
        experts,
        step=fields.count("decoder_sparse_step", 1),
        dense_layers=dense_layers(fields),
    )
    return layered(
        fields,
        family="qwen3_next",
        rope=rope(fields, theta=None, simulated=True),
        layout=layout(fields, lambda i: mixers[kinds[i]], feed),
        modules=_MODULES,
        kv_heads=full.kv_heads,
        head_dim=full.head_dim,
        ffn=experts.width,
    )


def _full(config: Config) -> GroupedAttention:
    heads = config.count("num_attention_heads")
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    config.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    rotated = round(head_dim * _share(config))
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        output_gate=True,
        rotary_dim=rotated,
    )


def _share(config: Config) -> float:
    """`partial_rotary_factor`, in rope_parameters since transformers 5."""
    parameters = config.part("rope_parameters")
    holder = parameters if parameters and "partial_rotary_factor" in parameters else config
    share = holder.real("partial_rotary_factor", 1.0)
    if share > 1:
        raise holder.refuse("partial_rotary_factor", "a share of a head, up to 1")
    return share


def _linear(config: Config) -> DeltaNet:
    key_heads, value_heads = (
        config.count("linear_num_key_heads"),
        config.count("linear_num_value_heads"),
    )
    config.divides("linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads)
    return DeltaNet(
        key_heads=key_heads,
        key_dim=config.count("linear_key_head_dim"),
        value_heads=value_heads,
        value_dim=config.count("linear_value_head_dim"),
        conv=config.count("linear_conv_kernel_dim"),
    )


def _kinds(config: Config) -> tuple[str, ...]:
    """`layer_types`, or full attention in every full_attention_interval-th layer."""
    if kinds := kinds_of_layers(config, "layer_types", (_LINEAR, _FULL)):
        return kinds
    every, layers = config.count("full_attention_interval"), config.count("num_hidden_layers")
    if every > layers:
        raise ConfigError(
            f"{config.name}: full_attention_interval is {every}; allowed: up to num_hidden_layers "
            f"= {layers}"
        )
    return tuple(_LINEAR if (index + 1) % every else _FULL for index in range(layers))
