"""The zoo's page, and its table in the project's README."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.studies.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_table_is_made_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "studies/zoo")
    page = loaded("zoo/page.py")
    found = {device: page.rows(device) for device in page.CEILINGS}
    assert page.front(found) == (ROOT / "README.md").read_text(encoding="utf-8"), "make studies"
