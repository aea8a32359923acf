"""Cuts a model's vectors and tables into what each rank holds for each stage, in FP32, the type the
engine computes in: shared by the reference and the engine's packer. matrices.py cuts the matrices.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twin.errors import PlanError
from twin.models.mixers import ShortConvolution
from twin.models.spec import DType, LaneHead, ModelSpec, Rope, RopeScaling, RopeStyle
from twin.models.yarn import blended
from twin.plan.catalogue import FINAL_NORM, ROWS, StageKind
from twin.plan.delta_shards import Rows
from twin.plan.options import Common
from twin.plan.types import Plan, Stage

Array = NDArray[Any]
Vector = NDArray[np.float32]
RopeTable = tuple[Vector, Vector]  # cosines and sines, each [positions, head_dim / 2]


class Weights(Protocol):
    """Tensors by canonical name ("layers.3.q", "embed", ...), matrices as [out, in], in their
    stored type.

    A coded matrix has its parts: "layers.3.q.codes", a byte each, "layers.3.q.scales", and what
    else its code has (`Code.parts`); GGUF's has "layers.3.q.blocks" as the file has them.
    """

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> DType: ...

    def __getitem__(self, name: str) -> Array: ...


def channels_of(kind: ShortConvolution, plan: Plan, rank: int) -> Rows:
    count = kind.channels // plan.ranks
    return np.arange(rank * count, (rank + 1) * count)


def shared_rows(plan: Plan, table: Array, rank: int, count: int) -> Array:
    """The `count` rows that a rank has of a table whose products all ranks need alike: its share,
    or every row.
    """
    shared = plan.options.common is Common.SHARDED
    return padded(table, rank * count if shared else 0, count)


def padded(table: Array, first: int, count: int) -> Array:
    """Rows first..first+count-1 of a table, zeros past its end."""
    rows = table[first : first + count]
    missing = count - len(rows)
    return (
        np.concatenate([rows, np.zeros((missing, *table.shape[1:]), table.dtype)])
        if missing
        else rows
    )


def qkv_bias(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Vector:
    """[rows] of q, k and v on this rank."""
    biases = {
        name: weights[f"layers.{stage.layer}.{name}_bias"][head_rows(plan, stage, name, rank)]
        for name in "qkv"
    }
    return np.concatenate([turning(weights, name, bias) for name, bias in biases.items()]).astype(
        np.float32
    )


def stage_norm(stage: Stage, weights: Weights) -> Vector | None:
    """[hidden] RMSNorm scale that the stage applies to its input, None when it applies none.

    Lanes that end as the mean of normed lanes are normed where they are published, all others in
    the LM head. What a family multiplies its logits with is part of the final norm's scale.
    """
    lanes, before = weights.spec.lanes, weights.spec.variant.norms.before
    mean = lanes is not None and lanes.head is LaneHead.MEAN
    row = ROWS[stage.kind]
    name = (_parallel(weights.spec) and row.norm_in_parallel) or row.norm
    if name == FINAL_NORM:
        if mean != (stage.kind is StageKind.LANE_MEAN):
            return None
    elif name and before:
        name = f"layers.{stage.layer}.{name}"
    else:
        return None
    scale = weights[name].astype(np.float32)
    if stage.kind is StageKind.ROUTER and _parallel(weights.spec):
        scale = scale * np.float32(weights.spec.hidden**-0.5)
    return scale * np.float32(weights.spec.variant.logit) if name == FINAL_NORM else scale


def _parallel(spec: ModelSpec) -> bool:
    """Do experts stand next to a dense MLP?"""
    return spec.experts is not None and spec.experts.parallel


def stage_post_norm(stage: Stage, weights: Weights) -> Vector | None:
    """[hidden] RMSNorm scale of what the stage adds to the residual, None where the family norms
    nothing of it.
    """
    spec = weights.spec
    if not spec.variant.norms.after or not stage.reads:
        return None
    added = {  # by what it multiplies: the module before
        "attn_norm": f"layers.{stage.layer - 1}.ffn_post_norm",
        "ffn_norm": f"layers.{stage.layer}.attn_post_norm",
        FINAL_NORM: f"layers.{spec.layers - 1}.ffn_post_norm",
    }
    name = added.get(ROWS[stage.kind].norm)
    return None if name is None else weights[name].astype(np.float32)


def parallel_norms(stage: Stage, weights: Weights) -> dict[str, Vector]:
    """[hidden] RMSNorm scales of the dense MLP's and of the experts' output, which the stage adds
    to each other before it norms the sum; none where it reads no such two.
    """
    spec, layer = weights.spec, layer_ended(weights.spec, stage)
    if not _parallel(spec) or layer is None:
        return {}
    names = ("shared_post_norm", "experts_post_norm")
    return {name: weights[f"layers.{layer}.{name}"].astype(np.float32) for name in names}


def layer_ended(spec: ModelSpec, stage: Stage) -> int | None:
    """The layer whose end the stage adds to the residual; None: of none."""
    if not stage.reads:
        return None
    if stage.kind is StageKind.LM_HEAD:
        return spec.layers - 1
    return stage.layer - 1 if ROWS[stage.kind].norm == "attn_norm" else None


def layer_scalar(stage: Stage, weights: Weights) -> Vector | None:
    """[1] What the residual is multiplied by once the stage has added the end of a layer to it;
    None where the family has no such factor.
    """
    layer = layer_ended(weights.spec, stage)
    if not weights.spec.variant.layer_scalar or layer is None:
        return None
    return weights[f"layers.{layer}.layer_scalar"].astype(np.float32)


def query_key_norms(stage: Stage, weights: Weights) -> tuple[Vector, Vector] | None:
    """Scales of q and k in an attention stage, [head_dim] or of all heads, None when the model has
    none.
    """
    if stage.kind is not StageKind.ATTENTION or not weights.spec.qk_norm:
        return None
    q, k = (
        turning(weights, name, weights[f"layers.{stage.layer}.{name}_norm"]).astype(np.float32)
        for name in "qk"
    )
    return q, k


def rope_tables(spec: ModelSpec, positions: int, *, present: int) -> list[RopeTable]:
    """The tables of `spec.rotations`, in order, for a sequence of `present` tokens."""
    found = []
    for number, rope in enumerate(spec.rotations):
        dim = spec.rotated_dim(number)
        table = rope_table(spec, positions, rope, present=present, dim=dim) if rope else None
        found.append(table or _standing(positions, dim))
    return found


def rope_table(
    spec: ModelSpec,
    positions: int,
    rope: Rope | None = None,
    *,
    present: int = 1,
    dim: int | None = None,
) -> RopeTable:
    """(cos, sin), each [positions, dim / 2], pair i in column i for both pairing styles. `rope`,
    `dim`: the model's own unless given. `present`: tokens of the sequence, which choose LongRoPE's
    factors.

    Pairs that are not rotated stand still: cosine one, sine zero.
    """
    rope, dim = rope or spec.rope, dim or spec.head_dim
    rotated = rope.rotated or dim
    pairs = np.arange(0, rotated, 2, dtype=np.float64)
    frequencies = _scaled(rope.theta ** (-pairs / rotated), rope, present)[: rope.pairs]
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    factor = _magnitude(rope.scaling)
    cos, sin = _standing(positions, dim)
    turned = len(frequencies)
    cos[:, :turned], sin[:, :turned] = factor * np.cos(angles), factor * np.sin(angles)
    return cos, sin


def _magnitude(scaling: RopeScaling | None) -> float:
    """Of rotated elements."""
    if scaling is None:
        return 1.0
    return scaling.factor if scaling.kind == "longrope" else scaling.magnitude


def factors_change(spec: ModelSpec) -> int | None:
    """Tokens of the longest sequence that has LongRoPE's short factors; a longer one has the long
    ones at all its positions (transformers, `dynamic_rope_update`). None: the factors never change.
    """
    ends = {
        rope.scaling.original_context
        for rope in spec.rotations
        if rope and rope.scaling and rope.scaling.short != rope.scaling.long
    }
    return min(ends, default=None)


def _standing(positions: int, dim: int) -> RopeTable:
    shape = (positions, dim // 2)
    return np.ones(shape, np.float32), np.zeros(shape, np.float32)


def turning(weights: Weights, name: str, rows: Array) -> Array:
    """Rows of q or k, [heads * head_dim, ...], with the elements of each head in the order in which
    the kernel turns them.

    It turns element i with i + head_dim / 2. Where a family rotates a part of a head, each half
    begins with its half of that part; scores do not depend on the order, which is the same for q
    and k.
    """
    spec, rotated = weights.spec, weights.spec.rope.rotated
    if name in ("v", "gate") or rotated is None or spec.rope.style is RopeStyle.INTERLEAVED:
        return rows
    first, rest = (
        np.arange(rotated).reshape(2, -1),
        np.arange(rotated, spec.head_dim).reshape(2, -1),
    )
    order = np.concatenate([first, rest], axis=1).reshape(-1)
    return rows.reshape(-1, spec.head_dim, *rows.shape[1:])[:, order].reshape(rows.shape)


def head_rows(plan: Plan, stage: Stage, name: str, rank: int) -> slice | Rows:
    """Rows of q, k, v or the outputs' gates on this rank; ranks that share a KV head hold the same
    rows.
    """
    own = plan.attention_of(stage)
    if name in ("q", "gate") and plan.spec is not None and plan.spec.output_gate:
        begins = (2 * (rank * own.heads + np.arange(own.heads)) + (name == "gate")) * own.head_dim
        return (begins[:, None] + np.arange(own.head_dim)).reshape(-1)
    heads, first = (own.heads, rank) if name == "q" else (own.kv_heads, rank // own.kv_replicas)
    size = heads * own.head_dim
    return slice(first * size, (first + 1) * size)


def _scaled(frequencies: NDArray[np.float64], rope: Rope, present: int) -> NDArray[np.float64]:
    """Llama 3: long wavelengths are divided by the factor, short ones kept, those between blended.

    LongRoPE: each pair's own factor, by the tokens present.
    """
    scaling = rope.scaling
    if scaling is None:
        return frequencies
    if scaling.kind == "yarn":
        return blended(
            frequencies,
            rope.theta,
            factor=scaling.factor,
            context=scaling.original_context,
            turns=(scaling.fast_turns, scaling.slow_turns),
            truncate=scaling.truncate,
        )
    if scaling.kind == "longrope":
        own: NDArray[np.float64] = frequencies / np.array(
            scaling.long if present > scaling.original_context else scaling.short
        )
        return own
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind != "llama3":
        raise PlanError(f"rope scaling {scaling.kind!r}: expected llama3, linear or yarn")
    # full turns within the original context
    turns = scaling.original_context * frequencies / (2 * math.pi)
    keep = np.clip(
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor),
        0.0,
        1.0,
    )
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
