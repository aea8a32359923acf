"""Hunyuan, dense and with experts: Llama whose queries and keys are normed head by head after their
rotation. A fixed `alpha` stretches the base of the rotation's frequencies. Experts stand next to a
shared one as wide as they are, in every layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from twin.errors import ConfigError
from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import HUNYUAN
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import Variant

_THETA = 10000.0  # class default
_SCALINGS = ("rope_parameters", "rope_scaling")
_VARIANT = Variant(norms_turned=True)
_NAMES = Names(
    *("mlp.gate.wg", "mlp.experts", "gate_proj", "up_proj", "down_proj"), shared="mlp.shared_mlp"
)
_NORMS = {
    "self_attn.q_norm": "self_attn.query_layernorm",
    "self_attn.k_norm": "self_attn.key_layernorm",
}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `hunyuan_v1_dense` configuration describes."""
    _require(fields)
    return dense(
        fields,
        family="hunyuan_v1_dense",
        rope=_rope(fields, _head_dim(fields)),
        windows=no_windows(fields),
        qk_norm=True,
        variant=_VARIANT,
    )


def with_experts(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `hunyuan_v1_moe` configuration describes."""
    _require(fields)
    # what transformers does not read: experts, and the shared one, are intermediate_size wide
    fields.unused("moe_intermediate_size", "num_shared_expert")
    heads, kv_heads, head_dim = grouped_heads(fields)
    attention = GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=True)
    width = fields.count("intermediate_size")
    experts = ExpertFeed(
        experts=_alike(fields, "num_experts"),
        top_k=_alike(fields, "moe_topk"),
        width=width,
        shared_width=width,
    )
    check_experts(fields, experts, "num_experts", "moe_topk")
    return layered(
        fields,
        family="hunyuan_v1_moe",
        rope=_rope(fields, head_dim),
        layout=layout(fields, lambda i: attention, feed_of(fields, experts)),
        table=HUNYUAN,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=width,
        variant=_VARIANT,
    )


def _require(fields: Config) -> None:
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    fields.require("use_qk_norm", True, (True,), "queries and keys of this family are normed")
    fields.require("use_cla", False, (False,), "layers that borrow a cache are not described")
    fields.unused("attention_head_dim", "eod_token_id")  # head_dim once more; a token's number


def _head_dim(config: Config) -> int:
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    if "head_dim" in config:
        return config.count("head_dim")
    return config.divides("hidden_size", hidden, "num_attention_heads", heads)


def _alike(config: Config, key: str) -> int:
    """A number of all layers, or a list with the same one for each of them."""
    if not isinstance(config.get(key), list | tuple):
        return config.count(key)
    found, layers = set(config.wholes(key)), config.count("num_hidden_layers")
    if len(found) != 1 or len(config.wholes(key)) != layers:
        raise config.refuse(key, f"a number, or the same one for each of {layers} layers")
    return config.changed({key: found.pop()}).count(key)


def _rope(config: Config, head_dim: int) -> Rope:
    """With `alpha` all frequencies are those of a larger base, for sequences of any length."""
    key = next((key for key in _SCALINGS if config.part(key)), "")
    part = config.part(key) if key else None
    if part is None or "alpha" not in part:
        return rope(config, theta=_THETA)
    named = "rope_type" if "rope_type" in part else "type"
    if part.text(named, "default") != "dynamic":
        raise part.refuse(named, "dynamic, where there is an alpha")
    # next to a fixed alpha transformers reads none of these
    part.unused("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rope_type", "type")
    alpha = part.real("alpha")
    if head_dim < 4:
        raise ConfigError(
            f"{config.name}: head_dim is {head_dim}; allowed: 4 or more where rotations are "
            "stretched by alpha; correct the configuration"
        )
    kept: dict[str, Any] = {"rope_theta": part.real("rope_theta")} if "rope_theta" in part else {}
    plain = config.changed({key: kept} if kept else {}, without=() if kept else (key,))
    turned = rope(plain, theta=_THETA)
    return replace(turned, theta=turned.theta * alpha ** (head_dim / (head_dim - 2)))


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    found = decoder.tensors(spec, _NAMES if spec.experts else None)
    return {name: replace(tensor, name=_called(tensor.name)) for name, tensor in found.items()}


def _called(name: str) -> str:
    for ours, theirs in _NORMS.items():
        name = name.replace(ours, theirs)
    return name
