"""Cuts a model's matrices into what each rank holds for each stage, in their stored type: shared by
the reference and the engine's packer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from twin.errors import PlanError
from twin.models.codes import CODES, BlockCode, Blocks, Code, Encoded, code_of, joined, paired
from twin.models.feeds import halves_of
from twin.models.formats import WHOLE_ROW
from twin.models.mixers import DeltaNet, Recurring, ShortConvolution
from twin.plan.catalogue import ROWS, StageKind
from twin.plan.compressed_shards import SITES, compressed_rows, shares_of
from twin.plan.delta_shards import Rows, projected_rows, steering_rows
from twin.plan.matrix import CONV_UNIT, Matrix, Span
from twin.plan.shards import (
    Array,
    Weights,
    channels_of,
    head_rows,
    padded,
    shared_rows,
    turning,
)
from twin.plan.types import Plan, Shard, Stage


def stage_matrix(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Array | Encoded:
    """[rows, cols] of the stage on this rank, in the order of `stage.matrix`."""
    layer, matrix = f"layers.{stage.layer}", stage.matrix
    if matrix is None:
        raise PlanError(f"{stage.name} has no weights of a model")
    if matrix.format is not None and matrix.format.name in CODES:
        return _coded_matrix(plan, stage, rank, weights)
    if stage.kind in SITES:
        return compressed_rows(plan, stage, rank, weights)
    match stage.kind:
        case StageKind.QKV:
            return np.concatenate(
                [
                    turning(
                        weights,
                        name,
                        weights[f"{layer}.{leaf}"][head_rows(plan, stage, name, rank)],
                    )
                    for name, leaf in _qkv(plan, stage)
                ]
            )
        case StageKind.DELTA_IN:
            return _delta_in(plan, matrix, rank, weights, layer)
        case StageKind.DELTA_GATES:
            kind = _recurrence(weights)
            assert isinstance(kind, DeltaNet)
            return _rows(weights, layer, steering_rows(kind, plan.ranks, rank))
        case StageKind.CONV_IN:
            return weights[f"{layer}.conv_in"][channel_rows(_convolution(weights), plan, rank)]
        case StageKind.ROUTER:
            return shared_rows(plan, _router(weights, layer), rank, matrix.rows)
        case StageKind.LM_HEAD:
            return _head_matrix(plan.shard, rank, weights)
        case _:
            return _share(
                stage, matrix, rank, [weights[f"{layer}.{name}"] for name in named(stage)]
            )


def named(stage: Stage) -> tuple[str, ...]:
    """The tensors of a layer whose rows or columns the ranks share. Raises PlanError for others."""
    names = ROWS[stage.kind].weights
    if not names:
        raise PlanError(f"{stage.name} has no weights of a model")
    # of rows without a gate the last alone
    return ROWS[stage.kind].weights[-stage.matrix.unit if stage.matrix else 0 :]


def _share(stage: Stage, matrix: Matrix, rank: int, tables: list[Array]) -> Array:
    """A rank's rows of each table, which take turns, or its columns; zeros beyond them."""
    if ROWS[stage.kind].columns:
        (table,) = tables
        return padded(table.T, rank * matrix.cols, matrix.cols).T
    outputs = matrix.rows // matrix.unit
    rows = [padded(table, rank * outputs, outputs) for table in tables]
    return np.stack(rows, axis=1).reshape(matrix.rows, matrix.cols)


def _qkv(plan: Plan, stage: Stage) -> tuple[tuple[str, str], ...]:
    """(what a rank's rows are, the tensor that has them): of gated attention queries and gates take
    turns in one; values that are keys have no rows.
    """
    names = "qk" if plan.attention_of(stage).values_are_keys else "qkv"
    rows = tuple((name, name) for name in names)
    return (*rows, ("gate", "q")) if plan.spec and plan.spec.output_gate else rows


