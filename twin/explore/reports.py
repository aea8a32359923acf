"""Reports that `twin project` wrote into a folder, opened by the explorer."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

from twin.errors import ConfigError
from twin.files import read_text
from twin.server.problem import Problem
from twin.text import shown

PAGE = "report.html"
MOST = 200  # reports that are listed
MOST_PAGE = 64 << 20  # bytes; plotly takes 4.6 MB of each
HEAD = 2000  # bytes in which a page says its title
_TITLE = re.compile("<title>([^<]+)</title>")


def reports(folder: Path) -> list[dict[str, Any]]:
    """Those of its folders and its own, the newest first: name, title, when."""
    pages = [*folder.glob(f"*/{PAGE}"), *folder.glob(PAGE)]
    pages.sort(key=lambda page: -page.stat().st_mtime)
    return [
        {
            "name": PAGE if page.parent == folder else page.parent.name,
            "title": _title(page),
            "changed": page.stat().st_mtime,
        }
        for page in pages[:MOST]
        if page.is_file()
    ]


def report(folder: Path, name: str) -> bytes:
    """The page of a report. Raises Problem for a name that `reports` does not give."""
    known = [one["name"] for one in reports(folder)]
    if name not in known:
        raise Problem(f"{shown(name)}: no report of that name in the folder", status=404)
    try:
        page = folder / PAGE if name == PAGE else folder / name / PAGE
        return read_text(page, MOST_PAGE).encode()
    except ConfigError as error:
        raise Problem(str(error), status=404) from error


def _title(page: Path) -> str:
    """As it stands in the page's head; the folder's name where there is none."""
    try:
        with page.open("rb") as file:
            head = file.read(HEAD).decode("utf-8", "replace")
    except OSError:
        head = ""
    found = _TITLE.search(head)
    return unescape(found[1])[:200] if found else page.parent.name
