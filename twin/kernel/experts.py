"""How the kernel sees routed experts: one wide matrix for each stage, and where its tiles lie in
memory.

To a block ROUTED_UP is a matrix of all chosen experts' rows, one expert below the other, and
ROUTED_DOWN one of all their columns, side by side. So their products are those of any matrix; only
a tile's address depends on the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.models.feeds import Scoring
from twin.plan import shards
from twin.plan.shards import Weights
from twin.plan.types import Matrix, Plan, Stage, StageKind

CHOICE_WORDS = 2  # of a chosen expert: its number, its weight;
COUNTS = 3  # words behind them: of choices, and of those that each of two loaders has asked for
# of a stage, where a plan has experts
FIELDS = ("expert_page", "expert_units", "expert_rows", "expert_cols")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the experts of a stage lie behind a rank's streams: [experts][column
    slices][rows][columns of a slice].
    """

    page: int  # of expert 0
    units: int  # from expert to expert
    rows: int  # of one expert
    cols: int


def has_experts(plan: Plan) -> bool:
    """Are there experts in a plan that the kernel runs?"""
    return plan.attention is not None and any(stage.routed for stage in plan.stages)


def multiplied(plan: Plan, stage: Stage) -> Matrix | None:
    """The matrix that the kernel multiplies in a stage."""
    matrix, routed = stage.matrix, stage.routed
    if matrix is None or routed is None or not has_experts(plan):
        return matrix
    if stage.kind is StageKind.ROUTED_DOWN:
        return replace(matrix, cols=routed.top_k * matrix.cols)
    assert stage.publishes is not None
    owned = plan.values[stage.publishes].owned
    rows = tuple((matrix.unit * lo, matrix.unit * hi) for lo, hi in owned)
    return replace(matrix, rows=routed.top_k * matrix.rows, owned=rows)


def places(
    plan: Plan, page: int, *, page_bytes: int, unit_bytes: int
) -> tuple[dict[int, Place], int]:
    """By stage, from `page` on; and the first page behind them. Tiles are whole units, for a row of
    any slice is.
    """
    found = {}
    for stage in plan.stages if has_experts(plan) else ():
        if stage.routed is None or stage.matrix is None:
            continue
        matrix = stage.matrix
        size = matrix.rows * matrix.cols * plan.options.weight_dtype.bytes
        found[stage.index] = Place(page, size // unit_bytes, matrix.rows, matrix.cols)
        page += -(-size * stage.routed.experts // page_bytes)
    return found, page


def fields(place: Place | None) -> dict[str, int]:
    """The FIELDS of a stage; zeros where it has no experts."""
    if place is None:
        return dict.fromkeys(FIELDS, 0)
    return dict(zip(FIELDS, (place.page, place.units, place.rows, place.cols), strict=True))


def slices(matrix: Matrix, expert: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An expert's [rows, cols] as its column slices: rows of a slice follow each other, so that any
    of them are one copy.
    """
    for lo in range(0, matrix.cols, matrix.tile_cols):
        yield expert[:, lo : lo + matrix.tile_cols]


def pack(plan: Plan, stage: Stage, rank: int, weights: Weights, out: NDArray[Any]) -> None:
    """All experts of a stage into `out`, which begins with the first one's, in its element type."""
    assert stage.matrix is not None
    assert stage.routed is not None
    size = stage.matrix.rows * stage.matrix.cols
    for expert in range(stage.routed.experts):
        rows = shards.expert_matrix(plan, stage, rank, weights, expert)
        made = [part.reshape(-1) for part in slices(stage.matrix, rows)]
        out[expert * size : (expert + 1) * size] = np.concatenate(made).astype(
            out.dtype, copy=False
        )


def constants(plan: Plan) -> dict[str, bool | int | float]:
    """What a router does, for C++; empty without experts."""
    kind = plan.spec.experts if plan.spec and has_experts(plan) else None
    if kind is None:
        return {}
    return {
        "ANY": True,
        "COUNT": kind.experts,
        "TOP_K": kind.top_k,
        "WIDTH": next(
            s.matrix.cols for s in plan.stages if s.matrix and s.kind is StageKind.ROUTED_DOWN
        ),
        "SIGMOID": kind.scoring is Scoring.SIGMOID,
        "NORMALISED": kind.renormalise,
        "SCALING": kind.scaling,
    }


NO_ADDITIONS: dict[str, bool | int | float] = {
    "SINKS": False,
    "OUTPUT_BIAS": False,
    "EXPERT_BIAS": False,
    "GAIN": 1.0,
    "OFFSET": 0.0,
    "LIMIT": 0.0,
}


def additions(plan: Plan) -> dict[str, bool | int | float]:
    """What a layer has besides: sinks of its softmax, biases, clamped gates (LIMIT 0: not
    clamped).
    """
    spec = plan.spec
    kind = spec.experts if spec and has_experts(plan) else None
    if spec is None or kind is None:
        return NO_ADDITIONS
    return {
        "SINKS": spec.sinks,
        "OUTPUT_BIAS": spec.o_bias,
        "EXPERT_BIAS": kind.bias,
        "GAIN": kind.gain,
        "OFFSET": kind.offset,
        "LIMIT": kind.limit or 0.0,
    }
