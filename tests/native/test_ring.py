"""The ring of weight tiles and its two loaders, with threads of a CPU: no tile is used early, none
overwritten, nobody hangs.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.native.programs import built

SOURCE = Path(__file__).resolve().parent / "ring.cpp"
SHAPES = {  # slots, window, the LM head's, teams, column slices
    "Llama-3.2-1B": (13, 3, 5, 2, 2),
    "teams that skip the last portion": (2, 2, 2, 8, 12),
    "a window of all, an even ring": (4, 4, 4, 4, 1),
    "an even window, one team": (6, 2, 6, 1, 3),
    "a single slot": (1, 1, 1, 2, 3),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_are_used_when_they_are_there_and_kept_until_they_are_used(
    shape: str,
) -> None:
    slots, window, head, teams, slices = SHAPES[shape]
    flags = [
        "-std=c++17",
        "-O0",
        "-pthread",
        f"-DRING_SLOTS={slots}",
        f"-DRING_WINDOW={window}",
        f"-DRING_HEAD_WINDOW={head}",
        f"-DTEAMS={teams}",
        f"-DSLICES={slices}",
    ]
    done = subprocess.run([built(SOURCE, flags)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"exit {done.returncode}: {done.stderr}"
