"""How the matrices of a plan are cut into tiles, of which a ring slot holds one."""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.frozen import frozen
from twin.models.formats import UNIT_BYTES
from twin.plan.catalogue import Input, StageKind, input_of
from twin.plan.coding import COLUMN_STEP, Coding, coding_of
from twin.plan.matrix import Matrix, Span
from twin.plan.options import Options
from twin.plan.settle import as_stored
from twin.plan.types import Plan, Stage
from twin.schedule.block import FOLD_COLUMNS, ROWS_AT_ONCE, TEAM_WARPS, WARP
from twin.schedule.coded_tiles import MOST_ROWS, WORTHWHILE, SmallSlot, cut_coded

# columns of a packed tile: as many as eight warps hold at once; tiles of 16 bits are narrower
WIDEST_TILE = 2048
TEAM_COLUMNS = 1024  # of which all eight warps hold neighbours, by fours or, four warps, by eights
# narrow slices of one width that a matrix has at most; of more, threads that ask whether they have
# columns spill
MOST_EVEN = 4
LEAST_ROWS = 6  # of a low tile: a piece of it costs as much as one of ROWS_AT_ONCE


def tiled(plan: Plan, cutter: Cutter) -> Plan:
    """The plan with the tile of each matrix. Raises SmallSlot where a ring slot holds none, and
    PlanError for rows and columns that a thread's loads do not take.
    """
    return replace(plan, stages=tuple(cutter.stage(stage) for stage in plan.stages))


def cutter_of(plan: Plan, *, teams: bool = False) -> Cutter:
    """`teams`: as of a Cutter."""
    spec, options = plan.spec, plan.options
    if spec is None:
        forms = {m.format for stage in plan.stages for m in stage.matrices if m.format}
        return Cutter(options, coding_of(forms, 1))
    coding = coding_of(spec.coded, plan.ranks) if as_stored(spec, options, plan.limits) else None
    dense = spec.experts is None and not spec.layout and not coding
    folded = teams and plan.ranks == 1 and dense and options.weight_dtype.bytes == 2
    return Cutter(options, coding, teams=teams, folded=folded)


@frozen
class Cutter:
    """Cuts the matrices of one plan."""

    options: Options
    coding: Coding | None = None  # of a plan whose weights are coded
    teams: bool = False  # of a plan that the engine runs: teams of warps multiply
    # may an NVIDIA block's warps take rows of the residual's matrices by themselves?
    folded: bool = False

    def stage(self, stage: Stage) -> Stage:
        """The stage with tiles. Raises PlanError for low-bit experts that are no whole tiles:
        blocks beyond the last tile have no rows.
        """
        if stage.matrix is None:
            return stage
        top_k = stage.routed.top_k if stage.routed else 0
        own, *more = (self._cut(stage.kind, matrix, top_k) for matrix in stage.matrices)
        if stage.kind is StageKind.ROUTED_UP and own.pack and own.rows % own.tile_rows:
            raise PlanError(
                f"{stage.name}: an expert's {own.rows} gate and up rows are no whole tiles of "
                f"{own.tile_rows} rows: use tile_rows={ROWS_AT_ONCE}"
            )
        hidden = self.folded and input_of(stage.kind, routed=False) is Input.HIDDEN
        own = replace(own, folded=hidden and folds(own))
        return replace(stage, matrix=own, more=tuple(more))

    def _cut(self, kind: StageKind, matrix: Matrix, top_k: int) -> Matrix:
        """Slices of a token's experts side by side are those of one wide matrix (chosen.py)."""
        plain, down = matrix.format is None, kind is StageKind.ROUTED_DOWN
        even = down and (plain or self.coding is not None)
        if self.coding:
            single = even or kind is StageKind.ROUTED_UP
            return cut_coded(matrix, self.coding, self.options, even=even, single=single)
        joined = top_k if down and plain and self.teams else 0
        return cut(matrix, self.options, even=even, joined=joined)


