"""Seed-OSS: Llama with biases on q, k and v, and heads whose size is not hidden / heads."""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors"]

_HEAD_DIM, _THETA = 128, 10000.0  # class defaults


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `seed_oss` configuration describes."""
    fields.require(
        "attention_out_bias",
        False,
        (False,),
        "a bias on the output of attention is not supported in this family",
    )
    null = "head_dim" in fields.values and "head_dim" not in fields  # then hidden / heads
    return dense(
        fields,
        family="seed_oss",
        rope=rope(fields, theta=_THETA),
        windows=no_windows(fields),
        head_dim=None if null else _HEAD_DIM,
        qkv_bias=fields.flag("attention_bias", True),
    )
