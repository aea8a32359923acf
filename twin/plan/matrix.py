"""Weights of a stage as blocks stream them: matrices, tiles, those of chosen experts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from twin.frozen import frozen
from twin.models.formats import Format

# rows of a matrix between two block barriers, in whole tiles; a tile of more rows is a batch of its
# own
BATCH_ROWS = 64
# where few warps share a row; Stage::tile_inverse of the kernel is exact up to there
MOST_BATCH_ROWS = 256
MOST_WARPS = 16  # of a block: each has partial sums of a tile's rows, and attention partials
WARP_COLUMNS = 128  # fewest of a tile that a warp covers
CONV_UNIT = 3  # rows of a channel of a short convolution: b, c, x
Span = tuple[int, int]  # elements lo..hi-1; lo == hi is empty


@frozen
class Matrix:
    """Weights of one stage on one rank: [rows, cols], row-major; `unit` rows make one published
    element.

    Of routed experts, one expert's. Where the blocks divide the chosen experts' rows among
    themselves, nobody owns rows (`owned` is empty).
    """

    rows: int
    cols: int
    unit: int  # 2 for gate_up with gates (gate row, up row interleaved), 3 of CONV_IN, else 1
    tile_rows: int  # a tile is tile_rows x tile_cols, one ring slot; tails are smaller
    tile_cols: int
    owned: tuple[Span, ...]  # [blocks] rows of each block
    format: Format | None = None  # as stored; None: the plan's weight type
    # elements of a row that a GPU's thread holds at once; 0: what suits the weight type
    pack: int = 0
    # equal matrices side by side that are one to whoever multiplies them; no slice has columns of
    # two
    joined: int = 1
    # a GPU's warp takes rows of a tile by itself, in column folds: all of a row is in one tile
    folded: bool = False

    @property
    def slices(self) -> int:
        """Column slices, each a tile wide; the last one of each matrix may be narrower."""
        return self.joined * -(-self.cols // (self.joined * self.tile_cols))

    @property
    def share_step(self) -> int:
        """Elements that blocks do not divide where they share the chosen experts' rows: a tile of
        low-bit weights lies in memory with its scales.
        """
        return self.tile_rows // self.unit if self.pack else 1

    @property
    def batch_rows(self) -> int:
        """Most rows that a block multiplies between two barriers: the fewer share a row, the more
        rows' partial sums have room.

        Not in folds: with 256 rows at once Gemma-3-1B took an H200 667 us instead of 653, its first
        ones being published later.
        """
        more = 1 if self.folded else max(1, MOST_WARPS // self.sharers)
        rows = min(BATCH_ROWS * more, MOST_BATCH_ROWS)
        return max(self.tile_rows, rows // self.tile_rows * self.tile_rows)

    @property
    def sharers(self) -> int:
        """Most partial sums of one row that a block makes: of its column slices, or of a GPU
        block's warps, which may be more.
        """
        if self.folded:
            return 1
        if self.tile_cols < self.cols:
            return max(MOST_WARPS, self.slices)
        # a team of warps is a power of two
        return min(MOST_WARPS, 1 << (-(-self.cols // WARP_COLUMNS) - 1).bit_length())

    @property
    def sums_floats(self) -> int:
        """Partial sums of one batch of rows in shared memory, FP32 [sharers][batch_rows]:
        `multiply` in gemv.cuh strides by the whole batch, also where a block has fewer rows, so
        only the last part ends early.
        """
        most = _widest(self.owned) if self.owned else self.rows
        return (self.sharers - 1) * self.batch_rows + min(self.batch_rows, most)


@frozen
class Routed:
    """A stage whose weights are those of the experts that a step's tokens choose."""

    experts: int  # held by a rank, whole or sliced
    most: int  # of them used in one step
    total: int  # of the layer
    top_k: int  # per token
    always: int = 0  # of these the last, which every token visits: shared ones


def tiles(matrix: Matrix, block: int) -> Iterator[tuple[Span, Span]]:
    """(rows, cols) of each ring slot of a block, in the order of the stream: row groups, then
    column slices.
    """
    return tiles_of(matrix, *matrix.owned[block])


def tiles_of(matrix: Matrix, lo: int, hi: int) -> Iterator[tuple[Span, Span]]:
    """The same for rows lo..hi-1."""
    each = matrix.cols // matrix.joined
    for row in range(lo, hi, matrix.tile_rows):
        for first in range(0, matrix.cols, each):
            for col in range(first, first + each, matrix.tile_cols):
                yield (
                    (row, min(row + matrix.tile_rows, hi)),
                    (col, min(col + matrix.tile_cols, first + each)),
                )


@lru_cache(maxsize=1024)
def _widest(spans: tuple[Span, ...]) -> int:
    return max(hi - lo for lo, hi in spans)


@lru_cache(maxsize=4096)
def rows_bytes(format: Format, tile_rows: int, tile_cols: int, rows: int, cols: int) -> int:
    """Stored bytes of [rows, cols] when every tile brings its own scales."""
    # (row groups, rows of each); the last one may be shorter
    high = ((rows // tile_rows, tile_rows), (1, rows % tile_rows))
    wide = ((cols // tile_cols, tile_cols), (1, cols % tile_cols))
    return sum(
        groups * slices * format.bytes(h, w) for groups, h in high for slices, w in wide if h and w
    )


def expected_experts(routed: Routed, tokens: int) -> float:
    """Different experts of a layer that `tokens` tokens choose, on average over uniform routing."""
    return routed.total * (1.0 - (1.0 - routed.top_k / routed.total) ** tokens)


def always_all(routed: Routed) -> bool:
    """Do all draws choose equally many of the experts that a rank holds? Those of one token, where
    it holds all.
    """
    return routed.most == routed.top_k and routed.experts == routed.total


def routed_share(total: int, blocks: int, block: int, step: int = 1) -> Span:
    """A block's part of the rows of all chosen experts, stacked: the blocks of a rank divide them
    in order, and evenly but for whole steps.
    """
    steps = total // step
    return step * (block * steps // blocks), step * ((block + 1) * steps // blocks)
