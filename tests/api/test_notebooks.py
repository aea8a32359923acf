"""The code of docs/python.md and of the notebooks runs, block by block, as its readers would."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ["python.md", *sorted(f"notebooks/{page.name}" for page in DOCS.glob("notebooks/*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_s_code_runs(
    page: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
    monkeypatch.chdir(tmp_path)
    said: dict[str, object] = {}
    blocks = BLOCK.findall((DOCS / page).read_text())
    assert blocks
    for block in blocks:
        exec(compile(block, page, "exec"), said)


def test_the_pages_lead_to_every_notebook() -> None:
    text = (DOCS / "python.md").read_text()
    assert [page for page in PAGES[1:] if page not in text] == []
    assert len(PAGES) == 4
