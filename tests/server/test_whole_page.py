"""Pages are kept in files that people read, and served whole."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twin.explore import app as explore
from twin.server import app as serve
from twin.server.application import whole_page

PAGES = pytest.mark.parametrize("folder", [explore.PAGE, serve.PAGE], ids=["explore", "serve"])
LINE = 100  # columns


@PAGES
def test_a_page_holds_all_files_of_its_folder_and_loads_none(folder: Path) -> None:
    made = whole_page(folder).decode()
    for file in folder.iterdir():
        if file.suffix != ".html":
            assert made.count(file.read_text(encoding="utf-8")) == 1, file.name
    assert not re.findall(r"<link rel=\"?stylesheet|<script [^>]*src", made)
    assert len(re.findall("</script>", made)) == len(list(folder.glob("*.js")))
    assert len(re.findall("</style>", made)) == 1


@PAGES
def test_the_files_of_a_page_are_for_people(folder: Path) -> None:
    for file in folder.iterdir():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= LINE, f"{file.name}:{number}: {len(line)} columns"
