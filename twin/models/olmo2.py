"""OLMo 2: Llama that norms what modules add instead of what they read, and all heads of q and of k
together.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import ModelSpec
from twin.models.variant import Norms, Variant

__all__ = ["Tensor", "from_config", "tensors"]

_THETA = 10000.0


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `olmo2` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    variant = Variant(norms=Norms.AFTER, whole_qk_norm=True)
    turned = rope(fields, theta=_THETA)
    return dense(
        fields,
        family="olmo2",
        rope=turned,
        windows=no_windows(fields),
        qk_norm=True,
        variant=variant,
    )
