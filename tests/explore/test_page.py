"""The explorer in a real browser: choices by keyboard, shared addresses, narrow and dark."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.explore.serving import SHORT, Running, running
from tests.server import axe
from tests.server.browser import CHROMIUM, Page, browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
# One of them each time, all where there is time.
SLOW = pytest.mark.slow
SCREENS = [
    (1440, 900, False),
    pytest.param(1440, 900, True, marks=SLOW),
    pytest.param(390, 844, False, marks=SLOW),
    (390, 844, True),
]
AXE_SCREENS = [
    (390, 844, True),
    *(
        pytest.param(width, height, dark, marks=pytest.mark.slow)
        for width, height in ((1440, 900), (390, 844), (320, 568))
        for dark in (False, True)
        if (width, height, dark) != (390, 844, True)
    ),
]
SHORTER = SHORT.replace(" ", "+")
QUIET = "state.choices !== null && state.data.size > 0 && state.running.size === 0"
# Controls without a name, pictures without one, ids that stand twice: what checkers find most.
UNNAMED = """[...document.querySelectorAll("button, input, select, a, [role=img]")]
  .filter(e => e.offsetParent !== null || e.tagName === "svg")
  .filter(e => !(e.textContent.trim() && e.tagName !== "SELECT") && !e.getAttribute("aria-label")
    && !(e.labels && e.labels.length)).map(e => e.outerHTML.slice(0, 80))"""
TWICE = """[...document.querySelectorAll("[id]")].map(e => e.id)
  .filter((id, at, all) => all.indexOf(id) !== at)"""
# Text against what is behind it, WCAG's ratio, of everything that has words of its own.
FAINT = """(() => {
  const rgb = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
    const colour = rgb(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] > 0) return colour;
  } return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")]
    .filter(e => !e.closest("svg, script, style, option, :disabled") && e.getClientRects().length)
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .filter(e => { const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; })
    .map(e => e.outerHTML.slice(0, 80));
})()"""


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("explore")
    with running(folder) as server:
        yield server


def healthy(page: Page, width: int) -> None:
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(UNNAMED) == []
    assert page.run(TWICE) == []
    assert page.run(FAINT) == []
    assert page.faults == []


@pytest.mark.few(1)
@pytest.mark.parametrize(("width", "height", "dark"), SCREENS)
def test_an_exploration_is_made_and_its_address_shows_it_again(
    width: int, height: int, dark: bool, live: Running
) -> None:
    with browser() as page:
        page.show(f"{live.url}/?case={SHORTER}", width, height, dark=dark)
        page.until(QUIET)
        assert "tokens/s, predicted" in page.run("at('cards').textContent")
        assert page.run("at('choose').open") == (width > 860)
        page.run("at('choose').open = true")
        healthy(page, width)
        # A second case, changed by keyboard alone.
        page.run("at('more').focus()")
        page.key("Enter")
        page.until("state.cases.length === 2")
        page.run("at('set-1').focus()")
        page.type("handoff")
        page.key("Tab")
        page.type("grid")
        page.key("Enter")
        page.until("state.cases[1].sets.includes('handoff=grid')")
        page.until(QUIET)
        assert page.run("document.querySelectorAll('.card .big').length") == 2
        assert "hand-off" in page.run("at('diff').textContent")
        page.run("at('stages-button').click()")
        page.until("state.stages && !!state.stages.found")
        assert "lm_head" in page.run("at('stages').textContent")
        # A sweep of two numbers is a heat map.
        page.run("at('axis-0').focus()")
        page.type("memory.stream")
        page.run("at('values-0').focus()")
        page.type("x0.8,x1,x1.2")
        page.key("Enter")
        page.run("at('axis-1').focus()")
        page.type("clock")
        page.run("at('values-1').focus()")
        page.type("x0.5,x1")
        page.key("Enter")
        page.until("state.sweep && !!state.sweep.found && state.sweep.found.axes.length === 2")
        assert page.run("at('sweep').querySelectorAll('svg rect').length") == 6
        page.until(QUIET)
        healthy(page, width)
        # The address alone shows the same.
        address = page.run("location.href")
        shown = page.run("at('cards').textContent")
        page.show("about:blank", width, height, dark=dark)
        page.show(address, width, height, dark=dark)
        page.until(QUIET)
        page.until("state.sweep && !!state.sweep.found")
        assert page.run("at('cards').textContent") == shown
        commands = page.run("at('again').textContent")
        assert "--set layers=1 --set handoff=grid" in commands
        assert "--sweep memory.stream=x0.8,x1,x1.2 --sweep clock=x0.5,x1" in commands
        page.run("[...document.querySelectorAll('[data-sweep]')].at(-1).click()")
        page.until("at('sweep-section').hidden")
        page.run("history.back()")
        page.until("!at('sweep-section').hidden && at('axis-1').value === 'clock'")


@pytest.mark.few(1)
@pytest.mark.skipif(axe.script() is None, reason="no axe-core here (pip install axe-core-python)")
@pytest.mark.parametrize(("width", "height", "dark"), AXE_SCREENS)
def test_axe_finds_nothing_serious(width: int, height: int, dark: bool, live: Running) -> None:
    """Two cases with a sweep, everything unfolded, and a case that cannot be."""
    cases = f"case={SHORTER}&case={SHORTER}+handoff%3Dgrid&case={SHORTER}+blocks%3D500"
    with browser() as page:
        page.show(f"{live.url}/?{cases}&sweep=clock%3Dx0.5%2Cx1", width, height, dark=dark)
        page.until(QUIET)
        page.until("state.sweep && !!state.sweep.found")
        page.run("at('stages-button').click()")
        page.until("state.stages && !!state.stages.found")
        page.run("document.querySelectorAll('details').forEach(one => (one.open = true))")
        assert axe.serious(page) == []
        page.run("document.body.append(document.createElement('img'))")
        assert [one["id"] for one in axe.serious(page)] == ["image-alt"], "axe looks"


@pytest.mark.slow
def test_a_wrong_address_and_a_wrong_choice_get_one_error_each(live: Running) -> None:
    with browser() as page:
        page.show(f"{live.url}/?case={SHORTER}&colour=red", 1440, 900)
        page.until("!at('wrong').hidden")
        assert "unknown in an address" in page.run("at('wrong').textContent")
        page.show(f"{live.url}/?case={SHORTER}+handoff%3Dgird", 1440, 900)
        page.until("document.querySelectorAll('.card .wrong').length === 1")
        assert "did you mean grid" in page.run("at('cards').textContent")
        assert page.run("document.querySelectorAll('[role=alert]:not([hidden])').length") == 1


def test_a_width_that_changes_before_a_case_is_chosen_draws_nothing(live: Running) -> None:
    with browser() as page:
        page.show(f"{live.url}/?case={SHORTER}", 1440, 900)
        page.until(QUIET)
        page.run("(held = state.cases, state.cases = [], at('show').style.width = '500px')")
        page.until("at('show').clientWidth === 500")
        page.run(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            ".then(() => { state.cases = held; })"
        )
        page.until("state.cases.length === 1")
        assert page.faults == []


@pytest.mark.few(1)
@pytest.mark.parametrize("address", ["foo=bar", f"case={SHORTER}&case=x"])
def test_an_address_that_is_refused_says_why_and_simulates_nothing(
    address: str, live: Running
) -> None:
    with browser() as page:
        page.show(f"{live.url}/?{address}", 1200, 900)
        page.until("!document.getElementById('wrong').hidden")
        page.until("document.body.innerText.includes('No prediction.')")
        assert page.run("state.running.size") == 0
        assert "simulating" not in page.run("document.body.innerText").lower()


def test_a_floor_far_away_does_not_set_the_axis(live: Running) -> None:
    with browser() as page:
        page.show(f"{live.url}/?case={SHORTER}", 1200, 900)
        page.until(QUIET)
        share = """(floor => {
          const bar = () => { const [b] = document.querySelectorAll('#speed rect');
            return b.width.baseVal.value / document.querySelector('#speed svg').clientWidth; };
          const found = state.data.get(key(state.cases[0]));
          found.speed.floor_tokens_per_s = floor * found.speed.tokens_per_s;
          render();
          return bar(); })"""
        near, far = page.run(f"{share}(1.5)"), page.run(f"{share}(14)")
        assert 0.3 < near < far
        assert far > 0.5  # the interval of so small a model reaches to twice the speed
        assert "floor" in page.run("document.getElementById('speed').textContent")
