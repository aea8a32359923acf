"""Coded weights as the kernel finds them: the bytes of a tile, and what the table of stages says of
them.

A tile of low-bit weights holds the codes of its rows, one row after the other: a byte each, or two
of four bits, the first in the lower half. For a GPU, two rows of four bits share each load of 16
bytes, PACK columns of both; rows of four bits are filled up to an even number.

Behind the codes lie scales, each kind as [blocks of a row][rows, filled up to SCALED_ROWS]: where a
row has one as well as its blocks (FP32), that comes first; then the blocks', then their zero
points, a byte each. The end is filled up to UNIT_BYTES.

GGUF's blocks, which CPUs multiply, lie otherwise: twin/models/codes/gguf.py.

A GPU's thread holds `pack` elements of each row. Where these take several loads of 16 bytes, as
those of the plan's weight type do among low-bit weights, the first loads of all threads come
first, then the second ones: neighbouring threads then load neighbouring bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.models.codes import CODES, Blocks, Coded, Encoded
from twin.models.formats import PACK, SCALED_ROWS, UNIT_BYTES
from twin.models.spec import DType
from twin.plan.coding import BYTE_BITS
from twin.plan.types import Matrix, Plan, Stage, tiles
from twin.schedule.choose import chooser_of

STORAGE: dict[DType, Any] = {
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.FP32: np.float32,
}
NUMBERS = {name: at for at, name in enumerate(CODES, start=1)}


def bits_of(matrices: Iterable[Matrix]) -> int:
    """A bit for each code of these matrices."""
    return sum({1 << _number(matrix) for matrix in matrices})


def coded_fields(plan: Plan, matrix: Matrix | None) -> dict[str, int]:
    """How a stage's weights are stored; bytes of a row's codes and scales in a whole tile, and in
    the last column slice.
    """
    if matrix is None:
        return dict.fromkeys(("code", "row_bytes", "last_bytes", "row_scales", "last_scales"), 0)
    last = matrix.cols // matrix.joined % matrix.tile_cols or matrix.tile_cols
    bits, form = (
        matrix.format.bits if matrix.format else 8 * plan.options.weight_dtype.bytes,
        matrix.format,
    )
    scales = [form.scaling(cols) if form else 0 for cols in (matrix.tile_cols, last)]
    return {
        "code": _number(matrix),
        "row_bytes": matrix.tile_cols * bits // 8,
        "last_bytes": last * bits // 8,
        "row_scales": scales[0],
        "last_scales": scales[1],
    }


def pack_coded(
    plan: Plan,
    stage: Stage,
    source: NDArray[Any] | Encoded,
    starts: list[int],
    out: NDArray[np.uint8],
) -> list[int]:
    """Write a stage's tiles at `starts`, one of each block, into `out`. Returns where the next
    stage's begin.
    """
    matrix, ends = stage.matrix, list(starts)
    assert matrix is not None
    for block in range(plan.blocks):
        if isinstance(source, Blocks):
            ends[block] += _pack_blocks(matrix, source, block, out[ends[block] :])
            continue
        for (lo, hi), (left, right) in tiles(matrix, block):
            size = plan.stored_bytes(matrix, hi - lo, right - left)
            made = tile(plan, matrix, source, (lo, hi), (left, right))
            out[ends[block] : ends[block] + len(made)] = made
            out[ends[block] + len(made) : ends[block] + size] = 0
            ends[block] += size
    return ends


def _pack_blocks(matrix: Matrix, source: Blocks, block: int, out: NDArray[np.uint8]) -> int:
    """The same of a block's tiles of GGUF's blocks, those of one height and width at once. Returns
    their bytes.
    """
    (lo, hi), high, at = matrix.owned[block], matrix.tile_rows, 0
    for first, last in ((lo, hi - (hi - lo) % high), (hi - (hi - lo) % high, hi)):
        if first == last:
            continue
        tiles_high = -(-(last - first) // high)
        slices = [
            source.rows(slice(first, last))
            .columns(left, min(left + matrix.tile_cols, matrix.cols))
            .interleaved()
            .reshape(tiles_high, -1)
            for left in range(0, matrix.cols, matrix.tile_cols)
        ]
        size = sum(part.size for part in slices)
        to, begin = out[at : at + size].reshape(tiles_high, -1), 0
        for part in slices:
            to[:, begin : begin + part.shape[1]] = part
            begin += part.shape[1]
        at += size
    return at


def tile(
    plan: Plan,
    matrix: Matrix,
    source: NDArray[Any] | Encoded,
    rows: tuple[int, int],
    cols: tuple[int, int],
) -> NDArray[np.uint8]:
    """A tile's bytes, without what fills it up."""
    if isinstance(source, Blocks):
        return source.rows(slice(*rows)).columns(*cols).interleaved().reshape(-1)
    if isinstance(source, Coded):
        part = source.rows(slice(*rows)).columns(*cols)
        kinds = (
            (part.outer, np.float32),
            (part.scales, part.code.scale_type),
            (part.zeros, np.uint8),
        )
        return np.concatenate(
            [_bits(plan, part), *(_scaling(of, kind) for of, kind in kinds if of is not None)]
        )
    plain = np.ascontiguousarray(source[slice(*rows), slice(*cols)]).astype(
        STORAGE[plan.options.weight_dtype]
    )
    loads = chooser_of(plan.limits).loads(matrix, plain.itemsize)
    bytes_ = plain.view(np.uint8).reshape(len(plain), -1, loads, UNIT_BYTES if loads > 1 else 1)
    return (
        np.ascontiguousarray(bytes_.swapaxes(1, 2)).reshape(-1) if loads > 1 else bytes_.reshape(-1)
    )


def _bits(plan: Plan, part: Coded) -> NDArray[np.uint8]:
    """The codes of a tile's rows."""
    form, (rows, cols) = part.code.format, part.shape
    filled: NDArray[np.uint8]
    filled = np.zeros((form.whole_rows(rows), cols), np.uint8)
    filled[:rows] = part.codes
    if form.bits == BYTE_BITS:
        return filled.reshape(-1)
    together = chooser_of(plan.limits).code_rows
    rounds = filled.reshape(len(filled) // together, together, -1, PACK).swapaxes(1, 2)
    codes = np.ascontiguousarray(rounds).reshape(-1)
    return codes[0::2] | codes[1::2] << np.uint8(form.bits)


def _scaling(of_rows: NDArray[Any], kind: Any) -> NDArray[np.uint8]:
    """Scales or zero points [rows, blocks] as a tile holds them."""
    filled = np.zeros((of_rows.shape[1], -(-len(of_rows) // SCALED_ROWS) * SCALED_ROWS), kind)
    filled[:, : len(of_rows)] = of_rows.T
    return filled.view(np.uint8).reshape(-1)


def _number(matrix: Matrix) -> int:
    return NUMBERS[matrix.format.name] if matrix.format else 0
