"""Cuts what compressed attention and hyper-connections multiply into the rows of each rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.errors import PlanError
from twin.models.formats import decoded
from twin.models.mixers import CompressedAttention
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.options import Common, Options
from twin.plan.shards import Array, Weights, padded
from twin.plan.types import Plan, Stage

STORAGE: dict[DType, Any] = {DType.FP16: np.float16, DType.BF16: ml_dtypes.bfloat16}
# of a layer's projections from the residual, in the order of their elements
FIRST = ("q_a", "kv", "compress_kv", "compress_gate", "index_kv", "index_gate", "index_heads")
SECOND = ("q_b", "index_q")  # the same from the compressed queries
FROM_RESIDUAL = (StageKind.LATENT, StageKind.COMPRESS)
SITES = {StageKind.HYPER, *FROM_RESIDUAL, StageKind.QUERY}
# From this many on ranks divide an indexer's entries, below it its heads. In the twin,
# DeepSeek-V4-Flash on eight H200: at 128 positions (32 entries) dividing heads is 7 us a layer
# faster, at 131,072 (32,768 entries) 76 us slower; the two meet near 12,000 positions.
DIVIDED_ENTRIES = 3072


def divides_entries(options: Options, ranks: int, kind: CompressedAttention) -> bool:
    """Do ranks divide an indexer's entries, not its heads?"""
    shared = options.common is Common.SHARDED and ranks > 1
    return shared and kind.entries(options.max_context) >= DIVIDED_ENTRIES


def mixing_parts(options: Options) -> int:
    """Matrices whose sum is an FP32 mixing matrix: weights of 16 bits, and what these leave."""
    return 1 if options.weight_dtype is DType.FP32 else 2


def compressed_rows(plan: Plan, stage: Stage, rank: int, weights: Weights) -> NDArray[Any]:
    """[rows, cols] of all plain matrices of a stage of `SITES` on this rank, one below the other.

    A mixing matrix is [residuals * mixes, hidden]: the rows of the first residual, of the second.
    """
    if stage.kind is StageKind.HYPER:
        return _share(_mixing(plan, stage, weights), rank, sum(m.rows for m in stage.matrices))
    shares = shares_of(plan, stage)
    tables = [weights[f"layers.{stage.layer}.{name}"] for name in shares]
    return np.concatenate(
        [_share(table, rank, rows) for table, rows in zip(tables, shares.values(), strict=True)]
    )


def shares_of(plan: Plan, stage: Stage) -> dict[str, int]:
    """The tensors that a stage LATENT, COMPRESS or QUERY multiplies, in order, and how many rows of
    each a rank has.
    """
    kind, ranks = compressing(plan, stage), plan.ranks
    common = ranks if plan.options.common is Common.SHARDED else 1
    rows = {w.name: w.rows for w in kind.weights(plan.shard.hidden, spec_of(plan).formats)}
    if stage.kind in FROM_RESIDUAL:
        first, then = divided(spec_of(plan), kind) if plan.attentions else (FIRST, ())
        names = first if stage.kind is StageKind.LATENT else then
        return {name: -(-rows[name] // common) for name in names if name in rows}
    whole = divides_entries(plan.options, ranks, kind)
    parts = {"q_b": ranks, "index_q": 1 if whole else common}
    return {name: -(-rows[name] // parts[name]) for name in SECOND if name in rows}


def divided(spec: ModelSpec, kind: CompressedAttention) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a layer's projections from the residual those that the engine multiplies first, and those
    that are stored otherwise than these.
    """
    forms = {w.name: decoded(w.format) for w in kind.weights(spec.hidden, spec.formats)}
    there = [name for name in FIRST if name in forms]
    same = tuple(name for name in there if not spec.stored or forms[name] == forms[there[0]])
    return same, tuple(name for name in there if name not in same)


def projected(plan: Plan, stage: Stage) -> dict[str, Span]:
    """Where in what a rank publishes of a stage LATENT or QUERY each tensor's elements lie."""
    shares = shares_of(plan, stage)
    ends = np.cumsum([0, *shares.values()]).tolist()
    return dict(zip(shares, pairwise(ends), strict=True))


def compressing(plan: Plan, stage: Stage) -> CompressedAttention:
    """The attention of the stage's layer. Raises PlanError for another kind."""
    mixer = spec_of(plan).layer(stage.layer).mixer
    if not isinstance(mixer, CompressedAttention):
        raise PlanError(
            f"{stage.name} belongs to {type(mixer).__name__}, which is simulated only: the "
            "reference computes grouped and compressed attention"
        )
    return mixer


def spec_of(plan: Plan) -> ModelSpec:
    assert plan.spec is not None
    return plan.spec


def _mixing(plan: Plan, stage: Stage, weights: Weights) -> Array:
    """As it is stored, or in the two parts that the kernel multiplies."""
    name = plan.values[stage.publishes or 0].name.partition("[")[0]
    table = weights[name if stage.layer < 0 else f"layers.{stage.layer}.{name}"]
    pieces = table.reshape(len(table), -1, plan.shard.hidden).transpose(1, 0, 2)
    whole = pieces.reshape(-1, plan.shard.hidden).astype(np.float32)
    if not plan.attentions or mixing_parts(plan.options) == 1:
        return whole
    stored = STORAGE[plan.options.weight_dtype]
    high = whole.astype(stored).astype(np.float32)
    return np.concatenate([high, whole - high])


def _share(table: Array, rank: int, count: int) -> Array:
    """All rows, or a rank's where ranks have fewer."""
    return table if count == len(table) else padded(table, rank * count, count)
