"""Gemma 4 (dense): five layers with a window for each with full attention, whose few key heads are
their values too.

Not described: the norms after each module (2 x hidden a layer), softcapping and the vision tower;
none of them moves weights.
"""

from __future__ import annotations

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.feeds import DenseFeed
from twin.models.gemma2 import cap
from twin.models.layered import kinds_of_layers, layered, layout
from twin.models.mixers import GroupedAttention, Mixer
from twin.models.modules import DENSE
from twin.models.spec import ModelSpec

# "proportional" scales the rotated share of a head: nothing that moves bytes
_TURNED = ("rope_type", "partial_rotary_factor")
_SLIDING, _FULL = "sliding_attention", "full_attention"


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
        "enable_moe_block", False, (False,), "the dense models of this family are described"
    )
    fields.require(
        "num_kv_shared_layers",
        0,
        (0,),
        "layers that borrow another layer's cache are not described",
    )
    cap(fields, "final_logit_softcapping", None)  # of what is only simulated
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
    feed = DenseFeed(width=fields.count("intermediate_size"))
    layers = layout(fields, lambda i: mixers[kinds[i]], lambda i: feed)
    return layered(
        fields,
        family="gemma4",
        rope=rope(_full_rope(fields), theta=None, simulated=True),
        layout=layers,
        table=DENSE,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim"),
        ffn=feed.width,
    )


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
    )


def _full(config: Config) -> GroupedAttention:
    """Fewer key heads than in layers with a window only where they are the values too."""
    heads, shared = config.count("num_attention_heads"), config.flag("attention_k_eq_v", False)
    few = shared and "num_global_key_value_heads" in config
    key = "num_global_key_value_heads" if few else "num_key_value_heads"
    kv_heads, head_dim = config.count(key), config.count("global_head_dim")
    config.divides("num_attention_heads", heads, key, kv_heads)
    return GroupedAttention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=True, values_are_keys=shared
    )


def _full_rope(config: Config) -> Config:
    """`rope_parameters` by kind of layer: those of full attention."""
    kinds = config.part("rope_parameters")
    parameters = kinds.part(_FULL) if kinds else None
    if kinds is None or parameters is None:
        raise ConfigError(
            f"{config.name}: rope_parameters.{_FULL} is missing; allowed: a mapping; take it from "
            "the model's config.json"
        )
    kinds.unused(_SLIDING)
    return config.holding("rope_parameters", parameters.changed(without=_TURNED))
