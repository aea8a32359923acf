"""The packed weight streams: where each block's tiles lie. packing.py fills them."""

from __future__ import annotations

from twin.frozen import frozen
from twin.kernel import experts
from twin.kernel.fields import Table
from twin.models.formats import UNIT_BYTES
from twin.plan.matrix import Matrix, rows_bytes
from twin.plan.types import Plan
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
