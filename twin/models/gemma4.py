"""Gemma 4: five layers with a window for each with full attention, whose few, wide key heads are
their values too. Values are normed as well, and each layer ends by scaling the whole residual.

In the model with experts they stand next to a dense MLP: both see the same residual, each normed by
weights of its own, and what both make is normed before it is added up, and after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from twin.errors import ConfigError
from twin.models import stacked
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, canonical_shape
from twin.models.feeds import DenseFeed, ExpertFeed, Feed
from twin.models.gemma import embedding
from twin.models.gemma2 import cap
from twin.models.layered import check_experts, kinds_of_layers, layered, layout
from twin.models.layers import Layer
from twin.models.mixers import GroupedAttention, Mixer
from twin.models.modules import GEMMA4
from twin.models.spec import ModelSpec, Rope
from twin.models.stacked import joined
from twin.models.variant import Activation, Norms, Variant

__all__ = ["VISION", "canonical", "from_config", "from_multimodal", "joined", "tensors"]

VISION = ("model.vision_tower.", "model.embed_vision.")  # of what sees images
_INNER = "language_model."  # of a text model within one that sees images
_SLIDING, _FULL = "sliding_attention", "full_attention"
_PROPORTIONAL = "proportional"


def from_config(fields: Config) -> ModelSpec:
    """The text model that a Hugging Face `gemma4_text` configuration describes."""
    fields = _by_kind(fields)
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not described",
    )
    fields.require(
        "use_bidirectional_attention",
        None,
        (None, "vision"),
        "attention to later tokens is not described but for images",
    )
    fields.require(
        "num_kv_shared_layers",
        0,
        (0,),
        "layers that borrow another layer's cache are not described",
    )
    fields.require(
        "hidden_activation",
        Activation.GELU.value,
        Activation.GELU.names,
        "this family's feed-forward layers are gated by GELU",
    )
    # of layers that borrow a cache
    fields.unused("use_double_wide_mlp")
    fields.require("hidden_size_per_layer_input", 0, (0,), "embeddings per layer are not described")
    fields.unused("vocab_size_per_layer_input", "num_global_key_value_heads")
    kinds = kinds_of_layers(fields, "layer_types", (_SLIDING, _FULL))
    if kinds is None:
        raise fields.refuse(
            "layer_types",
            f"a list of {_SLIDING} or {_FULL}",
            "take it from the model's config.json",
        )
    mixers: dict[str, Mixer] = {_SLIDING: _sliding(fields), _FULL: _full(fields)}
    turns = {_SLIDING: _near(fields), _FULL: _far(fields)}
    feed, ffn = _feed(fields)
    return layered(
        fields,
        family="gemma4_text",
        rope=turns[_FULL],
        ropes=tuple(turns[kind] for kind in kinds),
        layout=layout(fields, lambda i: mixers[kinds[i]], feed),
        table=GEMMA4,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim"),
        ffn=ffn,
        variant=Variant(
            activation=Activation.GELU,
            norms=Norms.AROUND,
            embedding=embedding(fields),
            score=1.0,
            logit_cap=cap(fields, "final_logit_softcapping", None),
            layer_scalar=True,
        ),
    )


def from_multimodal(fields: Config) -> ModelSpec:
    """The text model of a Hugging Face `gemma4` configuration, from its `text_config`."""
    return replace(from_config(fields), family="gemma4")


def _feed(config: Config) -> tuple[Callable[[int], Feed], int]:
    """Of each layer, and the width that tables show: of an expert where there are some."""
    dense = DenseFeed(width=config.count("intermediate_size"))
    if not config.flag("enable_moe_block", False):
        config.unused("num_experts", "top_k_experts", "moe_intermediate_size")
        config.unused("expert_intermediate_size")
        return lambda _: dense, dense.width
    experts = ExpertFeed(
        experts=config.count("num_experts"),
        top_k=config.count("top_k_experts"),
        width=config.count("moe_intermediate_size"),
        shared_width=dense.width,
        parallel=True,
    )
    check_experts(config, experts, "num_experts", "top_k_experts")
    return lambda _: experts, experts.width


def _by_kind(config: Config) -> Config:
    """The same, with what transformers 5 writes layer by layer in the published file's words."""
    layers = config.part("per_layer_config")
    kinds = kinds_of_layers(config, "layer_types", (_SLIDING, _FULL))
    if layers is None or kinds is None:
        return config
    full = {index for index, kind in enumerate(kinds) if kind == _FULL}
    parts = [part for key in layers.values if (part := layers.part(key))]
    own = [part.values for part in parts]
    alike = len(own) == len(layers.values) and all(values == own[0] for values in own)
    if not own or {int(key) for key in layers.values if key.isdecimal()} != full or not alike:
        raise config.refuse("per_layer_config", "the same for all layers of full attention")
    names = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    said = parts[0]
    for key in said.values:
        if key not in names:
            raise said.refuse(key, f"nothing; only {' and '.join(names)} differ by kind of layer")
    for part in parts:
        part.unused(*part)
    return config.changed({names[key]: said.count(key) for key in said.values})


