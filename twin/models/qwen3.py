"""Qwen 3 (dense): RMSNorm over each head of q and k instead of biases."""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, tensors
from twin.models.qwen2 import windows
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors"]

_HEAD_DIM = 128  # class default: hidden / heads would be wrong for several sizes


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen3` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    return dense(
        fields,
        family="qwen3",
        rope=rope(fields, theta=None),
        windows=windows(fields),
        head_dim=_HEAD_DIM,
        qk_norm=True,
    )
