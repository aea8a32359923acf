"""The zoo's page, and its table in the project's README."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_readmes_table_is_made_of_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("zoo_page", ROOT / "studies/zoo/page.py")
    monkeypatch.syspath_prepend(ROOT / "studies/zoo")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, page)  # dataclasses look their module up
    spec.loader.exec_module(page)
    found = {device: page.rows(device) for device in page.CEILINGS}
    assert page.front(found) == (ROOT / "README.md").read_text(encoding="utf-8"), "make studies"
