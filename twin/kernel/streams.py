"""The packed weight streams: where each block's tiles lie, and the weights in their order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.frozen import frozen
from twin.kernel import experts
from twin.kernel.coded import STORAGE, pack_coded
from twin.kernel.fields import Table
from twin.models.codes import Blocks, Coded
from twin.models.formats import UNIT_BYTES
from twin.plan import shards
from twin.plan.shards import Weights
from twin.plan.types import Matrix, Plan, rows_bytes
from twin.schedule.types import Schedule

PAGE_BYTES = 4096  # streams of blocks start on a page


@frozen
class Streams:
    """Where the memory of weights is divided, in pages from its start."""

    block_bytes: list[int]  # [blocks] weights that one step streams through each
    blocks: Table  # [blocks] the first page of each block's stream
    experts: dict[int, experts.Place]  # of each stage that has some, behind the streams
    pages: int  # in all
    # one kernel per stage: [stages][blocks] where a stage's tiles start, in units of UNIT_BYTES
    # from the start of the block's stream; else empty
    starts: Table


def streams_of(schedule: Schedule) -> Streams:
    plan = schedule.plan
    ends, resident = [0] * plan.blocks, plan.options.resident
    starts: Table = []
    for stage in plan.stages:
        starts += [] if resident else [(end // UNIT_BYTES,) for end in ends]
        if stage.matrix and not stage.routed:
            sizes = _block_bytes(plan, stage.matrix)
            ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    rows: Table = []
    page = 0
    for size in ends:
        rows.append((page,))
        page += -(-size // PAGE_BYTES)
    placed, pages = experts.places(plan, page, page_bytes=PAGE_BYTES, unit_bytes=UNIT_BYTES)
    return Streams(ends, rows, placed, pages, starts)


def _block_bytes(plan: Plan, matrix: Matrix) -> list[int]:
    """[blocks] Of each block's tiles."""
    rows = [max(0, hi - lo) for lo, hi in matrix.owned]
    if matrix.format is None:
        each = matrix.cols * plan.options.weight_dtype.bytes
        return [count * each for count in rows]
    high, wide = matrix.tile_rows, matrix.tile_cols
    return [rows_bytes(matrix.format, high, wide, count, matrix.cols) for count in rows]


# ---- packing -------------------------------------------------------------------------------------


def pack(plan: Plan, made: Streams, weights: Weights, rank: int, out: NDArray[np.uint8]) -> None:
    """Write the streams of all blocks of a rank into `out` [stream_pages * PAGE_BYTES], in the
    order of `types.tiles`, and the experts behind them.
    """
    storage = STORAGE[plan.options.weight_dtype]
    starts = [int(row[0]) * PAGE_BYTES for row in made.blocks]
    for stage in plan.stages:
        if stage.matrix is None:
            continue
        if stage.routed:
            place = made.experts[stage.index]
            first = place.page * PAGE_BYTES
            size = stage.routed.experts * place.units * UNIT_BYTES
            experts.pack(plan, stage, rank, weights, place, out[first : first + size])
            continue
        found = shards.stage_matrix(plan, stage, rank, weights)
        if plan.coded:
            starts = pack_coded(plan, stage, found, starts, out)
            continue
        assert not isinstance(found, Blocks | Coded)
        source = np.ascontiguousarray(found).astype(storage, copy=False)
        for block, (lo, hi) in enumerate(stage.matrix.owned):
            size = (hi - lo) * stage.matrix.cols * source.itemsize
            target = out[starts[block] : starts[block] + size].view(storage)
            _tile(stage.matrix, source[lo:hi], target)
            starts[block] += size


def embedding(plan: Plan, weights: Weights) -> NDArray[Any]:
    """[vocab, hidden] in the plan's weight type; one copy serves all ranks of a GPU."""
    return np.ascontiguousarray(weights["embed"]).astype(
        STORAGE[plan.options.weight_dtype], copy=False
    )


def _tile(matrix: Matrix, rows: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy [rows, cols] into tile order: row groups, inside a group column slices, inside a slice
    row-major.
    """
    if matrix.tile_cols >= matrix.cols:
        out[:] = rows.reshape(-1)
        return
    height, cols = matrix.tile_rows, matrix.cols
    whole = len(rows) // height * height
    for part, target, high in (
        (rows[:whole], out[: whole * cols], height),
        (rows[whole:], out[whole * cols :], len(rows) - whole),
    ):
        if not len(part):
            continue
        groups = part.reshape(-1, high, cols)
        stream = target.reshape(len(groups), high * cols)
        for lo in range(0, cols, matrix.tile_cols):
            hi = min(lo + matrix.tile_cols, cols)
            stream[:, high * lo : high * hi].reshape(len(groups), high, hi - lo)[:] = groups[
                :, :, lo:hi
            ]
