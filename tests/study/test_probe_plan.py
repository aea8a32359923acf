"""Which measurements first: what the order promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.study import interval
from twin.study.hardware import node_on_file
from twin.study.interval import Draws
from twin.study.point import Point
from twin.study.probe_plan import AGAIN, Found, measurements, probe_plan
from twin.study.runner import Runner


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> Found:
    point = Point(str(checkpoint), "1xmi300x", (("blocks", 2), ("context", 64)))
    return probe_plan([point], 4, Runner.inline())


def test_the_most_useful_measurement_is_first_and_knowing_all_leaves_nothing(found: Found) -> None:
    alone = [step.alone for step in found.steps]
    assert alone == sorted(alone, reverse=True)
    assert found.steps[0].alone <= 1.5 * found.width
    left = [step.left for step in found.steps if step.left is not None]
    assert left[-1] < 0.1 * found.width


@pytest.mark.parametrize("name", ["1xmi300x", "8xh200", "1xb200", "8xrubin-r200"])
def test_every_uncertain_number_belongs_to_one_measurement(name: str) -> None:
    node = node_on_file(name)
    (first, *_) = interval.settings(node, Draws(4))
    paths = [path for one in measurements(node) for path in one.paths]
    assert sorted(paths) == sorted(path for path, _ in first)


def test_numbers_that_a_fit_draws_together_are_measured_together() -> None:
    node = node_on_file("1xh200")
    named = {one.name: set(one.paths) for one in measurements(node)}
    assert named[AGAIN] == interval.drawn_together(node) & set.union(*named.values())


@pytest.mark.slow
def test_what_no_probe_measures_is_said(twin: Twin, checkpoint: Path) -> None:
    line = ("probe-plan", "1xrubin-r200", "--model", checkpoint, "--blocks", "2", "--draws", "4")
    said = twin(*line, "--workers", "1")
    assert said.code == 0, said.err
    assert "no probe of ours" in said.out
    assert "twin calibrate" not in said.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--draws", "2"), "--draws 2: from 4 to 256"),
        (("--model", "llama-3.2-1b", "--model", "llama-3.2-1b"), "given twice"),
        (("--model", "no-such-model"), "neither a model's name"),
    ],
)
def test_a_wrong_request_is_refused(twin: Twin, words: tuple[str, ...], said: str) -> None:
    refused = twin("probe-plan", "1xmi300x", *words)
    assert refused.code == 2
    assert said in " ".join(refused.err.split())
