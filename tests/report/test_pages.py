"""Pages: they hold what the result says, plotly accepts their figures, and nothing in them needs a
network.
"""

from __future__ import annotations

import json
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import plotly.graph_objects
import pytest

from tests.calibrate.ran import ran
from tests.command_line import TINY
from twin.batching.prices import rates_of
from twin.calibrate.validate import Validation
from twin.hardware.load import load_node
from twin.plan.types import Plan
from twin.report import figures, pages, step, words
from twin.report.html import Chip, Page, Section, html_table
from twin.schedule.options import plan_for
from twin.sim.run import Result, simulate
from twin.sim.trace import Trace, named_track, span
from twin.study.compared import Compared, Comparison
from twin.study.outcome import Bars, Series
from twin.study.sensitivity import Effect

NODE = load_node("1xh200")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_for(TINY, NODE, blocks=8)


@pytest.fixture(scope="module")
def result(plan: Plan) -> Result:
    return simulate(plan, NODE, trace=True, blocks=step.traced_blocks(plan.options.blocks))


@pytest.fixture(scope="module")
def page(plan: Plan, result: Result) -> Page:
    extra = (
        pages.engines({"one": result, "two": result}),
        pages.validation(VALIDATION),
        pages.sensitivity(EFFECTS, 0.1),
    )
    return pages.simulation_page(plan, NODE, result, *extra)


VALIDATION = Validation(
    (ran("a", 110.0, 100.0, 0.01), ran("b<", 90.0, 100.0, 0.02)), node="1xhost", fit="some-run"
)
EFFECTS = [
    Effect("device.memory.stream_bytes_per_s", "assumed", 1.0, 1.1, 11.0, 0.05),
    Effect("ring_slots", "option", 10, 9, 9.0, -0.02),
    Effect("blocks", "option", 10, 11, None, 0.0, "not possible"),
]


