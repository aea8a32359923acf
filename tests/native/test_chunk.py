"""The tensor-core products of a prompt pass, lane by lane on the CPU: what a GPU would compute, without one."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from twin import toolchain
from twin.kernel.layout import _tile
from twin.models.spec import DType
from twin.plan.types import Matrix

SOURCE = Path(__file__).resolve().parent / "chunk.cpp"
STORED: dict[DType, Any] = {DType.FP16: np.float16, DType.BF16: ml_dtypes.bfloat16}
SHAPES = {  # rows lo..hi, columns, tile columns, tile rows, rows of an element
    "one slice, two batches of rows, half a group": ((5, 75), 96, 96, 16, 1),
    "slices that end within a step, groups of four rows": ((0, 22), 600, 304, 4, 2),
    "more steps than slots": ((8, 20), 1328, 1328, 8, 1),
    "a warp's columns end before others' begin": ((2, 10), 40, 40, 8, 2),
}


@pytest.fixture(scope="module", params=[(16, DType.FP16), (32, DType.BF16), (64, DType.FP16)], ids=lambda p: f"{p[0]} {p[1].value}")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ctypes.CDLL, int, DType]:
    chunk, dtype = request.param
    library = tmp_path_factory.mktemp("chunk") / "chunk.so"
    flags = [*toolchain.FLAGS, "-O1", f"-DCHUNK={chunk}", f"-DSTORED={dtype.name}"]
    done = subprocess.run([toolchain.host_compiler(), *flags, str(SOURCE), "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library)), chunk, dtype


@pytest.mark.parametrize("shape", SHAPES)
def test_a_block_multiplies_a_chunk_with_its_rows(built: tuple[ctypes.CDLL, int, DType], shape: str) -> None:
    library, chunk, dtype = built
    (lo, hi), cols, tile_cols, tile_rows, unit = SHAPES[shape]
    tokens = chunk - 3
    rng = np.random.default_rng(cols)
    x = rng.standard_normal((tokens, cols)).astype(np.float32).astype(STORED[dtype])
    rows = rng.standard_normal((hi - lo, cols)).astype(np.float32).astype(STORED[dtype])
    stream = np.zeros(2 * rows.size, STORED[dtype])
    matrix = Matrix(hi, cols, unit, tile_rows, tile_cols, ((lo, hi),))
    for time in range(2):
        _tile(matrix, rows, stream[time * rows.size : (time + 1) * rows.size])
    sums = np.full((2, tokens, (hi - lo) // unit), np.nan, np.float32)
    inputs = np.ascontiguousarray(x.astype(np.float32))
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (stream.view(np.uint8), inputs, sums[0], sums[1])]
    library.chunk_products(pointers[0], pointers[1], tokens, lo, hi, cols, tile_cols, tile_rows, unit, pointers[2], pointers[3])
    wanted = x.astype(np.float64) @ rows.astype(np.float64).T
    assert np.abs(sums[0] - wanted[:, ::unit]).max() < 1e-4 * np.abs(wanted).max()
    assert np.abs(sums[1] - wanted[:, unit - 1 :: unit]).max() < 1e-4 * np.abs(wanted).max()
