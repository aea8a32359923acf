"""What a GPU's threads make of packed low-bit weights, run on a CPU and compared with FP64."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.models.codes.names import coded_names
from tests.native.programs import built
from twin.data import data_dir
from twin.kernel.coded import NUMBERS
from twin.kernel.packing import tile
from twin.models.codes import CODES, Coded
from twin.models.formats import UNIT_BYTES
from twin.plan.options import Limits, Options
from twin.plan.types import Plan
from twin.schedule.block import ROWS_AT_ONCE
from twin.schedule.plans import build
from twin.schedule.products import TENSOR

SOURCE = Path(__file__).resolve().parent / "coded.cpp"
COLUMNS, ROWS = 256, 13
TEAMS = Limits(
    blocks=2, dies=1, on_chip_bytes=2**18, memory_bytes=2**40, oversubscribe=False, teams=True
)
# largest error, of the root mean square of the sums
BOUNDS = {"plain": 1e-6, "int8": 1e-4, "fp8": 1e-6, "fp8-128x128": 1e-6}
COLUMNS_OF_ZEROS = 32
FEW = ("int4-g128-zp-fp16", "mxfp4", "nvfp4")  # of each element of four bits, all kinds of scales


def planned(name: str) -> Plan:
    from tests.engine.small_engine import LLAMA
    from twin.models.formats import format_named
    from twin.models.quantized import requantized

    return build(requantized(LLAMA, format_named(name)), Options(context=8, max_context=64), TEAMS)


def summed(
    code: str,
    pack: int,
    x: NDArray[np.float32],
    packed: NDArray[np.uint8],
    loads: int = ROWS_AT_ONCE,
    rows: int = ROWS,
    team: int = 1,
    slices: int = 1,
    on_chip: bool = False,
    experts: bool = False,
) -> NDArray[np.float32]:
    """`loads`: of a piece; `team`: warps that share the columns of one of so many slices;
    `on_chip`: the input lies in the block's memory; `experts`: of a model that has some.
    """
    native = data_dir("native") / "platform"
    defined = {
        "PACK_ELEMENTS": pack,
        "CODED_AS": NUMBERS.get(code, 0),
        "COLUMNS": len(x),
        "TEAM_WARPS": team,
        "TEAM_SLICES": slices,
        "ON_CHIP": int(on_chip),
        "ANY_EXPERTS": int(experts),
    }
    flags = [
        "-std=c++17",
        "-O0",
        "-pthread",
        f"-I{native}",
        *(f"-D{name}={value}" for name, value in defined.items()),
    ]
    done = subprocess.run(
        [built(SOURCE, flags), str(rows), str(loads)],
        input=x.tobytes() + packed.tobytes(),
        capture_output=True,
        check=True,
    )
    return np.frombuffer(done.stdout, np.float32)


def error(found: NDArray[np.float32], weights: NDArray[Any], x: NDArray[np.float32]) -> float:
    wanted = weights.astype(np.float64) @ x.astype(np.float64)
    return float(np.abs(found - wanted).max() / np.sqrt((wanted**2).mean()))


def activations() -> NDArray[np.float32]:
    """Of which one in 64 is thirty times larger."""
    chance = np.random.default_rng(5)
    x = chance.standard_normal(COLUMNS).astype(np.float32)
    x[::64] *= 30
    return x


@pytest.mark.few(2)
@pytest.mark.parametrize("name", coded_names(FEW))
def test_threads_sum_coded_rows_as_fp64_does(name: str) -> None:
    plan, x = planned(name), activations()
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and stage.matrix.format)
    weights: Coded = CODES[name].quantise(
        np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
    )
    packed = tile(plan, matrix, weights, (0, ROWS), (0, COLUMNS))
    found = summed(name, matrix.pack, x, packed)
    assert error(found, weights.astype(np.float64), x) < BOUNDS.get(name, 1e-4)
    if name in TENSOR:  # always multiplied 16 rows at a time
        return
    for loads in (4, 2) if CODES[name].format.bits == 4 else (4,):  # smaller pieces, the same sums
        small = summed(name, matrix.pack, x, packed, loads)
        assert np.array_equal(found, small)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [p for p in coded_names(FEW) if p.values[0] not in TENSOR])
def test_threads_sum_rows_of_an_input_in_shared_memory_as_fp64_does(name: str) -> None:
    plan, x = planned(name), activations()
    x[:COLUMNS_OF_ZEROS] = 0.0  # of a portion without a scale
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and stage.matrix.format)
    weights: Coded = CODES[name].quantise(
        np.random.default_rng(1).standard_normal((ROWS, COLUMNS), np.float32)
    )
    packed = tile(plan, matrix, weights, (0, ROWS), (0, COLUMNS))
    found = summed(name, matrix.pack, x, packed, on_chip=True)
    assert error(found, weights.astype(np.float64), x) < 1e-4
    x[5] = np.nan
    assert np.isnan(summed(name, matrix.pack, x, packed, on_chip=True)).all()


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TENSOR)
@pytest.mark.parametrize(
    ("rows", "cols", "team", "slices"),
    [
        (16, 2880, 4, 2),
        (5, 1920, 2, 2),
        *(
            pytest.param(*shape, marks=pytest.mark.slow)
            for shape in ((6, 960, 2, 1), (23, 512, 1, 1), (16, 2048, 4, 1))
        ),
        # three experts' columns: their scales are no whole loads, and zeros lie behind them
        *[(16, 1248, 1, 3), (7, 1200, 1, 3)],
    ],
)
def test_a_block_sums_rows_of_fp4_as_fp64_does(
    name: str, rows: int, cols: int, team: int, slices: int
) -> None:
    plan, chance = planned(name), np.random.default_rng(cols + rows)
    x = chance.standard_normal(cols).astype(np.float32)
    x[::96] *= 30
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and stage.matrix.format)
    weights: Coded = CODES[name].quantise(chance.standard_normal((rows, cols), np.float32))
    wide = -(-cols // slices // 32) * 32
    tiles = [
        tile(plan, matrix, weights, (0, rows), (left, min(left + wide, cols)))
        for left in range(0, cols, wide)
    ]
    whole = [np.pad(one, (0, -len(one) % UNIT_BYTES)) for one in tiles]
    behind = np.full(8192, 255, np.uint8)  # what a slot has behind a tile
    found = summed(
        name,
        matrix.pack,
        x,
        np.concatenate([*whole, behind]),
        rows=rows,
        team=team,
        slices=slices,
    )
    assert error(found, weights.astype(np.float64), x) < 1e-4


SHAPES = [
    (8, 2048, 4, 1),
    (7, 1408, 4, 1),
    (13, 1024, 1, 2),
    (8, 1280, 2, 2),
]  # 1,408: idle threads


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fp8", "fp8-128x128", *TENSOR])
@pytest.mark.parametrize(("rows", "cols", "team", "slices"), SHAPES)
def test_an_input_gathered_by_fours_is_summed_as_fp64_does(
    name: str, rows: int, cols: int, team: int, slices: int
) -> None:
    """Threads quantise neighbouring fours, whoever multiplies them."""
    found, weights, x = _gathered_by_fours(name, rows, cols, team, slices)
    assert error(found, weights.astype(np.float64), x) < 2e-4


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_no_number_is_not_hidden_by_fours(name: str, strange: float) -> None:
    found, *_ = _gathered_by_fours(name, 8, 512, 1, 1, strange)
    assert not np.isfinite(found).any()


def _gathered_by_fours(
    name: str,
    rows: int,
    cols: int,
    team: int,
    slices: int,
    strange: float | None = None,
) -> tuple[NDArray[np.float32], Coded, NDArray[np.float32]]:
    """Sums of rows, their weights and the input."""
    plan, chance = planned(name), np.random.default_rng(cols + rows)
    x = chance.standard_normal(cols).astype(np.float32)
    x[::96] *= 30
    x[64:128] = 0.0  # groups without a scale
    if strange is not None:
        x[5] = strange
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and stage.matrix.format)
    weights: Coded = CODES[name].quantise(chance.standard_normal((rows, cols), np.float32))
    wide = -(-cols // slices // 32) * 32
    tiles = [
        tile(plan, matrix, weights, (0, rows), (left, min(left + wide, cols)))
        for left in range(0, cols, wide)
    ]
    whole = [np.pad(one, (0, -len(one) % UNIT_BYTES)) for one in tiles]
    behind = np.full(8192, 255, np.uint8)  # what a slot has behind a tile: no numbers
    found = summed(
        name,
        matrix.pack,
        x,
        np.concatenate([*whole, behind]),
        rows=rows,
        team=team,
        slices=slices,
        on_chip=True,
        experts=True,
    )
    return found, weights, x


def test_threads_sum_rows_of_the_weight_type_among_coded_ones() -> None:
    plan, x = planned("int8"), activations()
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and not stage.matrix.format)
    weights = np.random.default_rng(2).standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
    packed = tile(plan, matrix, weights, (0, ROWS), (0, COLUMNS))
    found = summed("plain", matrix.pack, x, packed)
    assert error(found, weights, x) < BOUNDS["plain"]


def test_an_input_that_is_no_number_is_not_hidden() -> None:
    plan, x = planned("int8"), activations()
    matrix = next(stage.matrix for stage in plan.stages if stage.matrix and stage.matrix.format)
    weights = CODES["int8"].quantise(np.ones((ROWS, COLUMNS), np.float32))
    packed = tile(plan, matrix, weights, (0, ROWS), (0, COLUMNS))
    for strange in (np.nan, np.inf):
        x[17] = strange
        assert not np.isfinite(summed("int8", matrix.pack, x, packed)).any()
