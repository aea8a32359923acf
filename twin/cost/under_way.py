"""What of its rate memory delivers to few bytes under way.

A latency alone makes a sharp bend: below it a stream takes bytes under way over latency, beyond it
the memory's rate. Measured streams bend softly: `memory.shortfall_ratio` says how much.
"""

from __future__ import annotations

from twin.hardware.types import Device
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.options import Options
from twin.plan.types import Plan


def delivered_share(plan: Plan, device: Device) -> float:
    """Of the memory's rate, over all of a step. A slot holds one tile, and the tiles of a matrix
    may be smaller than slots; the LM head may have a window of its own.
    """
    memory, options = device.memory, plan.options
    if memory.under_way_s is None or memory.shortfall_ratio is None:
        return 1.0
    needed = memory.under_way_s.value * memory.stream_bytes_per_s.value
    size = slowed = 0.0
    for stage in plan.stages:
        late = options.head_window_slots if stage.kind is StageKind.LM_HEAD else None
        window = (late or options.window_slots) * options.blocks
        for matrix in stage.matrices:
            tile = _bytes(matrix, matrix.tile_rows, options)
            whole = _bytes(matrix, matrix.rows, options)
            size += whole
            missing = max(0.0, 1 - window * tile / matrix.slices / needed)
            slowed += whole / (1 - memory.shortfall_ratio.value * missing)
    return size / slowed if size else 1.0


def enough_under_way(plan: Plan, device: Device) -> bool:
    """Does memory deliver all of its rate?"""
    return delivered_share(plan, device) == 1


def _bytes(matrix: Matrix, rows: int, options: Options) -> int:
    """Of so many rows, as they are stored."""
    if matrix.format:
        return matrix.format.bytes(rows, matrix.cols)
    return rows * matrix.cols * options.weight_dtype.bytes
