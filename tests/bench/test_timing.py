"""Alternation and statistics of samples."""

from __future__ import annotations

import numpy as np
import pytest

from twin.bench.timing import Sample, Steps, Variant, alternate, summary
from twin.errors import EngineError


def variant(name: str, log: list[str], ns: int = 1000) -> Variant:
    def run(repeat: int) -> Steps:
        log.append(f"{name}{repeat}")
        return Steps(np.array([ns, ns], np.int64))

    return Variant(name, "", lambda: log.append(f"warm {name}"), run)


def test_variants_alternate_after_all_are_warm() -> None:
    log: list[str] = []
    samples = alternate(
        [variant("a", log), variant("b", log)],
        3,
        show=lambda text: None,
        after_round=lambda: log.append("round"),
    )
    assert log == [
        "warm a",
        "warm b",
        "a0",
        "b0",
        "round",
        "a1",
        "b1",
        "round",
        "a2",
        "b2",
        "round",
    ]
    assert [(s.variant, s.repeat) for s in samples] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
        ("a", 2),
        ("b", 2),
    ]


def test_the_median_is_over_repetitions_and_a_slow_step_counts_in_its_own() -> None:
    runs = [[1000, 1000], [1000, 9000], [2000, 2000]]
    samples = [Sample("a", at, Steps(np.array(ns, np.int64))) for at, ns in enumerate(runs)]
    made = summary([*samples, Sample("b", 0, Steps(np.array([7], np.int64)))], "a")
    assert made["repeats_us_per_token"] == [1.0, 5.0, 2.0]
    assert made["us_per_token"] == 2.0
    assert made["tokens_per_s"] == 500_000
    assert made["spread"] == 2.0
    assert made["steps"] == 6
    assert made["step_us"]["p50"] == 1.5


def test_a_step_without_time_is_refused() -> None:
    with pytest.raises(EngineError, match="a: repetition 1 has a step that took no time"):
        alternate([variant("a", [], ns=0)], 1, show=lambda text: None, after_round=lambda: None)


def test_a_variant_without_samples_is_refused() -> None:
    with pytest.raises(EngineError, match="has no sample"):
        summary([], "a")
