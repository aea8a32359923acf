"""The playground in a real browser; by its text where there is none."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.server import axe
from tests.server.browser import CHROMIUM, browser
from tests.server.serving import Running
from tests.server.test_hard_times import held_back
from twin.server.expected import Expected

# One of them each time, all where there is time.
AXE_SCREENS = [
    (1366, 768, False),
    *(
        pytest.param(width, height, dark, marks=pytest.mark.slow)
        for width, height in ((1366, 768), (390, 844), (320, 568))
        for dark in (False, True)
        if (width, height, dark) != (1366, 768, False)
    ),
]

# The page judges answers of 17 tokens and more; a drawn one may end before that.
LONG_ENOUGH = "at('most').value = 30, at('temperature').value = 0"


def test_the_page_names_no_foreign_host_and_may_load_from_none(http: httpx.Client) -> None:
    answer = http.get("/")
    assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "prefers-color-scheme: dark" in answer.text
    controls = re.findall(r"<(?:textarea|input)[^>]*>", answer.text)
    assert all("aria-label" in one or "id=" in one for one in controls)


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "seed"])
def test_what_the_sampler_has_can_be_chosen_on_the_page(name: str, http: httpx.Client) -> None:
    text = http.get("/").text
    (control,) = re.findall(rf'<input id="{name}"[^>]*>', text)
    assert 'type="number"' in control
    assert f'{name}: number("{name}")' in text


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize(("width", "height", "dark"), [(1366, 768, False), (390, 844, True)])
def test_a_chat_is_held_by_keyboard_and_its_rates_are_shown(
    width: int, height: int, dark: bool, live: Running
) -> None:
    too_slow = Expected(1.0, 1.0, live.app.served.context, 0.99, 1.01)
    with live.expecting(too_slow), browser() as page:
        page.show(live.url, width, height, dark=dark)
        page.until("state.facts !== null")
        assert page.run("document.documentElement.scrollWidth") <= width
        page.run(LONG_ENOUGH)
        for turn in (1, 2):
            page.type("hello")
            page.key("Enter")
            page.until(f"state.history.length === {2 * turn} && state.stop === null")
            assert page.run("at('tokens').textContent") == "30"
        assert page.run("document.querySelectorAll('.turn.user').length") == 2
        assert re.match(r"[\d,.]+ tokens/s", page.run("at('rate').textContent"))
        assert "predicted" in page.run("at('alarm').textContent")
        assert not page.run("at('alarm').hidden")
        assert "tokens" in page.run("at('kept').textContent"), "the second turn kept the first"
        assert page.run("at('line').querySelectorAll('path').length") == 3
        page.run("at('fresh').click()")
        assert page.run("state.history.length + at('said').children.length") == 0
        assert page.faults == []


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_rate_and_line_are_live_and_escape_ends_an_answer(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    with browser() as page, monkeypatch.context() as patch:
        page.show(live.url, 1366, 768)
        page.until("state.facts !== null")
        page.run("at('most').value = 150, at('temperature').value = 0")
        held_back(live, patch)
        page.type("hello")
        page.key("Enter")
        page.until("Number(at('tokens').textContent) > 10")
        rate = page.run("parseFloat(at('rate').textContent)")
        assert 5 < rate < 55, "each token waits for 20 ms"
        assert re.match(r"[\d.]+ m?s", page.run("at('first').textContent"))
        measured = '[...at("line").querySelectorAll("path")].at(-1).getAttribute("d").length'
        before = page.run(measured)
        page.until(f"{measured} > {before}")
        page.key("Escape")
        page.until("state.stop === null")
        live.wait_idle()
        assert page.run("[...document.querySelectorAll('.turn')].at(-1).textContent") == "stopped"
        assert page.run("state.history.length") == 2, "what was said stays"
        assert page.faults == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_what_is_chosen_on_the_page_is_sent(live: Running) -> None:
    def answer(**chosen: object) -> str:
        page.run("at('fresh').click()")
        for name, value in chosen.items():
            page.run(f"at('{name}').value = '{value}'")
        page.type("hello")
        page.key("Enter")
        page.until("state.stop === null && document.querySelectorAll('.turn').length >= 2")
        return str(page.run("[...document.querySelectorAll('.turn')].at(-1).textContent"))

    with browser() as page:
        page.show(live.url, 1366, 768)
        page.until("state.facts !== null")
        best = answer(most=20, temperature=0)
        drawn = answer(temperature=1.5, seed=3)
        assert best != drawn
        assert answer(min_p=1) == best, "only the most probable token is left"
        assert answer(min_p="0.0", top_k=1) == best
        assert answer(top_k="") == drawn
        assert "min_p=1.5" in answer(min_p="1.5")
        assert page.run("document.querySelectorAll('.wrong').length") == 1
        assert page.run("at('text').value") == "hello", "to be sent again"
        assert page.run("state.history.length") == 0


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.skipif(axe.script() is None, reason="no axe-core here (pip install axe-core-python)")
@pytest.mark.parametrize(("width", "height", "dark"), AXE_SCREENS)
def test_axe_finds_nothing_serious(width: int, height: int, dark: bool, live: Running) -> None:
    """Before a chat with the settings open, and after one with an alarm and an error."""
    too_slow = Expected(1.0, 1.0, live.app.served.context, 0.99, 1.01)
    with live.expecting(too_slow), browser() as page:
        page.show(live.url, width, height, dark=dark)
        page.until("state.facts !== null")
        page.run("document.querySelector('details').open = true")
        assert axe.serious(page) == []
        page.run(LONG_ENOUGH)
        page.type("hello")
        page.key("Enter")
        page.until("!at('alarm').hidden && state.stop === null")
        assert axe.serious(page) == []
        page.type("x" * 9000)
        page.key("Enter")
        page.until("document.querySelector('.wrong') !== null && state.stop === null")
        assert axe.serious(page) == []
        page.run("document.body.append(document.createElement('img'))")
        assert [one["id"] for one in axe.serious(page)] == ["image-alt"], "axe looks"
