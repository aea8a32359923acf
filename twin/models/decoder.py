"""What the dense decoder families share: sizes, refusals, and the names of a Hugging Face
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.config import Config, dtype
from twin.models.experts import CHOSEN, Names, feed_shape
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.linear import mixer_shape
from twin.models.modules import DENSE, Table
from twin.models.quantized import stored_formats
from twin.models.readable import dense_quantization
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import LLAMA, Activation, Norms, Variant


@frozen
class Tensor:
    """One tensor of a checkpoint: its name there and its shape there."""

    name: str
    shape: tuple[int, ...]


def dense(
    config: Config,
    *,
    family: str,
    rope: Rope,
    windows: tuple[int, ...],
    head_dim: int | None = None,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    variant: Variant = LLAMA,
    ropes: tuple[Rope | None, ...] = (),
    table: Table = DENSE,
) -> ModelSpec:
    """A ModelSpec from the fields that all families spell alike. `head_dim`, `tied`: the family's
    default; None: hidden / heads. `table`: what its matrices are called in checkpoints.
    """
    _refuse_unsupported(config, variant.activation)
    heads, hidden = config.count("num_attention_heads"), config.count("hidden_size")
    kv_heads = config.count("num_key_value_heads", heads)
    config.divides("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    head_dim = _head_dim(config, head_dim, hidden, heads)
    spec = ModelSpec(
        name=config.name,
        family=family,
        layers=config.count("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=config.count("intermediate_size"),
        vocab=config.count("vocab_size"),
        context=config.count("max_position_embeddings"),
        norm_eps=config.real("rms_norm_eps"),
        rope=rope,
        windows=windows,
        tied=config.flag("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        dtype=dtype(config),
        variant=variant,
        ropes=ropes,
    )
    return replace(spec, stored=stored_formats(config, spec, table, dense_quantization(config)))


def no_windows(config: Config) -> tuple[int, ...]:
    """Full attention in every layer."""
    return (0,) * config.count("num_hidden_layers")


def layer_types(config: Config, window: int) -> tuple[int, ...] | None:
    """Windows from transformers' `layer_types`; None if absent. `window` 0: the configuration has
    none to slide.
    """
    if "layer_types" not in config:
        return None
    types, layers = config.get("layer_types"), config.count("num_hidden_layers")
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(types, list | tuple) or any(t not in allowed for t in types):
        raise config.refuse("layer_types", f"a list of {' or '.join(allowed)}")
    if len(types) != layers:
        count = f"layer_types has {len(types)} entries; allowed: num_hidden_layers = {layers}"
        raise ConfigError(f"{config.name}: {count}; correct one of the two")
    if "sliding_attention" in types and not window:
        raise config.refuse(
            "layer_types",
            "full_attention only, because no sliding window is switched on",
            "set sliding_window",
        )
    return tuple(window if t == "sliding_attention" else 0 for t in types)


def all_but_every(config: Config, window: int, every: int) -> tuple[int, ...]:
    """A window in all layers but every `every`-th."""
    layers = config.count("num_hidden_layers")
    return tuple(window if (layer + 1) % every else 0 for layer in range(layers))


def tensors(spec: ModelSpec, names: Names | None = None) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint in the usual Hugging Face naming (Llama, Mistral,
    Qwen).

    `names`: of a family with experts.
    """
    return whole(spec, lambda i: _layer(spec) if names is None else dict(_routed(spec, i, names)))


def whole(
    spec: ModelSpec,
    layer: Callable[[int], Mapping[str, Tensor]],
    *,
    embed: str = "model.embed_tokens",
    norm: str = "model.norm",
    layers: str = "model.layers",
) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint. `layer`: those of one, named below it."""
    table = (spec.vocab, spec.hidden)
    out = {
        "embed": Tensor(f"{embed}.weight", table),
        "final_norm": Tensor(f"{norm}.weight", (spec.hidden,)),
    }
    if not spec.tied:
        out["lm_head"] = Tensor("lm_head.weight", table)
    for index in range(spec.layers):
        for name, tensor in layer(index).items():
            out[f"layers.{index}.{name}"] = Tensor(f"{layers}.{index}.{tensor.name}", tensor.shape)
    return out


def _routed(spec: ModelSpec, layer: int, names: Names) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer of a family with experts: some of its layers may be dense."""
    feed = spec.layer(layer).feed
    for name, tensor in _layer(spec).items():
        dense = feed_shape(feed, spec.hidden, name)
        if dense is None or isinstance(feed, DenseFeed):
            yield name, Tensor(tensor.name, dense or tensor.shape)
    if not isinstance(feed, ExpertFeed):
        return
    stored = names.alone(feed)
    for expert in range(feed.experts):
        stored |= names.of(expert)
    for name, called in stored.items():
        shape = feed_shape(feed, spec.hidden, name)
        assert shape is not None
        yield name, Tensor(f"{called}.weight", shape)
    if feed.choice_bias:
        yield "choice_bias", Tensor(names.choice_bias, (feed.experts,))


