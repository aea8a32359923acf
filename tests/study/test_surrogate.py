"""A surrogate of the twin: where it says that it holds, the simulator agrees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import Twin
from twin.study.inverse import parse_varied
from twin.study.point import Point
from twin.study.runner import Runner
from twin.study.surrogate import CERTAIN, WITHIN, Checked, Sizes, Surrogate, surrogate

VARY = "memory.stream,kernel.stage,structure.sms=x2"
SIZES = Sizes(trained=40, bounded=30, checked=20)


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> tuple[Surrogate, list[Checked]]:
    point = Point(str(checkpoint), "1xh200", (("blocks", 8), ("context", 64)))
    return surrogate(point, parse_varied(VARY, point), SIZES, 1, Runner.inline())


def test_machines_that_the_fit_never_saw_lie_within_their_bounds(
    made: tuple[Surrogate, list[Checked]],
) -> None:
    checked = made[1]
    inside = sum(abs(one.error) <= one.bound for one in checked)
    assert inside >= (CERTAIN - 0.15) * len(checked)
    assert max(abs(one.error) for one in checked if one.bound <= WITHIN) < 2 * WITHIN


def test_machines_are_the_same_for_a_seed_and_counts_stay_counts(
    made: tuple[Surrogate, list[Checked]],
) -> None:
    one, again = ([*made[0].drawn(100, 3)] for _ in range(2))
    for parts in zip(one, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(*parts, strict=True))
    ((machines, speeds, bounds),) = one
    blocks = made[0].varied[2]
    counts = blocks.value * 2.0 ** machines[:, 2]
    assert np.allclose(counts, np.rint(counts))
    assert (speeds > 0).all()
    assert (bounds > 0).all()


def test_the_command_says_how_far_to_trust_it_and_writes_all_machines(
    twin: Twin, checkpoint: Path, tmp_path: Path
) -> None:
    line = ["surrogate", checkpoint, "1xh200", "--vary", "memory.stream", "--blocks", "8"]
    few = ["--points", "1000", "--trained", "24", "--bounded", "24", "--checked", "4"]
    said = twin(*line, *few, "--workers", "1", "--to", tmp_path / "all.parquet", "--json")
    assert said.code == 0, said.err
    data = json.loads(said.out)
    assert data["machines"] == 1000
    assert len(data["checked"]) == 4
    assert 0 <= data["held_share"] <= 1
    from pyarrow import parquet

    assert parquet.read_metadata(tmp_path / "all.parquet").num_rows == 1000
    refused = twin(*line, "--points", "0")
    assert refused.code == 2
    assert "--points 0: from 1" in refused.err
