"""Which numbers a group of probes binds: by curvature, on one side only, as a sum, or not at
all.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from twin.calibrate.bound import ALLOWED, Group, Vector, allowed, curvature, noise
from twin.hardware.number import Kind, Number

FACTOR_OF_TWO = Number(1.0, Kind.ASSUMED, "test", 0.5, 2.0)
NOISE = 0.01


def group(slopes: list[list[float]], *, level: float = NOISE) -> Group:
    """A group that is linear in its logarithms, at zero."""
    matrix = np.array(slopes, dtype=np.float64)

    def misfit(point: Vector) -> float:
        return float(np.sum((matrix @ point) ** 2))

    return Group(
        [f"n{at}" for at in range(matrix.shape[1])],
        np.zeros(matrix.shape[1]),
        matrix,
        level,
        misfit,
    )


def strengths(found: Group, *before: Number) -> dict[str, float]:
    return found.judged(before or [FACTOR_OF_TWO] * len(found.paths)).strength


def test_a_number_that_its_probe_follows_is_bound_and_one_that_no_probe_sees_is_not() -> None:
    found = strengths(group([[1.0, 0.0], [1.0, 0.0], [0.9, 0.001]]))
    assert found["n1"] < 1 < found["n0"]


def test_more_noise_binds_less() -> None:
    quiet, loud = (strengths(group([[0.1], [0.1]], level=level))["n0"] for level in (0.01, 0.1))
    assert quiet == pytest.approx(10 * loud)
    assert loud < 1 < quiet


def test_a_wider_range_is_easier_to_bind_than_a_narrow_one() -> None:
    wide = strengths(group([[0.02], [0.02]]), Number(1.0, Kind.ASSUMED, "test", 0.1, 10.0))["n0"]
    narrow = strengths(group([[0.02], [0.02]]), Number(1.0, Kind.MEASURED, "test", 0.99, 1.01))[
        "n0"
    ]
    assert wide / narrow == pytest.approx(math.log(10) / ALLOWED)


def test_of_two_numbers_that_are_known_as_a_sum_one_is_bound() -> None:
    found = group([[1.0, 1.0], [1.0, 1.0]]).judged([FACTOR_OF_TWO] * 2)
    assert sorted(strength >= 1 for strength in found.strength.values()) == [False, True]
    assert list(found.replaced) == found.unbound


def test_a_rate_that_nothing_waits_for_is_not_bound_on_one_side_only() -> None:
    def misfit(point: Vector) -> float:
        return float(min(0.0, point[0] + 0.1) ** 2)

    flat = Group(["rate"], np.zeros(1), np.zeros((2, 1)), NOISE, misfit)
    assert flat.judged([FACTOR_OF_TWO]).strength["rate"] < 1
    assert flat.judged([FACTOR_OF_TWO]).replaced == ("rate",)
    refused = Number(0.5, Kind.ASSUMED, "test", 0.4, 0.6)  # the probes say that it is more
    assert flat.judged([refused]).unbound == ["rate"]
    assert flat.judged([refused]).replaced == ()


def test_the_allowed_range_holds_what_the_file_says_and_a_factor_of_two_about_the_value() -> None:
    assert allowed(Number(4.0, Kind.MEASURED, "test", 3.9, 4.1), math.log(3.0)) == pytest.approx(
        (math.log(1.5), math.log(6.0))
    )
    assert allowed(Number(4.0, Kind.ASSUMED, "test", 0.0, 40.0), math.log(3.0)) == pytest.approx(
        (math.log(1.5), math.log(40.0))
    )


def test_curvature_is_the_misfits_growth_with_the_others_following() -> None:
    assert curvature(np.array([[3.0], [4.0]])) == pytest.approx([5.0])
    assert curvature(np.array([[1.0, 1.0], [0.0, 1.0]])) == pytest.approx([math.sqrt(0.5), 1.0])


def test_noise_is_what_is_left_or_what_repeats_differ_by() -> None:
    assert noise(0.08, 10, 2, 0.0) == pytest.approx(0.1)
    assert noise(0.0, 10, 2, 0.03) == 0.03
    assert noise(0.0, 1, 2, 0.0) > 0
