"""SmolLM 3: Llama, of which some layers know no positions."""

from __future__ import annotations

from twin.errors import ConfigError
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, layer_types, no_windows, tensors
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors"]

_THETA = 2000000.0  # class defaults
_INTERVAL = 4


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `smollm3` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    turned, placed = rope(fields, theta=_THETA), _placed(fields)
    ropes = () if all(placed) else tuple(turned if has else None for has in placed)
    return dense(
        fields,
        family="smollm3",
        rope=turned,
        windows=_windows(fields, placed),
        tied=True,
        ropes=ropes,
    )


def _placed(config: Config) -> tuple[bool, ...]:
    """Of each layer: does it turn queries and keys by their positions?"""
    layers = config.count("num_hidden_layers")
    if "no_rope_layers" not in config:
        every = config.count("no_rope_layer_interval", _INTERVAL)
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    config.unused("no_rope_layer_interval")
    given = config.wholes("no_rope_layers")  # 1: with positions
    if len(given) != layers:
        count = f"no_rope_layers has {len(given)} entries; allowed: num_hidden_layers = {layers}"
        raise ConfigError(f"{config.name}: {count}; correct one of the two")
    return tuple(map(bool, given))


def _windows(config: Config, placed: tuple[bool, ...]) -> tuple[int, ...]:
    """The class's rule: with use_sliding_window, layers without positions have the window."""
    slides = config.flag("use_sliding_window", False) and "sliding_window" in config
    config.unused("sliding_window", "max_window_layers")
    window = config.count("sliding_window") if slides else 0
    return layer_types(config, window) or (
        tuple(0 if has else window for has in placed) if slides else no_windows(config)
    )
