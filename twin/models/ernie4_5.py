"""ERNIE 4.5, dense: Llama whose rotation turns neighbouring elements, as in GPT-J. Its biases are
all there or none; the published models have none.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import ModelSpec, RopeStyle

__all__ = ["Tensor", "from_config", "tensors"]

_HEAD_DIM, _THETA = 128, 500000.0  # class defaults


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `ernie4_5` configuration describes."""
    for key in ("use_bias", "attention_bias"):
        fields.require(key, False, (False,), "biases in this family's layers are not supported")
    null = "head_dim" in fields.values and "head_dim" not in fields  # then hidden / heads
    return dense(
        fields,
        family="ernie4_5",
        rope=rope(fields, theta=_THETA, style=RopeStyle.INTERLEAVED),
        windows=no_windows(fields),
        head_dim=None if null else _HEAD_DIM,
        tied=True,
    )
