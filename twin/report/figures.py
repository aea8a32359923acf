"""Plotly figures as plain data: the charts of an outcome, a step's timeline, and predictions
against measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from twin.report.html import Figure
from twin.report.step import spoken
from twin.study.outcome import Bars, Chart, Heat, Lines, Series, Waterfall

# One colour for each cause, the same in every figure; distinct in grey too, for print.
COLOURS = {
    "streaming": "#2b6cb0",
    "hand_off": "#e07b39",
    "collective": "#b83280",
    "consumer": "#38a169",
    "attention": "#805ad5",
    "routing": "#1a8a8a",
    "launch": "#c53030",
    "sampling": "#d69e2e",
    "other": "#8a94a6",
}
NAMED = {**COLOURS, "has a source": "#2b6cb0", "assumed": "#d69e2e"}  # what has a colour everywhere
CODES = (  # of what has none
    "2b6cb0 e07b39 38a169 805ad5 b83280 d69e2e 1a8a8a 8a94a6 5a3e2b 7a9e1f 4c3fa6 c98bb3 2f6f4f "
    "b0452c 6fa8dc a3a847 8f5f9e 444c5c ff9da7 0b3c5d d9b44a 75b1a9 7c1d2e b9a7e0 c4d600 9c6b4e "
    "e5484d 3fa7d6 a0a0a0 00674f 5c0099 ffb347"
)
PALETTE = tuple(f"#{code}" for code in CODES.split())
# One form for each series of marks of a chart, so that they differ in grey too.
MARKS = ("diamond", "circle", "square", "triangle-up")
BLUE, GREY, GRID, INK = "#2b6cb0", "#8a94a6", "#e5e9f0", "#1b2433"
MARGIN = {"l": 10, "r": 20, "t": 10, "b": 45}  # of figures whose rows have names
EDGES_PX = MARGIN["t"] + MARGIN["b"]
ROW_PX, BAR_PX, GAP_PX, STACK_PX, LEVEL_PX = 26, 13, 12, 24, 34
WHOLE = "all of it"
TEXT_ROOM = 1.18  # of an axis whose bars have their numbers behind them
# Digits of a logarithmic axis' ticks, from sparse to dense: the first that gives enough ticks is
# taken.
DIGITS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 2, 5),
    (1, 2, 3, 4, 5, 6, 7, 8, 9),
    *(tuple(1 + at / n for at in range(9 * n)) for n in (2, 10)),
)
FEWEST_TICKS = 4


def mark_forms(series: Sequence[Series]) -> list[str]:
    """The form of each series of marks, in order; of the others "circle"."""
    forms = cycle(MARKS)
    return [next(forms) if one.marks else "circle" for one in series]


def axis_title(axis: str, *, log: bool) -> str:
    return f"{axis} (logarithmic)" if log else axis


def log_ticks(values: Iterable[float | None]) -> dict[str, Any]:
    """Ticks of a logarithmic axis over positive `values`, each with its whole number: plotly's own
    "D2" labels 500 as "5".
    """
    known = [value for value in values if value is not None and value > 0]
    if not known:
        return {}
    low, high = min(known), max(known)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    found: list[float] = []
    for digits in DIGITS:
        found = [
            tick
            for power in powers
            for digit in digits
            if low / 1.2 <= (tick := digit * 10.0**power) <= high * 1.2
        ]
        if len(found) >= FEWEST_TICKS:
            break
    return {"tickmode": "array", "tickvals": found, "ticktext": [f"{tick:,.10g}" for tick in found]}


def _axis(title: str, **others: Any) -> dict[str, Any]:
    return {"title": {"text": title}, "gridcolor": GRID, **others}


def _rows(data: list[dict[str, Any]], x_axis: dict[str, Any], height: int, **others: Any) -> Figure:
    """A figure whose rows have names, the first on top."""
    names = {"autorange": "reversed", "automargin": True, "type": "category"}
    layout = {"height": EDGES_PX + height, "xaxis": x_axis, "yaxis": names, "margin": MARGIN}
    return {"data": data, "layout": layout | others}


# ---- charts of an outcome ------------------------------------------------------------------------


def figure(chart: Chart) -> Figure:
    match chart:
        case Bars():
            return bars(chart)
        case Heat():
            return heat(chart)
        case Lines():
            return lines(chart)
        case Waterfall():
            return waterfall(chart)


def causes_chart(rows: Mapping[str, Mapping[str, float]]) -> Bars:
    """Microseconds of each row by cause."""
    found = [c for c in COLOURS if any(parts.get(c, 0) > 0 for parts in rows.values())]
    series = (Series(c, tuple(parts.get(c, 0) for parts in rows.values())) for c in found)
    return Bars(tuple(rows), tuple(series), "microseconds a step", stacked=True)


def bars(chart: Bars) -> Figure:
    """Horizontal, the first name on top; figures of others as marks in their bar's place."""
    plain = [series for series in chart.series if not series.marks]
    colours = _colours(plain)
    data = [_bar(chart, series, colour) for series, colour in zip(plain, colours, strict=True)]
    # Marks that belong to no bar take the colour after all of them.
    colours.append(PALETTE[len(plain) % len(PALETTE)])
    data += [
        _mark(chart, series, colours[_place(plain, series)], form)
        for series, form in zip(chart.series, mark_forms(chart.series), strict=True)
        if series.marks
    ]
    each = STACK_PX if chart.stacked else BAR_PX * max(1, len(plain)) + GAP_PX
    ticks = (
        {"type": "log", **log_ticks(_values(chart.series))}
        if chart.log
        else {"tickformat": ".0%" if _fractions(chart) else ",~r"}
    )
    return _rows(
        data,
        _axis(axis_title(chart.axis, log=chart.log), zerolinecolor=INK, **ticks),
        each * len(chart.names),
        barmode="group" if _side_by_side(chart) else "stack",
        scattermode="group",
        bargap=0.25,
    )


