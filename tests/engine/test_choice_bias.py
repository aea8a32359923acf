"""Experts whose choice has a bias of its own on the CPU engine: the bias decides who is chosen, not
what they weigh.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES
from tests.engine.small_engine import error, planned
from tests.engine.test_convolution import convolved
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.load import from_config
from twin.plan.options import CollectiveKind, Common, Sampling
from twin.proof.prove import prove
from twin.reference.experts import chosen

FEED = ExpertFeed(experts=8, top_k=3, width=40, scoring=Scoring.SIGMOID, choice_bias=True)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("feed", "more"),
    [
        (FEED, {"blocks": 5}),
        (replace(FEED, experts=135, top_k=5), {}),  # compared in groups
        (replace(FEED, experts=66, top_k=40), {}),  # in one, of more than a group takes
        (replace(FEED, renormalise=False, scaling=2.5), {"sampling": Sampling.FULL}),
        (FEED, {"gpus": 2, "common": Common.SHARDED, "collective": CollectiveKind.PUSH}),
        (replace(FEED, shared_width=56, experts=9), {"blocks": 5}),
        (replace(FEED, shared_width=48, shared_gate=True, experts=130), {}),
        (replace(FEED, scoring=Scoring.SOFTMAX, scaling=1.5), {}),
        (replace(FEED, scoring=Scoring.SOFTMAX, renormalise=False, experts=135), {}),
    ],
    ids=(
        *("few", "groups", "many", "scaled", "two ranks", "shared", "gated"),
        *("softmax", "softmax of all"),
    ),
)
def test_logits_are_the_references(feed: ExpertFeed, more: dict[str, Any]) -> None:
    plan = planned(convolved(feed=feed), **more)
    prove(plan)
    assert plan.simulation_only() is None
    assert error(plan) < 1e-5


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    feed = replace(FEED, experts=4, top_k=2)
    plain, moved = chosen(feed, logits), chosen(feed, logits, np.float32([0, 0, 0, 9]))
    assert (plain.experts, moved.experts) == ((0, 1), (3, 0))
    scores = 1 / (1 + np.exp(-logits[[3, 0]]))
    np.testing.assert_allclose(moved.weights, scores / scores.sum(), rtol=1e-6)


def test_a_bias_is_added_to_the_softmax_of_all_logits() -> None:
    logits = np.array([2.0, 1.0, 0.0, -1.0], np.float32)
    feed = replace(FEED, experts=4, top_k=2, scoring=Scoring.SOFTMAX)
    shares = np.exp(logits) / np.exp(logits).sum()
    over = float(shares[1] - shares[3])
    for bias, best in ((over * 1.01, 3), (over * 0.99, 1)):
        found = chosen(feed, logits, np.float32([0, 0, 0, bias]))
        assert found.experts == (0, best)
        weights = shares[[0, best]]
        np.testing.assert_allclose(found.weights, weights / weights.sum(), rtol=1e-6)


def test_layers_whose_heads_are_normed_together_run_on_one_gpu_only() -> None:
    spec = from_config(FAMILIES["minimax-m2"], "together")
    assert planned(spec).simulation_only() is None
    reason = planned(spec, gpus=2).simulation_only()
    assert reason is not None
    assert "2 ranks, which divide heads that are normed together" in reason


def test_heads_normed_together_are_not_run_next_to_gated_outputs() -> None:
    spec = from_config(FAMILIES["minimax-m2"], "gated")
    layout = tuple(
        replace(layer, mixer=replace(layer.mixer, output_gate=True)) for layer in spec.layout
    )
    assert replace(spec, layout=layout).runnable_reason() is not None
