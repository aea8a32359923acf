"""The charts of a study as plotly figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from twin.report.figures import COLOURS, EDGES_PX, MARGIN, axis_title, log_ticks, mark_forms
from twin.report.html import Figure
from twin.report.step import spoken
from twin.study.outcome import Bars, Chart, Heat, Lines, Series, Waterfall

PALETTE = (
    "#2b6cb0",
    "#e07b39",
    "#38a169",
    "#805ad5",
    "#b83280",
    "#d69e2e",
    "#1a8a8a",
    "#8a94a6",
    "#5a3e2b",
    "#7a9e1f",
    "#4c3fa6",
    "#c98bb3",
    "#2f6f4f",
    "#b0452c",
    "#6fa8dc",
    "#a3a847",
    "#8f5f9e",
    "#444c5c",
    "#ff9da7",
    "#0b3c5d",
    "#d9b44a",
    "#75b1a9",
    "#7c1d2e",
    "#b9a7e0",
    "#c4d600",
    "#9c6b4e",
    "#e5484d",
    "#3fa7d6",
    "#a0a0a0",
    "#00674f",
)
NAMED = {**COLOURS, "has a source": "#2b6cb0", "assumed": "#d69e2e"}  # what has a colour everywhere
GRID = "#e5e9f0"
INK = "#1b2433"
BAR_PX, GAP_PX = 13, 12
STACK_PX, LEVEL_PX = 24, 34
WHOLE = "all of it"
TEXT_ROOM = 1.18  # of an axis whose bars have their numbers behind them


def figure(chart: Chart) -> Figure:
    if isinstance(chart, Bars):
        return bars(chart)
    if isinstance(chart, Heat):
        return heat(chart)
    return lines(chart) if isinstance(chart, Lines) else waterfall(chart)


def bars(chart: Bars) -> Figure:
    """Horizontal, the first name on top; figures of others as marks in their bar's place."""
    plain = [series for series in chart.series if not series.marks]
    colours = _colours(plain)
    data = [_bar(chart, series, colour) for series, colour in zip(plain, colours, strict=True)]
    # Marks that belong to no bar take the colour after all of them.
    colours.append(PALETTE[len(plain) % len(PALETTE)])
    data += [
        _mark(chart, series, colours[_place(plain, series)], form)
        for series, form in zip(chart.series, _forms(chart.series), strict=True)
        if series.marks
    ]
    each = STACK_PX if chart.stacked else BAR_PX * max(1, len(plain)) + GAP_PX
    x_axis: dict[str, Any] = {
        "title": {"text": axis_title(chart.axis, log=chart.log)},
        "gridcolor": GRID,
        "zerolinecolor": INK,
    }
    x_axis |= (
        {"type": "log", **log_ticks(_values(chart.series))}
        if chart.log
        else {"tickformat": ".0%" if _fractions(chart) else ",~r"}
    )
    layout = {
        "barmode": "group" if _beside(chart) else "stack",
        "scattermode": "group",
        "bargap": 0.25,
        "height": EDGES_PX + each * len(chart.names),
        "xaxis": x_axis,
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}


def _bar(chart: Bars, series: Series, colour: str) -> dict[str, Any]:
    number = (
        "%{x:+.1%}"
        if _fractions(chart) and not chart.stacked
        else "%{x:.1%}"
        if chart.stacked and _fractions(chart)
        else "%{x:,.4~g}"
    )
    shape: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": spoken(series.label),
        "y": list(chart.names),
        "x": list(series.values),
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}: {number}<extra>{spoken(series.label)}</extra>",
        "offsetgroup": series.label if _beside(chart) else "",
    }
    if series.low:
        shape["error_x"] = _spread(series)
    return shape


def _mark(chart: Bars, series: Series, colour: str, form: str) -> dict[str, Any]:
    """Somebody else's figures, each in the place of the bar that has its label."""
    return {
        "type": "scatter",
        "orientation": "h",
        "mode": "markers",
        "name": spoken(series.label),
        "y": list(chart.names),
        "x": list(series.values),
        "marker": {
            "symbol": form,
            "size": 9,
            "color": colour,
            "line": {"color": INK, "width": 1.2},
        },
        "hovertemplate": "%{y}: %{x:,.4~g}<extra>" + spoken(series.label) + "</extra>",
        "offsetgroup": series.beside if _beside(chart) else "",
    }


def _spread(series: Series) -> dict[str, Any]:
    up = [
        None if v is None or h is None else h - v
        for v, h in zip(series.values, series.high, strict=True)
    ]
    down = [
        None if v is None or low is None else v - low
        for v, low in zip(series.values, series.low, strict=True)
    ]
    return {
        "type": "data",
        "symmetric": False,
        "array": up,
        "arrayminus": down,
        "color": INK,
        "thickness": 1.2,
        "width": 3,
    }


