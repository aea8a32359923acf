"""How work is divided over blocks and how a matrix is cut into tiles."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache

from twin.errors import PlanError
from twin.models.formats import PACK, UNIT_BYTES, Format
from twin.plan.types import Matrix, Options, Span

MOST_ROWS = 64  # of a tile of a narrow matrix: the sums of a batch of rows fit the scratch
# columns of a packed tile: as many as eight warps hold at once; tiles of 16 bits are narrower
WIDEST_TILE = 2048
TEAM_COLUMNS = 1024  # of which all eight warps hold neighbours, by fours or, four warps, by eights
WARP, TEAM_WARPS = 32, 8  # of a GPU's block: threads of a warp, warps that multiply
COVERED_THREADS = WARP * TEAM_WARPS  # which share the columns of a coded tile
# of a tile: their weights, and those of the next ones, are in a thread's registers
ROWS_AT_ONCE = 8
# the same of a warp that takes its rows in column folds, of so many columns each
FOLDED_ROWS, FOLD_COLUMNS = 4, 256
# narrow slices of one width that a matrix has at most; of more, threads that ask whether they have
# columns spill
MOST_EVEN = 4
LEAST_ROWS = 6  # of a low tile: a piece of it costs as much as one of ROWS_AT_ONCE
WORTHWHILE = 1.1  # times as many threads busy that narrower tiles must bring
# times as wide that tiles of experts' columns are which are better uneven: few bytes of narrow ones
# are under way
NARROW = 2
LINE_BYTES = 128
BYTE_BITS = 8
BLOCK_COLUMNS = 2048  # of a tile in a plan with GGUF's blocks, at most
COLUMN_STEP = 8  # a thread loads 8 values (16 bytes of a 16-bit type) at once


class SmallSlot(PlanError):
    """A ring slot holds no tile of a matrix; one of `need` bytes does."""

    def __init__(self, slot_bytes: int, rows: int, need: int) -> None:
        self.rows, self.need = rows, need + -need % UNIT_BYTES
        super().__init__(
            f"slot_bytes={slot_bytes} holds no tile of {rows} rows: use at least {self.need}"
        )


@lru_cache(maxsize=1024)
def spread(count: int, blocks: int, shift: int = 0) -> tuple[Span, ...]:
    """Contiguous spans in block order; the `count % blocks` longer ones start at block `shift`.

    Stages rotate `shift` so that over a step every block streams the same bytes within one row.
    Equal shares are one object, which whoever compares spans later sees at once.
    """
    base, longer = divmod(count, blocks)
    spans, lo = [], 0
    for block in range(blocks):
        hi = lo + base + ((block - shift) % blocks < longer)
        spans.append((lo, hi))
        lo = hi
    return tuple(spans)


@lru_cache(maxsize=1024)
def spread_beside(
    count: int, items: tuple[Span, ...], rows: int, shift: int = 0
) -> tuple[Span, ...]:
    """Contiguous spans in block order: `rows` for each block that has items, an equal share of the
    others for each one that has none, of which the longer ones start at the `shift`th of these.
    """
    free = sum(lo == hi for lo, hi in items)
    rest = spread(count - rows * (len(items) - free), free, shift % free)
    sizes = iter(hi - lo for lo, hi in rest)
    spans, lo = [], 0
    for first, last in items:
        hi = lo + (rows if first < last else next(sizes))
        spans.append((lo, hi))
        lo = hi
    return tuple(spans)


def share(name: str, ranks: int, what: str, count: int) -> int:
    """What one rank has of `count` equal things of the model `name`. Raises PlanError."""
    if count % ranks:
        raise PlanError(
            f"{name}: {count} {what} do not divide over {ranks} ranks: choose a tensor-parallel "
            "degree that does"
        )
    return count // ranks


def kv_share(name: str, ranks: int, kv_heads: int) -> int:
    """KV heads of one rank, replicated when there are more ranks than KV heads. Raises
    PlanError.
    """
    if kv_heads % ranks and ranks % kv_heads:
        raise PlanError(
            f"{name}: {kv_heads} KV heads neither divide over {ranks} ranks nor replicate evenly"
        )
    return max(1, kv_heads // ranks)


@lru_cache(maxsize=1024)
def scatter(count: int, blocks: int) -> tuple[Span, ...]:
    """Spans of few items spread evenly over many blocks: item i goes near block i * blocks /
    count.
    """
    return tuple(
        (block * count // blocks, (block + 1) * count // blocks) for block in range(blocks)
    )


def cut(
    *,
    rows: int,
    cols: int,
    unit: int,
    owned: tuple[Span, ...],
    options: Options,
    format: Format | None = None,
    coding: Coding | None = None,
    even: bool = False,
    single: bool = False,
    beside: int = 0,
) -> Matrix:
    """Choose the tile of a matrix so that one tile fills at most one ring slot. `format`: as
    stored, if not in the plan's weight type.

    `coding`: of a plan with coded weights.

    `even`: column slices of one width, so that the slices of several matrices side by side are
    those of one wide matrix; of a coded plan unless narrow ones alone are even. `single`: beside
    few-bit weights, tiles of no more rows than a warp multiplies at once.

    `beside`: so many of these matrices are one for the teams of an NVIDIA block. A team that holds
    columns of several takes tiles of few rows.
    """
    if coding:
        matrix = Matrix(rows, cols, unit, 0, 0, owned, format)
        return _cut_coded(matrix, coding, options, even=even, single=single or even)
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
        if beside > teams_beside(cols, options.weight_dtype.bytes):
            most = ROWS_AT_ONCE
        fitting = max(options.tile_rows, min(options.slot_bytes // size(1, cols), most))
        tile_rows = fitting - fitting % options.tile_rows
        while size(tile_rows, cols) > options.slot_bytes:
            tile_rows -= options.tile_rows
        return Matrix(rows, cols, unit, tile_rows, cols, owned, format)
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
        low = low_rows(unit, owned, high)
        if whole and -(-cols // whole) == slices:
            tile_cols = whole
        elif (
            slices > min(MOST_EVEN, -(-cols // TEAM_COLUMNS)) > 1
            and low < high
            and size(low, TEAM_COLUMNS) <= options.slot_bytes
        ):
            high, tile_cols = low, TEAM_COLUMNS
    return Matrix(rows, cols, unit, high, tile_cols, owned, format)


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


def teams_beside(cols: int, weight_bytes: int) -> int:
    """Teams of an NVIDIA block that hold slices of `cols` columns: a thread loads 16 bytes of a row
    at once, and a team is a power of two of warps.
    """
    warps = -(-cols * weight_bytes // (WARP * UNIT_BYTES))
    return max(1, TEAM_WARPS >> (warps - 1).bit_length())


# ---- coded weights -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Coding:
    """What all matrices of a plan with coded weights have in common, those of its weight type too.

    A thread of a GPU holds PACK elements of a stage's input in a row, whatever the matrix's
    format. So a stage's input is laid out once for all matrices that multiply it.
    """

    narrowest: Format
    grain: int  # columns that no tile divides
    ranks: int
    blocks: Format | None = None  # the widest of GGUF's, where it has some

    @property
    def share(self) -> int:
        """Columns of a matrix are a multiple of it: whole loads; of a rank's part of a larger one,
        whole blocks.
        """
        return self.grain if self.ranks > 1 else PACK


def coding_of(forms: Collection[Format], ranks: int) -> Coding | None:
    """Of a plan with weights in these coded formats; None without any."""
    if not forms:
        return None
    in_blocks = [form for form in forms if form.interleaved]
    return Coding(
        min(forms, key=lambda form: form.bits),
        max(form.grain for form in forms),
        ranks,
        max(in_blocks, key=lambda form: form.bytes(1, form.grain) / form.grain, default=None),
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


def _cut_coded(
    matrix: Matrix, coding: Coding, options: Options, *, even: bool, single: bool
) -> Matrix:
    """The same with the tile of a coded plan: columns by the narrowest format, rows as many as the
    slot then holds.
    """
    bits = matrix.format.bits if matrix.format else 8 * options.weight_dtype.bytes
    if matrix.cols % coding.share:
        raise PlanError(
            f"a matrix has {matrix.cols} columns per rank; {coding.narrowest.name} weights take "
            f"multiples of {coding.share}: use fewer GPUs or lanes"
        )
    if coding.blocks:
        return _cut_blocks(matrix, coding, coding.blocks, options, even=even)
    at_once = options.tile_rows * BYTE_BITS // bits
    if at_once % 2 or not at_once:
        raise PlanError(
            f"tile_rows={options.tile_rows}: beside {coding.narrowest.name} a tile of {bits} bits "
            f"has {options.tile_rows * BYTE_BITS / bits:g} rows, and these are even: use "
            f"tile_rows={ROWS_AT_ONCE}"
        )
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
            high = matrix.format.interleaved if matrix.format else COLUMN_STEP
            return replace(matrix, tile_rows=high or COLUMN_STEP, tile_cols=wide, pack=PACK)
    raise SmallSlot(options.slot_bytes, widest.interleaved, need)
