"""Granite 3 (dense): Llama with factors of the embeddings, of what modules add, of the scores and
of the logits.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import ModelSpec
from twin.models.variant import Variant

__all__ = ["Tensor", "from_config", "tensors"]

_THETA = 10000.0


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `granite` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    return dense(
        fields,
        family="granite",
        rope=rope(fields, theta=_THETA),
        windows=no_windows(fields),
        variant=factors(fields),
    )


def factors(config: Config) -> Variant:
    """Those of the embeddings, of what modules add, of the scores and of the logits."""
    return Variant(
        embedding=config.real("embedding_multiplier", 1.0),
        residual=config.real("residual_multiplier", 1.0),
        score=config.real("attention_multiplier", 1.0),
        logit=1.0 / config.real("logits_scaling", 1.0),
    )
