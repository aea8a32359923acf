"""EXAONE 4: norms of what modules add and of each head of q and k; where some layers have a window,
those without one know no positions.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, all_but_every, dense, layer_types, no_windows, tensors
from twin.models.spec import ModelSpec
from twin.models.variant import Norms, Variant

__all__ = ["Tensor", "from_config", "tensors"]

_THETA, _WINDOW, _EVERY = 10000.0, 4096, 4  # class defaults


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `exaone4` configuration describes."""
    turned, windows = rope(fields, theta=_THETA), _windows(fields)
    slides = "sliding_window" in fields or "sliding_window" not in fields.values
    ropes = tuple(turned if window else None for window in windows) if slides else ()
    return dense(
        fields,
        family="exaone4",
        rope=turned,
        windows=windows,
        qk_norm=True,
        variant=Variant(norms=Norms.AFTER),
        ropes=ropes if None in ropes else (),
    )


def _windows(config: Config) -> tuple[int, ...]:
    """A sliding_window of null: full attention in every layer."""
    if "sliding_window" in config.values and "sliding_window" not in config:
        config.unused("sliding_window_pattern")
        return layer_types(config, 0) or no_windows(config)
    window = config.count("sliding_window", _WINDOW)
    if types := layer_types(config, window):
        config.unused("sliding_window_pattern")  # "LLLG", which the list spells out
        return types
    every = config.count("sliding_window_pattern", _EVERY)
    return all_but_every(config, window, every)
