"""Phi 3 and 4 (dense): Llama with q, k and v in one matrix, gate and up in another, and heads that
may be rotated in part.
"""

from __future__ import annotations

import math
from typing import Any

import numpy.typing as npt

from twin.models import decoder
from twin.models.config import Config, rope
from twin.models.decoder import Tensor, dense, matrix_shapes, no_windows
from twin.models.modules import FUSED
from twin.models.spec import ModelSpec, Rope, RopeScaling

_THETA = 10000.0
_CONTEXT = 4096  # class default of original_max_position_embeddings
_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
_MODULES = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
# three names of one scaling: in this family the two older ones never meant another
_LONG = ("longrope", "su", "yarn")


def from_config(fields: Config) -> ModelSpec:
    """The model that a Hugging Face `phi3` configuration describes."""
    fields.require(
        "attention_bias",
        False,
        (False,),
        "biases in the attention of this family are not supported",
    )
    fields.require("full_attn_mod", 1, (1,), "attention that skips positions is not supported")
    fields.require("interpolate_factor", 1, (1, 1.0), "other scalings stand in rope_scaling")
    fields.require("lm_head_bias", False, (False,), "biases of the LM head are not supported")
    window = fields.count("sliding_window") if "sliding_window" in fields else 0
    windows = (window,) * fields.count("num_hidden_layers") if window else no_windows(fields)
    return dense(fields, family="phi3", rope=_rope(fields), windows=windows, table=FUSED)


def tensors(spec: ModelSpec) -> dict[str, Tensor]:
    """Canonical name -> tensor of the checkpoint; several names may be parts of one tensor."""
    out = decoder.tensors(spec)
    rows = _rows(spec)
    for layer in range(spec.layers):
        for leaf, fused in _FUSED.items():
            out[f"layers.{layer}.{leaf}"] = Tensor(
                f"model.layers.{layer}.{_MODULES[fused]}.weight", (rows[fused], spec.hidden)
            )
    return out


def canonical(spec: ModelSpec, name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The rows of a fused matrix that a canonical name means."""
    leaf = name.rpartition(".")[2]
    if leaf not in _FUSED:
        return array
    first = 0
    for other, fused in _FUSED.items():
        if other == leaf:
            break
        first += matrix_shapes(spec)[other][0] if fused == _FUSED[leaf] else 0
    return array[first : first + matrix_shapes(spec)[leaf][0]]


def _rows(spec: ModelSpec) -> dict[str, int]:
    shapes = matrix_shapes(spec)
    return {
        fused: sum(shapes[leaf][0] for leaf, of in _FUSED.items() if of == fused)
        for fused in _MODULES
    }


def _rope(config: Config) -> Rope:
    """`rope_scaling` and partial_rotary_factor, or both in `rope_parameters` (transformers 5)."""
    part = config.part("rope_parameters") or config.part("rope_scaling")
    share = (part if part and "partial_rotary_factor" in part else config).real(
        "partial_rotary_factor", 1.0
    )
    long = part is not None and (part.get("rope_type") in _LONG or part.get("type") in _LONG)
    dropped = ("partial_rotary_factor", *(("rope_type", "type") if long else ()))
    parts = {
        key: found.changed(without=dropped).values
        for key in ("rope_parameters", "rope_scaling")
        if (found := config.part(key))
    }
    plain = config.changed(parts, without=("partial_rotary_factor", "rope_scaling"))
    turned = rope(plain, theta=_THETA)
    rotated = int(_head_dim(config) * share)
    if rotated < 2 or rotated % 2:
        raise config.refuse(
            "partial_rotary_factor", "a share that is an even number of a head's elements"
        )
    config.unused("original_max_position_embeddings")  # of LongRoPE alone
    scaling = _long(config, part, rotated // 2) if long and part else turned.scaling
    return Rope(
        turned.theta, turned.style, scaling, None if rotated == _head_dim(config) else rotated
    )


def _long(config: Config, part: Config, pairs: int) -> RopeScaling:
    """LongRoPE: a factor for each pair, and one of the rotated elements."""
    context = (part if "original_max_position_embeddings" in part else config).count(
        "original_max_position_embeddings", _CONTEXT
    )
    if context < 2:
        raise config.refuse(
            "original_max_position_embeddings",
            "at least 2, because the rotation's factor divides by its logarithm",
        )
    factor = (
        part.real("factor")
        if "factor" in part
        else config.count("max_position_embeddings") / context
    )
    # as the published code: queries and keys grow with the reach
    grown = math.sqrt(1 + math.log(factor) / math.log(context)) if factor > 1 else 1.0
    factor = part.real("attention_factor", grown)
    return RopeScaling(
        "longrope",
        factor,
        original_context=context,
        short=part.reals("short_factor", pairs),
        long=part.reals("long_factor", pairs),
    )


def _head_dim(config: Config) -> int:
    heads = config.count("num_attention_heads")
    return config.count("head_dim", config.count("hidden_size") // heads)