def cut(matrix: Matrix, options: Options, *, even: bool = False, joined: int = 0) -> Matrix:
    """The matrix with a tile that fills at most one ring slot.

    `even`: column slices of one width, so that the slices of several matrices side by side are
    those of one wide matrix. `joined`: so many of these matrices are one for the teams of an NVIDIA
    block. A team that holds columns of several takes tiles of few rows.
    """
    cols, format = matrix.cols, matrix.format
    if cols % COLUMN_STEP:
        raise PlanError(
            f"a matrix has {cols} columns per rank; the kernel loads {COLUMN_STEP} at a time: use "
            "fewer GPUs or lanes"
        )

    def size(high: int, wide: int) -> int:
        return format.bytes(high, wide) if format else high * wide * options.weight_dtype.bytes

    grain = max(COLUMN_STEP, format.row_group if format else 1)  # scales are not cut
    if size(options.tile_rows, cols) <= options.slot_bytes and (
        format is None or cols <= WIDEST_TILE
    ):
        most = MOST_ROWS
        if joined > teams_joined(cols, options.weight_dtype.bytes):
            most = ROWS_AT_ONCE
        fitting = max(options.tile_rows, min(options.slot_bytes // size(1, cols), most))
        tile_rows = fitting - fitting % options.tile_rows
        while size(tile_rows, cols) > options.slot_bytes:
            tile_rows -= options.tile_rows
        return replace(matrix, tile_rows=tile_rows, tile_cols=cols)
    widest = options.slot_bytes * COLUMN_STEP // size(options.tile_rows, COLUMN_STEP)
    if format is not None:
        widest = min(WIDEST_TILE, options.slot_bytes * 8 // (options.tile_rows * format.bits))
    widest -= widest % grain
    while widest > 0 and size(options.tile_rows, widest) > options.slot_bytes:
        widest -= grain
    if widest <= 0:
        raise SmallSlot(options.slot_bytes, options.tile_rows, size(options.tile_rows, grain))
    slices = -(-cols // widest)
    if even:
        slices = next(
            n for n in range(slices, cols + 1) if cols % (n * grain) == 0 or n * grain >= cols
        )
    tile_cols = -(-cols // slices)  # slices of the same width, as nearly as the grain allows
    tile_cols += -tile_cols % grain
    # Warps that all hold columns need no conditions; the last slice is short then. Of two slices
    # each is a team's last.
    whole = widest // TEAM_COLUMNS * TEAM_COLUMNS
    high = options.tile_rows
    if format is None and not even and slices > 2:
        low = low_rows(matrix.unit, matrix.owned, high)
        if whole and -(-cols // whole) == slices:
            tile_cols = whole
        elif (
            slices > min(MOST_EVEN, -(-cols // TEAM_COLUMNS)) > 1
            and low < high
            and size(low, TEAM_COLUMNS) <= options.slot_bytes
        ):
            high, tile_cols = low, TEAM_COLUMNS
    return replace(matrix, tile_rows=high, tile_cols=tile_cols)


def folds(matrix: Matrix) -> bool:
    """Are more of an NVIDIA block's products of use where each warp takes rows by itself, in folds,
    than where warps share them? Of 16-bit matrices whose tiles are whole rows.

    Eight warps hold 2,048 columns, of which 1,152 are 0.56; of five folds they are 0.9. Gemma-3-1B
    takes an H200 14 % less time so. In tiles of four rows, of wider residuals, folds took more
    (studies/h200-history/tried.md).
    """
    whole = matrix.tile_cols == matrix.cols and matrix.tile_rows == ROWS_AT_ONCE
    if matrix.format is not None or not whole or not TEAM_COLUMNS < matrix.cols <= WIDEST_TILE:
        return False
    shared, folded = WIDEST_TILE, -(-matrix.cols // FOLD_COLUMNS) * FOLD_COLUMNS
    return shared >= WORTHWHILE * folded


def low_rows(unit: int, owned: tuple[Span, ...], tile_rows: int) -> int:
    """Rows of the lowest tiles of which a block has no more than of `tile_rows` rows; no lower ones
    of elements of several rows.
    """
    share = max((hi - lo for lo, hi in owned), default=0)
    groups = -(-share // tile_rows)
    if unit > 1 or groups == 0:
        return tile_rows
    return min(tile_rows, max(LEAST_ROWS, -(-share // groups)))


def tight_bytes(matrix: Matrix, weight_bytes: int) -> int:
    """Of the smallest slot that takes no more tiles of a matrix: its slices of one width, or lower
    tiles of whole teams' columns.
    """
    elements = matrix.tile_rows * matrix.tile_cols
    if matrix.slices <= MOST_EVEN:
        elements = matrix.tile_rows * -(-matrix.cols // (matrix.slices * COLUMN_STEP)) * COLUMN_STEP
    if matrix.tile_cols == TEAM_COLUMNS < matrix.cols:
        low = low_rows(matrix.unit, matrix.owned, matrix.tile_rows)
        elements = min(elements, low * TEAM_COLUMNS)
    return elements * weight_bytes


def teams_joined(cols: int, weight_bytes: int) -> int:
    """Teams of an NVIDIA block that hold slices of `cols` columns: a thread loads 16 bytes of a row
    at once, and a team is a power of two of warps.
    """
    warps = -(-cols * weight_bytes // (WARP * UNIT_BYTES))
    return max(1, TEAM_WARPS >> (warps - 1).bit_length())
