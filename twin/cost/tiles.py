"""What a block of warps takes for the tiles of a matrix: its teams' rounds, waits and sums."""

from __future__ import annotations

from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.models.spec import DType
from twin.plan.matrix import Matrix
from twin.schedule.block import FOLDED_ROWS, TEAM_WARPS, WARP
from twin.schedule.products import tensor_products
from twin.schedule.teams import Team, rows_at_once, team_for
from twin.units import picoseconds

LOOPED_ROWS = 4  # of a tile at once, in a loop over its rows; of four bits in one slice, four times
CHAIN_GROUPS = 4  # of columns that share a scale, which a chain of FP4's products keeps separate


@frozen
class TeamWork:
    """What a tile costs a block of warps."""

    weights: float  # that are multiplied, those of idle threads and of repeated rows included
    ends_ps: int  # waits and loads before, sums over threads behind


def vector_team(matrix: Matrix) -> Team | None:
    """The team whose threads gather a matrix's input, as those do that multiply 16-bit weights.
    Threads with FP32 weights hold half as many neighbours, which the twin leaves out of account.
    """
    return team_for(matrix, DType.BF16)


def team_work(
    warps: WarpKernel,
    matrix: Matrix,
    *,
    rows: int,
    cols: int,
    groups: int,
    dtype: DType,
    joined: bool = True,
    step_s: float = 0.0,
) -> TeamWork:
    """A tile's share of the round in which the block's teams take it, each its own tiles at the
    same time.

    A round is `groups` row groups side by side, each with all its column slices. It takes as long
    whether all teams have a tile or one, and whether all threads of a team hold columns or some: a
    warp waits for each slice that it sees, loads ROWS_AT_ONCE rows of it and multiplies them, slice
    after slice, and then sums its threads once. `joined`: the first two slices take one wait. In
    the code of probes the compiler makes their products together, behind the wait for the second,
    unless a slice's weights may have been prefetched. Layers whose hidden vector has three slices
    show it too: with a wait for each the twin gives their QKV 0.5 us too much
    (2026-11-24T031558-probes). `step_s`: of a loop over a tile's low-bit rows, for each time that
    it is gone through.
    """
    team = team_for(matrix, dtype)
    if team is None:
        raise HardwareError(
            f"tiles of {matrix.tile_cols} columns are wider than {TEAM_WARPS} warps take at once: "
            "use a smaller slot_bytes"
        )
    at_once = rows_at_once(matrix, dtype)
    # of folds all pieces of a tile are taken side by side, and none is waited for
    pieces = 1 if matrix.folded else -(-rows // at_once)
    portions, tiles = 1 if matrix.folded else team.portions, groups * team.slices
    held = team.teams * _held_columns(team, matrix) * at_once
    waits = pieces * (portions - (joined and portions > 1)) * warps.slice_s.value / tiles
    ends = pieces * warps.reduction_s.value / tiles
    if step_s:
        waits += -(-rows // rolled_rows(matrix)) * team.portions * step_s / tiles
    return TeamWork(pieces * held / tiles, picoseconds(waits + ends))


def rolled_rows(matrix: Matrix) -> int:
    """Rows of a tile that a loop takes at once, of experts: `Rolled` in cuda_core.cuh.

    Where rows have no gates the kernel takes eight of eight bits at once. They are priced as four:
    with half as many steps the twin gives Nemotron 3 Nano 6 % less time, and 1.0 % came.
    """
    assert matrix.format is not None
    few = matrix.format.bits == 8 or vector_portions(matrix) > 1
    return LOOPED_ROWS if few else 4 * LOOPED_ROWS


def _held_columns(team: Team, matrix: Matrix) -> int:
    """Columns that a team's threads multiply, of all slices that it sees. Of tensor cores' chains
    (Fragments in cuda_fragments.cuh) each warp takes every so manyth, and none beyond the slice: so
    a last slice that that is a team's alone costs what it has.
    """
    if not tensor_products(matrix):
        return team.portions * team.size * WARP * team.vector
    assert matrix.format is not None
    chains = CHAIN_GROUPS * matrix.format.block[1] * team.size

    def held(wide: int) -> int:
        return -(-wide // chains) * chains

    each = team.cols // team.joined
    full = held(min(team.tile, each))
    lone = team.joined == 1 and team.portions > 1 and team.slices % team.teams == 1
    last = held(each - (team.slices - 1) * team.tile) if lone else full
    return (team.portions - 1) * full + last


def vector_portions(matrix: Matrix) -> int:
    """Column slices of which a thread holds elements."""
    team = vector_team(matrix)
    return team.portions if team else 1


def teams_at_once(matrix: Matrix, dtype: DType) -> int:
    """Row groups whose tiles a block of warps takes side by side."""
    team = team_for(matrix, dtype)
    if team and matrix.folded:  # two warps to a tile
        return team.groups * FOLDED_ROWS // matrix.tile_rows
    return team.groups if team else 1


def tiles_of_a_round(matrix: Matrix, dtype: DType) -> int:
    """Of all the row groups that a block's teams take side by side."""
    team = team_for(matrix, dtype)
    return teams_at_once(matrix, dtype) * team.slices if team else 1


def team_loads_ps(device: Device, warps: WarpKernel, dtype: DType, matrix: Matrix) -> int:
    """A tile's share of the wait for its slice, and a team's loads of ROWS_AT_ONCE rows of it from
    the chip's memory, all threads.
    """
    team = team_for(matrix, dtype)
    if team is None:
        return 0
    bits = matrix.format.bits if matrix.format else 8 * dtype.bytes
    size = team.size * WARP * team.vector * rows_at_once(matrix, dtype) * bits // 8
    waits = team.portions * warps.slice_s.value / (team.groups * team.slices)
    return picoseconds(
        waits + size / (warps.shared_bytes_per_cycle.value * device.block.clock_hz.value)
    )
