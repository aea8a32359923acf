"""The inverse question: machines that reach a speed, or why none does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.study.inverse import Found, Unreached, factors, inverse, parse_varied
from twin.study.point import Point
from twin.study.runner import Runner

VARY = "memory.stream,kernel.stage,kernel.bf16"


@pytest.fixture(scope="module")
def point(checkpoint: Path) -> Point:
    return Point(str(checkpoint), "1xh200", (("blocks", 8), ("context", 64)))


def faster(point: Point, by: float, vary: str = VARY) -> Found:
    runner = Runner.inline()
    (base,) = runner.rows([point])
    return inverse(point, parse_varied(vary, point), base.tokens_per_s * by, runner)


def test_every_machine_of_the_frontier_reaches_the_speed_by_itself(point: Point) -> None:
    found = faster(point, 1.3)
    assert found.machines
    for machine in found.machines:
        (row,) = Runner.inline().rows([point.with_settings(*machine.settings)])
        assert row.tokens_per_s >= found.base.tokens_per_s * 1.3 * (1 - 1e-9)


def test_the_frontier_is_cheapest_first_and_no_machine_needs_all_that_another_needs(
    point: Point,
) -> None:
    found = faster(point, 1.2)
    costs = [machine.doublings for machine in found.machines]
    assert costs == sorted(costs)
    for one in found.machines:
        for other in found.machines:
            less = all(a <= b for a, b in zip(one.change, other.change, strict=True))
            assert one is other or not less


def test_no_number_goes_beyond_its_bound_nor_the_wrong_way(point: Point) -> None:
    found = faster(point, 1.2, "memory.stream=x2,kernel.stage=x0.25")
    for machine in found.machines:
        for name, factor in factors(found, machine).items():
            assert 1 / 4 <= factor <= 1 if name.endswith("_s") else 1 <= factor <= 2


def test_a_speed_that_is_reached_needs_no_change(point: Point) -> None:
    (machine,) = faster(point, 0.9).machines
    assert not machine.settings
    assert machine.doublings == 0


def test_a_speed_beyond_the_bounds_is_refused_with_the_best_that_is_reached(point: Point) -> None:
    with pytest.raises(Unreached, match=r"no change within the bounds .* it is [\d,.e+]+ .* binds"):
        faster(point, 100)


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ("memory.stream,", "a name is empty"),
        ("memory.stream,memory.stream_bytes_per_s", "given twice"),
        ("memory.strem", "no number"),
        ("memory.stream=5 TB/s", "a bound is a factor such as x8"),
        ("memory.stream=x1", "a bound is a factor such as x8"),
        ("memory.stream=x5000", "at most x1000"),
        ("handoff.cross_die", "no factor changes that"),
        ("clock", "changes several numbers"),
    ],
)
def test_a_wrong_number_is_refused_with_the_next_step(twin: Twin, vary: str, words: str) -> None:
    line = ("inverse", "llama-3.2-1b", "1xh200", "--tokens-per-s", "3000", "--vary", vary)
    refused = twin(*line)
    assert refused.code == 2
    assert words in " ".join(refused.err.split())


def test_the_command_shows_the_change_and_what_binds_then(twin: Twin, checkpoint: Path) -> None:
    line = ("inverse", checkpoint, "1xh200", "--blocks", "8", "--workers", "1", "--vary", VARY)
    base = json.loads(twin(*line, "--tokens-per-s", "1", "--json").out)
    wanted = round(base["tokens_per_s"] * 1.2)
    said = twin(*line, "--tokens-per-s", wanted)
    assert said.code == 0, said.err
    assert "what binds then" in said.out
    data = json.loads(twin(*line, "--tokens-per-s", wanted, "--json").out)
    assert all(machine["tokens_per_s"] >= wanted for machine in data["machines"])