def lines(chart: Lines) -> Figure:
    """A line for each series, with a band where it has an interval."""
    data: list[dict[str, Any]] = []
    looks = zip(chart.series, _colours(chart.series), _forms(chart.series), strict=True)
    for series, colour, form in looks:
        if series.low:
            data.append(_band(chart, series, colour))
        data.append(
            {
                "type": "scatter",
                "mode": "markers" if series.marks else "lines+markers",
                "name": spoken(series.label),
                "x": list(chart.x),
                "y": list(series.values),
                "line": {"color": colour, "width": 2},
                "marker": {
                    "color": colour,
                    "size": 9 if series.marks else 6,
                    "symbol": form,
                },
                "hovertemplate": "%{x}: %{y:,.4~g}<extra>" + spoken(series.label) + "</extra>",
            }
        )
    ticks = (
        {"tickvals": list(chart.x), "ticktext": [_tick(x) for x in chart.x]}
        if len(chart.x) <= 12
        else log_ticks([float(x) for x in chart.x])
        if _type(chart.log_x, chart.x) == "log"
        else {}
    )
    x_axis = {
        "title": {"text": axis_title(chart.x_axis, log=_type(chart.log_x, chart.x) == "log")},
        "gridcolor": GRID,
        "zeroline": False,
        "type": _type(chart.log_x, chart.x),
        **ticks,
    }
    y_axis: dict[str, Any] = {
        "title": {"text": axis_title(chart.y_axis, log=chart.log_y)},
        "gridcolor": GRID,
        "automargin": True,
    }
    y_axis |= (
        {"type": "log", **log_ticks(_values(chart.series))}
        if chart.log_y
        else {"rangemode": "tozero"}
    )
    layout = {"height": 420, "xaxis": x_axis, "yaxis": y_axis, "margin": MARGIN | {"b": 50}}
    return {"data": data, "layout": layout}


def _band(chart: Lines, series: Series, colour: str) -> dict[str, Any]:
    both = [
        (x, low, high)
        for x, low, high in zip(chart.x, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _, _ in both] + [x for x, _, _ in reversed(both)],
        "y": [high for _, _, high in both] + [low for _, low, _ in reversed(both)],
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},0.13)",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def waterfall(chart: Waterfall) -> Figure:
    """From nothing to the first level, then each step, then the last level whole."""
    steps = [
        chart.values[0],
        *(after - before for before, after in zip(chart.values, chart.values[1:], strict=False)),
    ]
    data = [
        {
            "type": "waterfall",
            "orientation": "h",
            "y": [*chart.names, WHOLE],
            "x": [*steps, chart.values[-1]],
            "measure": ["absolute", *(["relative"] * (len(steps) - 1)), "total"],
            "text": [
                f"{chart.values[0]:,.0f}",
                *(f"{step:+,.0f}" for step in steps[1:]),
                f"{chart.values[-1]:,.0f}",
            ],
            "textposition": "outside",
            "cliponaxis": False,
            "connector": {"line": {"color": "#8a94a6", "width": 1}},
            "increasing": {"marker": {"color": "#38a169"}},
            "decreasing": {"marker": {"color": "#c53030"}},
            "totals": {"marker": {"color": "#2b6cb0"}},
            "hovertemplate": "%{y}: %{text}<extra></extra>",
        }
    ]
    layout = {
        "height": EDGES_PX + LEVEL_PX * (len(chart.names) + 1),
        "xaxis": {
            "title": {"text": chart.axis},
            "gridcolor": GRID,
            "range": [0, TEXT_ROOM * max(chart.values)],
            "tickformat": ",~r",
        },
        "yaxis": {"autorange": "reversed", "automargin": True, "type": "category"},
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}


def heat(chart: Heat) -> Figure:
    """A map with the number in each cell, the darker the more."""
    data = [
        {
            "type": "heatmap",
            "x": list(chart.across),
            "y": list(chart.down),
            "z": [list(row) for row in chart.values],
            "colorscale": [[0, "#deebf7"], [1, "#0b62c4"]],
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
            "texttemplate": "%{z:,.0f}",
            "hovertemplate": f"{chart.down_axis} %{{y}}, {chart.across_axis} %{{x}}: "
            "%{z:,.4~g}<extra></extra>",
        }
    ]
    layout = {
        "height": EDGES_PX + LEVEL_PX * len(chart.down),
        "xaxis": {"title": {"text": chart.across_axis}, "type": "category"},
        "yaxis": {
            "autorange": "reversed",
            "automargin": True,
            "type": "category",
        },
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}


def _values(series: Sequence[Series]) -> list[float | None]:
    """All that an axis must reach."""
    return [value for one in series for value in (*one.values, *one.low, *one.high)]


def _forms(series: Sequence[Series]) -> list[str]:
    return mark_forms([one.marks for one in series])


def _colours(series: Sequence[Series]) -> list[str]:
    """One for each series: its own everywhere, else the next of the palette that no other series of
    the chart has.
    """
    taken = {NAMED[one.label] for one in series if one.label in NAMED}
    free = cycle([colour for colour in PALETTE if colour not in taken])
    return [NAMED.get(one.label) or next(free) for one in series]


def _fractions(chart: Bars) -> bool:
    return chart.axis.startswith(("share", "change"))


def _beside(chart: Bars) -> bool:
    """Whether bars need places side by side: not where they are stacked, nor where each name has a
    value in one series only.
    """
    series = [one for one in chart.series if not one.marks]
    return not chart.stacked and not all(
        sum(one.values[at] is not None for one in series) <= 1
        for at in range(len(series[0].values) if series else 0)
    )


def _place(bars: Sequence[Series], marks: Series) -> int:
    """Which bars a series of marks belongs to."""
    labels = [one.label for one in bars]
    return labels.index(marks.beside) if marks.beside in labels else len(labels)


def _tick(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:,g}"


def _type(log: bool, x: Sequence[float | str]) -> str:
    return "category" if any(isinstance(one, str) for one in x) else "log" if log else "linear"
