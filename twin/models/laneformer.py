"""Laneformer: Llama trained for delayed tensor parallelism, with one residual per lane.

Norm scales are shared by the lanes. Field names are those of the published configuration class and
of the released model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from twin.errors import ConfigError
from twin.models.config import Config, dtype, llama3_scaling, refuse_quantized, rope
from twin.models.decoder import Tensor, canonical_shape, matrix_shapes
from twin.models.spec import LaneHead, Lanes, ModelSpec, Rope, RopeStyle
from twin.models.variant import Activation
from twin.text import shown

_THETA = 10000.0  # class defaults: the published model does not say its own
_EPS = 1e-5
_ROWS_BY_LANE = ("q", "k", "v", "gate", "up")  # column-parallel [lanes, out/lanes, in]
_COLUMNS_BY_LANE = ("o", "down")  # row-parallel [lanes, out, in/lanes]
_HEADS = {"replicate": LaneHead.MEAN, "vocab_parallel": LaneHead.VOCABULARY}


def from_config(fields: Config) -> ModelSpec:
    """The model that a `laneformer` (or `laneformer_tp`) configuration describes."""
    _refuse_unsupported(fields)
    heads, hidden = fields.count("num_attention_heads"), fields.count("hidden_size")
    kv_heads = fields.count("num_key_value_heads", heads)
    fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    spec = ModelSpec(
        name=fields.name,
        family="laneformer",
        layers=fields.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.divides("hidden_size", hidden, "num_attention_heads", heads),
        ffn=fields.count("intermediate_size"),
        vocab=fields.count("vocab_size"),
        context=fields.count("max_position_embeddings"),
        norm_eps=fields.real("norm_eps", _EPS),
        rope=_rope(fields),
        windows=_windows(fields),
        tied=fields.flag("tie_word_embeddings", False),
        dtype=dtype(fields),
        lanes=_lanes(fields),
    )
    _check_lanes(fields, spec)
    return spec


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of the checkpoint; matrices of a layer have the lane as their first
    axis.
    """
    out = {
        "embed": Tensor("model.tok_embeddings.weight", (spec.vocab, spec.hidden)),
        "final_norm": Tensor("model.norm.weight", (spec.hidden,)),
    }
    if not spec.tied:
        out["lm_head"] = Tensor("lm_head.weight", _stored_shape(spec, "lm_head"))
    modules = {"q": "attention.wq", "k": "attention.wk", "v": "attention.wv", "o": "attention.wo"}
    modules |= {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    modules |= {"attn_norm": "attention_norm", "ffn_norm": "ffn_norm"}
    for layer in range(spec.layers):
        for leaf, module in modules.items():
            out[f"layers.{layer}.{leaf}"] = Tensor(
                f"model.layers.{layer}.{module}.weight", _stored_shape(spec, leaf)
            )
    return out


def canonical(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The stored array of `name` as [out, in]: lanes side by side along the axis that they
    split.
    """
    leaf = name.rpartition(".")[2]
    if leaf in _COLUMNS_BY_LANE:
        array = np.moveaxis(array, 0, 1)
    return array.reshape(canonical_shape(spec, leaf))


def _stored_shape(spec: ModelSpec, leaf: str) -> tuple[int, ...]:
    lanes = _of(spec)
    if leaf == "lm_head" and lanes.head is LaneHead.VOCABULARY:
        return (lanes.count, spec.vocab // lanes.count, spec.hidden)
    if leaf not in matrix_shapes(spec):
        return canonical_shape(spec, leaf)
    rows, cols = matrix_shapes(spec)[leaf]
    return (
        (lanes.count, rows // lanes.count, cols)
        if leaf in _ROWS_BY_LANE
        else (lanes.count, rows, cols // lanes.count)
    )


def _of(spec: ModelSpec) -> Lanes:
    if spec.lanes is None:
        raise ConfigError(
            f"{spec.name}: lanes is None; allowed: a Lanes; a laneformer cannot do without"
        )
    return spec.lanes


def _lanes(config: Config) -> Lanes:
    delay = config.whole("broadcast_delay")
    if delay > config.count("num_hidden_layers"):
        raise config.refuse("broadcast_delay", "layers, from 0 to num_hidden_layers")
    return Lanes(
        config.count("num_lanes"), delay, _head(config), config.flag("use_early_comm", False)
    )


def _head(config: Config) -> LaneHead:
    kind, summed = config.text("lm_head_type", "replicate"), config.flag("pre_norm_lane_agg", False)
    if kind not in _HEADS:
        raise config.refuse(
            "lm_head_type", " or ".join(_HEADS), "a head per lane without a mean is not supported"
        )
    if not summed:
        return _HEADS[kind]
    if kind != "replicate":
        raise config.refuse(
            "pre_norm_lane_agg",
            f"false with lm_head_type {shown(kind)}, whose lanes are never summed",
        )
    return LaneHead.SUM


def _windows(config: Config) -> tuple[int, ...]:
    """`swa_layers` (a list of layers or a count) or `sliding_window_n_layers`; a count below zero
    means the last ones.
    """
    layers = config.count("num_hidden_layers")
    keys = [key for key in ("swa_layers", "sliding_window_n_layers") if key in config]
    if len(keys) > 1:
        raise config.refuse(
            "swa_layers", "one of swa_layers and sliding_window_n_layers", "remove one of the two"
        )
    if not keys:
        config.require(
            "sliding_window",
            None,
            (None,),
            "say which layers have it: swa_layers or sliding_window_n_layers",
        )
        return (0,) * layers
    chosen = _windowed_layers(config, keys[0], layers)
    config.unused("sliding_window")
    window = config.count("sliding_window") if chosen else 0
    return tuple(window if layer in chosen else 0 for layer in range(layers))


def _windowed_layers(config: Config, key: str, layers: int) -> set[int]:
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and -layers <= value <= layers:
        return set(range(value) if value >= 0 else range(layers + value, layers))
    listed = value if isinstance(value, list | tuple) and key == "swa_layers" else [-1]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < layers for i in listed):
        raise config.refuse(
            key,
            f"a count from -{layers} to {layers}, or for swa_layers a list of layers below "
            f"{layers}",
        )
    return set(listed)


def _rope(config: Config) -> Rope:
    """The released model calls Llama 3's scaling `rope_scaling_args`."""
    arguments = config.part("rope_scaling_args")
    base = rope(config, theta=_THETA, style=RopeStyle.INTERLEAVED, yarn=False)
    if arguments is None or not arguments.values:
        return base
    if base.scaling is not None:
        raise config.refuse(
            "rope_scaling_args", "null where rope_scaling is given", "remove one of the two"
        )
    return Rope(base.theta, base.style, llama3_scaling(arguments))


def _check_lanes(config: Config, spec: ModelSpec) -> None:
    """Every lane owns an equal part of each axis that is split."""
    lanes = _of(spec)
    split = {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
    }
    split["intermediate_size"] = spec.ffn
    if lanes.head is LaneHead.VOCABULARY:
        split["vocab_size"] = spec.vocab
        config.require(
            "tie_word_embeddings",
            False,
            (False,),
            "a vocabulary split over lanes cannot share the embedding table",
        )
    for key, value in split.items():
        config.divides(key, value, "num_lanes", lanes.count)


def _refuse_unsupported(config: Config) -> None:
    config.require(
        "hidden_act",
        "silu",
        Activation.SILU.names,
        "this family's feed-forward layers are gated by SILU",
    )
    refuse_quantized(config)
    config.require("replicated_rmsn_scale", True, (True,), "norm scales per lane are not supported")
    for key in ("use_comm", "use_attention_comm", "use_mlp_comm"):
        config.require(key, True, (True,), "lanes that never exchange are not supported")
    for key in ("attention_bias", "mlp_bias"):
        config.require(key, False, (False,), "biases are not supported in this family")
    config.require("unclamped_layers", None, (None, 0, [], ()), "its meaning is not published")
    if "head_dim" in config and config.count("head_dim") != config.count(
        "hidden_size"
    ) // config.count("num_attention_heads"):
        raise config.refuse("head_dim", "hidden_size / num_attention_heads")
