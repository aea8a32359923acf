"""Qwen3-Next: three layers of gated DeltaNet for each of gated full attention; routed experts
next to a gated shared one. Norms are stored less their one, but for those of DeltaNet's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from twin.errors import ConfigError
from twin.models import decoder, gemma, linear
from twin.models.config import Config, rope, rotated
from twin.models.decoder import Tensor
from twin.models.feeds import Feed
from twin.models.layered import check_experts, feed_of, kinds_of_layers, layered, layout
from twin.models.mixers import DeltaNet, GroupedAttention, Mixer
from twin.models.modules import QWEN_EXPERTS, Table
from twin.models.qwen2_moe import NAMES, with_shared
from twin.models.qwen3_moe import dense_layers
from twin.models.spec import ModelSpec

_LINEAR, _FULL = "linear_attention", "full_attention"
SHARE = 0.25  # of a head that is rotated; the class default
NO_PART = ("mtp.",)  # a draft layer, which is no part of the model
_PROJECTIONS = {"qkvz": "in_proj_qkvz", "ba": "in_proj_ba"}
_DELTA = {  # canonical name -> name, of a layer of gated DeltaNet
    "o": "out_proj.weight",
    linear.TAPS: "conv1d.weight",
    linear.DECAY: "A_log",
    linear.STEP: "dt_bias",
    linear.NORM: "norm.weight",
}
_ATTENTION = ("q", "k", "v", "o", "q_norm", "k_norm")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return named(spec, decoder.tensors(spec, NAMES), _PROJECTIONS)


def named(
    spec: ModelSpec, found: dict[str, Tensor], projections: Mapping[str, str]
) -> dict[str, Tensor]:
    """`found` of the usual naming, with the tensors of gated DeltaNet and of gated attention."""
    delta = {name: f"{module}.weight" for name, module in projections.items()} | _DELTA
    for index in range(spec.layers):
        layer, mixer = f"layers.{index}", spec.layer(index).mixer
        if not isinstance(mixer, DeltaNet):
            shape = linear.mixer_shape(mixer, spec.hidden, "q")
            if shape is not None:  # with the gates' rows
                found[f"{layer}.q"] = Tensor(found[f"{layer}.q"].name, shape)
            continue
        for name in _ATTENTION:
            del found[f"{layer}.{name}"]
        for name, stored_as in delta.items():
            shape = linear.mixer_shape(mixer, spec.hidden, name)
            assert shape is not None
            if name == linear.TAPS:  # of a convolution of one channel each
                shape = (shape[0], 1, shape[1])
            found[f"{layer}.{name}"] = Tensor(f"model.{layer}.linear_attn.{stored_as}", shape)
    return found


def canonical(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Norms with their one, in FP32; taps without the channel that each has to itself."""
    if name.endswith(f".{linear.TAPS}"):
        return array[:, 0]
    return array if name.endswith(linear.NORM) else gemma.canonical(spec, name, array)


def stored(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The way back."""
    if name.endswith(f".{linear.TAPS}"):
        return array[:, None]
    return array if name.endswith(linear.NORM) else gemma.stored(spec, name, array)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen3_next` configuration describes."""
    experts = check_experts(fields, with_shared(fields), "num_experts", "num_experts_per_tok")
    feed = feed_of(
        fields,
        experts,
        step=fields.count("decoder_sparse_step", 1),
        dense_layers=dense_layers(fields),
    )
    return hybrid(
        fields,
        family="qwen3_next",
        delta=linear_attention(fields),
        feed=feed,
        ffn=experts.width,
        table=QWEN_EXPERTS,
    )


def hybrid(
    fields: Config,
    *,
    family: str,
    delta: DeltaNet,
    feed: Callable[[int], Feed],
    ffn: int,
    table: Table,
) -> ModelSpec:
    """Layers of `delta` and of gated attention, each with a `feed` of `ffn` columns."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    full, kinds = _full(fields), _kinds(fields)
    mixers: dict[str, Mixer] = {_FULL: full, _LINEAR: delta}
    turned = rope(fields, theta=None, simulated=True)
    return layered(
        fields,
        family=family,
        rope=replace(turned, rotated=rotated(fields, full.head_dim, SHARE)),
        layout=layout(fields, lambda i: mixers[kinds[i]], feed),
        table=table,
        kv_heads=full.kv_heads,
        head_dim=full.head_dim,
        ffn=ffn,
    )


def _full(config: Config) -> GroupedAttention:
    heads = config.count("num_attention_heads")
    kv_heads, head_dim = config.count("num_key_value_heads"), config.count("head_dim")
    config.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        output_gate=True,
    )


def linear_attention(config: Config) -> DeltaNet:
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
        config.unused("full_attention_interval")
        return kinds
    every, layers = config.count("full_attention_interval"), config.count("num_hidden_layers")
    if every > layers:
        raise ConfigError(
            f"{config.name}: full_attention_interval is {every}; allowed: up to num_hidden_layers "
            f"= {layers}"
        )
    return tuple(_LINEAR if (index + 1) % every else _FULL for index in range(layers))
