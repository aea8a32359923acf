"""Cells of predictions that are written once, and how they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from studies.common import foretold
from studies.common.foretold import (
    FILE,
    beside,
    limits,
    limits_text,
    read_cells,
    spread,
    write_once,
)
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.errors import ConfigError


def test_predictions_are_written_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(foretold, "commit_of", lambda folder: "abc")
    assert read_cells(tmp_path) == {}
    write_once(tmp_path, lambda: {"rows": {"a": {"p50": 1.0}}})
    assert read_cells(tmp_path) == {"a": {"p50": 1.0}}
    assert list(json.loads((tmp_path / FILE).read_text())) == ["commit", "rows"]
    with pytest.raises(ConfigError, match="written once, before the runs"):
        write_once(tmp_path, lambda: pytest.fail("computed before it is refused"))


def test_a_spread_holds_the_errors_of_the_held_out_runs() -> None:
    node = calibrated_node("1xh200-sxm")
    known = known_error(node)
    assert known is not None
    speeds = [1000 / (1 + error) for error in known.every]
    found = spread([1000.0], node)
    assert min(speeds) <= found["p10"] < found["p50"] < found["p90"] <= max(speeds)


def test_the_three_largest_causes_are_named_as_shares() -> None:
    found = limits({"launch": 1, "hand_off": 2, "sampling": 1, "streaming": 4})
    assert found == {"streaming": 0.5, "hand_off": 0.25, "launch": 0.125}
    assert limits_text({"limits": found}) == "streaming 50%, hand-off 25%, launch 12%"


def test_what_is_missing_stays_empty_beside_the_rest() -> None:
    cell = {"p10": 900.0, "p50": 1100.0, "p90": 1200.0}
    assert beside(1000.0, cell) == ("1,000", "1,100 (900-1,200)", "+10.0%")
    assert beside(None, cell) == ("not run", "1,100 (900-1,200)", "")
    assert beside(1000.0, {"refused": "no room"}) == ("1,000", "", "")
