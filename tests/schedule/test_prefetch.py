"""A ring holds what warps prefetch: the law, compared with a walk of the warps, one by one."""

from __future__ import annotations

import pytest

from twin.models.spec import DType
from twin.plan.matrix import Matrix
from twin.schedule.block import ROWS_AT_ONCE
from twin.schedule.prefetch import Prefetch
from twin.schedule.teams import Team


def taken(ahead: Prefetch, matrix: Matrix, slots: int) -> bool:
    """Do all teams find what they take before the stage's inputs are there, as `prefetch` in
    cuda_core.cuh?

    Tile n arrives once tile n - slots has been left.
    """
    team = ahead.team
    rows = min(matrix.owned[0][1], matrix.batch_rows)
    tiles = -(-rows // matrix.tile_rows)
    left: set[int] = set()
    waiting = {
        number: _moves(ahead, matrix, tiles, number)
        for number in range(team.groups * min(team.slices, team.teams))
    }
    moved = True
    while moved:
        moved = False
        for moves in waiting.values():
            while moves:
                tile, leaves = moves[0]
                if (
                    tile is not None
                    and tile >= slots
                    and not all(one in left for one in range(tile - slots + 1))
                ):
                    break
                left.update(leaves)
                moves.pop(0)
                moved = True
    return not any(waiting.values())


def _moves(
    ahead: Prefetch, matrix: Matrix, tiles: int, number: int
) -> list[tuple[int | None, list[int]]]:
    """Of a team: (a tile that it awaits, tiles that it then leaves)."""
    team, moves = ahead.team, []
    group, first = (
        (number // team.slices, number % team.slices) if team.slices < team.teams else (0, number)
    )
    piece, pieces = 0, -(-matrix.tile_rows // ROWS_AT_ONCE)
    for _ in range(ahead.groups):
        if group >= tiles:
            break
        slices = [
            first + chunk * team.teams
            for chunk in range(ahead.portions)
            if first + chunk * team.teams < team.slices
        ]
        numbers = [group * team.slices + one for one in slices]
        moves += [(one, []) for one in numbers]
        last = piece == pieces - 1
        moves.append((None, numbers if last else []))
        piece = 0 if last else piece + 1
        group += team.groups if last else 0
    return moves


# columns, columns and rows of a tile, elements of a load, warps of a team; chunks and row groups
# ahead; a block's rows
CASES = [
    (8192, 1024, 8, 8, 4, 3, 1, 16),
    (8192, 1024, 8, 8, 4, 1, 1, 16),
    (5120, 1024, 8, 8, 4, 3, 1, 24),
    (11008, 1008, 8, 4, 8, 6, 1, 16),
    (8192, 256, 8, 8, 1, 3, 1, 8),
    (1024, 1024, 8, 8, 4, 1, 4, 48),
    (512, 512, 16, 8, 2, 1, 3, 128),
    (512, 512, 16, 8, 2, 1, 4, 128),
    (512, 512, 16, 8, 2, 1, 3, 80),
    (512, 512, 16, 8, 2, 1, 1, 32),
    (256, 256, 32, 8, 1, 1, 3, 256),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_smallest_ring_is_the_one_in_which_no_warp_waits_forever(case: tuple[int, ...]) -> None:
    cols, tile, high, vector, size, chunks, groups, rows = case
    ahead = Prefetch(Team(cols, tile, vector, size, 8), chunks, groups, DType.BF16)
    matrix = Matrix(rows, cols, 1, high, tile, ((0, rows),))
    needed = ahead.ring_slots(matrix)
    assert taken(ahead, matrix, needed)
    assert needed == 1 or not taken(ahead, matrix, needed - 1)
