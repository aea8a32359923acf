"""Qwen 3.5, 3.6 and 3.8 (dense, and with experts): Qwen3-Next's layers, with the projections of
gated DeltaNet in a matrix each. The published models also see images; their text model is run, and
the vision tower and the draft layer (MTP) are left alone.

Published checkpoints in 16 bits hold all experts of a layer in two tensors, those in 8 bits a
module for each expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models import decoder, qwen3_next
from twin.models.config import Config
from twin.models.decoder import Tensor
from twin.models.experts import expert_of
from twin.models.feeds import DenseFeed, ExpertFeed
from twin.models.formats import Role
from twin.models.layered import check_experts, feed_of
from twin.models.modules import QWEN3_5
from twin.models.qwen2_moe import NAMES, with_shared
from twin.models.qwen3_next import hybrid, linear_attention, stored
from twin.models.spec import ModelSpec

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
    if not _each_expert(spec):
        found |= _stacked(spec)
    inner = "" if spec.family.endswith("_text") else _INNER
    return {
        name: replace(tensor, name=tensor.name.replace("model.", f"model.{inner}", 1))
        for name, tensor in found.items()
    }


def _each_expert(spec: ModelSpec) -> bool:
    return spec.formats.of(Role.EXPERT).name != spec.dtype.value


def _stacked(spec: ModelSpec) -> dict[str, Tensor]:
    """Experts' matrices, of which a layer has [experts, gates and what passes them, in] and
    [experts, out, in].
    """
    out: dict[str, Tensor] = {}
    for layer in range(spec.layers):
        feed = spec.layer(layer).feed
        if not isinstance(feed, ExpertFeed):
            continue
        module = f"model.layers.{layer}.mlp.experts"
        up = Tensor(f"{module}.gate_up_proj", (feed.experts, 2 * feed.width, spec.hidden))
        down = Tensor(f"{module}.down_proj", (feed.experts, spec.hidden, feed.width))
        for expert in range(feed.experts):
            name = f"layers.{layer}.experts.{expert}"
            out |= {f"{name}.gate": up, f"{name}.up": up, f"{name}.down": down}
    return out


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """A stored array's part of one expert; others as Qwen3-Next's."""
    expert = expert_of(name)
    if expert is None or array.ndim == 2:
        return qwen3_next.canonical(spec, name, array)
    own: NDArray[Any] = array[expert]
    leaf, half = name.rpartition(".")[2], len(own) // 2
    return {"gate": own[:half], "up": own[half:], "down": own}[leaf]


def joined(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The way back, of all parts of a tensor in the order of `tensors`."""
    if len(arrays) == 1:
        return arrays[0]
    if names[0].endswith(".down"):
        return np.stack(arrays)
    return np.stack([np.concatenate(two) for two in zip(arrays[0::2], arrays[1::2], strict=True)])
