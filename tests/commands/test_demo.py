"""What `twin demo` compares and says: of the cores that it has, and nothing of a busy computer."""

from __future__ import annotations

import dataclasses
import re

import pytest

from tests.calibrate.ran import ran
from twin.calibrate.validate import Validation
from twin.commands.demo import page, text, ways
from twin.commands.demo_model import PROMPT, RANDOM, DemoModel
from twin.engine.tokenizer import Tokenizer
from twin.engine.weights import random_weights

RUNS = (
    ran("one core", 80.0, 41.0, 0.02),
    ran("all 2 cores", 81.0, 65.0, 0.03, blocks=2),
)
QUIET = Validation(RUNS, node="1xhost", fit="a run")
BUSY = dataclasses.replace(QUIET, busy="other programs had 1.0 of 2 cores")
FOUND = {"cpu": "a CPU", "cores": 2, "load_before": 0.1}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> DemoModel:
    monkeypatch.setattr("twin.commands.demo._step_here", lambda _: [])
    spec = dataclasses.replace(RANDOM, layers=1, windows=(0,), hidden=64, heads=1, kv_heads=1)
    weights = random_weights(dataclasses.replace(spec, ffn=64, vocab=32), 1)
    return DemoModel("a model", spec, weights, Tokenizer.__new__(Tokenizer), [1], PROMPT, "a note")


@pytest.mark.parametrize(
    ("cores", "most"), [(1, "one core"), (2, "all 2 cores"), (4, "all 4 cores")]
)
def test_all_cores_are_compared_and_one_alone(cores: int, most: str) -> None:
    found = dict(ways(cores))
    assert found["one core"] == {"blocks": 1}
    assert [name for name in found if name.startswith(most)] == [
        name for name in found if name == most or name != "one core"
    ]
    assert len(found) == (3 if cores == 1 else 4)


def test_a_quiet_computer_sees_its_error(model: DemoModel) -> None:
    said = text(model, QUIET, {}, "report")  # type: ignore[arg-type]
    assert "+95.1%" in said
    assert "median error 59.9%" in said
    assert "busy" not in said


def test_a_busy_computer_sees_no_error(model: DemoModel) -> None:
    said = text(model, BUSY, {}, "report")  # type: ignore[arg-type]
    assert "busy: other programs had 1.0 of 2 cores" in said
    assert "median error" not in said
    assert not re.search(r"[+-]\d+\.\d%", said)
    made = page(BUSY, model, {}, FOUND)
    assert made.cards[0][0] == "busy"
    assert not any("edian error" in section.text for section in made.sections)
    record = BUSY.to_json()
    assert (record["busy"], record["median_abs_error"]) == (BUSY.busy, None)
