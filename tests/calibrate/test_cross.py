"""Shapes that are left out say how wide intervals must be."""

from __future__ import annotations

import numpy as np
import pytest

from twin.calibrate.cross import FEWEST, Cross, crossed

GENERATOR = np.random.default_rng(3)
NAMES = [f"design-{number:02d}" for number in range(20)]


def linear(noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Slopes of two numbers, and the residuals at the least squares of noisy shapes."""
    slopes = np.column_stack([np.ones(20), GENERATOR.uniform(-1, 1, 20)])
    target = GENERATOR.normal(0, noise, 20)
    point = np.linalg.lstsq(slopes, target, rcond=None)[0]
    return slopes, slopes @ point - target


def test_an_error_is_that_of_a_fit_without_the_shape() -> None:
    slopes, left = linear(0.05)
    found = crossed(NAMES, NAMES, left, slopes)
    for at, name in enumerate(NAMES):
        kept = np.arange(20) != at
        again = np.linalg.lstsq(slopes[kept], -left[kept], rcond=None)[0]
        assert found.errors[name] == pytest.approx(left[at] + slopes[at] @ again)
        assert abs(found.errors[name]) >= abs(left[at])  # a shape pulls the fit towards itself


@pytest.mark.parametrize("noise", [0.001, 0.05])
def test_draws_along_what_steps_see_best_spread_as_the_errors_do(noise: float) -> None:
    slopes, left = linear(noise)
    found = crossed(NAMES, NAMES, left, slopes)
    spread = np.sqrt(np.mean(np.square(slopes @ found.along)))
    assert spread == pytest.approx(np.sqrt(np.mean(np.square(list(found.errors.values())))))
    # no further than it takes: all steps see the first number alike
    assert max(map(abs, found.along)) < 2 * noise


def test_stages_are_left_out_with_their_step() -> None:
    """A shape's own stages would tell the fit about it."""
    slopes, left = linear(0.05)
    rows = [*NAMES, *NAMES, ""]
    found = crossed(
        NAMES,
        rows,
        np.concatenate([left, left, [0.0]]),
        np.vstack([slopes, slopes, [0.0, 0.0]]),
    )
    alone = crossed(NAMES, NAMES, left, slopes)
    assert found.errors == pytest.approx(alone.errors)


def test_few_shapes_say_nothing() -> None:
    slopes, left = linear(0.05)
    few = NAMES[: FEWEST - 1]
    assert crossed(few, few, left[: len(few)], slopes[: len(few)]) == Cross()
