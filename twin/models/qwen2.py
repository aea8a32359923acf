"""Qwen 2 and 2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, layer_types, no_windows, tensors
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors", "windows"]


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen2` configuration describes."""
    return dense(
        fields,
        family="qwen2",
        rope=rope(fields, theta=None),
        windows=windows(fields),
        qkv_bias=True,
    )


def windows(config: Config) -> tuple[int, ...]:
    """Qwen's rule: a window only where use_sliding_window is on, and only from layer
    max_window_layers on.
    """
    if not config.flag("use_sliding_window", False):
        config.unused("sliding_window", "max_window_layers")
        return layer_types(config, 0) or no_windows(config)
    window = config.count("sliding_window")
    if types := layer_types(config, window):
        config.unused("max_window_layers")
        return types
    layers = config.count("num_hidden_layers")
    first = config.whole("max_window_layers")  # the first layer with a window
    if first > layers:
        raise ConfigError(
            f"{config.name}: max_window_layers is {first}; allowed: 0 to num_hidden_layers = "
            f"{layers}; switch windows off"
        )
    return (0,) * first + (window,) * (layers - first)
