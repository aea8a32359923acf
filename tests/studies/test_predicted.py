"""Cells of predictions next to what was measured."""

from __future__ import annotations

from studies.common.predicted import limits_text, next_to


def test_causes_are_named_as_shares() -> None:
    found = {"streaming": 0.5, "hand_off": 0.25, "launch": 0.125}
    assert limits_text({"limits": found}) == "streaming 50%, hand-off 25%, launch 12%"


def test_what_is_missing_stays_empty_next_to_the_rest() -> None:
    cell = {"p10": 900.0, "p50": 1100.0, "p90": 1200.0}
    assert next_to(1000.0, cell) == ("1,000", "1,100 (900-1,200)", "+10.0%")
    assert next_to(None, cell) == ("not run", "1,100 (900-1,200)", "")
    assert next_to(1000.0, {"refused": "no room"}) == ("1,000", "", "")