def _bar(chart: Bars, series: Series, colour: str) -> dict[str, Any]:
    number = "%{x:,.4~g}"
    if _fractions(chart):
        number = "%{x:.1%}" if chart.stacked else "%{x:+.1%}"
    shape: dict[str, Any] = {
        "type": "bar",
        "orientation": "h",
        "name": spoken(series.label),
        "y": list(chart.names),
        "x": list(series.values),
        "marker": {"color": colour},
        "hovertemplate": f"%{{y}}: {number}<extra>{spoken(series.label)}</extra>",
        "offsetgroup": series.label if _side_by_side(chart) else "",
    }
    return shape | ({"error_x": _spread(series)} if series.low else {})


def _mark(chart: Bars, series: Series, colour: str, form: str) -> dict[str, Any]:
    """Somebody else's figures, each in the place of the bar that has its label."""
    line = {"color": INK, "width": 1.2}
    return {
        "type": "scatter",
        "orientation": "h",
        "mode": "markers",
        "name": spoken(series.label),
        "y": list(chart.names),
        "x": list(series.values),
        "marker": {"symbol": form, "size": 9, "color": colour, "line": line},
        "hovertemplate": "%{y}: %{x:,.4~g}<extra>" + spoken(series.label) + "</extra>",
        "offsetgroup": series.next_to if _side_by_side(chart) else "",
    }


def _spread(series: Series) -> dict[str, Any]:
    def differences(
        high: Sequence[float | None], low: Sequence[float | None]
    ) -> list[float | None]:
        pairs = zip(high, low, strict=True)
        return [None if h is None or one is None else h - one for h, one in pairs]

    return {
        "type": "data",
        "symmetric": False,
        "array": differences(series.high, series.values),
        "arrayminus": differences(series.values, series.low),
        "color": INK,
        "thickness": 1.2,
        "width": 3,
    }


def lines(chart: Lines) -> Figure:
    """A line for each series, with a band where it has an interval."""
    data: list[dict[str, Any]] = []
    looks = zip(chart.series, _colours(chart.series), mark_forms(chart.series), strict=True)
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
                "marker": {"color": colour, "size": 9 if series.marks else 6, "symbol": form},
                "hovertemplate": "%{x}: %{y:,.4~g}<extra>" + spoken(series.label) + "</extra>",
            }
        )
    named = any(isinstance(x, str) for x in chart.x)
    kind = "category" if named else "log" if chart.log_x else "linear"
    ticks: dict[str, Any] = {}
    if len(chart.x) <= 12:
        shown = [x if isinstance(x, str) else f"{x:,g}" for x in chart.x]
        ticks = {"tickvals": list(chart.x), "ticktext": shown}
    elif kind == "log":
        ticks = log_ticks([float(x) for x in chart.x])
    x_title, y_title = (
        axis_title(chart.x_axis, log=kind == "log"),
        axis_title(chart.y_axis, log=chart.log_y),
    )
    scale = (
        {"type": "log", **log_ticks(_values(chart.series))}
        if chart.log_y
        else {"rangemode": "tozero"}
    )
    layout = {
        "height": 420,
        "xaxis": _axis(x_title, zeroline=False, type=kind, **ticks),
        "yaxis": _axis(y_title, automargin=True, **scale),
        "margin": MARGIN | {"b": 50},
    }
    return {"data": data, "layout": layout}


def _area(x: Sequence[Any], y: Sequence[float], colour: str, opacity: float) -> dict[str, Any]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "fill": "toself",
        "fillcolor": f"rgba({red},{green},{blue},{opacity})",
        "line": {"width": 0},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _band(chart: Lines, series: Series, colour: str) -> dict[str, Any]:
    both = [
        (x, low, high)
        for x, low, high in zip(chart.x, series.low, series.high, strict=True)
        if low is not None and high is not None
    ]
    x, low, high = zip(*both, strict=True) if both else ((), (), ())
    return _area([*x, *reversed(x)], [*high, *reversed(low)], colour, 0.13)