def _sliding(config: Config) -> GroupedAttention:
    heads, kv_heads = config.count("num_attention_heads"), config.count("num_key_value_heads")
    config.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.count("head_dim"),
        window=config.count("sliding_window"),
        qk_norm=True,
        value_norm=True,
    )


def _full(config: Config) -> GroupedAttention:
    """Fewer key heads than in layers with a window only where they are the values too."""
    heads, shared = config.count("num_attention_heads"), config.flag("attention_k_eq_v", False)
    few = shared and "num_global_key_value_heads" in config
    key = "num_global_key_value_heads" if few else "num_key_value_heads"
    kv_heads, head_dim = config.count(key), config.count("global_head_dim")
    config.divides("num_attention_heads", heads, key, kv_heads)
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        qk_norm=True,
        value_norm=True,
        values_are_keys=shared,
    )


def _near(config: Config) -> Rope:
    return rope(config.holding("rope_parameters", _parameters(config, _SLIDING)), theta=None)


def _far(config: Config) -> Rope:
    """Full attention turns the first pairs of a head, by a whole head's frequencies, and no others
    (transformers, `_compute_proportional_rope_parameters`).
    """
    parameters = _parameters(config, _FULL)
    kind = parameters.text("rope_type", "default")
    if kind != _PROPORTIONAL:
        return rope(config.holding("rope_parameters", parameters), theta=None)
    parameters.require("factor", 1.0, (1, 1.0), "frequencies are not divided in this family")
    pairs = (
        int(parameters.real("partial_rotary_factor", 1.0) * config.count("global_head_dim")) // 2
    )
    if pairs < 1:
        raise parameters.refuse("partial_rotary_factor", "a share of a head of at least one pair")
    whole = parameters.changed(without=("rope_type", "partial_rotary_factor", "factor"))
    return replace(rope(config.holding("rope_parameters", whole), theta=None), pairs=pairs)


def _parameters(config: Config, kind: str) -> Config:
    """`rope_parameters` of a kind of layer."""
    kinds = config.part("rope_parameters")
    parameters = kinds.part(kind) if kinds else None
    if parameters is None:
        raise ConfigError(
            f"{config.name}: rope_parameters.{kind} is missing; allowed: a mapping; take it from "
            "the model's config.json"
        )
    return parameters


# ---- tensors -------------------------------------------------------------------------------------

_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}


# of a layer whose experts stand next to a dense MLP
_NEXT_TO_DENSE = {
    **{f"shared_{name}": f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")},
    "router": "router.proj.weight",
    "router_norm": "router.scale",
    "expert_scales": "router.per_expert_scale",
    "experts_norm": "pre_feedforward_layernorm_2.weight",
    "shared_post_norm": "post_feedforward_layernorm_1.weight",
    "experts_post_norm": "post_feedforward_layernorm_2.weight",
}


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    found = {
        "embed": Tensor("model.embed_tokens.weight", (spec.vocab, spec.hidden)),
        "final_norm": Tensor("model.norm.weight", (spec.hidden,)),
    }
    if not spec.tied:
        found["lm_head"] = Tensor("lm_head.weight", (spec.vocab, spec.hidden))
    for layer in range(spec.layers):
        for name, called in _names(spec.layer(layer)).items():
            own = f"layers.{layer}.{name}"
            found[own] = Tensor(f"model.layers.{layer}.{called}", canonical_shape(spec, own))
    inner = "" if spec.family.endswith("_text") else _INNER
    if spec.experts is not None and stacked.is_stacked(spec):
        found |= stacked.tensors(spec, "experts")
    return {
        name: replace(tensor, name=tensor.name.replace("model.", f"model.{inner}", 1))
        for name, tensor in found.items()
    }


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A stored array, or its part of one expert."""
    own = stacked.canonical(name, array)
    return array if own is None else own


def _names(parts: Layer) -> dict[str, str]:
    found = {name: f"{stored}.weight" for name, stored in _NORMS.items()}
    found["layer_scalar"] = "layer_scalar"
    assert isinstance(parts.mixer, GroupedAttention)
    for name in "qko" if parts.mixer.values_are_keys else "qkvo":
        found[name] = f"self_attn.{name}_proj.weight"
    for name in ("q_norm", "k_norm"):
        found[name] = f"self_attn.{name}.weight"
    if not isinstance(parts.feed, ExpertFeed):
        return found | {name: f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    found |= _NEXT_TO_DENSE
    for expert in range(parts.feed.experts):
        found |= {
            f"experts.{expert}.{name}": f"experts.{expert}.{name}_proj.weight"
            for name in ("gate", "up", "down")
        }
    return found
