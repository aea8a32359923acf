"""The twin's prediction for a served plan."""

from __future__ import annotations

import pytest

from tests.command_line import TINY
from tests.server.serving import SMALL
from twin.calibrate.node import calibrated_node
from twin.engine.opening import Source
from twin.engine.weights import random_weights
from twin.errors import ConfigError
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.options import Sampling
from twin.schedule.options import plan_for
from twin.server.expected import Expectation, expect
from twin.server.open import opened


def test_a_long_context_is_predicted_slower_and_held_out_runs_give_an_interval() -> None:
    spec, node = load_model("llama-3.2-1b"), calibrated_node("1xh200")
    plan = plan_for(spec, node, max_context=8192, sampling=Sampling.FULL)
    found = expect(spec, node, plan, {})
    assert found.rate(1) > found.rate(4096) > found.rate(8192)
    assert found.rate(8192) == found.rate(10**6)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1 < found.high


def test_a_node_without_a_fit_has_no_interval() -> None:
    node: Node = load_node("1xhost")
    plan = plan_for(TINY, node, max_context=128, **SMALL)
    found = expect(TINY, node, plan, SMALL)
    assert found.low is None
    assert found.rate(1) > 0


def test_a_prediction_that_fails_says_why() -> None:
    def refuse() -> None:
        raise ConfigError("no such device")

    expectation = Expectation()
    expectation._predict(refuse)  # type: ignore[arg-type]
    assert expectation.json()["reason"] == "no such device"
    assert expectation.gauges() == {}


def test_a_model_without_words_is_not_served(tmp_path: object) -> None:
    source = Source(TINY, random_weights(TINY, 1), None)
    with (
        pytest.raises(ConfigError, match="no tokenizer"),
        opened(source, tmp_path, load_node("1xhost"), SMALL, print, greedy=True),  # type: ignore[arg-type]
    ):
        pass
