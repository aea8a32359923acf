"""Pages as a browser lays them out: readable on a phone as well as on a desk. Needs Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from tests.calibrate.ran import ran
from tests.command_line import TINY
from tests.patience import PATIENCE_S
from twin.calibrate.validate import Validation
from twin.hardware.load import load_node
from twin.plan.catalogue import StageKind
from twin.report import outcome, pages
from twin.report.html import Page
from twin.report.step import traced_blocks
from twin.schedule.options import plan_for
from twin.sim.run import simulate
from twin.study.kinds import Study
from twin.study.outcome import Bars, Column, Lines, Outcome, Part, Series, Shown, Table, Waterfall
from twin.study.runner import Runner
from twin.study.sensitivity import Effect

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium: how a page is laid out can be seen in a browser only"
)
PHONE, DESK = 390, 1280
# pixels; numbers of a vertical axis may take a few more than were foreseen
LEAST_PLOT, LEAST_PLOT_LINES = 280, 270
LINE = 18  # pixels of a line of a table

# Runs behind the page's own script and tells the page around it what it sees.
PROBE = """
<script>
const rect = (e) => {
  const { left, right, top, bottom } = e.getBoundingClientRect();
  return { left, right, top, bottom };
};
const all = (within, selector) =>
  [...within.querySelectorAll(selector)].map(rect).filter((r) => r.right > r.left);
