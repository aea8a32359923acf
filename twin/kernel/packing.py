"""Weights as a device's memory holds them: the bytes of every tile, stream and expert. Where these
lie, streams.py and experts.py say: a prediction needs no more.

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

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from twin.kernel.experts import Place
from twin.kernel.streams import PAGE_BYTES, Streams
from twin.models.codes import Blocks, Coded, Encoded
from twin.models.formats import PACK, SCALED_ROWS, UNIT_BYTES
from twin.models.spec import DType
from twin.plan import matrices
from twin.plan.coding import BYTE_BITS
from twin.plan.matrix import Matrix, tiles, tiles_of
from twin.plan.shards import Weights
from twin.plan.types import Plan, Stage
from twin.schedule.choose import chooser_of

STORAGE: dict[DType, Any] = {
    DType.FP16: np.float16,
    DType.BF16: ml_dtypes.bfloat16,
    DType.FP32: np.float32,
}


def pack(plan: Plan, made: Streams, weights: Weights, rank: int, out: NDArray[np.uint8]) -> None:
    """Write the streams of all blocks of a rank into `out` [stream_pages * PAGE_BYTES], in the
    order of `tiles` in twin/plan/matrix.py, and the experts behind them.
    """
    storage = STORAGE[plan.options.weight_dtype]
    starts = [int(row[0]) * PAGE_BYTES for row in made.blocks]
    for stage in plan.stages:
        if stage.matrix is None:
            continue
        if stage.routed:
            place = made.experts[stage.index]
            first = place.page * PAGE_BYTES
            size = stage.routed.experts * place.units * UNIT_BYTES
            pack_experts(plan, stage, rank, weights, place, out[first : first + size])
            continue
        found = matrices.stage_matrix(plan, stage, rank, weights)
        if plan.coded:
            starts = pack_coded(plan, stage, found, starts, out)
            continue
        assert not isinstance(found, Blocks | Coded)
        source = np.ascontiguousarray(found).astype(storage, copy=False)
        for block, (lo, hi) in enumerate(stage.matrix.owned):
            size = (hi - lo) * stage.matrix.cols * source.itemsize
            target = out[starts[block] : starts[block] + size].view(storage)
            _tile(stage.matrix, source[lo:hi], target)
            starts[block] += size


def embedding(plan: Plan, weights: Weights) -> NDArray[Any]:
    """[vocab, hidden] in the plan's weight type; one copy serves all ranks of a GPU."""
    return np.ascontiguousarray(weights["embed"]).astype(
        STORAGE[plan.options.weight_dtype], copy=False
    )


def _tile(matrix: Matrix, rows: NDArray[Any], out: NDArray[Any]) -> None:
    """Copy [rows, cols] into tile order: row groups, inside a group column slices, inside a slice
    row-major.
    """
    if matrix.tile_cols >= matrix.cols:
        out[:] = rows.reshape(-1)
        return
    height, cols = matrix.tile_rows, matrix.cols
    whole = len(rows) // height * height
    for part, target, high in (
        (rows[:whole], out[: whole * cols], height),
        (rows[whole:], out[whole * cols :], len(rows) - whole),
    ):
        if not len(part):
            continue
        groups = part.reshape(-1, high, cols)
        stream = target.reshape(len(groups), high * cols)
        for lo in range(0, cols, matrix.tile_cols):
            hi = min(lo + matrix.tile_cols, cols)
            stream[:, high * lo : high * hi].reshape(len(groups), high, hi - lo)[:] = groups[
                :, :, lo:hi
            ]


# ---- experts -------------------------------------------------------------------------------------


def slices(matrix: Matrix, expert: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An expert's [rows, cols] as its column slices: rows of a slice follow each other, so that any
    of them are one copy.
    """
    for lo in range(0, matrix.cols, matrix.tile_cols):
        yield expert[:, lo : lo + matrix.tile_cols]


def pack_experts(
    plan: Plan, stage: Stage, rank: int, weights: Weights, place: Place, out: NDArray[np.uint8]
) -> None:
    """All experts of a stage into `out`, which begins with the first one's."""
    assert stage.matrix is not None
    assert stage.routed is not None
    size = len(out) // stage.routed.experts
    for expert in range(stage.routed.experts):
        rows = matrices.expert_matrix(plan, stage, rank, weights, expert)
        own = out[expert * size : (expert + 1) * size]
        if plan.coded:
            pack_tiles(plan, stage.matrix, place, rows, own)
            continue
        assert not isinstance(rows, Blocks | Coded)
        made = [part.reshape(-1) for part in slices(stage.matrix, rows)]
        storage = STORAGE[plan.options.weight_dtype]
        own.view(storage)[:] = np.concatenate(made).astype(storage, copy=False)


def begins(place: Place, high: int, block: int, lo: int) -> int:
    """Units from an expert's first to a block's, whose first row is `lo`."""
    return -(-lo * place.group // high) + block * place.gap


def pack_tiles(
    plan: Plan, matrix: Matrix, place: Place, source: NDArray[Any] | Encoded, out: NDArray[np.uint8]
) -> None:
    """The tiles of an expert, of all blocks that own rows of it or of its row groups in order."""
    for block, (lo, hi) in enumerate(matrix.owned or ((0, matrix.rows),)):
        at = begins(place, matrix.tile_rows, block, lo) * UNIT_BYTES
        for rows, cols in tiles_of(matrix, lo, hi):
            made = tile(plan, matrix, source, rows, cols)
            out[at : at + len(made)] = made
            at += plan.stored_bytes(matrix, rows[1] - rows[0], cols[1] - cols[0])


# ---- tiles ---------------------------------------------------------------------------------------


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
