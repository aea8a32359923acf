"""axe-core, run in a page: rules of accessibility that a program can check."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.server.browser import Page

PACKAGES = ("axe_playwright_python", "axe_core_python")  # the first has the newer one
SERIOUS = ("serious", "critical")
ROW = "{id: v.id, impact: v.impact, nodes: v.nodes.map(n => n.html.slice(0, 200))}"


def script() -> Path | None:
    """axe.min.js of the package that is installed, which is not imported."""
    for name in PACKAGES:
        found = find_spec(name)
        for folder in (found.submodule_search_locations or []) if found else []:
            if (file := Path(folder) / "axe.min.js").is_file():
                return file
    return None


def violations(page: Page) -> list[dict[str, Any]]:
    """What axe finds in the page as it is."""
    file = script()
    assert file
    page.run(f"{file.read_text(encoding='utf-8')};null")
    found = json.loads(
        page.run(
            "axe.run(document).then(r => JSON.stringify({passes: r.passes.length, "
            f"violations: r.violations.map(v => ({ROW}))}}))"
        )
    )
    assert found["passes"] > 10, "axe has looked at the page"
    listed: list[dict[str, Any]] = found["violations"]
    return listed


def serious(page: Page) -> list[dict[str, Any]]:
    return [one for one in violations(page) if one["impact"] in SERIOUS]
