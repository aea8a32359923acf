"""What of its rate memory delivers to few bytes under way.

A latency alone makes a sharp bend: below it a stream takes bytes under way over latency, beyond it
the memory's rate. Measured streams bend softly; why was not looked for. On an H200 32 KiB under way
to each of 132 blocks, 0.95 us of the rate, bring 0.91 of what 48 KiB bring, and 48 KiB to each of
96 blocks, 1.03 us, bring 0.95 (2026-11-27T094746-probes). On an H100 21.5 KiB, 0.94 us, bring 0.90
of what 43 KiB bring, and 24 KiB, 1.05 us, 0.95 (studies/drawn-shapes/streams.csv).
"""

from __future__ import annotations

from twin.hardware.types import Device
from twin.plan.types import Matrix, Options, Plan, StageKind

# of the rate for all that is missing under way: 0.31 of it cost 0.09 of the rate
SHORTFALL = 0.27


def delivered_share(plan: Plan, device: Device) -> float:
    """Of the memory's rate, over all of a step. A slot holds one tile, and the tiles of a matrix
    may be smaller than slots; the LM head may have a window of its own.
    """
    memory, options = device.memory, plan.options
    if memory.under_way_s is None:
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
            slowed += whole / (1 - SHORTFALL * missing)
    return size / slowed if size else 1.0


def enough_under_way(plan: Plan, device: Device) -> bool:
    """Does memory deliver all of its rate?"""
    return delivered_share(plan, device) == 1


def _bytes(matrix: Matrix, rows: int, options: Options) -> int:
    """Of so many rows, as they are stored."""
    if matrix.format:
        return matrix.format.bytes(rows, matrix.cols)
    return rows * matrix.cols * options.weight_dtype.bytes
