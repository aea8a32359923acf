"""How an NVIDIA block's consumer warps share the tiles of a matrix.

A tile is taken by a team of warps. Each thread of a team holds `vector` neighbouring elements of
the stage's input in registers, for the columns that its team ever sees, and multiplies them with
all rows of its tiles. The kernel's other half of this division is TeamLayout in
native/platform/cuda_layout.cuh.

A block has TEAM_WARPS of them, two whole warp groups: with more, 96 to 160 registers a thread
spilled, and filled the first-level cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from twin.errors import PlanError
from twin.frozen import frozen
from twin.models.formats import LOAD_BITS
from twin.models.spec import DType
from twin.plan.catalogue import INPUTS
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.schedule.block import FOLD_COLUMNS, FOLDED_ROWS, ROWS_AT_ONCE, TEAM_WARPS, WARP

VECTORS = (8, 4)  # elements that a thread loads at once
LATE_AT_ONCE = 2  # elements of a thread of the scheduler warp whose late parts are loaded together
# of 232, for the vector and the weights: wider FP32 loads, from 136 on, made the compiler spill
THREAD_REGISTERS = 120


@frozen
class Team:
    """The division of one matrix shape over `warps` consumer warps."""

    cols: int
    tile: int  # columns of a tile
    vector: int
    size: int  # warps of a team; divides `warps`
    warps: int
    joined: int = 1  # equal matrices side by side, whose slices are their own

    @property
    def teams(self) -> int:
        return self.warps // self.size

    @property
    def slices(self) -> int:
        """Column slices, each a tile wide; the last one of each matrix may be narrower."""
        return self.joined * -(-self.cols // (self.joined * self.tile))

    @property
    def folds(self) -> int:
        """In which a team takes a tile that is wider than it holds at once."""
        return -(-self.tile // (self.size * WARP * self.vector))

    @property
    def portions(self) -> int:
        """Slices that one team sees, at most, or folds of its one slice."""
        return self.folds if self.folds > 1 else -(-self.slices // self.teams)

    @property
    def groups(self) -> int:
        """Teams that hold the same slice and take different rows."""
        return max(1, self.teams // self.slices)

    @property
    def full(self) -> bool:
        """Do all threads of a team hold columns of a whole slice?"""
        return self.tile == self.size * WARP * self.vector * self.folds

    @property
    def used(self) -> float:
        """Share of the threads' multiplications that are useful, 0 to 1."""
        return self.cols * self.groups / (self.portions * self.warps * WARP * self.vector)

    def registers(self, weight_bytes: int) -> int:
        """Of a thread: its part of the vector, and the weights of the rows under way and of those
        after them.
        """
        return self.portions * self.vector + 2 * ROWS_AT_ONCE * self.vector * weight_bytes // 4


NO_TEAM = Team(0, 1, 4, TEAM_WARPS, TEAM_WARPS)  # of an input that no matrix of a plan multiplies


def team_of(
    cols: int,
    tile: int,
    warps: int,
    *,
    weight_bytes: int = 2,
    pack: int = 0,
    joined: int = 1,
    folded: bool = False,
) -> Team | None:
    """The team that wastes least, with the fewest warps; None when all warps together do not cover
    a tile.

    Where the wider loads need more registers than a thread can spare, the narrower ones are taken.
    `pack`: of a plan with coded weights. `joined`, `folded`: as of a matrix.
    """
    if folded:
        return Team(cols, tile, FOLD_COLUMNS // WARP, 1, warps)
    found = []
    for vector in (pack,) if pack else VECTORS:
        if tile % vector or cols % vector:
            continue
        needed = -(-tile // (WARP * vector))
        sizes = [size for size in range(needed, warps + 1) if warps % size == 0]
        if sizes:
            found.append(Team(cols, tile, vector, sizes[0], warps, joined))
    return min(
        found,
        key=lambda team: (
            max(0, team.registers(weight_bytes) - THREAD_REGISTERS),
            -team.used,
            -team.vector,
        ),
        default=None,
    )


# every read of every block needs one, for a few shapes
_shaped = lru_cache(maxsize=1024)(team_of)


def team_for(matrix: Matrix, dtype: DType) -> Team | None:
    """`team_of` the shape of a matrix whose plan has weights of this type."""
    return _shaped(
        matrix.cols,
        matrix.tile_cols,
        TEAM_WARPS,
        weight_bytes=dtype.bytes,
        pack=matrix.pack,
        joined=matrix.joined,
        folded=matrix.folded,
    )


def rows_at_once(matrix: Matrix, dtype: DType) -> int:
    """Rows of a tile whose weights a thread has at once: of a coded plan as many bytes of each
    format.
    """
    if matrix.folded:
        return FOLDED_ROWS
    if not matrix.pack:
        return ROWS_AT_ONCE
    bits = matrix.format.bits if matrix.format else 8 * dtype.bytes
    return ROWS_AT_ONCE * LOAD_BITS // (matrix.pack * bits)


def teams_by_input(plan: Plan, matrices: tuple[Matrix | None, ...]) -> Mapping[str, Team]:
    """The team of each kind of input, NO_TEAM where no matrix multiplies it. `matrices`: [stages]
    as a block multiplies them.

    Raises PlanError for tiles that the warps of a block do not cover, and for tiles of more rows
    than a team of several slices takes.
    """
    shapes: dict[str, Matrix] = {}
    for stage, matrix in zip(plan.stages, matrices, strict=True):
        name = plan.input_of(stage)
        if matrix and name:
            shapes[name] = matrix
    dtype = plan.options.weight_dtype
    made = {name: team_for(matrix, dtype) for name, matrix in shapes.items()}
    if None in made.values():
        widest = max(matrix.tile_cols for matrix in shapes.values())
        most_bytes = plan.options.tile_rows * TEAM_WARPS * WARP * max(VECTORS) * dtype.bytes
        raise PlanError(
            f"tiles of {widest} columns are wider than a block's {TEAM_WARPS} warps take at once: "
            f"use slot_bytes={most_bytes} or less"
        )
    for name, matrix in shapes.items():
        team, most = made[name], rows_at_once(matrix, dtype)
        if team and team.slices > team.teams and matrix.tile_rows > most:
            raise PlanError(
                f"tile_rows={plan.options.tile_rows}: tiles of {matrix.tile_rows} rows, and a "
                f"block takes {most} rows of a matrix of {matrix.cols} columns at once; use "
                f"tile_rows={ROWS_AT_ONCE}"
            )
    return {name: made.get(name) or NO_TEAM for name in INPUTS}
