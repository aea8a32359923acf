"""What the families that are simulated layer by layer share: common fields, which layers have
experts, refusals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from twin.errors import ConfigError
from twin.models.config import Config, dtype
from twin.models.feeds import DenseFeed, ExpertFeed, Feed
from twin.models.formats import Role
from twin.models.layers import HyperConnections, Layer
from twin.models.mixers import RECURRENT, Mixer, NoMixer
from twin.models.modules import Table
from twin.models.quantized import stored_formats
from twin.models.schemes import quantization_of
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import LLAMA, Activation, Variant


def layered(
    config: Config,
    *,
    family: str,
    rope: Rope,
    layout: Sequence[Layer],
    table: Table,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    hyper: HyperConnections | None = None,
    variant: Variant = LLAMA,
    ropes: tuple[Rope | None, ...] = (),
    by_layer: tuple[Role, ...] = (),
) -> ModelSpec:
    """A ModelSpec with a layout. `table`: what its matrices are called in checkpoints; `by_layer`:
    kinds of which layers may be stored in formats of their own.
    """
    for key, allowed in (
        ("hidden_act", Activation.SILU.names),
        ("hidden_activation", (Activation.SILU.value, Activation.GELU.value)),
    ):
        config.require(key, "silu", allowed, "the gates described are SILU and GELU")
    config.require(
        "mlp_bias", False, (False,), "biases in dense feed-forward layers are not described"
    )
    spec = ModelSpec(
        name=config.name,
        family=family,
        layers=len(layout),
        hidden=config.count("hidden_size"),
        heads=config.count("num_attention_heads"),
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=config.count("vocab_size"),
        context=config.count("max_position_embeddings"),
        norm_eps=config.real("rms_norm_eps"),
        rope=rope,
        windows=tuple(layer.mixer.window for layer in layout),
        qkv_bias=_all(layout, "qkv_bias"),
        qk_norm=_all(layout, "qk_norm"),
        tied=config.flag("tie_word_embeddings", False),
        dtype=dtype(config),
        layout=tuple(layout),
        hyper=hyper,
        variant=variant,
        ropes=ropes,
    )
    quantization = quantization_of(config)
    stored = stored_formats(config, spec, table, quantization, by_layer=by_layer)
    return replace(spec, stored=stored)


def _all(layout: Sequence[Layer], what: str) -> bool:
    """Has every layer's attention this? Layers that carry a state have none."""
    others = (*RECURRENT, NoMixer)
    mixers = [layer.mixer for layer in layout if not isinstance(layer.mixer, others)]
    return bool(mixers) and all(getattr(mixer, what, False) for mixer in mixers)


def grouped_heads(config: Config) -> tuple[int, int, int]:
    """(query heads, key heads, elements of one). A head has hidden_size / num_attention_heads
    elements unless the configuration says another number.
    """
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads)
    config.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    if "head_dim" in config:
        return heads, kv_heads, config.count("head_dim")
    return heads, kv_heads, config.divides("hidden_size", hidden, "num_attention_heads", heads)


def layout(
    config: Config, mixer: Callable[[int], Mixer], feed: Callable[[int], Feed]
) -> list[Layer]:
    """One Layer per index of num_hidden_layers."""
    return [Layer(mixer(index), feed(index)) for index in range(config.count("num_hidden_layers"))]


def feed_of(
    config: Config,
    experts: ExpertFeed,
    first_dense: int = 0,
    step: int = 1,
    dense_layers: Sequence[int] = (),
) -> Callable[[int], Feed]:
    """Experts from layer `first_dense` on, in every `step`-th layer, not in `dense_layers`;
    elsewhere intermediate_size wide.
    """

    config.unused("intermediate_size")  # of a model whose layers all have experts

    def feed(index: int) -> Feed:
        if index >= first_dense and (index + 1) % step == 0 and index not in dense_layers:
            return experts
        return DenseFeed(width=config.count("intermediate_size"), limit=experts.limit)

    return feed


def check_experts(config: Config, experts: ExpertFeed, count: str, chosen: str) -> ExpertFeed:
    """The same, refused where more experts are chosen than exist."""
    if experts.top_k > experts.experts:
        raise ConfigError(
            f"{config.name}: {chosen} is {experts.top_k}; allowed: up to {count} = "
            f"{experts.experts}; correct one of the two"
        )
    return experts


def kinds_of_layers(config: Config, key: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """The entries of a list with one of `allowed` per layer; None if absent."""
    if key not in config:
        return None
    kinds, layers = config.texts(key), config.count("num_hidden_layers")
    if any(kind not in allowed for kind in kinds):
        raise config.refuse(key, f"a list of {' or '.join(allowed)}")
    if len(kinds) != layers:
        raise ConfigError(
            f"{config.name}: {key} has {len(kinds)} entries; allowed: num_hidden_layers = "
            f"{layers}; correct one of the two"
        )
    return kinds
