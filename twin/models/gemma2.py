"""Gemma 2: Gemma with norms around each module, capped scores and logits, and a window in every
other layer.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, layer_types, tensors
from twin.models.gemma import HEAD_DIM, THETA, canonical, embedding, refuse_others, stored
from twin.models.spec import ModelSpec
from twin.models.variant import Activation, Norms, Variant

__all__ = ["Tensor", "canonical", "cap", "from_config", "stored", "tensors"]

_SCORE_CAP, _LOGIT_CAP = 50.0, 30.0  # class defaults
_SCALAR, _WINDOW, _EVERY = 256, 4096, 2


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `gemma2` configuration describes."""
    refuse_others(fields)
    variant = Variant(
        activation=Activation.GELU,
        norms=Norms.AROUND,
        embedding=embedding(fields),
        score=fields.real("query_pre_attn_scalar", _SCALAR) ** -0.5,
        score_cap=cap(fields, "attn_logit_softcapping", _SCORE_CAP),
        logit_cap=cap(fields, "final_logit_softcapping", _LOGIT_CAP),
    )
    window = fields.count("sliding_window", _WINDOW)
    fields.require("sliding_window_size", window, (window,), "write sliding_window alone")
    slides = (layer + 1 for layer in range(fields.count("num_hidden_layers")))
    windows = layer_types(fields, window) or tuple(
        window if number % _EVERY else 0 for number in slides
    )
    turned = rope(fields, theta=THETA)
    return dense(
        fields,
        family="gemma2",
        rope=turned,
        windows=windows,
        head_dim=HEAD_DIM,
        tied=True,
        variant=variant,
    )


def cap(config: Config, key: str, default: float | None) -> float | None:
    """A soft limit; null means none, and a key that is missing the class's own."""
    if key not in config.values:
        return default
    return config.real(key) if key in config else None
