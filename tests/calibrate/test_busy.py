"""A busy computer is called busy, and its busy rounds do not count."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.draws import scaled
from twin.calibrate import store
from twin.calibrate.busy import ACTIVITY, COUNTED, Round, activity, busy, counted, quieter
from twin.calibrate.measure import between
from twin.calibrate.reading import settled

QUIET = {"others": 0.02, "stolen": 0.0, "own": 0.99, "spread": 0.03}


def _samples(slow: list[float], seed: int) -> store.Samples:
    """Of 20 probes: each round takes so many times as long."""
    random = np.random.default_rng(seed)
    return {
        f"p{at}": [scale * factor * float(1 + 0.02 * random.random()) for factor in slow]
        for at, scale in enumerate(10 ** random.uniform(-6, -1, 20))
    }


@settings(max_examples=scaled(60))
@given(
    slow=st.lists(st.sampled_from([1.0, 1.0, 1.3, 2.5]), min_size=4, max_size=12),
    seed=st.integers(0, 10**6),
)
def test_the_quieter_rounds_count_of_all_probes_alike(slow: list[float], seed: int) -> None:
    samples = _samples(slow, seed)
    chosen = quieter(samples)
    assert len(chosen) >= min(3, len(slow))
    left = [slow[at] for at in range(len(slow)) if at not in chosen]
    assert max(slow[at] for at in chosen) <= min(left, default=9.0)
    run = store.Run(Path("x"), {COUNTED: chosen}, samples)
    if sum(factor == 1.0 for factor in slow) >= len(chosen):
        for name, value in settled(counted(run)).items():
            assert value == pytest.approx(min(samples[name]), rel=0.03)


def test_a_run_without_marks_counts_as_a_whole() -> None:
    run = store.Run(Path("x"), {}, {"a": [1.0, 2.0]})
    assert counted(run) is run


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, None),
        ({"others": 0.5}, r"other programs had 1\.0 of 2 cores"),
        ({"stolen": 0.2}, "hypervisor gave 20%"),
        ({"own": 0.6}, "only 60% of their cores"),
        ({"spread": 0.4}, "differed by 40%"),
    ],
)
def test_each_sign_of_others_is_busy(change: dict[str, float], said: str | None) -> None:
    why = busy({"cores": 2, ACTIVITY: QUIET | change})
    if said is None:
        assert why is None
    else:
        assert why is not None
        assert re.search(said, why)


def test_what_is_not_known_is_not_busy() -> None:
    assert busy({}) is None


def test_only_counted_rounds_are_judged() -> None:
    rounds = [Round(0.9, 0.3, 0.2), *[Round(0.0, 0.0, 1.0)] * 3]
    samples = _samples([3.0, 1.0, 1.0, 1.0], 1)
    seen = activity(rounds, samples, [1, 2, 3])
    assert busy({"cores": 4, ACTIVITY: seen}) is None
    assert busy({"cores": 4, ACTIVITY: activity(rounds, samples, [0, 1])}) is not None


@settings(max_examples=scaled(60))
@given(calls=st.integers(0, 9), probes=st.integers(1, 60))
def test_every_call_comes_once_a_round_between_the_probes(calls: int, probes: int) -> None:
    made = [one for done in range(1, probes + 1) for one in between(range(calls), done, probes)]
    assert made == list(range(calls))
    most = max(len(between(range(calls), done, probes)) for done in range(1, probes + 1))
    assert most <= -(-calls // probes)