def _recurrence(weights: Weights) -> Recurring:
    kind = weights.spec.recurrence
    assert kind is not None
    return kind


def _convolution(weights: Weights) -> ShortConvolution:
    kind = weights.spec.convolution
    assert kind is not None
    return kind


def channel_rows(kind: ShortConvolution, plan: Plan, rank: int) -> Rows:
    """A rank's rows of conv_in, which has all b, all c, all x: by channel."""
    own = channels_of(kind, plan, rank)
    rows: Rows = (own[:, None] + kind.channels * np.arange(CONV_UNIT)).reshape(-1)
    return rows


def _delta_in(plan: Plan, matrix: Matrix, rank: int, weights: Weights, layer: str) -> Array:
    """The projections; behind them write strengths and decays, where the stage has them, too."""
    kind = _recurrence(weights)
    parts = projected_rows(kind, plan.ranks, rank)
    if isinstance(kind, DeltaNet) and sum(len(rows) for _, rows in parts) < matrix.rows:
        parts += steering_rows(kind, plan.ranks, rank)
    return _rows(weights, layer, parts)


def _rows(weights: Weights, layer: str, parts: Sequence[tuple[str, Rows]]) -> Array:
    return np.concatenate([weights[f"{layer}.{name}"][rows] for name, rows in parts])


def _router(weights: Weights, layer: str) -> Array:
    """A row of each expert; the one that gates shared experts comes last."""
    router, spec = weights[f"{layer}.router"], weights.spec
    if spec.experts is None or not spec.experts.shared_gate:
        return router
    return np.concatenate([router, weights[f"{layer}.shared_expert_gate"]])


