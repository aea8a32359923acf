"""`twin run` says when the engine ran at another rate than the twin predicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.calibrate.known_error import KnownError
from twin.errors import PlanError
from twin.server.expected import Expected

RUN = ("--prompt", "hi", "--max-tokens", 20, "--ignore-eos", "--blocks", 1)
KNOWN = KnownError("1xhost", "fit", "record", {"run": 0.1}, {})


@pytest.fixture
def expects(monkeypatch: pytest.MonkeyPatch) -> list[Expected | None]:
    """What the twin says; the last one counts, None fails."""
    said: list[Expected | None] = []

    def expect(*_: object) -> Expected:
        if (found := said[-1]) is None:
            raise PlanError("cannot be simulated")
        return found

    monkeypatch.setattr("twin.commands.alarm.known_error", lambda node: KNOWN)
    monkeypatch.setattr("twin.server.expected.expect", expect)
    return said


@pytest.mark.parametrize(
    ("step_s", "words"),
    [(1e-12, "a throttled clock or a busy neighbour"), (1e3, "the fit on file may be of another")],
)
def test_a_run_outside_the_interval_raises_the_alarm(
    step_s: float, words: str, expects: list[Expected | None], twin: Twin, checkpoint: Path
) -> None:
    expects.append(Expected(step_s, step_s, 23, 0.9, 1.1))
    outcome = twin("run", checkpoint, *RUN)
    assert outcome.code == 0
    assert "alarm: " in outcome.err
    assert words in outcome.err
    said = json.loads(twin("run", checkpoint, *RUN, "--json").out)["predicted"]
    assert said["parted"] is True
    assert said["interval"] == pytest.approx([0.9 / step_s, 1.1 / step_s])


@pytest.mark.parametrize(
    "expected", [Expected(1.0, 1.0, 23, 1e-9, 1e9), Expected(1e3, 1e3, 23), None]
)
def test_without_an_interval_or_inside_of_it_there_is_no_alarm(
    expected: Expected | None, expects: list[Expected | None], twin: Twin, checkpoint: Path
) -> None:
    expects.append(expected)
    outcome = twin("run", checkpoint, *RUN, "--json")
    assert outcome.code == 0
    assert "alarm" not in outcome.err
    said = json.loads(outcome.out)["predicted"]
    assert said is None or said["parted"] is False


def test_few_tokens_say_nothing(
    expects: list[Expected | None], twin: Twin, checkpoint: Path
) -> None:
    few = ("--prompt", "hi", "--max-tokens", 5, "--blocks", 1, "--json")
    assert json.loads(twin("run", checkpoint, *few).out)["predicted"] is None
