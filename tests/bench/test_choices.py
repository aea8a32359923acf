"""Choices of experts that rounding decides: followed where they are close, and only there."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.engine.small_engine import SEED, TOKENS, planned
from tests.engine.test_experts import FEED, MANY, routed
from tests.engine.test_recurrent import recurrent
from twin.bench import choices
from twin.bench.choices import Agreement, agreement
from twin.bench.measure import check_logits
from twin.engine.weights import random_weights
from twin.errors import EngineError
from twin.models.feeds import ExpertFeed
from twin.plan.shards import Array
from twin.plan.types import Plan, Stage
from twin.reference.experts import Choice, Experts, chosen_by, weighed
from twin.reference.step import Reference

PLAN = planned(routed(MANY))
WEIGHTS = random_weights(PLAN.spec, SEED, PLAN.options.weight_dtype)  # type: ignore[arg-type]
BEYOND = 1e-5
LAYER = 1


class Otherwise(Experts):
    """Takes the first expert that was not chosen instead of the last that was, in LAYER at the step
    `at`.
    """

    steps, at, margin = 0, -1, 0.0

    def _choice(self, kind: ExpertFeed, stage: Stage, logits: Array, bias: Array | None) -> Choice:
        by = chosen_by(kind, logits, bias)
        order = np.argsort(-by, kind="stable")[: kind.top_k + 1]
        if stage.layer == LAYER:
            if self.steps == self.at:
                self.margin = (by[order[-2]] - by[order[-1]]) / np.abs(by).max()
                order[-2] = order[-1]
            self.steps += 1
        return weighed(kind, logits, order[:-1])


def run(plan: Plan, at: int = -1) -> tuple[Array, float]:
    """Logits of an engine that chooses otherwise at step `at`; how close that choice was."""
    reference = Reference(plan, WEIGHTS)
    own = reference.experts = Otherwise(plan, WEIGHTS, reference.dtype)
    own.at = at
    return np.stack([reference.step(token) for token in TOKENS]), own.margin


@cache
def wanted() -> Array:
    return run(PLAN)[0]


@cache
def runs() -> list[tuple[Array, float]]:
    return [run(PLAN, at) for at in range(len(TOKENS))]


def closest() -> int:
    return min(range(len(TOKENS)), key=lambda at: runs()[at][1])


def compared(found: Array) -> Agreement:
    return agreement(PLAN, WEIGHTS, TOKENS, found, wanted(), beyond=BEYOND)


def test_a_close_choice_is_followed_and_named() -> None:
    """Later tokens, which see the caches it left, agree as well."""
    found, margin = runs()[closest()]
    made = compared(found)
    assert margin < choices.CLOSE
    assert made.unfollowed > BEYOND > made.difference
    assert [(one.token, one.layer) for one in made.followed] == [(closest(), LAYER)]
    (one,) = made.followed
    assert one.margin == pytest.approx(margin)
    assert one.after < BEYOND < one.before


def test_a_wide_choice_is_an_error() -> None:
    at = max(range(len(TOKENS)), key=lambda at: runs()[at][1])
    found, margin = runs()[at]
    made = compared(found)
    assert margin > choices.CLOSE
    assert made.difference == made.unfollowed > BEYOND
    assert made.followed == ()


@pytest.mark.parametrize("fault", ["a logit", "a token"])
def test_wrong_numbers_are_not_explained_by_choices(fault: str) -> None:
    found = wanted().copy()
    found[7] = np.roll(found[7], 1) if fault == "a token" else found[7]
    found[7, 3] += 0.1 * np.abs(found).max()
    assert compared(found).difference > 0.04


class Running:
    """A session whose logits are these."""

    def __init__(self, found: Array) -> None:
        self.found = found

    def logits(self, tokens: Any) -> Array:
        return self.found


def test_a_check_allows_followed_choices_and_no_larger_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, _ = runs()[closest()]
    monkeypatch.setattr("twin.bench.measure.LOGIT_TOLERANCE", BEYOND)
    monkeypatch.setattr("twin.bench.measure.reference_logits", lambda *_: wanted())
    made = check_logits(Running(found), PLAN, WEIGHTS, TOKENS)  # type: ignore[arg-type]
    assert len(made.followed) == 1
    assert made.difference < BEYOND < made.unfollowed
    with pytest.raises(EngineError, match="logits differ from the reference by"):
        check_logits(Running(found * 1.01), PLAN, WEIGHTS, TOKENS)  # type: ignore[arg-type]


def test_a_step_that_is_undone_leaves_nothing() -> None:
    """Of recurrent states and histories, too."""
    for spec in (routed(FEED), recurrent()):
        plan = planned(spec)
        reference = Reference(plan, random_weights(spec, SEED, plan.options.weight_dtype))
        for token in TOKENS[:3]:
            reference.step(token)
        mark = reference.mark()
        once = [reference.step(token).copy() for token in TOKENS[3:6]]
        reference.back_to(mark)
        reference.step(TOKENS[9])
        reference.back_to(mark)
        assert np.array_equal(once, [reference.step(token) for token in TOKENS[3:6]])