def matrix_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Canonical [out, in] of each matrix of a layer."""
    return {
        "q": (spec.q_size, spec.hidden),
        "k": (spec.kv_size, spec.hidden),
        "v": (spec.kv_size, spec.hidden),
        "o": (spec.hidden, spec.q_size),
        "gate": (spec.ffn, spec.hidden),
        "up": (spec.ffn, spec.hidden),
        "down": (spec.hidden, spec.ffn),
    }


def canonical_shape(spec: ModelSpec, name: str) -> tuple[int, ...]:
    """Shape of a tensor under its canonical name: matrices [out, in], vectors [n]."""
    leaf = name.rpartition(".")[2]
    if leaf in ("embed", "lm_head"):
        return (spec.vocab, spec.hidden)
    if leaf == "layer_scalar":
        return (1,)
    if spec.hyper and "hyper" in leaf:
        return spec.hyper.shapes(spec.hidden)[leaf]
    if spec.layout and name.startswith("layers."):
        _, layer, inner = name.split(".", 2)
        parts = spec.layer(int(layer))
        if inner == CHOSEN and isinstance(parts.feed, ExpertFeed):
            return (spec.vocab, parts.feed.top_k)
        shape = mixer_shape(parts.mixer, spec.hidden, inner)
        shape = shape or feed_shape(parts.feed, spec.hidden, inner)
        if shape is not None:
            return shape
    if leaf in ("q_norm", "k_norm"):
        whole = spec.q_size if leaf == "q_norm" else spec.kv_size
        return (whole if spec.whole_qk_norm else spec.head_dim,)
    if leaf == "sinks":
        return (spec.heads,)
    if leaf.endswith("_bias") and leaf != "o_bias":
        return (spec.q_size,) if leaf == "q_bias" else (spec.kv_size,)
    return matrix_shapes(spec).get(leaf, (spec.hidden,))


_NORMS = {  # canonical name -> module, by where a family norms
    Norms.BEFORE: {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    Norms.AROUND: {
        "attn_norm": "input_layernorm",
        "attn_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
    Norms.AFTER: {
        "attn_post_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    },
}


def _layer(spec: ModelSpec) -> dict[str, Tensor]:
    names = {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "o": "self_attn.o_proj",
    }
    names |= {"gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
    out = {
        key: Tensor(f"{module}.weight", (spec.hidden,))
        for key, module in _NORMS[spec.variant.norms].items()
    }
    out |= {
        key: Tensor(f"{names[key]}.weight", shape) for key, shape in matrix_shapes(spec).items()
    }
    if spec.qkv_bias:
        out |= {f"{key}_bias": Tensor(f"{names[key]}.bias", (out[key].shape[0],)) for key in "qkv"}
    if spec.o_bias:
        out["o_bias"] = Tensor(f"{names['o']}.bias", (spec.hidden,))
    if spec.sinks:
        out["sinks"] = Tensor("self_attn.sinks", (spec.heads,))
    if spec.qk_norm:
        norms = {name: canonical_shape(spec, name) for name in ("q_norm", "k_norm")}
        out |= {name: Tensor(f"self_attn.{name}.weight", shape) for name, shape in norms.items()}
    return out


def _head_dim(config: Config, default: int | None, hidden: int, heads: int) -> int:
    if "head_dim" not in config and default is None:
        size = config.divides("hidden_size", hidden, "num_attention_heads", heads)
    else:
        size = config.count("head_dim", default)
    if size % 2:
        raise ConfigError(
            f"{config.name}: head_dim is {size}; allowed: even numbers; RoPE rotates pairs, "
            "correct the configuration"
        )
    return size


def _refuse_unsupported(config: Config, activation: Activation) -> None:
    for key in ("hidden_act", "hidden_activation"):
        config.require(
            key,
            activation.value,
            activation.names,
            f"this family's feed-forward layers are gated by {activation.name}",
        )
    config.require(
        "mlp_bias", False, (False,), "biases in the feed-forward layers are not supported"
    )
