"""Gemma 3 (text): Gemma 2 with normed queries and keys instead of caps, and a rotation of their own
for layers with a window.

From 4B on the published models also see images (`gemma3`). Of these the text model is run; their
vision tower is left alone.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import ConfigError
from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, all_but_every, dense, layer_types
from twin.models.gemma import HEAD_DIM, canonical, embedding, refuse_others, stored
from twin.models.gemma2 import cap
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import Activation, Norms, Variant

__all__ = ["VISION", "Tensor", "canonical", "from_config", "from_multimodal", "stored", "tensors"]

VISION = ("vision_tower.", "multi_modal_projector.")
_TEXT = {  # class defaults: published configurations of models that see images leave them out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}

_SCALAR, _WINDOW, _EVERY = 256, 4096, 6  # class defaults
_THETA, _LOCAL_THETA = 1e6, 1e4
_KINDS = ("full_attention", "sliding_attention")


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `gemma3_text` configuration describes."""
    refuse_others(fields)
    fields.require(
        "attn_logit_softcapping",
        None,
        (None,),
        "the published code of this family does not cap scores",
    )
    variant = Variant(
        activation=Activation.GELU,
        norms=Norms.AROUND,
        embedding=embedding(fields),
        score=fields.real("query_pre_attn_scalar", _SCALAR) ** -0.5,
        logit_cap=cap(fields, "final_logit_softcapping", None),
    )
    windows = _windows(fields)
    far, near = _ropes(fields)
    ropes = () if far == near else tuple(near if window else far for window in windows)
    return dense(
        fields,
        family="gemma3_text",
        rope=far,
        windows=windows,
        head_dim=HEAD_DIM,
        qk_norm=True,
        tied=True,
        variant=variant,
        ropes=ropes,
    )


def from_multimodal(fields: Config) -> ModelSpec:
    """The text model of a Hugging Face `gemma3` configuration, from its `text_config`."""
    whole = replace(fields, values={**_TEXT, **fields.values})
    return replace(from_config(whole), family="gemma3")


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of the checkpoint, where images are seen that of its language
    model.
    """
    inner = "language_model." if spec.family == "gemma3" else ""
    return {
        key: Tensor(inner + tensor.name, tensor.shape)
        for key, tensor in decoder.tensors(spec).items()
    }


def _windows(config: Config) -> tuple[int, ...]:
    window, every = (
        config.count("sliding_window", _WINDOW),
        config.count("sliding_window_pattern", _EVERY),
    )
    if types := layer_types(config, window):
        config.unused("_sliding_window_pattern")
        return types
    return all_but_every(config, window, every)


def _ropes(config: Config) -> tuple[Rope, Rope]:
    """Of layers with full attention, and with a window: by kind in `rope_parameters` (transformers
    5), or theta and scaling of the first, and the second's base.
    """
    parts = config.part("rope_parameters")
    if parts and any(kind in parts for kind in _KINDS):
        far, near = (rope(_of_kind(config, parts, kind), theta=None) for kind in _KINDS)
        return far, near
    if parts:
        raise ConfigError(
            f"{parts.name} names no kind of layer; allowed: {' and '.join(_KINDS)}; take it from "
            "the model's config.json"
        )
    return rope(config, theta=_THETA), Rope(config.real("rope_local_base_freq", _LOCAL_THETA))


def _of_kind(config: Config, parts: Config, kind: str) -> Config:
    own = parts.part(kind) or Config(parts.name, {})
    default = _THETA if kind == _KINDS[0] else _LOCAL_THETA
    whole = replace(own, values={"rope_theta": default, **own.values})
    return config.holding("rope_parameters", whole)
