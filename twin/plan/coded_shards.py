"""What each rank holds of low-bit weights: rows and columns of matrices as they are stored."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from twin.models.codes import BlockCode, Blocks, Code, Encoded, code_of, joined, paired
from twin.models.formats import WHOLE_ROW
from twin.plan.catalogue import ROWS
from twin.plan.delta_shards import projected_rows
from twin.plan.shards import (
    Weights,
    channel_rows,
    convolution,
    head_rows,
    named,
    qkv,
    recurrence,
    turning,
)
from twin.plan.types import Matrix, Plan, Span, Stage, StageKind


def coded_matrix(plan: Plan, stage: Stage, rank: int, weights: Weights) -> Encoded:
    matrix = stage.matrix
    assert matrix is not None
    assert matrix.format is not None
    code, outputs, first = code_of(matrix.format), matrix.rows // matrix.unit, rank * matrix.cols

    def coded(leaf: str) -> Encoded:
        return _named(weights, code, leaf if stage.layer < 0 else f"layers.{stage.layer}.{leaf}")

    def turned(name: str, leaf: str) -> Encoded:
        rows = np.arange(plan.ranks * matrix.rows)[head_rows(plan, stage, name, rank)]
        return coded(leaf).rows(turning(weights, name, rows))

    match stage.kind:
        case StageKind.QKV:
            return joined([turned(name, leaf) for name, leaf in qkv(plan, stage)])
        case StageKind.DELTA_IN:
            parts = projected_rows(recurrence(weights), plan.ranks, rank)
            return joined([coded(name).rows(rows) for name, rows in parts])
        case StageKind.CONV_IN:
            return coded("conv_in").rows(channel_rows(convolution(weights), plan, rank))
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


def _named(weights: Weights, code: Code | BlockCode, name: str) -> Encoded:
    return code.matrix(*(weights[f"{name}.{part}"] for part in code.parts))


def coded_expert(
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
