"""What a CU is stated to consume follows from what its waves issue."""

from __future__ import annotations

import pytest

from tests.gfx942.issued import CLOCK_HZ, REACHED, Issued, issued
from twin.hardware.load import load_device
from twin.models.spec import DType

STATED = load_device("mi300x").kernel


def test_vectors_of_two_waves_or_their_turns_bind() -> None:
    vectors = Issued(vector=160, scalar=10, shared=2, load=4)
    assert vectors.bytes_per_cycle() == pytest.approx(4 * 2 * 4096 / (2 * 160 * 4))
    turns = Issued(vector=80, scalar=200, shared=2, load=4)
    assert turns.bytes_per_cycle() == pytest.approx(4 * 2 * 4096 / (286 * 4))
    nothing = Issued(vector=1, scalar=1, shared=1, load=1)
    assert nothing.bytes_per_cycle() == 64  # the first-level cache


@pytest.mark.slow  # a minute: four kernels compiled and interpreted for each type
@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_the_stated_rates_are_those_of_the_machine_code(dtype: DType) -> None:
    found = issued(dtype)
    stated = getattr(STATED, f"{dtype.value}_bytes_per_s")
    assert found.load == pytest.approx(4, rel=0.05)  # a strip's
    most = found.bytes_per_cycle() * CLOCK_HZ
    assert stated.high == pytest.approx(most, rel=0.03)
    assert stated.value == pytest.approx(REACHED * most, rel=0.03)
    assert stated.low == pytest.approx(found.alone() * CLOCK_HZ, rel=0.03)
