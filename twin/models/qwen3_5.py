"""Qwen 3.5, 3.6 and 3.8 (dense, and with experts): Qwen3-Next's layers, with the projections of
gated DeltaNet in a matrix each. The published models also see images; their text model is run, and
the vision tower and the draft layer (MTP) are left alone.

Published checkpoints in 16 bits hold all experts of a layer in two tensors, those in 8 bits a
module for each expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from twin.models import decoder, qwen3_next, stacked
from twin.models.config import Config
from twin.models.decoder import Tensor
from twin.models.feeds import DenseFeed
from twin.models.layered import check_experts, feed_of
from twin.models.modules import QWEN3_5
from twin.models.qwen2_moe import NAMES, with_shared
from twin.models.qwen3_next import hybrid, linear_attention, stored
from twin.models.spec import ModelSpec
from twin.models.stacked import joined

__all__ = [
    "NO_PART",
    "canonical",
    "from_config",
    "from_multimodal",
    "joined",
    "stored",
    "tensors",
]

NO_PART = ("mtp.", "model.visual.")  # how the names of tensors begin that are no part of the model
_INNER = "language_model."  # of a text model within one that sees images
_SPLIT = {"qkv": "in_proj_qkv", "z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a"}


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `qwen3_5_moe_text` or `qwen3_5_text` configuration
    describes.
    """
    fields.require("attn_output_gate", True, (True,), "attention of this family has gates")
    fields.unused("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    fields.require("mlp_only_layers", [], ([],), "no layer of this family lacks experts")
    if rotation := fields.part("rope_parameters"):  # a text's three positions are one
        rotation.unused("mrope_section", "mrope_interleaved")
    delta = replace(linear_attention(fields), split=True)
    if "num_experts" in fields:
        experts = check_experts(fields, with_shared(fields), "num_experts", "num_experts_per_tok")
        feed, width, family = feed_of(fields, experts), experts.width, "qwen3_5_moe_text"
    else:
        dense = DenseFeed(width=fields.count("intermediate_size"))
        feed, width, family = lambda _: dense, dense.width, "qwen3_5_text"
    return hybrid(fields, family=family, delta=delta, feed=feed, ffn=width, table=QWEN3_5)


def from_multimodal(fields: Config) -> ModelSpec:
    """The text model of a `qwen3_5_moe` or `qwen3_5` configuration, from its `text_config`."""
    spec = from_config(fields)
    return replace(spec, family=spec.family.removesuffix("_text"))


# ---- tensors -------------------------------------------------------------------------------------


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    found = qwen3_next.named(spec, decoder.tensors(spec, NAMES), _SPLIT)
    if stacked.is_stacked(spec):
        found |= stacked.tensors(spec, "mlp.experts")
    inner = "" if spec.family.endswith("_text") else _INNER
    return {
        name: replace(tensor, name=tensor.name.replace("model.", f"model.{inner}", 1))
        for name, tensor in found.items()
    }


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A stored array's part of one expert; others as Qwen3-Next's."""
    own = stacked.canonical(name, array)
    return qwen3_next.canonical(spec, name, array) if own is None else own
