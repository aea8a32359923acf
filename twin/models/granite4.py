"""Granite 4: Mamba-2 in most layers, attention in the others, mostly without positions. Behind each
stands a SwiGLU that all tokens share, with routed experts next to it or alone. The factors are
those of Granite 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models import granite, linear, stacked
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, whole
from twin.models.experts import expert_of, feed_shape
from twin.models.feeds import DenseFeed, ExpertFeed, Feed
from twin.models.layered import check_experts, grouped_heads, kinds_of_layers, layered, layout
from twin.models.mixers import GroupedAttention, Mamba2, Mixer
from twin.models.modules import GRANITE4
from twin.models.nemotron_h import step_limit
from twin.models.spec import ModelSpec, Rope

_MAMBA, _FULL = ("mamba", "linear_attention"), ("attention", "full_attention")
_KINDS = "layer_types", "layers_block_type"  # one name of the other
_NOWHERE = ("nope", "none")  # positions, as published files say it
_FUSED = {"gate": 0, "up": 1, "shared_gate": 0, "shared_up": 1}  # halves of one matrix
_STATES = {name: f"mamba.{stored}" for name, stored in linear.MAMBA_TENSORS.items()}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `granitemoehybrid` configuration describes."""
    for key in ("attention_bias", "mamba_proj_bias"):
        fields.require(key, False, (False,), "biases of matrices are not described in this family")
    fields.unused("mamba_chunk_size", "mamba_expand", "normalization_function", "init_method")
    heads, kv_heads, head_dim = grouped_heads(fields)
    kinds = _kinds(fields)
    mixers: dict[bool, Mixer] = {
        False: GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    }
    if True in kinds:
        mixers[True] = _mamba(fields)
    fields.unused(*_OF_STATES)
    feed = _feed(fields)
    turned = _turned(fields)
    return layered(
        fields,
        family="granitemoehybrid",
        rope=turned or Rope(10000.0),
        layout=layout(fields, lambda i: mixers[kinds[i]], lambda i: feed),
        table=GRANITE4,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=feed.width,
        variant=granite.factors(fields),
        ropes=() if turned else (None,) * len(kinds),
    )


_OF_STATES = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_conv_bias", "time_step_limit"),
)


def _kinds(config: Config) -> list[bool]:
    """Is a layer one of Mamba-2? All of them, unless the configuration names them."""
    said = [kinds for key in _KINDS if (kinds := kinds_of_layers(config, key, (*_MAMBA, *_FULL)))]
    found = [[kind in _MAMBA for kind in kinds] for kinds in said]
    if any(kinds != found[0] for kinds in found):
        raise config.refuse(_KINDS[1], f"the same as {_KINDS[0]}", "remove one of the two")
    return found[0] if found else [True] * config.count("num_hidden_layers")


def _mamba(config: Config) -> Mamba2:
    heads, hidden = config.count("mamba_n_heads"), config.count("hidden_size")
    # the class norms all outputs of a layer together
    config.require("mamba_n_groups", 1, (1,), "heads of one group are described")
    inner = config.count("mamba_expand", 2) * hidden
    each = config.get("mamba_d_head", "auto")
    value_dim = inner // heads if each == "auto" else config.count("mamba_d_head")
    if value_dim * heads != inner:
        raise config.refuse("mamba_d_head", f"{inner} elements of all {heads} heads together")
    least, most = step_limit(config)
    return Mamba2(
        key_heads=1,
        key_dim=config.count("mamba_d_state"),
        value_heads=heads,
        value_dim=value_dim,
        conv=config.count("mamba_d_conv"),
        conv_bias=config.flag("mamba_conv_bias", True),
        least_step=least,
        most_step=most,
    )


