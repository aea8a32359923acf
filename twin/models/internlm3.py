"""InternLM 3: Llama by other names. Its biases are all there or none; the published models have
none.
"""

from __future__ import annotations

from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, no_windows, tensors
from twin.models.spec import ModelSpec

__all__ = ["Tensor", "from_config", "tensors"]


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `internlm3` configuration describes."""
    for key in ("qkv_bias", "bias", "attention_bias"):
        fields.require(key, False, (False,), "biases in this family's layers are not supported")
    turned = rope(_within_context(fields), theta=None)
    return dense(fields, family="internlm3", rope=turned, windows=no_windows(fields))


def _within_context(config: Config) -> Config:
    """Without "dynamic" scaling: it changes nothing up to max_position_embeddings, and no plan goes
    beyond.
    """
    for key in ("rope_scaling", "rope_parameters"):
        part = config.part(key)
        if part and "dynamic" in (part.get("rope_type"), part.get("type")):
            plain = part.changed(without=("rope_type", "type", "factor"))
            config = config.changed({key: plain.values or None})
    return config
