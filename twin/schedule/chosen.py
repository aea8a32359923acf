"""How a block sees a token's routed experts: one wide matrix for each stage.

ROUTED_UP is a matrix of all chosen experts' rows, one expert below the other, and ROUTED_DOWN one
of all their columns, side by side. So their products are those of any matrix; only a tile's address
depends on the choice.
"""

from __future__ import annotations

from dataclasses import replace

from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.types import Plan, Stage


def multiplied(plan: Plan) -> tuple[Matrix | None, ...]:
    """[stages] The matrix that a block multiplies for one token."""
    if not plan.kernel_routed:
        return tuple(stage.matrix for stage in plan.stages)
    return tuple(of_all_chosen(plan, stage) for stage in plan.stages)


def of_all_chosen(plan: Plan, stage: Stage) -> Matrix | None:
    """The rows or columns of a token's chosen experts as one matrix, which they are to warps; of a
    stage without experts its own.
    """
    matrix, routed = stage.matrix, stage.routed
    if matrix is None or routed is None:
        return matrix
    if stage.kind is StageKind.ROUTED_DOWN:
        return side_by_side(matrix, routed.top_k)
    assert stage.publishes is not None
    owned = plan.values[stage.publishes].owned
    rows = tuple((matrix.unit * lo, matrix.unit * hi) for lo, hi in owned)
    return replace(matrix, rows=routed.top_k * matrix.rows, owned=rows)


def side_by_side(matrix: Matrix, experts: int) -> Matrix:
    """The columns of so many experts, each with `matrix`, as one."""
    return replace(matrix, cols=experts * matrix.cols, joined=experts)
