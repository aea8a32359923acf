"""The zoo's page, and its table in the project's README."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.studies.scripts import loaded
from twin.models.load import load_model, model_names

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_table_is_made_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies/zoo")
    page = loaded("zoo/page.py")
    found = {device: page.rows(device) for device in page.CEILINGS}
    assert page.front(found) == (ROOT / "README.md").read_text(encoding="utf-8"), "make studies"


def test_every_model_of_the_readmes_table_is_known_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bytes that were timed: `twin simulate NAME 1xh200` answers for each row."""
    monkeypatch.syspath_prepend(ROOT / "studies/zoo")
    page, shapes = loaded("zoo/page.py"), loaded("zoo/shapes.py")
    timed = {row.name: row.weights for row in page.rows("h200-sxm")}
    table = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in table for name in timed)
    assert set(timed) <= set(model_names())
    assert {spec.name: spec.streamed_bytes for spec in shapes.shapes()} == timed
    assert {load_model(name).streamed_bytes for name in timed} == set(timed.values())
