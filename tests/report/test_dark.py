"""Reports on dark ground: figures are drawn, and text can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.explore.test_page import FAINT
from tests.server.browser import CHROMIUM, browser
from twin.report import figures
from twin.report.html import Chip, Page, Section, html_table

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
TEXTS = "[...document.querySelectorAll('.figure text')].map(e => getComputedStyle(e).fill)"


def test_a_page_is_readable_in_light_and_dark(tmp_path: Path) -> None:
    table = html_table(("a", "b"), [("x", Chip("assumed")), ("y", Chip("measured"))])
    figure = figures.figure(figures.causes_chart({"a": {"streaming": 1.0, "hand_off": 2.0}}))
    page = Page("A page", "of a test", (("1", "card"),), (Section("S", "text", (figure,), table),))
    file = page.write(tmp_path / "page.html")
    seen = {}
    with browser() as shown:
        for dark in (False, True):
            shown.show(file.as_uri(), 1200, 900, dark=dark)
            shown.until("document.querySelectorAll('.figure .xtick').length > 1")
            assert shown.run(FAINT) == []
            assert shown.faults == []
            seen[dark] = set(shown.run(TEXTS))
    assert seen == {False: {"rgb(27, 36, 51)"}, True: {"rgb(231, 234, 238)"}}