class Outside(HTMLParser):
    """Every address that a browser would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        loads = {"script": "src", "img": "src", "link": "href", "iframe": "src"}
        self.loaded += [value for name, value in attrs if name == loads.get(tag) and value]


def test_page_loads_nothing_from_outside(page: Page) -> None:
    outside = Outside()
    outside.feed(page.html())
    assert outside.loaded == []
    assert "@import" not in page.html().split("<script>")[0]


def test_page_shows_headline_and_every_section(page: Page, result: Result) -> None:
    html = page.html()
    assert pages.headline(result)[0][0] in html
    for title in (
        "Timeline",
        "Where the time goes",
        "Prediction against measurement",
        "Sensitivity",
        "rest on",
        "Conditions",
    ):
        assert re.search(rf"<h2>[^<]*{title}", html), title
    assert "b&lt;" in html


def test_figures_are_valid_for_plotly(page: Page) -> None:
    drawn = [figure for section in page.sections for figure in section.figures]
    assert len(drawn) >= 6
    for figure in drawn:
        plotly.graph_objects.Figure(figure)


def test_figure_data_cannot_end_its_script() -> None:
    section = Section(
        "t", "", (figures.figure(Bars(("</script>",), (Series("a", (1.0,)),), "us")),)
    )
    html = Page("t", "", (), (section,)).html()
    data = re.search(r"data-figure='figure-0-0'>(.*?)</script>", html, re.DOTALL)
    assert data
    assert json.loads(data[1])["data"][0]["y"] == ["</script>"]


def test_a_legend_is_text_above_its_figure_with_a_name_for_each_colour(
    page: Page, result: Result
) -> None:
    html = page.html()
    legend = html.partition("<h2>Where the time goes</h2>")[2].partition("<div class='figure'")[0]
    for cause, seconds in result.attribution.items():
        assert (
            f"--colour:{figures.COLOURS[cause]}'></i>{step.spoken(cause)}</button>" in legend
        ) == (seconds > 0)
    assert '"showlegend": true' not in html


def test_a_figure_of_one_series_has_no_legend() -> None:
    section = Section("t", "", (figures.figure(Bars(("a",), (Series("b", (1.0,)),), "us")),))
    assert "class='legend'" not in Page("t", "", (), (section,)).html()


def test_timeline_covers_the_step(plan: Plan, result: Result) -> None:
    path, blocks = pages._spans(result)
    assert sum(span.end_us - span.start_us for span in path) == pytest.approx(
        result.step_s * 1e6, rel=1e-6
    )
    assert {span.row for span in blocks} == {
        f"Gpu[0].Die[0].Block[{b}]" for b in step.traced_blocks(plan.options.blocks)
    }


def test_attribution_by_kind_sums_to_the_step(result: Result) -> None:
    total = sum(us for causes in step.by_kind(result).values() for us in causes.values())
    assert total == pytest.approx(result.step_s * 1e6)


def test_every_assumed_number_is_listed(page: Page, result: Result) -> None:
    body = next(section.body for section in page.sections if "rest on" in section.title)
    assert result.assumed
    for path in result.assumed:
        assert path.removeprefix("device.") in body


def test_a_lowered_number_says_so() -> None:
    assert [effect.label for effect in EFFECTS] == [
        "memory.stream_bytes_per_s",
        "ring_slots (lowered)",
        "blocks",
    ]
    assert [effect.assumed for effect in EFFECTS] == [True, False, False]


def test_table_escapes_and_marks() -> None:
    html = html_table(("a", "b"), [("<x>", 1), (Chip("assumed"), None)])
    assert "&lt;x&gt;" in html
    assert "chip assumed" in html
    assert "<td class='number'>1</td>" in html


def test_every_cause_has_a_colour(result: Result) -> None:
    assert set(result.attribution) == set(figures.COLOURS)


def test_what_ended_as_the_step_began_is_not_shown_whatever_its_times_round_to() -> None:
    # ps; in microseconds, begin + duration is end, or just above it
    start, middle, end = 3_387_434_596, 3_389_668_739, 3_394_916_953
    events = (
        named_track(0, 0, "Block[0].consumer"),
        span("sample", "stage", 0, 0, start, end),
        span("consumer", "consumer", 0, 0, middle, end),
        span("embed", "stage", 0, 0, end, end + 5_000_000),
        span("consumer", "consumer", 0, 0, end, end + 5_000_000),
    )
    shown = pages._spans(SimpleNamespace(trace=Trace(events), step_ends_ps=(end, end + 5_000_000)))[
        1
    ]  # type: ignore[arg-type]
    assert [one.label for one in shown] == ["embed"]


def test_numbers_and_their_sources_are_folded_away_and_each_source_stands_once(page: Page) -> None:
    body = next(section.body for section in page.sections if "rest on" in section.title)
    assert body.startswith("<details><summary>")
    sources = re.findall(r"\[\d+\]</td><td[^>]*>([^<]+)</td></tr>", body)
    assert len(sources) > 10
    assert len(set(sources)) == len(sources)


def test_the_card_of_the_speed_has_the_interval_and_the_other_engines(result: Result) -> None:
    ours = Compared("MonoTwin", 100.0, 90.0, 110.0, None, None, None)
    theirs = Compared("an engine 1.0", 50.0, None, None, None, None, None)
    card = pages.headline(result, Comparison((ours, theirs), (), rates_of(NODE)))[0]
    assert card[1].split("\n") == [
        "tokens/s, predicted",
        "interval 90 .. 110",
        "an engine 1.0: 50",
    ]


def test_a_page_is_small_and_the_same_each_time(page: Page) -> None:
    assert len(page.html()) < 2_500_000
    assert page.html() == page.html()


# ---- for a reader who is new ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"),
    [(500.0, 520.0), (23.0, 80.0), (3.0, 900.0), (0.02, 7.0), (5.0, 5.0), (1.0, 1e9)],
)
def test_ticks_of_a_logarithmic_axis_are_at_least_two_and_carry_their_whole_number(
    low: float, high: float
) -> None:
    ticks = figures.log_ticks([low, None, high])
    assert 2 <= len(ticks["tickvals"]) <= 24
    assert not any("e" in text for text in ticks["ticktext"])
    assert [float(text.replace(",", "")) for text in ticks["ticktext"]] == pytest.approx(
        ticks["tickvals"]
    )
    assert low / 1.2 <= min(ticks["tickvals"]) <= max(ticks["tickvals"]) <= high * 1.2


def test_a_what_if_page_says_what_was_changed_and_first_what_it_did(
    plan: Plan, result: Result
) -> None:
    change = Section("Baseline and change", "")
    page = pages.simulation_page(
        plan,
        NODE,
        result,
        change,
        what_if="link.hop=x0.5",
        cards=[("+1.0%", "against the baseline")],
    )
    assert page.title.startswith("What if link.hop=x0.5? ")
    assert page.cards[0] == ("+1.0%", "against the baseline")
    assert page.sections[0] == change


def test_a_validation_page_says_under_which_conditions_was_measured() -> None:
    html = pages.validation_page(
        VALIDATION, {"cpu": "a CPU", "load_before": 0.5, "steps": {"long": 1}}
    ).html()
    assert "a CPU" in html
    assert "load before" in html
    assert "long" not in re.findall(r"<section><h2>Measured under.*?</section>", html, re.DOTALL)[0]


def test_pages_and_help_and_the_glossary_explain_each_cause_in_the_same_words(page: Page) -> None:
    assert {step.spoken(cause) for cause in figures.COLOURS} <= words.WORDS.keys()
    assert {*words.OF_A_PLAN, *words.OF_A_RESULT} <= words.WORDS.keys()
    assert escape(words.WORDS["consumer"]) in page.html()
    root = Path(__file__).resolve().parents[2]
    assert (root / "docs" / "glossary.md").read_text() == words.glossary()
