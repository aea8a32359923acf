"""How work is divided over blocks and how a matrix is cut into tiles."""

from __future__ import annotations

from functools import lru_cache

from twin.errors import PlanError
from twin.models.formats import Format
from twin.plan.types import Matrix, Options, Span

MOST_ROWS = 64  # of a tile of a narrow matrix: the sums of a batch of rows fit the scratch
# columns of a packed tile: as many as eight warps hold at once; tiles of 16 bits are narrower
WIDEST_TILE = 2048
COLUMN_STEP = 8  # a thread loads 8 values (16 bytes of a 16-bit type) at once


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
    even: bool = False,
) -> Matrix:
    """Choose the tile of a matrix so that one tile fills at most one ring slot. `format`: as
    stored, if not in the plan's weight type.

    `even`: column slices of one width, so that the slices of several matrices side by side are
    those of one wide matrix.
    """
    if cols % COLUMN_STEP:
        raise PlanError(
            f"a matrix has {cols} columns per rank; the kernel loads {COLUMN_STEP} at a time: use "
            "fewer GPUs or lanes"
        )

    def size(high: int, wide: int) -> int:
        return format.bytes(high, wide) if format else high * wide * options.weight_dtype.bytes

    # scales are not cut
    grain = (
        COLUMN_STEP if format is None or format.block[0] != 1 else max(COLUMN_STEP, format.block[1])
    )
    if size(options.tile_rows, cols) <= options.slot_bytes and (
        format is None or cols <= WIDEST_TILE
    ):
        fitting = max(options.tile_rows, min(options.slot_bytes // size(1, cols), MOST_ROWS))
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
        need = size(options.tile_rows, grain)
        raise PlanError(
            f"slot_bytes={options.slot_bytes} holds no tile of {options.tile_rows} rows: use at "
            f"least {need}"
        )
    slices = -(-cols // widest)
    if even:
        slices = next(
            n for n in range(slices, cols + 1) if cols % (n * grain) == 0 or n * grain >= cols
        )
    tile_cols = -(-cols // slices)  # slices of the same width, as nearly as the grain allows
    tile_cols += -tile_cols % grain
    return Matrix(rows, cols, unit, options.tile_rows, tile_cols, owned, format)