// bars of a logarithmic axis begin far to its left
const plot = (box) => rect(box.querySelector(".nsewdrag"));
const inside = (cell) => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return range.getBoundingClientRect().height;
};
const swiped = (target) => {
  const touches = [new Touch({ identifier: 1, target, clientX: 50, clientY: 50 })];
  const event = { bubbles: true, cancelable: true, touches, changedTouches: touches };
  target.dispatchEvent(new TouchEvent("touchstart", event));
  return target.dispatchEvent(new TouchEvent("touchmove", event));
};
drawn.then(() => parent.postMessage(JSON.stringify({
  width: innerWidth, needs: document.documentElement.scrollWidth,
  cells: [...document.querySelectorAll("td")].map((e) => (
    { height: inside(e), letters: e.textContent.length })),
  figures: [...document.querySelectorAll(".figure")].map((box) => ({
    box: rect(box), plot: plot(box), rows: box.querySelectorAll(".barlayer path").length > 0,
    legend: box.previousElementSibling?.matches(".legend")
      ? all(box.previousElementSibling, "button") : [],
    bars: all(box, ".barlayer path, .waterfalllayer .point path").map((bar) => (
      { ...bar, left: Math.max(bar.left, plot(box).left) })),
    names: all(box, ".annotation-text, .ytick text"),
    scrolls: swiped(box.querySelector(".nsewdrag")),
    ticks: all(box, ".xtick text"), titles: all(box, ".xtitle, .ytitle"),
  })),
}), "*"));
</script>
"""
AROUND = """
<iframe src='page.html' style='border: 0; width: {width}px; height: 900px'></iframe>
<script>
addEventListener("message", (said) => {{
  document.body.innerHTML = "<pre></pre>";
  document.body.firstChild.textContent = said.data;
}});
</script>
"""


@dataclass(frozen=True, slots=True)
class Box:
    left: float
    right: float
    top: float
    bottom: float

    def covers(self, other: Box) -> bool:
        """Whether they share more than an edge."""
        across = min(self.right, other.right) - max(self.left, other.left)
        down = min(self.bottom, other.bottom) - max(self.top, other.top)
        return across > 1 and down > 1


class Wanted:
    def run(self, runner: Runner) -> Outcome:
        raise NotImplementedError


def simulated() -> Page:
    node = load_node("1xh200")
    plan = plan_for(TINY, node, blocks=8)
    result = simulate(plan, node, trace=True, blocks=traced_blocks(plan.options.blocks))
    both = (ran("a", 110.0, 100.0, 0.01), ran("b", 900.0, 1000.0, 0.02))
    compared = Validation(both, node="host", fit="a-run")
    effects = [
        Effect("device.memory.stream_bytes_per_s", "assumed", 1.0, 1.1, 11.0, 0.05),
        Effect("blocks", "option", 10, 11, 9.0, -0.02),
    ]
    engines = dict.fromkeys(("stream", "graph", "resident, grid", "resident, sentinel"), result)
    extra = pages.engines(engines), pages.validation(compared), pages.sensitivity(effects, 0.1)
    return pages.simulation_page(plan, node, result, *extra)


def studied() -> Page:
    cells = tuple(
        f"llama-3.2-1b on 8xmi300x, clock x0.6, context {context}" for context in (128, 4096, 16384)
    )
    kinds = tuple(Series(kind.value, (0.04,) * len(cells)) for kind in StageKind)
    speeds = Series("8xh200", (2000.0, 1000.0, 30.0), (1900.0, 900.0, 20.0), (2100.0, 1100.0, 40.0))
    theirs = Series("8xh200, published", (2200.0, None, None), marks=True)
    ideas = Waterfall(
        ("a launch for each operation", "one graph of kernels", "data is the flag"),
        (573.0, 795.0, 700.0),
        "tokens/s",
    )
    curves = tuple(
        Series(f"recorded, {kind}", (2000.0, 200.0, 20.0))
        for kind in ("all calls", "commands", "other calls")
    )
    lines = Lines(
        (30.0, 1000.0, 30000.0),
        curves,
        "tokens/s of the engine",
        "wall clock, seconds",
        log_x=True,
        log_y=True,
    )
    columns = (
        Column("number", Shown.TEXT),
        Column("kind", Shown.CHIP),
        Column("value"),
        Column("source", Shown.TEXT),
    )
    sources = Table(
        "sources",
        columns,
        (("memory.stream_bytes_per_s", "assumed", 4.8e12, "a sentence of some length, " * 6),),
    )
    wide = Table(
        "wide",
        (Column("cell", Shown.TEXT), *(Column(f"column {i}") for i in range(14))),
        ((cells[0], *range(14)),),
    )
    charts = (
        Bars(
            cells,
            (speeds, theirs),
            "tokens/s, predicted, for one user at the cached positions that the row says",
            log=True,
        ),
        Bars(cells, kinds, "share of a step", stacked=True),
        ideas,
        lines,
    )
    part = Part("Everything", "What to see.", charts, (sources, wide))
    return outcome.page(
        Study("all", "projection", "A title", "A question?", "A prediction.", Wanted()),
        Outcome((part,), (("1", "card"),)),
    )


def laid_out(page: Page, width: int, folder: Path) -> dict[str, Any]:
    """What the page looks like in a window of this width. A frame is used because Chromium's own
    window has a least width.
    """
    (folder / "page.html").write_text(
        page.html().replace("</body>", f"{PROBE}</body>"), encoding="utf-8"
    )
    (folder / "around.html").write_text(AROUND.format(width=width), encoding="utf-8")
    assert BROWSER
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        f"--user-data-dir={folder / 'profile'}",
        "--virtual-time-budget=10000",
        "--window-size=1400,1000",
        "--dump-dom",
        (folder / "around.html").as_uri(),
    ]
    dumped = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    said = re.search(r"<pre>(.*)</pre>", dumped, re.DOTALL)
    assert said, "the page's own script did not come to its end"
    seen: dict[str, Any] = json.loads(unescape(said[1]))
    assert seen["width"] == width
    return seen


@pytest.fixture(
    scope="module",
    params=[
        (simulated, PHONE),
        pytest.param((studied, PHONE), marks=pytest.mark.slow),
        pytest.param((simulated, DESK), marks=pytest.mark.slow),
        (studied, DESK),
    ],
    ids=lambda param: f"{param[0].__name__}-{param[1]}",
)
def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    make, width = request.param
    return laid_out(make(), width, tmp_path_factory.mktemp("page"))


def boxes(figure: dict[str, Any], kind: str) -> list[Box]:
    return [Box(**one) for one in figure[kind]]


def test_no_plot_is_narrow(seen: dict[str, Any]) -> None:
    assert len(seen["figures"]) >= 4
    for figure in seen["figures"]:
        plot = Box(**figure["plot"])
        assert plot.right - plot.left >= (LEAST_PLOT if figure["rows"] else LEAST_PLOT_LINES)


def test_the_page_does_not_scroll_sideways(seen: dict[str, Any]) -> None:
    assert seen["needs"] <= seen["width"]


def test_a_finger_on_a_figure_scrolls_the_page(seen: dict[str, Any]) -> None:
    assert all(figure["scrolls"] for figure in seen["figures"])


def test_a_legend_covers_nothing_of_its_figure(seen: dict[str, Any]) -> None:
    assert any(figure["legend"] for figure in seen["figures"])
    for figure in seen["figures"]:
        assert not any(Box(**figure["box"]).covers(entry) for entry in boxes(figure, "legend"))


def test_names_of_rows_cover_no_bars(seen: dict[str, Any]) -> None:
    drawn = 0
    for figure in seen["figures"]:
        names, bars = boxes(figure, "names"), boxes(figure, "bars")
        drawn += len(bars)
        assert not [(name, bar) for name in names for bar in bars if name.covers(bar)]
    assert drawn


def test_texts_of_an_axis_cover_neither_each_other_nor_its_title(seen: dict[str, Any]) -> None:
    for figure in seen["figures"]:
        texts = [*boxes(figure, "ticks"), *boxes(figure, "titles")]
        assert not [
            (one, other)
            for at, one in enumerate(texts)
            for other in texts[:at]
            if one.covers(other)
        ]


def test_all_text_lies_within_its_figure(seen: dict[str, Any]) -> None:
    for figure in seen["figures"]:
        around = Box(**figure["box"])
        for text in (*boxes(figure, "names"), *boxes(figure, "ticks"), *boxes(figure, "titles")):
            assert around.left - 1 <= text.left, text
            assert text.right <= around.right + 1, text
            assert text.bottom <= around.bottom + 1, text


def test_no_cell_of_a_table_is_a_tower_of_single_words(seen: dict[str, Any]) -> None:
    towers = [
        cell for cell in seen["cells"] if cell["height"] / LINE > max(3, cell["letters"] / 10)
    ]
    assert not towers
