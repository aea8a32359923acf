"""A cache's end is found in the measured curve, wherever it is and whatever the system says of
it.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.draws import drawn
from twin.calibrate.knee import knee
from twin.cost.terms import kept_share
from twin.hardware.host import detect_host
from twin.hardware.number import Kind, Number
from twin.hardware.types import Cache

MB = 10**6
LADDER = [round(4 * MB * 2 ** (at / 2)) for at in range(18)]  # to 1.45 GB


def cache(capacity: float) -> Cache:
    """An LLC of which the system says `capacity`."""
    llc = detect_host().llc
    assert llc is not None
    return dataclasses.replace(
        llc, capacity_bytes=Number(capacity, Kind.DATASHEET, "test"), block_bytes=None
    )


def curve(capacity: float, fast: float, slow: float, noise: float, seed: int) -> dict[int, float]:
    random, law = np.random.default_rng(seed), cache(capacity)
    shares = {size: kept_share(size, law) for size in LADDER}
    return {
        size: size * (kept / fast + (1 - kept) / slow) * math.exp(noise * random.standard_normal())
        for size, kept in shares.items()
    }


@drawn(20)
@given(
    capacity=st.floats(10e6, 300e6),
    fast=st.floats(8e9, 60e9),
    contrast=st.floats(1.5, 6.0),
    said=st.sampled_from([1e6, 32e6, 503e6, 1e9]),
    seed=st.integers(0, 10**6),
)
def test_the_capacity_is_found_whatever_the_system_says(
    capacity: float, fast: float, contrast: float, said: float, seed: int
) -> None:
    found = knee(curve(capacity, fast, fast / contrast, 0.03, seed), cache(said))
    assert found is not None
    assert found.capacity_bytes == pytest.approx(capacity, rel=0.5)
    assert found.cache_bytes_per_s == pytest.approx(fast, rel=0.15)
    assert found.memory_bytes_per_s == pytest.approx(fast / contrast, rel=0.15)


@drawn(15)
@given(
    rate=st.floats(5e9, 50e9),
    noise=st.floats(0, 0.02),
    said=st.sampled_from([1e6, 32e6, 503e6]),
    seed=st.integers(0, 10**6),
)
@example(rate=5e9, noise=0.015625, said=1e6, seed=13241)
def test_a_flat_curve_has_no_knee(rate: float, noise: float, said: float, seed: int) -> None:
    assert knee(curve(30e6, rate, rate, noise, seed), cache(said)) is None


def test_few_points_have_no_knee() -> None:
    assert knee({4 * MB: 1e-3, 8 * MB: 9e-3}, cache(32e6)) is None
