"""A study's outcome in every form says the same."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path

import pytest

from twin.plan.catalogue import StageKind
from twin.report import outcome as report
from twin.report.figures import figure
from twin.study.kinds import Study
from twin.study.outcome import Bars, Column, Lines, Outcome, Part, Series, Shown, Table, Waterfall
from twin.study.runner import Runner

TABLE = Table(
    "cells",
    (
        Column("model", Shown.TEXT),
        Column("tokens/s"),
        Column("us a step", Shown.MICROSECONDS),
        Column("kind", Shown.CHIP),
        Column("gain", Shown.CHANGE),
        Column("bytes", Shown.QUANTITY, "B"),
    ),
    (("a | b", 1234.5678, 0.00081, "vendor", 0.125, 4.4e9), ("<c>", None, None, None, None, None)),
)
HIDDEN = Table("widths", (Column("kind", Shown.CHIP),), (("assumed",),), terminal=False)
OURS = Series("8xh200", (2.0, None), (1.0, None), (3.0, None))
THEIRS = Series("8xh200, published", (5.0, None), marks=True)
BARS = Bars(("x", "y"), (OURS, THEIRS), "tokens/s")
OUTCOME = Outcome(
    (
        Part(
            "Speeds",
            "What to see.",
            (BARS, Waterfall(("one idea", "another"), (1.0, 3.0), "tokens/s")),
            (TABLE, HIDDEN),
        ),
        Part(
            "Lines",
            "",
            (
                Lines(
                    (1, 2), (Series("s", (1.0, 2.0), (0.5, 1.5), (2.0, 3.0)),), "GPUs", "tokens/s"
                ),
            ),
        ),
    ),
    (("1,234", "tokens/s"),),
    ("a note & a limit",),
)


class Answered:
    def run(self, runner: Runner) -> Outcome:
        return OUTCOME


STUDY = Study("demo", "projection", "A title", "A question?", "A prediction.", Answered())


def test_terminal_shows_rounded_cells_and_leaves_out_what_is_for_files() -> None:
    text = report.text(STUDY, OUTCOME)
    assert re.search(r"a \| b +1,235 +810\.0 +vendor +\+12\.5% +4\.4 GB", text)
    assert "predicted before it ran: A prediction." in text
    assert "- a note & a limit" in text
    assert "assumed" not in text


def test_terminal_leaves_out_columns_without_any_value() -> None:
    empty = dataclasses.replace(TABLE, rows=tuple((name, *(None,) * 5) for name, *_ in TABLE.rows))
    assert "tokens/s" not in report.text(STUDY, Outcome((Part("Speeds", tables=(empty,)),)))
    assert "tokens/s" in report.text(
        STUDY, Outcome((Part("Speeds", tables=(dataclasses.replace(TABLE, rows=()),)),))
    )


def test_csv_keeps_full_numbers_in_base_units() -> None:
    rows = list(csv.reader(io.StringIO(report.to_csv(TABLE))))
    assert rows[0] == ["model", "tokens/s", "a step (s)", "kind", "gain", "bytes (B)"]
    assert rows[1] == ["a | b", "1234.5678", "0.00081", "vendor", "0.125", "4400000000.0"]
    assert rows[2] == ["<c>", "", "", "", "", ""]


def test_markdown_escapes_and_aligns() -> None:
    text = report.markdown(STUDY, OUTCOME)
    assert "| a \\| b | 1,235 |" in text
    assert "| --- | ---: | ---: | --- | ---: | ---: |" in text
    assert "**Predicted before it ran.** A prediction." in text


def test_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    written = report.write(STUDY, OUTCOME, tmp_path / "new")
    assert {path.name for path in written} == {
        "report.html",
        "result.json",
        "tables.md",
        "cells.csv",
        "widths.csv",
    }
    html = (tmp_path / "new" / "report.html").read_text()
    assert "&lt;c&gt;" in html
    assert "a note &amp; a limit" in html
    assert "<span class='chip vendor'>vendor</span>" in html
    assert not re.search(r"<(script|link)[^>]+(src|href)=", html)
    assert html.count("data-figure=") == 3
    data = json.loads((tmp_path / "new" / "result.json").read_text())
    assert data["tables"]["cells"][0]["tokens/s"] == 1234.5678
    assert data["charts"][0]["kind"] == "Bars"


def test_published_figures_stand_in_their_bars_place() -> None:
    bar, mark = figure(BARS)["data"]
    assert mark["type"] == "scatter"
    assert mark["offsetgroup"] == bar["offsetgroup"]
    assert bar["error_x"]["array"] == [1.0, None]
    assert bar["error_x"]["arrayminus"] == [1.0, None]


def test_waterfall_ends_with_the_whole() -> None:
    data = figure(Waterfall(("one idea", "another"), (1.0, 3.0), "tokens/s"))["data"][0]
    assert data["x"] == [1.0, 2.0, 3.0]
    assert len(set(data["y"])) == 3
    assert data["measure"] == ["absolute", "relative", "total"]


def test_axes_of_500_are_not_labelled_5() -> None:
    chart = Bars(("x", "y"), (Series("s", (500.0, 20.0)),), "s", log=True)
    axis = figure(chart)["layout"]["xaxis"]
    assert "500" in axis["ticktext"]
    assert "dtick" not in axis
    lines = figure(Lines((1, 2), (Series("s", (500.0, 20.0)),), "GPUs", "s", log_y=True))
    assert "500" in lines["layout"]["yaxis"]["ticktext"]


def test_as_many_series_as_a_plan_has_kinds_of_stages_differ_in_colour() -> None:
    series = tuple(Series(kind.value, (1.0,)) for kind in StageKind)
    colours = [
        bar["marker"]["color"]
        for bar in figure(Bars(("x",), series, "share", stacked=True))["data"]
    ]
    assert len(set(colours)) == len(colours) == len(StageKind)


def test_rows_whose_names_begin_alike_stay_separate() -> None:
    names = tuple(
        f"llama-3.2-1b on 1xmi300x, clock x1, context {context}, handoff grid"
        for context in (128, 4096)
    )
    drawn = figure(
        Bars(
            names,
            (Series("a", (0.4, 0.5)), Series("b", (0.6, 0.5))),
            "share of a step",
            stacked=True,
        )
    )
    assert all(tuple(bar["y"]) == names for bar in drawn["data"])


def test_marks_stand_next_to_the_bars_that_they_are_named_after() -> None:
    series = (
        Series("vllm", (1.0,)),
        Series("sglang", (2.0,)),
        Series("sglang, tabulated", (3.0,), marks=True),
    )
    *_, sglang, mark = figure(Bars(("x",), series, "tokens/s"))["data"]
    assert mark["offsetgroup"] == sglang["offsetgroup"] == "sglang"
    assert mark["marker"]["color"] == sglang["marker"]["color"]


def test_a_page_opens_with_the_finding_and_says_that_the_prediction_came_before() -> None:
    page = report.page(STUDY, OUTCOME)
    assert page.subtitle == "A question?"
    titles = [section.title for section in page.sections]
    assert titles.index("Speeds") < titles.index(report.JUDGED)
    assert "not corrected afterwards" in report.text(STUDY, OUTCOME)


@pytest.mark.parametrize("came", ["", "It was half of that."])
def test_every_form_of_a_study_shows_what_became_of_its_prediction(came: str) -> None:
    study = dataclasses.replace(STUDY, outcome=came)
    body = next(
        section.body
        for section in report.page(study, OUTCOME).sections
        if section.title == report.JUDGED
    )
    for form in (body, report.text(study, OUTCOME), report.markdown(study, OUTCOME)):
        assert study.prediction in form
        assert (came or report.NUMBERS) in form
    assert report.to_json(study, OUTCOME)["outcome"] == came
