"""Charts as SVG: well-formed, everything inside the picture, units on both axes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from studies.common.svg import WIDTH, figure
from twin.report import figures
from twin.study.outcome import Bars, Chart, Lines, Series, Waterfall

CHARTS: dict[str, Chart] = {
    "bars": Bars(
        ("one <b>", "two"),
        (
            Series("a", (1.0, 3.0), (0.5, 2.0), (2.0, 4.0)),
            Series("a, published", (2.0, None), marks=True),
        ),
        "tokens/s",
    ),
    "one way and the other": Bars(
        ("x", "y"), (Series("error", (-0.1, 0.2)),), "error of the speed"
    ),
    "stacked": Bars(
        ("x",), (Series("a", (1.0,)), Series("b", (None,)), Series("c", (2.0,))), "us", stacked=True
    ),
    "logarithmic": Bars(("x", "y"), (Series("a", (1.0, 900.0)),), "us", log=True),
    "lines": Lines(
        (1, 10, 100),
        (Series("a", (1.0, None, 3.0)), Series("measured", (1.5, 2.0, 2.5), marks=True)),
        "load",
        "s",
        log_x=True,
    ),
    "words": Lines(("p10", "p90"), (Series("a", (1.0, 2.0)),), "share", "s", log_y=True),
    "waterfall": Waterfall(("a", "b"), (1.0, 2.0), "tokens/s"),
}


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_is_well_formed_and_inside_its_picture(name: str) -> None:
    text = figure(CHARTS[name])
    root = ElementTree.fromstring(text)
    height = float(root.attrib["viewBox"].split()[3])
    for element in root.iter():
        x, y = float(element.get("x", 0)), float(element.get("y", 0))
        assert 0 <= x <= WIDTH
        assert 0 <= y <= height
        assert float(element.get("width", 0)) >= 0


@pytest.mark.parametrize("name", CHARTS)
def test_a_chart_says_its_units(name: str) -> None:
    chart, text = CHARTS[name], figure(CHARTS[name])
    axes = (chart.x_axis, chart.y_axis) if isinstance(chart, Lines) else (chart.axis,)
    for axis in axes:
        assert re.search(rf">{re.escape(axis)}( \(logarithmic\))?</text>", text)


def test_colours_are_greys() -> None:
    for colour in re.findall(r'fill="#([0-9a-f]{6})"', figure(CHARTS["bars"])):
        assert colour[:2] == colour[2:4] == colour[4:]


MARKED = tuple(Series(f"server {at}", (1.0 + at, 2.0, 30.0), marks=True) for at in range(4))
MARKS = Lines(tuple(range(1, 40)), (Series("a", (1.0,) * 39),), "load", "s", log_x=True)


def test_four_series_of_marks_have_four_forms() -> None:
    for chart in (
        Lines((1, 10, 100), MARKED, "load", "s", log_x=True, log_y=True),
        Bars(("x", "y", "z"), (Series("ours", (1.0, 2.0, 3.0)), *MARKED), "us", log=True),
    ):
        drawn = figures.figure(chart)["data"]
        marks = [
            trace for trace in drawn if trace["mode" if "mode" in trace else "type"] == "markers"
        ]
        assert len({trace["marker"]["symbol"] for trace in marks}) == 4
        shapes = re.findall(r'<path d="M[\d.]+ [\d.]+([^"]+)" fill="white"', figure(chart))
        assert len(set(shapes)) == 4


@pytest.mark.parametrize("chart", [MARKS, CHARTS["lines"], CHARTS["words"], CHARTS["logarithmic"]])
def test_a_logarithmic_axis_says_so_and_has_labelled_ticks(chart: Bars | Lines) -> None:
    layout = figures.figure(chart)["layout"]
    axes = [axis for axis in (layout["xaxis"], layout["yaxis"]) if axis.get("type") == "log"]
    assert axes
    for axis in axes:
        assert axis["title"]["text"].endswith("(logarithmic)")
        assert axis["ticktext"]
    assert figure(chart).count("(logarithmic)") == len(axes)
