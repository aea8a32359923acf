"""The tensor-core products of a prompt pass, thread by thread on the CPU: what a GPU would compute,
without one.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.native.programs import built
from twin import toolchain
from twin.kernel.streams import PAGE_BYTES, _tile
from twin.models.spec import DType
from twin.plan.types import Matrix

SOURCE = Path(__file__).resolve().parent / "chunk.cpp"
STORED: dict[DType, Any] = {DType.FP16: np.float16, DType.BF16: ml_dtypes.bfloat16}
# rows of each block, columns, tile columns, tile rows, rows of an element, tokens of a tile and
# more
SHAPES = {
    "one slice, a few rows": ((20, 19, 19, 19, 19), 96, 96, 16, 1, 13),
    "slices that end within a step, groups of four rows": ((22, 20), 600, 304, 4, 2, 61),
    "more steps than lie on the chip": ((8, 9, 8), 1328, 1328, 8, 1, 64),
    "narrower than a step": ((10, 8, 8), 40, 40, 8, 2, 29),
    "several batches of rows, of several blocks": ((150, 148, 150, 148, 150), 128, 128, 8, 2, 130),
    "two warp groups of tokens, by two blocks": ((31, 31, 30), 320, 320, 8, 1, 90),
    "a few rows, tokens of two blocks": ((16, 15, 16), 1024, 512, 8, 1, 129),
    "a block without rows": ((3, 0, 3), 64, 64, 8, 1, 100),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((16, DType.FP16), marks=pytest.mark.slow),
        (64, DType.BF16),
        pytest.param((128, DType.BF16), marks=pytest.mark.slow),
        (1024, DType.FP16),
    ],
    ids=lambda p: f"{p[0]} {p[1].value}",
)
def products(request: pytest.FixtureRequest) -> tuple[ctypes.CDLL, int, DType]:
    chunk, dtype = request.param
    flags = [*toolchain.FLAGS, "-O1", f"-DCHUNK={chunk}", f"-DSTORED={dtype.name}"]
    return ctypes.CDLL(str(built(SOURCE, flags))), chunk, dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_multiply_a_chunk_with_their_rows(
    products: tuple[ctypes.CDLL, int, DType], shape: str
) -> None:
    library, chunk, dtype = products
    counts, cols, tile_cols, tile_rows, unit, tokens = SHAPES[shape]
    tokens = min(tokens, chunk)
    rng = np.random.default_rng(cols)
    ends = np.cumsum(counts)
    spans = [(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]
    x = rng.standard_normal((tokens, cols)).astype(np.float32).astype(STORED[dtype])
    rows = rng.standard_normal((int(ends[-1]), cols)).astype(np.float32).astype(STORED[dtype])
    pages = [-(-4 * count * cols // PAGE_BYTES) for count in counts]  # of a block: its rows twice
    starts = np.cumsum([0, *pages[:-1]]).astype(np.int32)
    stream = np.zeros(sum(pages) * PAGE_BYTES // 2, STORED[dtype])
    for (lo, hi), start in zip(spans, starts, strict=True):
        size, at = (hi - lo) * cols, int(start) * PAGE_BYTES // 2
        for time in range(2):
            _tile(
                Matrix(hi, cols, unit, tile_rows, tile_cols, ((lo, hi),)),
                rows[lo:hi],
                stream[at + time * size : at + (time + 1) * size],
            )
    sums = np.full((2, tokens, len(rows) // unit), np.nan, np.float32)
    inputs = np.ascontiguousarray(x.astype(np.float32))
    where = [np.ascontiguousarray(np.array(spans, np.int32)), starts]
    library.chunk_products(
        *(ctypes.c_void_p(a.ctypes.data) for a in (stream.view(np.uint8), inputs)),
        tokens,
        len(counts),
        *(ctypes.c_void_p(a.ctypes.data) for a in where),
        cols,
        tile_cols,
        tile_rows,
        unit,
        *(ctypes.c_void_p(a.ctypes.data) for a in sums),
    )
    wanted = x.astype(np.float64) @ rows.astype(np.float64).T
    assert np.abs(sums[0] - wanted[:, ::unit]).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(sums[1] - wanted[:, unit - 1 :: unit]).max() < 1e-4 * np.abs(wanted).max()