def waterfall(chart: Waterfall) -> Figure:
    """From nothing to the first level, then each step, then the last level whole."""
    first, last = chart.values[0], chart.values[-1]
    steps = [after - before for before, after in zip(chart.values, chart.values[1:], strict=False)]
    data = {
        "type": "waterfall",
        "orientation": "h",
        "y": [*chart.names, WHOLE],
        "x": [first, *steps, last],
        "measure": ["absolute", *(["relative"] * len(steps)), "total"],
        "text": [f"{first:,.0f}", *(f"{step:+,.0f}" for step in steps), f"{last:,.0f}"],
        "textposition": "outside",
        "cliponaxis": False,
        "connector": {"line": {"color": GREY, "width": 1}},
        "increasing": {"marker": {"color": "#38a169"}},
        "decreasing": {"marker": {"color": "#c53030"}},
        "totals": {"marker": {"color": BLUE}},
        "hovertemplate": "%{y}: %{text}<extra></extra>",
    }
    axis = _axis(chart.axis, range=[0, TEXT_ROOM * max(chart.values)], tickformat=",~r")
    return _rows([data], axis, LEVEL_PX * (len(chart.names) + 1))


def heat(chart: Heat) -> Figure:
    """A map with the number in each cell, the darker the more."""
    data = {
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
    axis = {"title": {"text": chart.across_axis}, "type": "category"}
    return _rows([data], axis, LEVEL_PX * len(chart.down))


def _values(series: Sequence[Series]) -> list[float | None]:
    """All that an axis must reach."""
    return [value for one in series for value in (*one.values, *one.low, *one.high)]


def _colours(series: Sequence[Series]) -> list[str]:
    """One for each series: its own everywhere, else the next of the palette that no other series of
    the chart has.
    """
    taken = {NAMED[one.label] for one in series if one.label in NAMED}
    free = cycle([colour for colour in PALETTE if colour not in taken])
    return [NAMED.get(one.label) or next(free) for one in series]


def _fractions(chart: Bars) -> bool:
    return chart.axis.startswith(("share", "change"))


def _side_by_side(chart: Bars) -> bool:
    """Whether bars need places side by side: not where they are stacked, nor where each name has a
    value in one series only.
    """
    series = [one for one in chart.series if not one.marks]
    return not chart.stacked and not all(
        sum(one.values[at] is not None for one in series) <= 1
        for at in range(len(series[0].values) if series else 0)
    )


def _place(plain: Sequence[Series], marks: Series) -> int:
    """Which bars a series of marks belongs to."""
    labels = [one.label for one in plain]
    return labels.index(marks.next_to) if marks.next_to in labels else len(labels)


# ---- of one step, and of runs --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one block's step on the timeline."""

    row: str
    start_us: float
    end_us: float
    cause: str
    label: str


def timeline(spans: Sequence[Span]) -> Figure:
    """One row a block; what it waited for or did, from left to right."""
    data = []
    for cause, colour in COLOURS.items():
        mine = [span for span in spans if span.cause == cause]
        if not mine:
            continue
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": spoken(cause),
                "y": [span.row for span in mine],
                "base": [round(span.start_us, 4) for span in mine],
                "x": [round(span.end_us - span.start_us, 4) for span in mine],
                "marker": {"color": colour, "line": {"width": 0}},
                "customdata": [span.label for span in mine],
                "hovertemplate": f"%{{customdata}}: %{{x:.3f}} us {spoken(cause)}"
                "<extra>%{y}</extra>",
            }
        )
    axis = _axis("microseconds since the step began", zeroline=False)
    rows = len({span.row for span in spans})
    return _rows(data, axis, ROW_PX * rows, barmode="overlay", bargap=0.25)


def comparison(
    names: Sequence[str],
    predicted: Sequence[float],
    measured: Sequence[float],
    *,
    band: float = 0.15,
) -> Figure:
    """Predicted against measured tokens/s on logarithmic axes; on the diagonal they agree, the band
    is +-`band`.
    """
    low, high = 0.7 * min([*predicted, *measured]), 1.4 * max([*predicted, *measured])
    edges = [low * (1 + band), high * (1 + band), high * (1 - band), low * (1 - band)]
    diagonal = _area([low, high], [low, high], BLUE, 0.0)
    data = [
        _area([low, high, high, low], edges, BLUE, 0.10),
        diagonal | {"fill": "none", "line": {"color": GREY, "dash": "dot", "width": 1}},
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(measured),
            "y": list(predicted),
            "customdata": list(names),
            "marker": {"color": BLUE, "size": 9, "line": {"color": "white", "width": 1}},
            "hovertemplate": "%{customdata}: measured %{x:.4g}, predicted %{y:.4g}<extra></extra>",
            "showlegend": False,
        },
    ]
    scale: dict[str, Any] = {"type": "log", "automargin": True, **log_ticks([low, high])}
    layout = {
        "height": 440,
        "xaxis": _axis("measured tokens/s", **scale),
        "yaxis": _axis("predicted tokens/s", **scale),
        "margin": {"l": 60, "r": 20, "t": 10, "b": 50},
    }
    return {"data": data, "layout": layout}
