"""Plotly figures as plain data, one function each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from twin.report.html import Figure
from twin.report.step import spoken

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
# One form for each series of marks of a chart, so that they differ in grey too.
MARKS = ("diamond", "circle", "square", "triangle-up")
ROW_PX = 34
MARGIN = {"l": 10, "r": 20, "t": 10, "b": 45}  # of figures whose rows have names
EDGES_PX = MARGIN["t"] + MARGIN["b"]
# Digits of a logarithmic axis' ticks, from sparse to dense: the first that gives enough ticks is
# taken.
DIGITS: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 2, 5),
    (1, 2, 3, 4, 5, 6, 7, 8, 9),
    *(tuple(1 + at / n for at in range(9 * n)) for n in (2, 10)),
)
FEWEST_TICKS = 4


@dataclass(frozen=True, slots=True)
class Span:
    """A piece of one block's step on the timeline."""

    row: str
    start_us: float
    end_us: float
    cause: str
    label: str


def mark_forms(marks: Sequence[bool]) -> list[str]:
    """The form of each series that is one of `marks`, in order; of the others "circle"."""
    forms = cycle(MARKS)
    return [next(forms) if one else "circle" for one in marks]


def axis_title(axis: str, *, log: bool) -> str:
    return f"{axis} (logarithmic)" if log else axis


def attribution(
    rows: Mapping[str, Mapping[str, float]], *, axis: str = "microseconds a step"
) -> Figure:
    """Stacked bars: one row each, its time by cause."""
    names = list(rows)
    causes = [c for c in COLOURS if any(parts.get(c, 0) > 0 for parts in rows.values())]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": spoken(cause),
            "y": names,
            "x": [rows[name].get(cause, 0) for name in names],
            "marker": {"color": COLOURS[cause]},
            "hovertemplate": "%{y}: %{x:.3g} us " + spoken(cause) + "<extra></extra>",
        }
        for cause in causes
    ]
    layout = {
        "barmode": "stack",
        "height": EDGES_PX + ROW_PX * len(names),
        "xaxis": {"title": {"text": axis}, "gridcolor": "#e5e9f0", "zeroline": False},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}


def timeline(spans: Sequence[Span]) -> Figure:
    """One row a block; what it waited for or did, from left to right."""
    rows = list(dict.fromkeys(span.row for span in spans))
    data: list[dict[str, Any]] = []
    for cause in COLOURS:
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
                "marker": {"color": COLOURS[cause], "line": {"width": 0}},
                "customdata": [span.label for span in mine],
                "hovertemplate": "%{customdata}: %{x:.3f} us "
                + spoken(cause)
                + "<extra>%{y}</extra>",
            }
        )
    layout = {
        "barmode": "overlay",
        "bargap": 0.25,
        "height": EDGES_PX + 26 * len(rows),
        "xaxis": {
            "title": {"text": "microseconds since the step began"},
            "gridcolor": "#e5e9f0",
            "zeroline": False,
        },
        "yaxis": {"autorange": "reversed", "automargin": True},
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}


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
    line: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
    }
    data = [
        line
        | {
            "x": [low, high, high, low],
            "y": [low * (1 + band), high * (1 + band), high * (1 - band), low * (1 - band)],
            "fill": "toself",
            "fillcolor": "rgba(43,108,176,0.10)",
            "line": {"width": 0},
        },
        line
        | {
            "x": [low, high],
            "y": [low, high],
            "line": {"color": "#8a94a6", "dash": "dot", "width": 1},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "x": list(measured),
            "y": list(predicted),
            "customdata": list(names),
            "marker": {"color": "#2b6cb0", "size": 9, "line": {"color": "white", "width": 1}},
            "hovertemplate": "%{customdata}: measured %{x:.4g}, predicted %{y:.4g}<extra></extra>",
            "showlegend": False,
        },
    ]
    axis = {"type": "log", "gridcolor": "#e5e9f0", "automargin": True, **log_ticks([low, high])}
    layout = {
        "height": 440,
        "xaxis": axis | {"title": {"text": "measured tokens/s"}},
        "yaxis": axis | {"title": {"text": "predicted tokens/s"}},
        "margin": {"l": 60, "r": 20, "t": 10, "b": 50},
    }
    return {"data": data, "layout": layout}


def tornado(
    names: Sequence[str], effects: Sequence[float], assumed: Sequence[bool], *, axis: str
) -> Figure:
    """Relative effect of each number, the strongest on top; numbers nobody measured stand out."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": label,
            "y": [n for n, a in zip(names, assumed, strict=True) if a is flag],
            "x": [100 * e for e, a in zip(effects, assumed, strict=True) if a is flag],
            "marker": {"color": colour},
            "hovertemplate": "%{y}: %{x:+.2f}%<extra></extra>",
        }
        for flag, label, colour in (
            (False, "has a source", "#2b6cb0"),
            (True, "assumed", "#d69e2e"),
        )
    ]
    layout = {
        "barmode": "overlay",
        "height": EDGES_PX + 22 * len(names),
        "xaxis": {"title": {"text": axis}, "gridcolor": "#e5e9f0", "zerolinecolor": "#1b2433"},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": list(names),
            "autorange": "reversed",
            "automargin": True,
        },
        "margin": MARGIN,
    }
    return {"data": data, "layout": layout}
