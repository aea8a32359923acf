"""KL divergence and the margin rule, on distributions whose answer is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from twin.bench import fidelity
from twin.bench.fidelity import judge, kl_divergence, summary
from twin.errors import EngineError


def logits(*rows: list[float]) -> Any:
    return np.array(rows, np.float32)


def test_kl_of_two_coins() -> None:
    even, biased = logits([0.0, 0.0]), logits([math.log(3.0), 0.0])
    assert kl_divergence(even, biased)[0] == pytest.approx(
        0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6
    )
    assert kl_divergence(biased, even)[0] == pytest.approx(
        0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5), rel=1e-6
    )


def test_kl_is_zero_for_the_same_distribution_and_never_negative() -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((50, 300)).astype(np.float32) for _ in range(2))
    assert np.abs(kl_divergence(a, a + np.float32(3))).max() < 1e-12  # a constant changes nothing
    assert kl_divergence(a, b).min() > 0


def test_large_logits_do_not_overflow() -> None:
    assert kl_divergence(logits([3e4, 0.0]), logits([3e4, 0.0]))[0] == 0.0


def test_a_small_margin_decides_nothing() -> None:
    reference = logits([1.0, 0.9, 0.0], [2.0, 0.0, 0.0])
    peer = logits([1.0, 0.9, 0.2], [2.0, 0.0, 0.2])  # noise 0.2
    made = summary(judge(reference, reference, peer, [1, 0]))
    assert made["decided_positions"] == 1
    assert made["greedy_agrees"] is True
    assert made["greedy_equal_anywhere"] == 0.5


def test_another_token_at_a_decided_position_is_a_mismatch() -> None:
    reference, peer = logits([2.0, 0.0, 0.0]), logits([2.0, 0.0, 0.2])
    made = summary(judge(reference, reference, peer, [1]))
    assert (made["decided_mismatches"], made["greedy_agrees"]) == (1, False)
    assert made["replay_mismatches"] == 1  # the engine's own logits say 0


def test_kl_not_worse_compares_the_means() -> None:
    reference = logits([1.0, 0.0], [1.0, 0.0])
    near, far = logits([1.01, 0.0], [1.01, 0.0]), logits([1.1, 0.0], [1.0, 0.0])
    assert summary(judge(reference, near, far, [0, 0]))["kl_not_worse"] is True
    assert summary(judge(reference, far, near, [0, 0]))["kl_not_worse"] is False
    assert summary(judge(reference, far, far, [0, 0]))["kl_not_worse"] is True


def test_stretches_of_positions_are_judged_alike() -> None:
    random = np.random.default_rng(2)
    reference = random.standard_normal((3 * fidelity.ROWS + 5, 40)).astype(np.float32)
    peer = reference + random.standard_normal(reference.shape).astype(np.float32) / 100
    made = judge(reference, peer, peer, list(reference.argmax(axis=-1)))
    assert made.engine_kl == pytest.approx(kl_divergence(reference, peer), abs=1e-15)
    assert (made.expected == reference.argmax(axis=-1)).all()
    assert len(list(fidelity.rows(made, 0))) == len(reference)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_refused(bad: float) -> None:
    good = logits([1.0, 0.0])
    with pytest.raises(EngineError, match="engine's logits are not finite"):
        judge(good, logits([bad, 0.0]), good, [0])


def test_logits_of_other_positions_are_refused() -> None:
    with pytest.raises(EngineError, match="do not belong together"):
        judge(logits([1.0, 0.0]), logits([1.0, 0.0], [1.0, 0.0]), logits([1.0, 0.0]), [0])
