"""Formats of low-bit weights: encoding, decoding, and the parts that ranks and stages take of a
matrix.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.codes.names import ON_EVERY_DEVICE
from twin.models.codes import CODES, joined, paired
from twin.models.formats import DECODED, INT4

# Of a weight's error, relative to the largest weight of its block.
HALF_STEP = {"int8": 0.5 / 127, "fp8": 16 / 448, "fp8-128x128": 16 / 448}
HALF_STEP["int8-g32-fp16"] = 0.5 / 127 + 2**-11
HALF_STEP |= {"mxfp4": 1 / 5, "nvfp4": 1 / 5.5}  # of the step from 4 to 6, where 5 is the largest
# and a scale in 16 bits is off by 2^-9 itself
HALF_STEP |= {
    form.name: (1 if form.zero_bytes else 0.5) / (15 if form.zero_bytes else 7) + 2**-8
    for form in INT4
}


def test_every_format_that_the_engine_runs_has_a_code() -> None:
    assert list(DECODED) == list(CODES)  # in the order of the kernel's numbers


@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_weights_are_rounded_by_at_most_half_a_step(name: str) -> None:
    weights = np.random.default_rng(0).standard_normal((6, 256), np.float32)
    error = np.abs(CODES[name].quantise(weights).astype(np.float64) - weights).max()
    assert 0 < error <= HALF_STEP[name] * np.abs(weights).max() * (1 + 1e-6)


@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_what_is_representable_is_kept(name: str) -> None:
    once = CODES[name].quantise(np.random.default_rng(1).standard_normal((4, 128), np.float32))
    again = CODES[name].quantise(once.astype(np.float32))
    assert np.abs(again.astype(np.float64) - once.astype(np.float64)).max() < 1e-6


@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_parts_of_a_matrix_are_parts_of_its_weights(name: str) -> None:
    a, b = (
        CODES[name].quantise(np.random.default_rng(seed).standard_normal((5, 512), np.float32))
        for seed in (2, 3)
    )
    whole, other = a.astype(np.float32), b.astype(np.float32)
    assert np.array_equal(
        a.rows(slice(1, 4)).columns(128, 384).astype(np.float32), whole[1:4, 128:384]
    )
    assert np.array_equal(joined([a, b]).astype(np.float32), np.concatenate([whole, other]))
    assert np.array_equal(paired(a, b).astype(np.float32)[2], whole[1])
    assert np.array_equal(paired(a, b).astype(np.float32)[3], other[1])


@pytest.mark.parametrize("name", ON_EVERY_DEVICE)
def test_a_row_of_zeros_stays_zero(name: str) -> None:
    assert not CODES[name].quantise(np.zeros((2, 128), np.float32)).astype(np.float32).any()
