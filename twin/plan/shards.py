"""Cuts a model's weights into what each rank holds for each stage: shared by the reference and the engine's packer.

Matrices keep their stored type; vectors and tables are FP32, the type the engine computes in.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twin.errors import PlanError
from twin.models.spec import DType, LaneHead, ModelSpec, RopeScaling
from twin.plan.types import Plan, Shard, Stage, StageKind

Array = NDArray[Any]
Vector = NDArray[np.float32]


class Weights(Protocol):
    """Tensors by canonical name ("layers.3.q", "embed", ...), matrices as [out, in], in their stored type."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> DType: ...

    def __getitem__(self, name: str) -> Array: ...


def stage_matrix(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Array:
    """[rows, cols] of the stage on this rank, in the order of `stage.matrix`."""
    layer, matrix = f"layers.{stage.layer}", stage.matrix
    if matrix is None:
        raise PlanError(f"{stage.name} has no weights of a model")
    columns, outputs = (slice(rank * count, (rank + 1) * count) for count in (matrix.cols, matrix.rows // matrix.unit))
    match stage.kind:
        case StageKind.QKV:
            return np.concatenate([weights[f"{layer}.{name}"][_head_rows(plan, name, rank)] for name in "qkv"])
        case StageKind.O_PROJ:
            return weights[f"{layer}.o"][:, columns]
        case StageKind.GATE_UP:
            pair = np.stack([weights[f"{layer}.gate"][outputs], weights[f"{layer}.up"][outputs]], axis=1)
            return pair.reshape(matrix.rows, matrix.cols)
        case StageKind.DOWN:
            return weights[f"{layer}.down"][:, columns]
        case StageKind.LM_HEAD:
            return _head_matrix(plan.shard, rank, weights)
        case _:
            raise PlanError(f"{stage.name} has no weights of a model")


def stage_bias(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Vector | None:
    """[rows] added to the stage's rows on this rank, None when it has no bias."""
    if stage.kind is not StageKind.QKV or not weights.spec.qkv_bias:
        return None
    rows = [weights[f"layers.{stage.layer}.{name}_bias"][_head_rows(plan, name, rank)] for name in "qkv"]
    return np.concatenate(rows).astype(np.float32)


def stage_norm(stage: Stage, weights: Weights) -> Vector | None:
    """[hidden] RMSNorm scale that the stage applies to its input, None when it applies none.

    Lanes that end as the mean of normed lanes are normed where they are published, all others in the LM head.
    """
    lanes = weights.spec.lanes
    mean = lanes is not None and lanes.head is LaneHead.MEAN
    match stage.kind:
        case StageKind.QKV:
            name = f"layers.{stage.layer}.attn_norm"
        case StageKind.GATE_UP:
            name = f"layers.{stage.layer}.ffn_norm"
        case StageKind.LANE_MEAN if mean:
            name = "final_norm"
        case StageKind.LM_HEAD if not mean:
            name = "final_norm"
        case _:
            return None
    return weights[name].astype(np.float32)


def query_key_norms(stage: Stage, weights: Weights) -> tuple[Vector, Vector] | None:
    """[head_dim] scales of q and k in an attention stage, None when the model has none."""
    if stage.kind is not StageKind.ATTENTION or not weights.spec.qk_norm:
        return None
    layer = f"layers.{stage.layer}"
    return weights[f"{layer}.q_norm"].astype(np.float32), weights[f"{layer}.k_norm"].astype(np.float32)


def rope_table(spec: ModelSpec, positions: int) -> tuple[Vector, Vector]:
    """(cos, sin), each [positions, head_dim / 2], pair i in column i for both pairing styles."""
    pairs = np.arange(0, spec.head_dim, 2, dtype=np.float64)
    frequencies = _scaled(spec.rope.theta ** (-pairs / spec.head_dim), spec.rope.scaling)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _head_rows(plan: Plan, name: str, rank: int) -> slice:
    """Rows of q, k or v on this rank; ranks that share a KV head hold the same rows."""
    own = plan.kernel_attention()
    heads, first = (own.heads, rank) if name == "q" else (own.kv_heads, rank // own.kv_replicas)
    size = heads * own.head_dim
    return slice(first * size, (first + 1) * size)


def _head_matrix(shard: Shard, rank: int, weights: Weights) -> Array:
    """[shard.vocab, hidden]: this rank's slice of the vocabulary, zero rows past its end."""
    table = weights["embed" if weights.spec.tied else "lm_head"]
    rows = table[rank * shard.vocab : (rank + 1) * shard.vocab]
    missing = shard.vocab - len(rows)
    return np.concatenate([rows, np.zeros((missing, shard.hidden), table.dtype)]) if missing else rows


def _scaled(frequencies: NDArray[np.float64], scaling: RopeScaling | None) -> NDArray[np.float64]:
    """Llama 3: long wavelengths are divided by the factor, short ones kept, those between blended."""
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind != "llama3":
        raise PlanError(f"rope scaling {scaling.kind!r}: expected llama3 or linear")
    turns = scaling.original_context * frequencies / (2 * math.pi)  # full turns within the original context
    keep = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / scaling.factor)
