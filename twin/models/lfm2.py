"""LFM2 and LFM2.5: gated short convolutions in most layers, attention with normed queries and keys
in the others. A dense model's feed-forward width is worked out of the one that its configuration
says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, whole
from twin.models.experts import Names, feed_shape
from twin.models.feeds import DenseFeed, ExpertFeed, Feed, Scoring
from twin.models.layered import check_experts, feed_of, kinds_of_layers, layered, layout
from twin.models.linear import TAPS, mixer_shape
from twin.models.mixers import GroupedAttention, Mixer, ShortConvolution
from twin.models.modules import LFM2
from twin.models.spec import ModelSpec

_CONV, _FULL = "conv", "full_attention"
_NORMS = {"attn_norm": "operator_norm", "ffn_norm": "ffn_norm"}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `lfm2` or `lfm2_moe` configuration describes."""
    fields.require("conv_bias", False, (False,), "convolutions of this family have no biases")
    # of training, or what the fields that are read say, too
    fields.unused("conv_dim", "block_dim", "num_heads", "block_norm_eps", "use_pos_enc")
    fields.unused("block_use_swiglu", "block_use_xavier_init", "conv_use_xavier_init")
    fields.unused("block_mlp_init_scale", "block_out_init_scale")
    said = fields.changed(
        {
            "rms_norm_eps": fields.real("norm_eps"),
            "tie_word_embeddings": fields.flag(
                "tie_embedding", fields.flag("tie_word_embeddings", True)
            ),
        },
    )
    heads, kv_heads = fields.count("num_attention_heads"), fields.count("num_key_value_heads")
    fields.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    hidden = fields.count("hidden_size")
    head_dim = fields.divides("hidden_size", hidden, "num_attention_heads", heads)
    mixers: dict[str, Mixer] = {
        _CONV: ShortConvolution(channels=hidden, conv=fields.count("conv_L_cache")),
        _FULL: GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=True),
    }
    if fields.text("model_type") == "lfm2_moe":
        family, feed = "lfm2_moe", _experts(fields)
        ffn = fields.count("moe_intermediate_size")
    else:
        dense = DenseFeed(width=_width(fields))
        family, feed, ffn = "lfm2", lambda _: dense, dense.width
    kinds = _kinds(fields)
    return layered(
        said,
        family=family,
        rope=rope(fields, theta=1000000.0),
        layout=layout(fields, lambda i: mixers[kinds[i]], feed),
        table=LFM2,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
    )


def _width(config: Config) -> int:
    """Columns of a dense model's feed-forward layers: two thirds of what the configuration says,
    times a factor, rounded up to whole multiples (transformers, Lfm2MLP).
    """
    key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
    config.unused("intermediate_size")
    said = config.count(key)
    multiple = config.count("block_multiple_of", 256)
    factor = config.real("block_ffn_dim_multiplier", 1.0)
    if not config.flag("block_auto_adjust_ff_dim", True):
        return said
    width = int(factor * int(2 * said / 3))
    return -(-width // multiple) * multiple


def _kinds(config: Config) -> tuple[str, ...]:
    """`layer_types`, or attention in the layers of `full_attn_idxs`; without both in all."""
    layers = config.count("num_hidden_layers")
    if kinds := kinds_of_layers(config, "layer_types", (_CONV, _FULL)):
        config.unused("full_attn_idxs")
        return kinds
    if "full_attn_idxs" not in config:
        return (_FULL,) * layers
    full = config.wholes("full_attn_idxs")
    if any(index >= layers for index in full):
        raise config.refuse("full_attn_idxs", f"layers below num_hidden_layers = {layers}")
    return tuple(_FULL if index in full else _CONV for index in range(layers))


def _experts(config: Config) -> Callable[[int], Feed]:
    """The feed of each layer: dense ones, then experts whose choice has a bias of its own."""
    experts = ExpertFeed(
        experts=config.count("num_experts"),
        top_k=config.count("num_experts_per_tok"),
        width=config.count("moe_intermediate_size"),
        scoring=Scoring.SIGMOID,
        renormalise=config.flag("norm_topk_prob", True),
        scaling=config.real("routed_scaling_factor", 1.0),
        choice_bias=config.flag("use_expert_bias", True),
    )
    check_experts(config, experts, "num_experts", "num_experts_per_tok")
    dense, layers = config.whole("num_dense_layers", 2), config.count("num_hidden_layers")
    if dense >= layers:
        raise ConfigError(
            f"{config.name}: num_dense_layers is {dense}; allowed: below num_hidden_layers = "
            f"{layers}; a model without experts is of model_type lfm2"
        )
    return feed_of(config, experts, first_dense=dense)


# ---- tensors -------------------------------------------------------------------------------------


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    return whole(spec, lambda i: _layer(spec, i), norm="model.embedding_norm")


def _layer(spec: ModelSpec, layer: int) -> dict[str, Tensor]:
    parts, hidden = spec.layer(layer), spec.hidden
    out = {name: Tensor(f"{stored}.weight", (hidden,)) for name, stored in _NORMS.items()}
    mixer = parts.mixer
    if isinstance(mixer, GroupedAttention):
        for name, rows in (("q", mixer.heads), ("k", mixer.kv_heads), ("v", mixer.kv_heads)):
            shape = (rows * mixer.head_dim, hidden)
            out[name] = Tensor(f"self_attn.{name}_proj.weight", shape)
        out["o"] = Tensor("self_attn.out_proj.weight", (hidden, mixer.heads * mixer.head_dim))
        for name in "qk":
            out[f"{name}_norm"] = Tensor(f"self_attn.{name}_layernorm.weight", (mixer.head_dim,))
    else:
        for name, module in (("conv_in", "in_proj"), ("o", "out_proj"), (TAPS, "conv")):
            own = mixer_shape(mixer, hidden, name)
            assert own is not None
            # the taps are of a convolution of one channel each
            whole = (own[0], 1, own[1]) if name == TAPS else own
            out[name] = Tensor(f"conv.{module}.weight", whole)
    return out | _feed(spec, parts.feed)


def _feed(spec: ModelSpec, feed: Feed) -> dict[str, Tensor]:
    names = Names(
        router="feed_forward.gate",
        experts="feed_forward.experts",
        gate="w1",
        up="w3",
        down="w2",
        choice_bias="feed_forward.expert_bias",
    )
    stored = {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"}
    if isinstance(feed, ExpertFeed):
        stored = names.alone(feed)
        for expert in range(feed.experts):
            stored |= names.of(expert)
    found = {}
    for name, module in stored.items():
        shape = feed_shape(feed, spec.hidden, name)
        assert shape is not None
        found[name] = Tensor(f"{module}.weight", shape)
    if isinstance(feed, ExpertFeed) and feed.choice_bias:
        found["choice_bias"] = Tensor(names.choice_bias, (feed.experts,))
    return found


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """Taps without the channel that each has to itself."""
    return array[:, 0] if name.endswith(f".{TAPS}") else array


def stored(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The way back."""
    return array[:, None] if name.endswith(f".{TAPS}") else array
