"""Gemma: gates with GELU, embeddings times the root of their width, and norms whose stored weights
are what is added to one.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from twin.models.config import Config, dtype, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import DType, ModelSpec
from twin.models.variant import Activation, Variant

__all__ = ["Tensor", "canonical", "embedding", "from_config", "refuse_others", "stored", "tensors"]

THETA = 10000.0  # class defaults
HEAD_DIM = 256
_TYPES: dict[DType, Any] = {
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.FP32: np.float32,
}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `gemma` configuration describes."""
    if fields.get("hidden_act") == "gelu":  # of the first releases, which meant this one
        fields = fields.changed({"hidden_act": Activation.GELU.value})
    refuse_others(fields)
    variant = Variant(activation=Activation.GELU, embedding=embedding(fields))
    return dense(
        fields,
        family="gemma",
        rope=rope(fields, theta=THETA),
        windows=no_windows(fields),
        head_dim=HEAD_DIM,
        tied=True,
        variant=variant,
    )


def canonical(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Norms with their one, in FP32, which holds the sum of one and a stored weight."""
    return array.astype(np.float32) + np.float32(1) if name.endswith("norm") else array


def stored(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The way back."""
    return array.astype(np.float32) - np.float32(1) if name.endswith("norm") else array


def embedding(config: Config) -> float:
    """The embeddings' factor, rounded to the stored type as in the published code."""
    return float(_TYPES[dtype(config)](math.sqrt(config.count("hidden_size"))))


def refuse_others(config: Config) -> None:
    config.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    config.require(
        "use_bidirectional_attention", False, (False,), "attention to later tokens is not supported"
    )