def _feed(config: Config) -> DenseFeed | ExpertFeed:
    shared = config.count("shared_intermediate_size")
    if config.whole("num_local_experts", 8) == 0:
        config.unused("num_experts_per_tok", "intermediate_size")
        return DenseFeed(width=shared)
    experts = ExpertFeed(
        experts=config.count("num_local_experts", 8),
        top_k=config.count("num_experts_per_tok", 2),
        width=config.count("intermediate_size"),
        shared_width=shared,
    )
    return check_experts(config, experts, "num_local_experts", "num_experts_per_tok")


def _turned(config: Config) -> Rope | None:
    """Rotations of all layers with attention; None: no positions."""
    kind = config.text("position_embedding_type", _NOWHERE[0])
    if kind == "rope":
        return rope(config, theta=10000.0)
    if kind not in _NOWHERE:
        raise config.refuse("position_embedding_type", f"rope or {' or '.join(_NOWHERE)}")
    config.unused("rope_theta", "rope_scaling", "rope_parameters")
    return None


# ---- tensors -------------------------------------------------------------------------------------


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint; several names may be parts of one tensor."""
    return whole(spec, lambda i: _layer(spec, i))


def _layer(spec: ModelSpec, layer: int) -> dict[str, Tensor]:
    mixer, feed = spec.layer(layer).mixer, spec.layer(layer).feed
    found = {
        "attn_norm": Tensor("input_layernorm.weight", (spec.hidden,)),
        "ffn_norm": Tensor("post_attention_layernorm.weight", (spec.hidden,)),
    }
    names = {name: f"self_attn.{name}_proj.weight" for name in "qkvo"}
    if isinstance(mixer, Mamba2):
        names = dict(_STATES)
        if not mixer.conv_bias:
            del names[linear.TAPS_BIAS]
    for name, called in names.items():
        shape = linear.mixer_shape(mixer, spec.hidden, name)
        assert shape is not None
        if name == linear.TAPS:  # of a convolution of one channel each
            shape = (shape[0], 1, shape[1])
        found[name] = Tensor(called, shape)
    return found | _feed_tensors(spec.hidden, feed)


def _feed_tensors(hidden: int, feed: Feed) -> dict[str, Tensor]:
    routed = isinstance(feed, ExpertFeed)
    assert isinstance(feed, DenseFeed | ExpertFeed)
    width = feed.shared_width if isinstance(feed, ExpertFeed) else feed.width
    before = "shared_" if routed else ""
    fused = Tensor("shared_mlp.input_linear.weight", (2 * width, hidden))
    found = {f"{before}{name}": fused for name in ("gate", "up")}
    found[f"{before}down"] = Tensor("shared_mlp.output_linear.weight", (hidden, width))
    if isinstance(feed, ExpertFeed):
        shape = feed_shape(feed, hidden, "router")
        assert shape is not None
        found["router"] = Tensor("block_sparse_moe.router.layer.weight", shape)
        up = Tensor("block_sparse_moe.input_linear.weight", (feed.experts, 2 * feed.width, hidden))
        down = Tensor("block_sparse_moe.output_linear.weight", (feed.experts, hidden, feed.width))
        for expert in range(feed.experts):
            name = f"experts.{expert}"
            found |= {f"{name}.gate": up, f"{name}.up": up, f"{name}.down": down}
    return found


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A stored array, or its part of one expert or of a gate; taps without the channel that each
    has to itself.
    """
    own = stacked.canonical(name, array)
    if own is not None:
        return own
    leaf = name.rpartition(".")[2]
    if leaf in _FUSED and expert_of(name) is None:
        halves: list[NDArray[Any]] = np.split(array, 2)
        return halves[_FUSED[leaf]]
    return array[:, 0] if leaf == linear.TAPS else array


def joined(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """A tensor of its parts, in the order of `tensors`."""
    if expert_of(names[0]) is not None:
        return stacked.joined(names, arrays)
    return np.concatenate(arrays) if len(arrays) > 1 else arrays[0]


def stored(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Taps as a checkpoint has them."""
    return array[:, None] if name.endswith(f".{linear.TAPS}") else array
