"""Shapes that are left out say how wide intervals must be."""

from __future__ import annotations

import numpy as np
import pytest

from twin.calibrate.cross import FEWEST, HELD, Cross, crossed

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
    found = crossed(NAMES, NAMES, left, slopes, GENERATOR.normal(0, 0.01, (400, 2)))
    for at, name in enumerate(NAMES):
        kept = np.arange(20) != at
        again = np.linalg.lstsq(slopes[kept], -left[kept], rcond=None)[0]
        assert found.errors[name] == pytest.approx(left[at] + slopes[at] @ again)
        assert abs(found.errors[name]) >= abs(left[at])  # a shape pulls the fit towards itself


@pytest.mark.parametrize("width", [0.001, 0.01, 1.0])
def test_widened_intervals_hold_four_of_five_shapes_and_none_narrows(width: float) -> None:
    slopes, left = linear(0.05)
    draws = GENERATOR.normal(0, width, (400, 2))
    found = crossed(NAMES, NAMES, left, slopes, draws)
    said = np.quantile(np.abs(found.widened * draws @ slopes.T), HELD, axis=0)
    held = np.mean(
        [
            abs(found.errors[name]) <= 1.000001 * reach
            for name, reach in zip(NAMES, said, strict=True)
        ]
    )
    assert held >= HELD
    assert found.widened == 1 if width == 1.0 else found.widened > 1


def test_stages_are_left_out_with_their_step() -> None:
    """A shape's own stages would tell the fit about it."""
    slopes, left = linear(0.05)
    rows = [*NAMES, *NAMES, ""]
    found = crossed(
        NAMES,
        rows,
        np.concatenate([left, left, [0.0]]),
        np.vstack([slopes, slopes, [0.0, 0.0]]),
        np.ones((4, 2)),
    )
    alone = crossed(NAMES, NAMES, left, slopes, np.ones((4, 2)))
    assert found.errors == pytest.approx(alone.errors)


def test_few_shapes_say_nothing() -> None:
    slopes, left = linear(0.05)
    few = NAMES[: FEWEST - 1]
    assert crossed(few, few, left[: len(few)], slopes[: len(few)], np.ones((4, 2))) == Cross()
