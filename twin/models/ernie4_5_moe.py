"""ERNIE 4.5 with experts: a few dense layers, then routed experts next to shared ones. They are
chosen by the softmax of their logits and a bias of the choice alone; positions rotate neighbouring
elements, as in GPT-J.

The draft layer (num_nextn_predict_layers) is no part of the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor
from twin.models.experts import Names
from twin.models.feeds import ExpertFeed
from twin.models.layered import check_experts, feed_of, grouped_heads, layered, layout
from twin.models.mixers import GroupedAttention
from twin.models.modules import GLM_EXPERTS
from twin.models.spec import ModelSpec, RopeStyle

NO_PART = ("model.mtp",)  # the draft layer
_THETA, _SMALLEST = 500000.0, 1e-12  # class defaults
_NAMES = Names(
    *("mlp.gate", "mlp.experts", "gate_proj", "up_proj", "down_proj"),
    shared="mlp.shared_experts",
    choice_bias="mlp.moe_statics.e_score_correction_bias",
)


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `ernie4_5_moe` configuration describes."""
    fields.unused("num_nextn_predict_layers", "moe_capacity")  # of the draft, of training
    fields.require("use_bias", False, (False,), "biases in this family's layers are not supported")
    fields.require("moe_gate", "topk", ("topk",), "experts are the best of their scores")
    fields.require("moe_use_aux_free", True, (True,), "the choice of experts has a bias")
    fields.require("moe_norm_min", _SMALLEST, (_SMALLEST,), "weights are divided by their sum")
    heads, kv_heads, head_dim = grouped_heads(fields)
    attention = GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    width = fields.count("moe_intermediate_size")
    experts = ExpertFeed(
        experts=fields.count("moe_num_experts", 64),
        top_k=fields.count("moe_k", 6),
        width=width,
        shared_width=fields.whole("moe_num_shared_experts", 2) * width,
        choice_bias=True,
    )
    check_experts(fields, experts, "moe_num_experts", "moe_k")
    feed = feed_of(
        fields,
        experts,
        first_dense=fields.whole("moe_layer_start_index", 1),
        step=fields.count("moe_layer_interval", 1),
        dense_layers=_behind(fields),
    )
    return layered(
        fields,
        family="ernie4_5_moe",
        rope=rope(fields, theta=_THETA, style=RopeStyle.INTERLEAVED),
        layout=layout(fields, lambda i: attention, feed),
        table=GLM_EXPERTS,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=width,
    )


def _behind(config: Config) -> range:
    """The dense layers behind those with experts: from moe_layer_end_index on, which is in; -1:
    none.
    """
    layers, last = config.count("num_hidden_layers"), config.get("moe_layer_end_index", -1)
    if last == -1:
        return range(0)
    end = config.whole("moe_layer_end_index", 0)
    if end >= layers:
        allowed = f"-1, or below num_hidden_layers = {layers}"
        raise config.refuse("moe_layer_end_index", allowed, "correct one of the two")
    return range(end + 1, layers)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of a checkpoint."""
    found = decoder.tensors(spec, _NAMES)
    return {
        name: replace(tensor, shape=(1, *tensor.shape)) if _is_bias(name) else tensor
        for name, tensor in found.items()
    }


def _is_bias(name: str) -> bool:
    return name.endswith(".choice_bias")


def canonical(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The bias of a choice without the group that all experts are in."""
    return array[0] if _is_bias(name) else array


def stored(spec: ModelSpec, name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The way back."""
    return array[None] if _is_bias(name) else array
