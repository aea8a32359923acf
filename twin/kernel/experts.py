"""Where the kernel finds routed experts: which tiles lie where in memory, what a router and its
neighbours are to C++. To its warps a stage's chosen experts are one matrix
(twin/schedule/chosen.py).
"""

from __future__ import annotations

from twin.frozen import frozen
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.schedule.block import up
from twin.schedule.memory import CONTEST

# of a stage, where a plan has experts
FIELDS = ("expert_page", "expert_units", "expert_rows", "expert_cols")
CODED_FIELDS = ("expert_group", "expert_gap")  # also, where it has low-bit weights


@frozen
class Place:
    """Where the experts of a stage lie behind a rank's streams: [experts][column
    slices][rows][columns of a slice].

    In a plan with low-bit weights it is [experts][row groups][column slices] of whole tiles with
    their scales. Where each block has rows of its own, its groups begin with the first of them.
    `gap` then is the most that a block's last group fills up, and lies between any two blocks.
    """

    page: int  # of expert 0
    units: int  # from expert to expert
    rows: int  # of one expert
    cols: int
    group: int = 0  # units of a whole row group
    gap: int = 0  # units between blocks


def places(
    plan: Plan, page: int, *, page_bytes: int, unit_bytes: int
) -> tuple[dict[int, Place], int]:
    """By stage, from `page` on; and the first page behind them. Tiles are whole units, for a row of
    any slice is.
    """
    found = {}
    for stage in plan.stages if plan.kernel_routed else ():
        if stage.routed is None or stage.matrix is None:
            continue
        matrix = stage.matrix
        if plan.coded:
            found[stage.index] = _coded_place(plan, matrix, page, unit_bytes)
        else:
            size = matrix.rows * matrix.cols * plan.options.weight_dtype.bytes
            found[stage.index] = Place(page, size // unit_bytes, matrix.rows, matrix.cols)
        size = found[stage.index].units * unit_bytes
        page += -(-size * stage.routed.experts // page_bytes)
    return found, page


def _coded_place(plan: Plan, matrix: Matrix, page: int, unit_bytes: int) -> Place:
    high = matrix.tile_rows
    group = _group_units(plan, matrix, high, unit_bytes)
    gap = 0
    for lo, hi in matrix.owned:
        whole, rest = divmod(hi - lo, high)
        units = whole * group + (_group_units(plan, matrix, rest, unit_bytes) if rest else 0)
        gap = max(gap, units - (hi - lo) * group // high)
    units = -(-matrix.rows * group // high) + gap * len(matrix.owned)
    return Place(page, units, matrix.rows, matrix.cols, group, gap)


def _group_units(plan: Plan, matrix: Matrix, rows: int, unit_bytes: int) -> int:
    """Of all column slices of some rows."""
    whole, rest = divmod(matrix.cols, matrix.tile_cols)
    sizes = [plan.stored_bytes(matrix, rows, cols) for cols in (matrix.tile_cols, rest) if cols]
    return (whole * sizes[0] + sum(sizes[1:])) // unit_bytes


def fields(place: Place | None, names: tuple[str, ...]) -> dict[str, int]:
    """FIELDS, and those of CODED_FIELDS that the plan has; zeros where a stage has no experts."""
    return {name: getattr(place, name.removeprefix("expert_")) if place else 0 for name in names}


def compared(experts: int, top_k: int, threads: int) -> int:
    """Others' logits that each of a block's threads looks at until the choice is made: of all
    experts, or of a group's, and then of those that come first in their groups.
    """
    groups = -(-experts // CONTEST)
    each = up(-(-experts // groups), 2)
    if groups == 1 or experts - (groups - 1) * each < top_k:
        return -(-experts // threads) * experts
    final = groups * top_k
    return -(-experts // threads) * each + -(-final // threads) * final
