"""OLMo 3: OLMo 2 with windows in three layers of four, whose rotation is not scaled."""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, all_but_every, dense, layer_types, tensors
from twin.models.spec import ModelSpec, Rope
from twin.models.variant import Norms, Variant

__all__ = ["Tensor", "from_config", "tensors"]

_THETA, _WINDOW, _EVERY = 500000.0, 4096, 4  # class defaults
_FULL, _SLIDING = "full_attention", "sliding_attention"


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `olmo3` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    far, near = _ropes(fields)
    windows = _windows(fields)
    ropes = tuple(near if window else far for window in windows)
    return dense(
        fields,
        family="olmo3",
        rope=far,
        windows=windows,
        qk_norm=True,
        variant=Variant(norms=Norms.AFTER, whole_qk_norm=True),
        ropes=ropes if len(set(ropes)) > 1 else (),
    )


def _windows(config: Config) -> tuple[int, ...]:
    window = config.count("sliding_window", _WINDOW)
    return layer_types(config, window) or all_but_every(config, window, _EVERY)


def _ropes(config: Config) -> tuple[Rope, Rope]:
    """Of layers with full attention, and with a window: by kind in `rope_parameters` (transformers
    5), or as published: rope_scaling is of full attention.
    """
    parts = config.part("rope_parameters")
    if parts is None:
        # transformers 5 takes another base for full attention only, what was before for all
        config.require(
            "rope_theta", _THETA, (_THETA,), "another base is read by kind of layer only"
        )
        return rope(config, theta=_THETA), Rope(_THETA)
    far, near = (
        rope(
            config.holding("rope_parameters", parts.part(kind) or Config(parts.name, {})),
            theta=_THETA,
        )
        for kind in (_FULL, _SLIDING)
    )
    return far, near
