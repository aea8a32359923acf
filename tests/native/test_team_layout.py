"""Who holds which column of a vector: an NVIDIA block's layout, run on a CPU."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.programs import built
from twin.data import data_dir

SOURCE = Path(__file__).resolve().parent / "layout.cpp"


@pytest.mark.parametrize(
    ("cols", "tile", "team", "each"),
    [
        (12672, 1408, 4, 1408),  # nine experts' columns, idle threads
        (4608, 512, 1, 512),
        (6912, 1024, 2, 1728),  # of four experts, whose second slices are narrower
        (10368, 1728, 4, 10368),
        (5632, 512, 1, 1408),
    ],
)
def test_who_gathers_a_column_finds_the_thread_that_multiplies_it(
    cols: int, tile: int, team: int, each: int
) -> None:
    native = data_dir("native") / "platform"
    shape = {
        "ALL_COLUMNS": cols,
        "TILE_COLUMNS": tile,
        "TEAM_WARPS": team,
        "EACH_COLUMNS": each,
    }
    flags = ["-std=c++17", f"-I{native}", *(f"-D{name}={value}" for name, value in shape.items())]
    done = subprocess.run([built(SOURCE, flags)], capture_output=True, check=True, text=True)
    assert done.stdout == ""
