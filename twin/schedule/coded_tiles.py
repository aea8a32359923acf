"""Tiles of a plan with coded weights: columns by the narrowest format, rows as many as the slot
then holds.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from twin.errors import PlanError
from twin.models.formats import PACK, UNIT_BYTES, Format
from twin.plan.coding import BYTE_BITS, COLUMN_STEP, Coding
from twin.plan.matrix import Matrix
from twin.plan.options import Options
from twin.schedule.block import LINE_BYTES, TEAM_WARPS, WARP

MOST_ROWS = 64  # of a tile of a narrow matrix: the sums of a batch of rows fit the scratch
COVERED_THREADS = WARP * TEAM_WARPS  # which share the columns of a coded tile
WORTHWHILE = 1.1  # times as many threads busy that narrower tiles must bring
# times as wide that tiles of experts' columns are which are better uneven: few bytes of narrow ones
# are under way
NARROW = 2
BLOCK_COLUMNS = 2048  # of a tile in a plan with GGUF's blocks, at most


class SmallSlot(PlanError):
    """A ring slot holds no tile of a matrix; one of `need` bytes does."""

    def __init__(self, slot_bytes: int, rows: int, need: int) -> None:
        self.rows, self.need = rows, need + -need % UNIT_BYTES
        super().__init__(
            f"slot_bytes={slot_bytes} holds no tile of {rows} rows: use at least {self.need}"
        )


def coded_slot_bytes(forms: Collection[Format], least: int) -> int:
    """A slot that holds tiles with `least` bytes of codes and the scales behind them, in whole
    lines.
    """
    loads = COLUMN_STEP * BYTE_BITS  # bits of a column's rows that are loaded at once
    if any(form.interleaved for form in forms):
        least *= 2  # of FP16 as many columns of COLUMN_STEP rows
        sizes = [form.bytes(form.interleaved or 1, BLOCK_COLUMNS) for form in forms]
    else:
        sizes = [form.bytes(loads // form.bits, least // COLUMN_STEP) for form in forms]
    return max([least, *(-(-size // LINE_BYTES) * LINE_BYTES for size in sizes)])


def _better_covered(cols: int, widest: int, grain: int) -> int:
    """Even slices, down to half as wide, whose warps' threads have more to multiply: 2,880 columns
    in three slices are 60 of the 64 threads of two warps each, in two 90 of 128.
    """
    narrower = range(widest - grain, widest // 2, -grain)
    found = max((wide for wide in narrower if cols % wide == 0), key=_covered, default=widest)
    return found if _covered(found) >= WORTHWHILE * _covered(widest) else widest


def _better_uneven(cols: int, even: int, uneven: int) -> bool:
    """Are tiles of `uneven` columns, the last of them narrower, much wider than even ones, or do
    they keep more threads busy: 10,368 columns in nine slices are 72 of 128 threads each, in six
    108.
    """
    if not uneven:
        return False
    held = -(-cols // uneven) * uneven / _covered(uneven)
    return NARROW * even < uneven or WORTHWHILE * held < cols / _covered(even)


def _covered(cols: int) -> float:
    """The share of the threads that hold a slice which have columns of it."""
    return cols / _held(cols)


def _held(cols: int) -> int:
    """Columns that the fewest warps which hold a slice, 1, 2, 4 or 8, have threads for."""
    held = WARP * PACK
    while held < cols:
        held *= 2
    return held


def cut_coded(
    matrix: Matrix, coding: Coding, options: Options, *, even: bool, single: bool
) -> Matrix:
    """The matrix with its tile. `even`: column slices of one width. `single`: tiles of no more rows
    than a warp multiplies at once. Raises SmallSlot, and PlanError for columns that no load takes.
    """
    bits = matrix.format.bits if matrix.format else 8 * options.weight_dtype.bytes
    if matrix.cols % coding.share:
        raise PlanError(
            f"a matrix has {matrix.cols} columns per rank; {coding.narrowest.name} weights take "
            f"multiples of {coding.share}: use fewer GPUs or lanes"
        )
    if coding.blocks:
        return _cut_blocks(matrix, coding, coding.blocks, options, even=even)
    at_once = coding.rows_at_once(matrix.format, options)
    narrow = options.tile_rows * BYTE_BITS // coding.narrowest.bits

    def size(high: int, wide: int) -> int:
        return matrix.format.bytes(high, wide) if matrix.format else high * wide * bits // 8

    def need_of(wide: int) -> int:
        return max(size(at_once, wide), coding.narrowest.bytes(narrow, wide))

    def filled(wide: int, slices: int) -> int:
        """The width that gives all threads columns, if there are no fewer slices then and it fits:
        such threads need no conditions, and the last slice is narrow. Of two slices each is a
        team's last.
        """
        held = _held(wide)
        as_many = -(-matrix.cols // held) == slices
        fits = held % coding.grain == 0 and need_of(held) <= options.slot_bytes
        return held if as_many and fits else wide

    need = 0
    uneven = 0  # the widest tile whose last one is narrower
    for slices in range(1, -(-matrix.cols // coding.grain) + 1):
        wide = min(matrix.cols, -(-matrix.cols // (slices * coding.grain)) * coding.grain)
        if wide > PACK * COVERED_THREADS:
            continue
        need = need_of(wide)
        if need > options.slot_bytes:
            continue
        if even and matrix.cols % wide:
            uneven = uneven or wide
            continue
        if even:
            wide = _better_covered(matrix.cols, wide, coding.grain)
            if _better_uneven(matrix.cols, wide, uneven):
                break
        elif slices > 2:
            wide = filled(wide, slices)
        high = at_once
        while (
            slices == 1
            and not single
            and high + at_once <= MOST_ROWS
            and size(high + at_once, wide) <= options.slot_bytes
        ):
            high += at_once
        return replace(matrix, tile_rows=high, tile_cols=wide, pack=PACK)
    if uneven:
        return replace(matrix, tile_rows=at_once, tile_cols=uneven, pack=PACK)
    raise SmallSlot(options.slot_bytes, at_once, need)


def _cut_blocks(
    matrix: Matrix, coding: Coding, widest: Format, options: Options, *, even: bool
) -> Matrix:
    """The same where some matrices are GGUF's blocks: tiles of as many rows as are interleaved, of
    one width whatever their format.
    """
    plain = COLUMN_STEP * options.weight_dtype.bytes  # of a column
    need = 0
    for slices in range(1, -(-matrix.cols // coding.grain) + 1):
        wide = min(matrix.cols, -(-matrix.cols // (slices * coding.grain)) * coding.grain)
        need = max(widest.bytes(widest.interleaved, wide), plain * wide)
        if (
            wide <= BLOCK_COLUMNS
            and need <= options.slot_bytes
            and not (even and matrix.cols % wide)
        ):
            high = coding.rows_at_once(matrix.format, options)
            return replace(matrix, tile_rows=high, tile_cols=wide, pack=PACK)
    raise SmallSlot(options.slot_bytes, widest.interleaved, need)
