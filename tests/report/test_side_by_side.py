"""Measured next to simulated stages."""

from __future__ import annotations

import pytest

from twin.report.side_by_side import StageTimes


def test_a_stage_next_to_the_others_has_no_difference() -> None:
    assert StageTimes("reduce", 26, *6 * (0.0,)).difference is None
    assert StageTimes("qkv", 16, 0, 0, 0, 0, 4.0, 5.0).difference == pytest.approx(0.25)
