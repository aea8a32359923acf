"""Llama 2 and 3, and Mistral, which is Llama with a sliding window in every layer."""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, layer_types, no_windows, tensors
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors"]

_THETA = 10000.0  # Llama 2 and the first Mistral were published without rope_theta


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `llama` or `mistral` configuration describes."""
    family = fields.text("model_type")
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    windows = _mistral_windows(fields) if family == "mistral" else _llama_windows(fields)
    return dense(fields, family=family, rope=rope(fields, theta=_THETA), windows=windows)


def _llama_windows(config: Config) -> tuple[int, ...]:
    config.require(
        "sliding_window",
        None,
        (None,),
        "Llama has full attention; for windows use model_type 'mistral'",
    )
    return layer_types(config, 0) or no_windows(config)


def _mistral_windows(config: Config) -> tuple[int, ...]:
    if "sliding_window" not in config.values:
        raise config.refuse(
            "sliding_window",
            "a whole number, or null for full attention",
            "say which (the key is missing)",
        )
    window = config.count("sliding_window") if "sliding_window" in config else 0
    return layer_types(config, window) or (window,) * config.count("num_hidden_layers")