def _coded_matrix(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Encoded:
    matrix = stage.matrix
    assert matrix is not None
    assert matrix.format is not None
    code, outputs, first = code_of(matrix.format), matrix.rows // matrix.unit, rank * matrix.cols

    def coded(leaf: str) -> Encoded:
        return _named(weights, code, leaf if stage.layer < 0 else f"layers.{stage.layer}.{leaf}")

    def turned(name: str, leaf: str) -> Encoded:
        rows = np.arange(plan.ranks * matrix.rows)[head_rows(plan, stage, name, rank)]
        return coded(leaf).rows(turning(weights, name, rows))

    if stage.kind in SITES:
        divided = shares_of(plan, stage).items()
        return joined([_part(coded(name), rank, count) for name, count in divided])
    match stage.kind:
        case StageKind.QKV:
            return joined([turned(name, leaf) for name, leaf in _qkv(plan, stage)])
        case StageKind.DELTA_IN:
            parts = projected_rows(_recurrence(weights), plan.ranks, rank)
            return joined([coded(name).rows(rows) for name, rows in parts])
        case StageKind.CONV_IN:
            return coded("conv_in").rows(channel_rows(_convolution(weights), plan, rank))
        case StageKind.LM_HEAD:
            table, vocab = coded("embed" if weights.spec.tied else "lm_head"), plan.shard.vocab
            return _within(table, (rank * vocab, (rank + 1) * vocab), (0, matrix.cols))
        case kind:
            found = [coded(leaf) for leaf in named(stage)]
            rows, cols = (rank * outputs, (rank + 1) * outputs), (0, matrix.cols)
            if ROWS[kind].columns:
                rows, cols = (0, matrix.rows), (first, first + matrix.cols)
            shares = [_within(one, rows, cols) for one in found]
            return shares[0] if len(shares) == 1 else paired(*shares)


def _part(table: Encoded, rank: int, count: int) -> Encoded:
    """All rows, or a rank's where ranks have fewer."""
    first = 0 if count == table.shape[0] else rank * count
    return _within(table, (first, first + count), (0, table.shape[1]))


def _named(weights: Weights, code: Code | BlockCode, name: str) -> Encoded:
    return code.matrix(*(weights[f"{name}.{part}"] for part in code.parts))


def expert_matrix(
    plan: Plan, stage: Stage, rank: int, weights: Weights, expert: int
) -> Array | Encoded:
    """[rows, cols] of one expert of a routed stage on this rank; behind the routed ones come shared
    ones that every token visits. Ranks divide its width; what is beyond it is zero.
    """
    matrix, routed, feed = stage.matrix, stage.routed, weights.spec.experts
    assert matrix is not None
    assert routed is not None
    assert feed is not None
    shared = expert - (routed.experts - routed.always)
    name, own = f"layers.{stage.layer}.experts.{expert}.", slice(None)
    if shared >= 0:
        name, own = f"layers.{stage.layer}.shared_", _nth(shared, feed.width)
    if matrix.format is not None and matrix.format.name in CODES:
        return _coded_expert(stage, matrix, rank, weights, name, own)
    if stage.kind is StageKind.ROUTED_DOWN:
        columns = padded(weights[f"{name}down"][:, own].T, rank * matrix.cols, matrix.cols)
        return columns.T
    width = matrix.rows // matrix.unit
    rows = [padded(weights[f"{name}{half}"][own], rank * width, width) for half in halves_of(feed)]
    return np.stack(rows, axis=1).reshape(matrix.rows, matrix.cols)


def _nth(at: int, width: int) -> slice:
    return slice(at * width, (at + 1) * width)


def _coded_expert(
    stage: Stage, matrix: Matrix, rank: int, weights: Weights, name: str, own: slice
) -> Encoded:
    """`own`: of the rows of gate (if any) and up, and of the columns of down, the expert's."""
    assert matrix.format is not None
    code, width, first = code_of(matrix.format), matrix.rows // matrix.unit, rank * matrix.cols
    if stage.kind is StageKind.ROUTED_DOWN:
        down = _named(weights, code, f"{name}down")
        if own.stop is not None:
            down = down.columns(own.start, own.stop)
        return _within(down, (0, matrix.rows), (first, first + matrix.cols))
    of_rank = (rank * width, (rank + 1) * width)
    shares = [
        _within(_named(weights, code, f"{name}{half}").rows(own), of_rank, (0, matrix.cols))
        for half in ("gate", "up")[-matrix.unit :]
    ]
    return shares[0] if len(shares) == 1 else paired(*shares)


def _within(stored: Encoded, rows: Span, cols: Span) -> Encoded:
    """A rank's part, of whole blocks. Beyond the matrix weights are zero, which any code with a
    scale of zero is; exponents have none, but code 0 of their weights is zero.
    """
    wide = stored.shape[1]
    part = stored.rows(slice(*rows)).columns(min(cols[0], wide), min(cols[1], wide))
    more = (rows[1] - rows[0] - part.shape[0], cols[1] - cols[0] - part.shape[1])
    if more == (0, 0):
        return part
    if isinstance(part, Blocks):
        return part.filled(rows[1] - rows[0], cols[1] - cols[0])
    block = stored.code.format.block[1]
    blocks = 1 if block == WHOLE_ROW else -(-(cols[1] - cols[0]) // block)
    filled: dict[str, Any] = {}
    for field in fields(part):
        array = getattr(part, field.name)
        if not isinstance(array, np.ndarray):
            continue
        by_block = field.name != "codes" and array.shape[1] == part.scales.shape[1]
        short = more[1] if field.name == "codes" else by_block * (blocks - part.scales.shape[1])
        least = np.zeros((), part.code.scale_type).astype(np.float32)
        beyond = least if field.name == "scales" else 0
        filled[field.name] = np.pad(array, ((0, more[0]), (0, short)), constant_values=beyond)
    return replace(part, **filled)


def _head_matrix(shard: Shard, rank: int, weights: Weights) -> Array:
    """[shard.vocab, hidden]: this rank's slice of the vocabulary, zero rows past its end."""
    table = weights["embed" if weights.spec.tied else "lm_head"]
    return padded(table, rank * shard.vocab, shard.vocab)
