"""The tensor-core products of a prompt pass, thread by thread on the CPU: what a GPU would compute,
without one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.codes.names import ON_EVERY_DEVICE, coded_names
from tests.native.programs import built
from tests.native.test_coded import planned
from twin import toolchain
from twin.kernel.coded import NUMBERS, coded_fields
from twin.kernel.packing import _tile, tile
from twin.kernel.streams import PAGE_BYTES
from twin.models.codes import CODES
from twin.models.formats import DECODED, PACK
from twin.models.spec import DType
from twin.plan.matrix import Matrix, tiles_of
from twin.plan.types import Plan
from twin.schedule.passes import GROUP_TOKENS, TILE_TOKENS, members_of

SOURCE = Path(__file__).resolve().parent / "chunk.cpp"
STORED: dict[DType, Any] = {DType.FP16: np.float16, DType.BF16: ml_dtypes.bfloat16}
# in the one library of all codes, which other tests compile anyway
EXPERTS, CHOSEN = 5, 2
ALL_CODES = 1 | sum(1 << NUMBERS[name] for name in ON_EVERY_DEVICE)
# rows of each block, columns, tile columns, tile rows, rows of an element, tokens of a tile and
# more
SHAPES = {
    "one slice, a few rows": ((20, 19, 19, 19, 19), 96, 96, 16, 1, 13),
    "slices that end within a step, groups of four rows": ((22, 20), 600, 304, 4, 2, 61),
    "more steps than shared memory holds": ((8, 9, 8), 1328, 1328, 8, 1, 64),
    "narrower than a step": ((10, 8, 8), 40, 40, 8, 2, 29),
    "several batches of rows, of several blocks": ((150, 148, 150, 148, 150), 128, 128, 8, 2, 130),
    "two warp groups of tokens, by two blocks": ((31, 31, 30), 320, 320, 8, 1, 90),
    "a few rows, tokens of two blocks": ((16, 15, 16), 1024, 512, 8, 1, 129),
    "seven blocks for four tiles of tokens: five share": (
        (9, 8, 8, 8, 9, 8, 8),
        64,
        64,
        8,
        1,
        385,
    ),
    "a block without rows": ((3, 0, 3), 64, 64, 8, 1, 100),
}


def compiled(chunk: int, dtype: DType, *more: str) -> ctypes.CDLL:
    """Passes of `chunk` tokens, unoptimised: compiling takes longer than what is computed."""
    flags = [*toolchain.FLAGS, "-O0", f"-DCHUNK={chunk}", f"-DSTORED={dtype.name}", *more]
    return ctypes.CDLL(str(built(SOURCE, flags)))


def with_experts(chunk: int, dtype: DType, *more: str) -> ctypes.CDLL:
    return compiled(chunk, dtype, f"-DHELD={EXPERTS}", f"-DCHOICES={CHOSEN}", *more)


def of_all_codes(dtype: DType) -> ctypes.CDLL:
    return with_experts(1024, dtype, f"-DCODED_AS={ALL_CODES}u")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((16, DType.FP16), marks=pytest.mark.slow),
        pytest.param((64, DType.BF16), marks=pytest.mark.slow),
        pytest.param((128, DType.BF16), marks=pytest.mark.slow),
        (1024, DType.FP16),
    ],
    ids=lambda p: f"{p[0]} {p[1].value}",
)
def products(request: pytest.FixtureRequest) -> tuple[ctypes.CDLL, int, DType]:
    chunk, dtype = request.param
    # long passes in the library of experts, which other tests compile anyway
    library = (with_experts if chunk == 1024 else compiled)(chunk, dtype)
    return library, chunk, dtype


def spans_of(counts: Sequence[int]) -> list[tuple[int, int]]:
    ends = np.cumsum(counts)
    return [(int(end) - count, int(end)) for end, count in zip(ends, counts, strict=True)]


def multiplied(
    library: ctypes.CDLL,
    stream: NDArray[np.uint8],
    x: NDArray[Any],
    spans: list[tuple[int, int]],
    starts: NDArray[np.int32],
    shape: tuple[int, int, int, int],
    coding: Sequence[int] = (0,) * 5,
) -> NDArray[np.float32]:
    """[first rows, last rows][tokens][elements] of all blocks; `shape`: columns of the matrix and
    of a tile, rows of a tile and of an element.
    """
    unit = shape[3]
    sums = np.full((2, len(x), spans[-1][1] // unit), np.nan, np.float32)
    inputs = np.ascontiguousarray(x.astype(np.float32))
    where = [np.ascontiguousarray(np.array(spans, np.int32)), starts]
    codes = np.array(coding, np.int32)
    library.chunk_products(
        *(ctypes.c_void_p(a.ctypes.data) for a in (stream, inputs)),
        len(x),
        len(spans),
        *(ctypes.c_void_p(a.ctypes.data) for a in where),
        *shape,
        *(ctypes.c_void_p(a.ctypes.data) for a in (codes, *sums)),
    )
    return sums


def distance(sums: NDArray[np.float32], x: NDArray[Any], rows: NDArray[Any], unit: int) -> float:
    """The largest difference from FP64, of the largest sum."""
    wanted = x.astype(np.float64) @ rows.astype(np.float64).T
    most = max(
        np.abs(sums[0] - wanted[:, ::unit]).max(),
        np.abs(sums[1] - wanted[:, unit - 1 :: unit]).max(),
    )
    return float(most / np.abs(wanted).max())


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_multiply_a_chunk_with_their_rows(
    products: tuple[ctypes.CDLL, int, DType], shape: str
) -> None:
    library, chunk, dtype = products
    counts, cols, tile_cols, tile_rows, unit, tokens = SHAPES[shape]
    tokens = min(tokens, chunk)
    rng = np.random.default_rng(cols)
    spans = spans_of(counts)
    x = rng.standard_normal((tokens, cols)).astype(np.float32).astype(STORED[dtype])
    rows = rng.standard_normal((spans[-1][1], cols)).astype(np.float32).astype(STORED[dtype])
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
    sums = multiplied(
        library, stream.view(np.uint8), x, spans, starts, (cols, tile_cols, tile_rows, unit)
    )
    assert distance(sums, x, rows, unit) < 1e-4


def test_as_many_blocks_share_their_rows_as_the_plan_says(
    products: tuple[ctypes.CDLL, int, DType],
) -> None:
    library, chunk, _ = products
    tile = min(chunk, TILE_TOKENS)
    most = max(chunk // tile, -(-tile // GROUP_TOKENS))
    for blocks in (1, 5, 7, 66, 78, 114, 128, 132, 144):
        for tiles in range(1, most + 1):
            assert library.chunk_sharing(tiles, blocks) == members_of(tiles, most, blocks)


# ---- low-bit weights, decoded before they are multiplied ----------------------------------------

# rows of each block, columns, tile columns, tile rows, rows of an element, tokens
CODED_SHAPES = {
    "whole rows": ((20, 19, 21, 0, 19), 256, 256, 16, 1, 70),
    "column slices, the last one narrower": ((22, 38, 20), 640, 256, 8, 2, 130),
}
# a sum's error, of the largest, where the other's weights are not rounded: half a unit in the last
# place of BF16 is 2^-9 of a weight
ROUNDED = {DType.BF16: 4e-3, DType.FP16: 5e-4}
# where they are; in FP16 a product halfway between two may go to the other
SAME = {DType.BF16: 1e-5, DType.FP16: 1e-4}


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", CODED_SHAPES)
@pytest.mark.parametrize("dtype", [DType.BF16, pytest.param(DType.FP16, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [*coded_names(("int4-g32", "int4-g128-zp-fp16", "mxfp4", "nvfp4")), "plain"]
)
def test_decoded_rows_are_multiplied_as_stored_ones_are(
    name: str, dtype: DType, shape: str
) -> None:
    plan = planned("int8" if name == "plain" else name)
    plan = replace(plan, options=replace(plan.options, weight_dtype=dtype))
    counts, cols, tile_cols, tile_rows, unit, tokens = CODED_SHAPES[shape]
    spans, rng = spans_of(counts), np.random.default_rng(cols)
    made = rng.standard_normal((spans[-1][1], cols), np.float32) / 16
    weights = made.astype(STORED[dtype]) if name == "plain" else CODES[name].quantise(made)
    form = None if name == "plain" else DECODED[name]
    owned = tuple(spans)
    matrix = Matrix(spans[-1][1], cols, unit, tile_rows, tile_cols, owned, form, PACK)
    streams = [
        b"".join(stored(plan, matrix, weights, *where) for where in tiles_of(matrix, lo, hi)) * 2
        for lo, hi in spans
    ]
    pages = [-(-len(one) // PAGE_BYTES) for one in streams]
    starts = np.cumsum([0, *pages[:-1]]).astype(np.int32)
    filled = (
        one.ljust(count * PAGE_BYTES, b"\xff") for one, count in zip(streams, pages, strict=True)
    )
    coding = coded_fields(plan, matrix)
    x = rng.standard_normal((tokens, cols)).astype(np.float32).astype(STORED[dtype])
    sums = multiplied(
        of_all_codes(dtype),
        np.frombuffer(b"".join(filled), np.uint8),
        x,
        spans,
        starts,
        (cols, tile_cols, tile_rows, unit),
        list(coding.values()),
    )
    assert distance(sums, x, weights, unit) < ROUNDED[dtype]
    assert distance(sums, x, weights.astype(STORED[dtype]), unit) < SAME[dtype]


def stored(
    plan: Plan, matrix: Matrix, weights: Any, rows: tuple[int, int], cols: tuple[int, int]
) -> bytes:
    """A tile with what fills it up."""
    made = tile(plan, matrix, weights, rows, cols)
    return made.tobytes().ljust(
        plan.stored_bytes(matrix, rows[1] - rows[0], cols[1] - cols[0]), b"\xff"
    )
