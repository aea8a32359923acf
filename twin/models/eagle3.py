"""EAGLE-3: a layer that drafts tokens from three hidden states of the model that it is trained for.

A token's input is the embedding of it and the hidden state behind the token before, both normed and
side by side: queries, keys and values have twice the columns. Behind a token that the model has
verified the hidden state is `fc` of three of the model's residuals; behind a drafted one, the
layer's own output before its last norm. The LM head knows `vocab` tokens; `d2t` says by how much
the model's number of each is larger.
"""

from __future__ import annotations

from pathlib import Path

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.feeds import DenseFeed
from twin.models.files import find, read_json
from twin.models.spec import DraftHead, ModelSpec
from twin.text import shown

HIDDEN_STATES = 3
PUBLISHED_VOCAB = 32_000  # of the heads that are published for larger vocabularies
EXPERTS_FFN = 6  # of published heads for models with experts: times `hidden`


def taken_layers(layers: int) -> tuple[int, ...]:
    """Whose inputs published heads are trained on: an early, the middle and a late layer."""
    if layers < HIDDEN_STATES + 1:
        raise ConfigError(f"{layers} layers: EAGLE-3 takes hidden states of at least 4")
    return (2, layers // 2, layers - 3) if layers > 6 else (1, layers // 2, layers - 1)


def from_folder(folder: Path, spec: ModelSpec) -> DraftHead:
    """The head that a folder's config.json describes, of the published layout, for a model. Raises
    ConfigError for one of another model or kind.
    """
    file = find(folder, "config.json")
    if file is None:
        raise ConfigError(f"{folder}: has no config.json; give the folder of an EAGLE-3 head")
    return from_config(Config(str(file), read_json(file, ConfigError)), spec)


def from_config(fields: Config, spec: ModelSpec) -> DraftHead:
    """The same of the fields."""
    named = fields.get("architectures") or [""]
    if not isinstance(named, list) or "eagle3" not in str(named[0]).lower():
        raise ConfigError(
            f"{fields.name}: architectures is {shown(named)}; allowed: a class with Eagle3 in its "
            "name, such as LlamaForCausalLMEagle3"
        )
    for name, wanted in (("hidden_size", spec.hidden), ("vocab_size", spec.vocab)):
        if (found := fields.count(name)) != wanted:
            raise ConfigError(
                f"{fields.name}: {name} is {found}, {spec.name} has {wanted}: a head drafts for "
                "the model that it was trained for"
            )
    target = fields.get("target_hidden_size", spec.hidden)
    if target != spec.hidden:
        raise ConfigError(f"{fields.name}: target_hidden_size is {target}, not {spec.hidden}")
    for name, only in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("norm_before_residual", False),
    ):
        fields.require(name, only, (only,), "heads of EAGLE-3 are read that are Llama's layer")
    heads = fields.count("num_attention_heads")
    return DraftHead(
        hidden=spec.hidden,
        heads=heads,
        kv_heads=fields.count("num_key_value_heads"),
        head_dim=fields.count("head_dim") if "head_dim" in fields else spec.hidden // heads,
        ffn=fields.count("intermediate_size"),
        vocab=fields.count("draft_vocab_size") if "draft_vocab_size" in fields else spec.vocab,
        norm_eps=fields.real("rms_norm_eps"),
        rope=rope(fields, theta=10_000.0),
        taken=_taken(fields, spec.layers),
    )


def _taken(fields: Config, layers: int) -> tuple[int, ...]:
    """A configuration numbers the layers whose outputs are taken: inputs of the next ones."""
    own = fields.part("eagle_config")
    listed = own.get("eagle_aux_hidden_state_layer_ids") if own else None
    if listed is None:
        return taken_layers(layers)
    if (
        not isinstance(listed, list)
        or len(listed) != HIDDEN_STATES
        or not all(type(one) is int and 0 <= one < layers - 1 for one in listed)
        or sorted(set(listed)) != listed
    ):
        raise ConfigError(
            f"{fields.name}: eagle_aux_hidden_state_layer_ids is {shown(listed)}; allowed: three "
            f"layers in order, from 0 to {layers - 2}"
        )
    return tuple(one + 1 for one in listed)


def published(spec: ModelSpec) -> DraftHead:
    """The shape that heads for such models are published in: Llama's layer, of the model's width,
    heads and feed-forward; 32,000 tokens of larger vocabularies.
    """
    dense = isinstance(spec.layer(spec.layers - 1).feed, DenseFeed)
    return DraftHead(
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn if dense else EXPERTS_FFN * spec.hidden,
        vocab=min(spec.vocab, PUBLISHED_VOCAB),
        norm_eps=spec.norm_eps,
        rope=spec.rope,
        taken=taken_layers(spec.layers),
    )
