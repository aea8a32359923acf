"""GPT-OSS: windows in every other layer, attention sinks, biases everywhere, clamped SwiGLU experts
stored in MXFP4.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor
from twin.models.experts import Names, expert_of
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, kinds_of_layers, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import GPT_OSS
from twin.models.spec import ModelSpec

_NAMES = Names("mlp.router", "mlp.experts", "gate_up_proj", "gate_up_proj", "down_proj")
_GAIN = 1.702  # of transformers' configuration, where a checkpoint's does not say it
_SLIDING, _FULL = "sliding_attention", "full_attention"
_SCALING = {  # of the class, where a configuration has neither rope_scaling nor rope_parameters
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `gpt_oss` configuration describes."""
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
        rope=rope(_scaled(fields), theta=None),
        layout=layers,
        table=GPT_OSS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=experts.width,
    )


def _scaled(config: Config) -> Config:
    if "rope_scaling" in config or "rope_parameters" in config:
        return config
    return Config(config.name, {**config.values, "rope_scaling": _SCALING})


def _experts(config: Config) -> ExpertFeed:
    """Softmax over the chosen logits only, which equals renormalising; the router has a bias."""
    config.unused("initial_context_length")  # which the rotation says, too
    if "experts_per_token" in config:
        config.require(
            "experts_per_token",
            None,
            (config.count("num_experts_per_tok"),),
            "it must be num_experts_per_tok",
        )
    return ExpertFeed(
        experts=config.count("num_local_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.count("intermediate_size"),
        router_bias=True,
        bias=True,
        limit=config.real("swiglu_limit"),
        gain=config.real("swiglu_alpha", _GAIN),
        offset=1.0,
    )


# ---- tensors ------------------------------------------------------------------------------------


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint in 16 or 32 bits. All experts of a layer share a
    tensor, [experts, in, out]; rows of gates and of what passes them take turns in it.
    """
    out = decoder.tensors(spec, _NAMES)
    for layer in range(spec.layers):
        feed = spec.layer(layer).feed
        if not isinstance(feed, ExpertFeed):
            continue
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}.mlp"
        count, pairs, hidden = feed.experts, 2 * feed.width, spec.hidden
        up = Tensor(f"{theirs}.experts.gate_up_proj", (count, hidden, pairs))
        down = Tensor(f"{theirs}.experts.down_proj", (count, feed.width, hidden))
        biases = {
            "gate": Tensor(f"{up.name}_bias", (count, pairs)),
            "up": Tensor(f"{up.name}_bias", (count, pairs)),
            "down": Tensor(f"{down.name}_bias", (count, hidden)),
        }
        out[f"{ours}.router_bias"] = Tensor(f"{theirs}.router.bias", (count,))
        for expert in range(count):
            for leaf, bias in biases.items():
                name = f"{ours}.experts.{expert}.{leaf}"
                out[name] = down if leaf == "down" else up
                out[f"{name}_bias"] = bias
    return out


def packed(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Of a checkpoint in MXFP4, by the name that a tensor has in 16 bits: [experts, rows, columns],
    whose codes and scales stand in `*_blocks` and `*_scales` in its place.
    """
    out = {}
    for layer in range(spec.layers):
        feed = spec.layer(layer).feed
        if isinstance(feed, ExpertFeed):
            name = f"model.layers.{layer}.mlp.experts"
            out[f"{name}.gate_up_proj"] = (feed.experts, 2 * feed.width, spec.hidden)
            out[f"{name}.down_proj"] = (feed.experts, spec.hidden, feed.width)
    return out


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A stored array's part of one expert, as [out, in] or [out]; others as they are."""
    expert = expert_of(name)
    if expert is None:
        return array
    own: NDArray[Any] = array[expert].T
    leaf = name.rpartition(".")[2].removesuffix("_bias")
    return own if leaf == "down" else own[int(leaf == "up") :: 2]


def joined(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The way back, of all parts of a tensor in the order of `tensors`."""
    if expert_of(names[0]) is None:
        return arrays[0]
    if "down" in names[0].rpartition(".")[2]:
        return np.stack([array.T for array in arrays])
    pairs = [np.stack(two, axis=1) for two in zip(arrays[0::2], arrays[1::2], strict=True)]
    return np.stack([pair.reshape(-1, *pair.shape[2:]).T for pair in pairs])
