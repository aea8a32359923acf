"""What a rank adds to its products: biases of a stage's rows, and sinks of its softmax.

Where ranks' sums meet, the first rank has the biases and the others zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models.spec import ModelSpec
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.shards import Vector, Weights, padded, qkv_bias, shared_rows
from twin.plan.types import Plan, Stage


def bias_shape(spec: ModelSpec, stage: Stage) -> tuple[int, ...] | None:
    """Of a rank's biases in a stage: [rows], of experts [experts, rows of one]; None: the model has
    none there.
    """
    feed, matrix = spec.experts, stage.matrix
    if matrix is None or not ROWS[stage.kind].bias:
        return None
    if stage.kind is StageKind.QKV:
        return (matrix.rows,) if spec.qkv_bias else None
    if stage.kind is StageKind.O_PROJ:
        return (matrix.rows,) if spec.o_bias else None
    if feed is None:
        return None
    if stage.kind is StageKind.ROUTER:
        return (matrix.rows,) if feed.router_bias else None
    return (feed.experts, matrix.rows) if feed.bias else None


def stage_bias(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Vector | None:
    """Of bias_shape, FP32; pairs of a gate and of what passes it take turns, as rows do."""
    shape = bias_shape(weights.spec, stage)
    if shape is None:
        return None
    if ROWS[stage.kind].summed and rank:
        return np.zeros(shape, np.float32)
    layer = f"layers.{stage.layer}"
    match stage.kind:
        case StageKind.QKV:
            found: NDArray[Any] = qkv_bias(plan, stage, rank, weights)
        case StageKind.O_PROJ:
            found = weights[f"{layer}.o_bias"]
        case StageKind.ROUTER:
            found = shared_rows(plan, weights[f"{layer}.router_bias"], rank, shape[0])
        case StageKind.ROUTED_UP:
            found = np.stack(
                [_pairs(weights, f"{layer}.experts.{i}", rank, shape[1]) for i in range(shape[0])]
            )
        case _:
            found = np.stack([weights[f"{layer}.experts.{i}.down_bias"] for i in range(shape[0])])
    return found.astype(np.float32)


def _pairs(weights: Weights, expert: str, rank: int, rows: int) -> NDArray[Any]:
    halves = [
        padded(weights[f"{expert}.{half}_bias"], rank * rows // 2, rows // 2)
        for half in ("gate", "up")
    ]
    return np.stack(halves, axis=1).reshape(-1)


def stage_sinks(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Vector | None:
    """[heads] of the rank: logits that join the softmax's sum; None where the model has none."""
    if not ROWS[stage.kind].sinks or not weights.spec.sinks:
        return None
    heads = plan.attention_of(stage).heads
    own = weights[f"layers.{stage.layer}.sinks"][rank * heads : (rank + 1) * heads]
    return own.astype(np.float32)
