"""How an NVIDIA block's consumer warps share the tiles of a matrix.

A tile is taken by a team of warps. Each lane of a team holds `vector` neighbouring elements of the stage's input in
registers, for the columns that its team ever sees, and multiplies them with all rows of its tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from twin.errors import PlanError
from twin.plan.types import Matrix, Plan, StageKind

WARP = 32
WARPS = (8,)  # consumer warps, whole warp groups: with more, 96 to 160 registers a thread were too few and spills filled the first-level cache
ROWS_AT_ONCE = 8  # as in cuda_vector.cuh
VECTORS = (8, 4)  # elements of one 16- or 8-byte load of 16-bit weights


@dataclass(frozen=True, slots=True)
class Team:
    """The division of one matrix shape over `warps` consumer warps."""

    cols: int
    tile: int  # columns of a tile
    vector: int
    size: int  # warps of a team; divides `warps`
    warps: int

    @property
    def teams(self) -> int:
        return self.warps // self.size

    @property
    def slices(self) -> int:
        return -(-self.cols // self.tile)

    @property
    def block_bytes(self) -> int:
        """The vector as FP32 in the registers of a block: some teams may hold the same slices."""
        return 4 * self.warps * WARP * self.vector * -(-self.slices // self.teams)

    @property
    def used(self) -> float:
        """Share of the lanes' multiplications that are useful, 0 to 1."""
        groups = max(1, self.teams // self.slices)
        chunks = -(-self.slices // self.teams)
        return self.cols / (groups and chunks * self.teams / groups * self.size * WARP * self.vector)


def team_of(cols: int, tile: int, warps: int) -> Team | None:
    """The team that wastes least, with the fewest warps; None when all warps together do not cover a tile."""
    found = []
    for at, vector in enumerate(VECTORS):
        if tile % vector or cols % vector:
            continue
        needed = -(-tile // (WARP * vector))
        sizes = [size for size in range(needed, warps + 1) if warps % size == 0]
        if sizes:
            team = Team(cols, tile, vector, sizes[0], warps)
            found.append((-team.used, at, team))
    return min(found, key=lambda entry: entry[:2])[2] if found else None


@dataclass(frozen=True, slots=True)
class Teams:
    """Of the matrices whose input is the residual stream (a probe's matrix too), the attention heads, the feed-forward."""

    warps: int
    hidden: Team
    heads: Team
    ffn: Team


KINDS = {
    "hidden": (StageKind.QKV, StageKind.GATE_UP, StageKind.LM_HEAD, StageKind.STREAM),
    "heads": (StageKind.O_PROJ,),
    "ffn": (StageKind.DOWN,),
}


@lru_cache(maxsize=64)
def teams_of(plan: Plan) -> Teams:
    """The number of consumer warps that wastes least, weighed by the weights that a step streams."""
    shapes: dict[str, Matrix] = {}
    weights: dict[str, int] = dict.fromkeys(KINDS, 0)
    for stage in plan.stages:
        for name, kinds in KINDS.items():
            if stage.matrix and stage.kind in kinds:
                shapes[name] = stage.matrix
                weights[name] += stage.matrix.rows * stage.matrix.cols

    def division(warps: int) -> dict[str, Team | None]:
        return {name: team_of(matrix.cols, matrix.tile_cols, warps) for name, matrix in shapes.items()}

    def time(warps: int) -> float:
        wasted = sum(weights[name] / team.used if team else math.inf for name, team in division(warps).items())
        return wasted * (WARPS[0] / warps) ** 0.25  # judged: more warps hide more latency

    warps = min(WARPS, key=time)
    if math.isinf(time(warps)):
        widest = max(matrix.tile_cols for matrix in shapes.values())
        raise PlanError(f"tiles of {widest} columns are wider than a block's {WARPS[0]} warps take at once: use a smaller slot_bytes")
    for name, matrix in shapes.items():
        team = division(warps)[name]
        if team and team.slices > team.teams and matrix.tile_rows > ROWS_AT_ONCE:
            raise PlanError(
                f"tile_rows={matrix.tile_rows}: a block takes {ROWS_AT_ONCE} rows of a matrix of {matrix.cols} columns at once; use tile_rows=8"
            )
    none = Team(0, 1, 4, warps, warps)
    made = division(warps)
    return Teams(warps, *(made.get(name) or none for name in KINDS))
