"""Reports that `twin project` wrote into a folder, opened by the explorer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from twin.errors import ConfigError
from twin.files import read_text
from twin.server.problem import Problem
from twin.text import shown

PAGE, RESULT = "report.html", "result.json"
MOST = 200  # reports that are listed
MOST_PAGE = 64 << 20  # bytes; plotly takes 4.6 MB of each
MOST_RESULT = 64 << 20


def reports(folder: Path) -> list[dict[str, Any]]:
    """The newest first: name, title, when."""
    pages = sorted(folder.glob(f"*/{PAGE}"), key=lambda page: -page.stat().st_mtime)[:MOST]
    return [
        {"name": page.parent.name, "title": _title(page), "changed": page.stat().st_mtime}
        for page in pages
    ]


def report(folder: Path, name: str) -> bytes:
    """The page of a report. Raises Problem for a name that `reports` does not give."""
    known = [one["name"] for one in reports(folder)]
    if name not in known:
        raise Problem(f"{shown(name)}: no report of that name in the folder", status=404)
    try:
        return read_text(folder / name / PAGE, MOST_PAGE).encode()
    except ConfigError as error:
        raise Problem(str(error), status=404) from error


def _title(page: Path) -> str:
    try:
        found = json.loads(read_text(page.with_name(RESULT), MOST_RESULT))["title"]
    except (ConfigError, ValueError, KeyError, TypeError):
        return page.parent.name
    return str(found)[:200]
