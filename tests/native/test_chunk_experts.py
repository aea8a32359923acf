"""Experts of a prompt pass as an NVIDIA block makes them, thread by thread on the CPU: entries
sorted by expert, batches of rows decoded and multiplied, a router's logits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.codes.names import coded_names
from tests.native.test_chunk import (
    CHOSEN,
    EXPERTS,
    STORED,
    of_all_codes,
    spans_of,
    stored,
    with_experts,
)
from tests.native.test_coded import planned
from twin.kernel.coded import coded_fields
from twin.kernel.experts import _coded_place
from twin.kernel.packing import _tile, pack_tiles, slices
from twin.kernel.streams import PAGE_BYTES
from twin.models.codes import CODES
from twin.models.formats import DECODED, PACK, UNIT_BYTES
from twin.models.spec import DType
from twin.plan.matrix import Matrix, tiles_of


def choices(tokens: int, spread: Sequence[float]) -> NDArray[np.int32]:
    """[tokens][CHOSEN], each expert with a probability of its own."""
    rng = np.random.default_rng(tokens)
    weights = np.array(spread, np.float64) / sum(spread)
    return np.array(
        [rng.choice(EXPERTS, CHOSEN, replace=False, p=weights) for _ in range(tokens)], np.int32
    )


def pointers(*arrays: NDArray[Any]) -> list[Any]:
    """Of arrays that live as long."""
    return [np.ctypeslib.as_ctypes(array.reshape(-1)) for array in arrays]


def check(
    library: ctypes.CDLL,
    dtype: DType,
    weights: NDArray[np.uint8],
    rows: NDArray[Any],
    matrix: Matrix,
    shape: Sequence[int],
    coding: Sequence[int],
    tokens: int,
    spread: Sequence[float],
    batch: tuple[int, int],
    *,
    down: bool,
) -> float:
    """The largest difference from FP64, of the largest sum. `rows`: [experts][rows][cols]; `down`:
    each entry has an input of its own.
    """
    unit, rng = matrix.unit, np.random.default_rng(7)
    chosen = choices(tokens, spread)
    entries = chosen.reshape(-1)
    inputs = len(entries) if down else tokens
    x = rng.standard_normal((inputs, matrix.cols)).astype(np.float32).astype(STORED[dtype])
    biases = rng.standard_normal((EXPERTS, matrix.rows)).astype(np.float32)
    said = np.zeros((tokens, 2 * CHOSEN + 1), np.float32)
    said[:, :CHOSEN] = chosen.view(np.float32)
    sums = np.zeros((2, len(entries), matrix.rows // unit), np.float32)
    spans = np.array(matrix.owned or [(0, 0)], np.int32)
    blocks = len(matrix.owned) or 3
    library.chunk_experts(
        *pointers(weights, np.ascontiguousarray(x.astype(np.float32)), said),
        tokens,
        blocks,
        *pointers(spans),
        unit,
        int(down),
        *pointers(np.array(shape, np.int32), np.array(coding, np.int32)),
        *batch,
        *pointers(biases, *sums),
    )
    own = x if down else x[np.arange(len(entries)) // CHOSEN]
    wanted = np.stack(
        [
            one.astype(np.float64) @ rows[expert].astype(np.float64).T + biases[expert]
            for one, expert in zip(own, entries, strict=True)
        ]
    )
    most = max(
        np.abs(sums[0] - wanted[:, ::unit]).max(),
        np.abs(sums[1] - wanted[:, unit - 1 :: unit]).max(),
    )
    return float(most / np.abs(wanted).max())


# tokens of a pass; their type; tokens; how often each expert is chosen; rows and columns of an
# expert, columns and rows of a tile, rows of an element, of a batch; is it a down projection
EVENLY = (1, 1, 1, 1, 1)
SHAPES = {
    "gates, two slices": (1024, DType.FP16, 150, EVENLY, 96, 160, 96, 8, 2, 64, False),
    "rows without gates": (1024, DType.FP16, 150, EVENLY, 88, 160, 96, 8, 1, 64, False),
    "an expert of all tokens, one of none": (
        1024,
        DType.FP16,
        140,
        (90, 1, 0, 1, 1),
        40,
        64,
        64,
        8,
        1,
        256,
        True,
    ),
    "few tokens, more rows than a batch": (
        1024,
        DType.FP16,
        3,
        (1, 1, 1, 1, 1),
        264,
        128,
        128,
        8,
        1,
        128,
        True,
    ),
    "short passes": (32, DType.BF16, 32, (1, 2, 3, 4, 5), 48, 72, 72, 8, 2, 32, False),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_entry_is_multiplied_with_its_experts_rows(shape: str) -> None:
    chunk, dtype, tokens, spread, rows, cols, tile_cols, high, unit, batch, down = SHAPES[shape]
    rng = np.random.default_rng(rows)
    made = rng.standard_normal((EXPERTS, rows, cols)).astype(np.float32).astype(STORED[dtype])
    matrix = Matrix(rows, cols, unit, high, tile_cols, ())
    packed = np.concatenate([part.reshape(-1) for one in made for part in slices(matrix, one)])
    units = rows * cols * 2 // UNIT_BYTES
    found = check(
        with_experts(chunk, dtype),
        dtype,
        packed.view(np.uint8),
        made,
        matrix,
        (rows, cols, tile_cols, high, units, 0, 0),
        (0,) * 5,
        tokens,
        spread,
        (batch, 1),
        down=down,
    )
    assert found < 1e-4


# rows of each block in an expert (none: they share row groups), columns, tile columns, tile rows,
# rows of an element, of a batch, blocks of one
CODED_SHAPES = {
    "gates": ((), 256, 256, 16, 2, 64, 1),
    "rows without gates": ((), 256, 256, 16, 1, 64, 1),
    "down, several blocks' rows": ((22, 21, 0, 21, 22), 384, 128, 16, 1, 64, 2),
    # three batches, of which only the first ones begin with a sector's first row
    "down, all rows of a step": (6 * (21,) + 3 * (20,) + 9 * (21,), 128, 128, 16, 1, 128, 6),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("shape", CODED_SHAPES)
@pytest.mark.parametrize("name", coded_names(("int4-g32", "mxfp4", "nvfp4")))
def test_experts_of_few_bits_are_decoded_and_multiplied(name: str, shape: str) -> None:
    dtype, tokens = DType.BF16, 70
    counts, cols, tile_cols, high, unit, batch, owners = CODED_SHAPES[shape]
    plan = planned(name)
    plan = replace(plan, options=replace(plan.options, weight_dtype=dtype))
    spans = tuple(spans_of(counts)) if counts else ()
    rows = sum(counts) or 96
    matrix = Matrix(rows, cols, unit, high, tile_cols, spans, DECODED[name], PACK)
    rng = np.random.default_rng(cols)
    coded = [
        CODES[name].quantise(rng.standard_normal((rows, cols), np.float32) / 16)
        for _ in range(EXPERTS)
    ]
    place = _coded_place(plan, matrix, 0, UNIT_BYTES)
    size = place.units * UNIT_BYTES
    packed = np.full(EXPERTS * size, 0xFF, np.uint8)
    for expert, one in enumerate(coded):
        pack_tiles(plan, matrix, place, one, packed[expert * size : (expert + 1) * size])
    coding = coded_fields(plan, matrix)
    found = check(
        of_all_codes(dtype),
        dtype,
        packed,
        np.stack([one.astype(STORED[dtype]) for one in coded]),
        matrix,
        (rows, cols, tile_cols, high, place.units, place.group, place.gap),
        list(coding.values()),
        tokens,
        (1, 2, 0, 2, 1),
        (batch, owners),
        down=bool(counts),
    )
    assert found < 1e-4


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("name", ["fp16", "bf16 among codes"])
def test_a_routers_logits_are_fp32_sums_of_what_lies_in_the_streams(name: str, tokens: int) -> None:
    """In the two libraries that other tests compile anyway."""
    hidden, tile_cols, high, counts = 272, 144, 4, (2, 0, 3)
    alone, rng = name == "fp16", np.random.default_rng(tokens)
    dtype = DType.FP16 if alone else DType.BF16
    plan = planned("int8")
    plan = replace(plan, options=replace(plan.options, weight_dtype=dtype))
    spans = spans_of(counts)
    matrix = Matrix(EXPERTS, hidden, 1, high, tile_cols, tuple(spans), None, PACK)
    rows = rng.standard_normal((EXPERTS, hidden)).astype(np.float32).astype(STORED[dtype])
    stream = np.zeros(len(counts) * PAGE_BYTES, np.uint8)
    for block, (lo, hi) in enumerate(spans):
        at = stream[block * PAGE_BYTES :]
        if alone:
            _tile(matrix, rows[lo:hi], at[: 2 * (hi - lo) * hidden].view(STORED[dtype]))
        else:
            made = b"".join(
                stored(plan, matrix, rows, *where) for where in tiles_of(matrix, lo, hi)
            )
            at[: len(made)] = np.frombuffer(made, np.uint8)
    coding = dict.fromkeys(range(5), 0) if alone else coded_fields(plan, matrix)
    x = rng.standard_normal((tokens, hidden)).astype(np.float32)
    logits = np.full((tokens, EXPERTS), np.nan, np.float32)
    library = with_experts(1024, dtype) if alone else of_all_codes(dtype)
    library.chunk_scores(
        *pointers(stream, x),
        tokens,
        hidden,
        len(counts),
        *pointers(np.array(spans, np.int32), np.arange(len(counts), dtype=np.int32)),
        tile_cols,
        high,
        *pointers(np.array(list(coding.values()), np.int32), logits),
    )
    wanted = x.astype(np.float64) @ rows.astype(np.float64).T
    assert np.abs(logits - wanted).max() < 1e-5 * np.abs(wanted).max()
