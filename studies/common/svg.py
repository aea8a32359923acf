"""Charts of a study as SVG for Markdown pages: plain shapes, readable in grey and without
scripts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from twin.report.figures import axis_title, log_ticks, mark_forms
from twin.report.step import spoken
from twin.study.outcome import Bars, Chart, Heat, Lines, Series, Waterfall

WIDTH, RIGHT, TOP = 720, 20, 12  # pixels
ROW, GAP, LETTER, LEGEND_ROW, AXIS = 11, 8, 5.6, 16, 38
PLOT_HEIGHT = 240  # of lines
TICKS = 6
GREYS = ("#333333", "#7a7a7a", "#b5b5b5", "#dcdcdc", "#555555", "#979797", "#c9c9c9", "#eeeeee")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 2", "10 4")
INK, GRID = "#222", "#ddd"


def figure(chart: Chart) -> str:
    """The chart, with units on both axes."""
    if isinstance(chart, Heat):
        return heat(chart)
    if isinstance(chart, Waterfall):
        levels = Series("level", chart.values)
        return bars(Bars(chart.names, (levels,), chart.axis))
    return bars(chart) if isinstance(chart, Bars) else lines(chart)


def bars(chart: Bars) -> str:
    """Horizontal bars, the first name on top; figures of others as marks, intervals as
    whiskers.
    """
    plain = [series for series in chart.series if not series.marks]
    each = ROW if chart.stacked else ROW * max(1, len(plain))
    left = min(290.0, 14 + LETTER * max(len(name) for name in chart.names))
    legend, top = _legend(chart.series, left)
    height = top + (each + GAP) * len(chart.names)
    scale = _Scale.of(_reach(chart), left, WIDTH - RIGHT, log=chart.log)
    parts = [*legend, *_grid(scale, top, height, axis_title(chart.axis, log=chart.log))]
    forms = mark_forms(chart.series)
    for at, name in enumerate(chart.names):
        y = top + at * (each + GAP) + GAP / 2
        parts.append(_text(left - 6, y + each / 2 + 3, name, "end"))
        parts += _row(chart, plain, at, y, scale)
        for series, form in zip(chart.series, forms, strict=True):
            if series.marks and (value := series.values[at]) is not None:
                middle = y + _next_to(plain, series) + ROW / 2 - 1
                parts.append(_mark(form, scale.at(value), middle))
    return _document(height + AXIS, parts)


def _row(chart: Bars, plain: Sequence[Series], at: int, y: float, scale: _Scale) -> Iterator[str]:
    """The bars of one name, side by side downwards or one behind the other."""
    start = 0.0
    for place, series in enumerate(plain):
        value = series.values[at]
        if value is None:
            continue
        top = y if chart.stacked else y + place * ROW
        low, high = (start, start + value) if chart.stacked else (scale.zero, value)
        yield _rectangle(
            scale.at(min(low, high)),
            top,
            abs(scale.at(high) - scale.at(low)),
            GREYS[place % len(GREYS)],
        )
        if chart.stacked:
            start += value
        elif series.low and series.low[at] is not None and series.high[at] is not None:
            yield _whisker(
                scale.at(series.low[at] or 0.0), scale.at(series.high[at] or 0.0), top + ROW / 2 - 1
            )


def _next_to(plain: Sequence[Series], marks: Series) -> float:
    """How far down the bar lies that a series of marks belongs to. The first where there is
    none.
    """
    labels = [series.label for series in plain]
    return ROW * (labels.index(marks.next_to) if marks.next_to in labels else 0)


def heat(chart: Heat) -> str:
    """A cell for each pair, the darker the more, with its number."""
    left = 12 + LETTER * max(len(chart.down_axis), *map(len, chart.down))
    wide, tall = (WIDTH - RIGHT - left) / len(chart.across), 24
    known = [value for row in chart.values for value in row if value is not None] or [0.0]
    low, span = min(known), max(known) - min(known) or 1.0
    parts = [_text(left - 6, TOP + 4, chart.down_axis, "end")]
    for at, name in enumerate(chart.across):
        parts.append(_text(left + wide * (at + 0.5), TOP + 4, name, "middle"))
    for line, (name, row) in enumerate(zip(chart.down, chart.values, strict=True)):
        y = TOP + 12 + tall * line
        parts.append(_text(left - 6, y + 15, name, "end"))
        for at, value in enumerate(row):
            x, share = left + wide * at, 0.0 if value is None else (value - low) / span
            grey = round(235 - 165 * share)
            said = "" if value is None else f"{value:,.4g}"
            ink = "white" if share > 0.5 else INK
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide - 2:.1f}" height="{tall - 2}" '
                f'fill="{"none" if value is None else f"rgb({grey},{grey},{grey})"}" '
                f'stroke="{GRID}"/><text x="{x + wide / 2:.1f}" y="{y + 15}" '
                f'text-anchor="middle" fill="{ink}">{said}</text>'
            )
    end = TOP + 12 + tall * len(chart.down)
    parts.append(_text(left + (WIDTH - RIGHT - left) / 2, end + 16, chart.across_axis, "middle"))
    return _document(end + 24, parts)


def lines(chart: Lines) -> str:
    """A line for each series, distinguished by dashes; series of marks by their forms."""
    left, numeric = 66.0, all(not isinstance(x, str) for x in chart.x)
    legend, top = _legend(chart.series, left, dashed=True)
    bottom = top + PLOT_HEIGHT
    values = [
        v
        for series in chart.series
        for v in (*series.values, *series.low, *series.high)
        if v is not None
    ]
    up = _Scale.of(values, bottom, top, log=chart.log_y)
    places = [float(x) for x in chart.x] if numeric else [float(at) for at in range(len(chart.x))]
    along = _Scale.of(places, left, WIDTH - RIGHT, log=chart.log_x and numeric, whole=False)
    parts = [*legend, *_upright(up, left, axis_title(chart.y_axis, log=chart.log_y))]
    named = [
        (place, f"{x:,g}" if not isinstance(x, str) else x)
        for place, x in zip(places, chart.x, strict=True)
    ]
    for place, name in named[:: max(1, len(named) // 10)]:
        parts.append(_text(along.at(place), bottom + 14, name, "middle"))
    x_axis = axis_title(chart.x_axis, log=along.log)
    parts.append(_text((left + WIDTH) / 2, bottom + 30, x_axis, "middle"))
    forms = mark_forms(chart.series)
    for at, series in enumerate(chart.series):
        points = [
            (along.at(x), up.at(y))
            for x, y in zip(places, series.values, strict=True)
            if y is not None
        ]
        if series.marks:
            parts += [_mark(forms[at], x, y) for x, y in points]
        elif points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            dash = DASHES[at % len(DASHES)]
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{INK}" stroke-width="1.6" '
                f'stroke-dasharray="{dash}"/>'
            )
    return _document(bottom + AXIS, parts)


class _Scale:
    """From values to pixels. `zero` is where bars begin: 0, or the axis' low end where it is
    logarithmic.
    """

    def __init__(self, low: float, high: float, first: float, last: float, *, log: bool) -> None:
        self.low, self.high, self.first, self.last, self.log = low, high, first, last, log
        self.zero = low if log else 0.0

    @classmethod
    def of(
        cls,
        values: Iterable[float | None],
        first: float,
        last: float,
        *,
        log: bool,
        whole: bool = True,
    ) -> _Scale:
        """Over all values; with `whole` a linear axis holds 0."""
        known = [value for value in values if value is not None and (value > 0 or not log)] or [
            0.0,
            1.0,
        ]
        low, high = min(known), max(known)
        if log:
            return cls(low / 1.15, high * 1.15, first, last, log=True)
        low, high = (min(0.0, low), max(0.0, high)) if whole else (low, high)
        room = 0.04 * (high - low or 1.0) if whole else 0.0
        return cls(
            low - room if low < 0 else low,
            high + room if high > 0 else high,
            first,
            last,
            log=False,
        )

    def at(self, value: float) -> float:
        low, high, value = (
            (map(math.log, (self.low, self.high, max(value, self.low))))
            if self.log
            else (self.low, self.high, value)
        )
        return self.first + (value - low) / (high - low or 1.0) * (self.last - self.first)

    def ticks(self) -> list[float]:
        if self.log:
            found: list[float] = log_ticks([self.low * 1.15, self.high / 1.15])["tickvals"]
            return [tick for tick in found if self.low <= tick <= self.high]
        rough = (self.high - self.low or 1.0) / TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough)
        return [
            step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)
        ]


def _reach(chart: Bars) -> list[float | None]:
    if not chart.stacked:
        return [value for one in chart.series for value in (*one.values, *one.low, *one.high)]
    return [sum(one.values[at] or 0.0 for one in chart.series) for at in range(len(chart.names))]


def _grid(scale: _Scale, top: float, bottom: float, axis: str) -> Iterator[str]:
    share = axis.startswith(("share", "change", "error"))
    for tick in scale.ticks():
        x = scale.at(tick)
        yield (
            f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" '
            f'stroke="{GRID if tick else INK}"/>'
        )
        yield _text(x, bottom + 14, f"{100 * tick:g} %" if share else f"{tick:,g}", "middle")
    yield _text((scale.first + scale.last) / 2, bottom + 30, axis, "middle")


def _upright(scale: _Scale, left: float, axis: str) -> Iterator[str]:
    for tick in scale.ticks():
        y = scale.at(tick)
        yield (
            f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" '
            f'stroke="{GRID if tick else INK}"/>'
        )
        yield _text(left - 6, y + 3, f"{tick:,g}", "end")
    middle = (scale.first + scale.last) / 2
    yield (
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" '
        f'text-anchor="middle">{escape(axis)}</text>'
    )


def _legend(
    series: Sequence[Series], left: float, *, dashed: bool = False
) -> tuple[list[str], float]:
    """The names of several series with their looks, and where the plot may begin below them."""
    if len(series) < 2:
        return [], float(TOP)
    forms = mark_forms(series)
    parts, x, y = [], left, float(TOP)
    for at, one in enumerate(series):
        label = spoken(one.label)
        width = 30 + LETTER * len(label)
        if x + width > WIDTH - RIGHT and x > left:
            x, y = left, y + LEGEND_ROW
        if one.marks:
            parts.append(_mark(forms[at], x + 9, y))
        elif dashed:
            dash = DASHES[at % len(DASHES)]
            parts.append(
                f'<line x1="{x}" y1="{y}" x2="{x + 18}" y2="{y}" stroke="{INK}" '
                f'stroke-width="1.6" stroke-dasharray="{dash}"/>'
            )
        else:
            parts.append(_rectangle(x, y - 5, 18, GREYS[at % len(GREYS)]))
        parts.append(_text(x + 22, y + 4, label, "start"))
        x += width
    return parts, y + LEGEND_ROW


def _rectangle(x: float, y: float, width: float, fill: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}" fill="{fill}"/>'


def _whisker(low: float, high: float, y: float) -> str:
    path = f"M{low:.1f} {y - 3:.1f}v6M{high:.1f} {y - 3:.1f}v6M{low:.1f} {y:.1f}H{high:.1f}"
    return (
        f'<path d="{path}" stroke="white" stroke-width="3"/><path d="{path}" stroke="{INK}" '
        'stroke-width="1"/>'
    )


def _mark(form: str, x: float, y: float) -> str:
    path = {
        "diamond": f"M{x:.1f} {y - 5:.1f}l5 5l-5 5l-5 -5z",
        "circle": f"M{x - 4:.1f} {y:.1f}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
        "square": f"M{x - 4:.1f} {y - 4:.1f}h8v8h-8z",
        "triangle-up": f"M{x:.1f} {y - 5:.1f}l5 9h-10z",
    }[form]
    return f'<path d="{path}" fill="white" stroke="{INK}"/>'


def _text(x: float, y: float, said: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'


def _document(height: float, parts: Iterable[str]) -> str:
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="sans-serif" font-size="10.5" '
        f'fill="{INK}">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>', *parts, "</svg>", ""]
    )
