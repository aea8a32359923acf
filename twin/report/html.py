"""One self-contained HTML file: text, tables and plotly figures, readable offline and on paper."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from html import escape
from pathlib import Path
from typing import Any

from twin.files import write
from twin.report.words import OF_A_PAGE, WORDS

WIDE = 7  # columns from which a table is set smaller
SHORT = 28  # characters of a cell that must not be broken over lines
TINY = 16  # and of one that is not broken on narrow screens either
SENTENCE = 48  # characters from which a cell needs room
LISTED = 6  # columns up to which a row with a sentence becomes a list on narrow screens
Figure = dict[str, Any]  # plotly's own JSON: {"data": [...], "layout": {...}}

LAYOUT: Figure = {
    "font": {
        "family": "system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif",
        "size": 12,
        "color": "#1b2433",
    },
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 10, "r": 20, "t": 10, "b": 40},
    "hoverlabel": {"align": "left"},
}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, a sentence that says what to see, figures, then a table."""

    title: str
    text: str
    figures: tuple[Figure, ...] = ()
    body: str = ""  # HTML, already escaped
    long: bool = field(default=False)  # may be split over printed pages


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    subtitle: str
    cards: tuple[tuple[str, str], ...]  # (value, what it is; more lines are facts of it)
    sections: tuple[Section, ...]

    def html(self) -> str:
        """The whole document, plotly.js included and packed: 2.1 MB, not 4.9."""
        cards = "".join(map(_card, self.cards))
        sections = "".join(_section(i, section) for i, section in enumerate(self.sections))
        style, script = (_next_to(f"page.{kind}") for kind in ("css", "js"))
        return (
            "<!doctype html>\n<html lang='en'><head><meta "
            f"charset='utf-8'><title>{escape(self.title)}</title>"
            "<meta name='viewport' content='width=device-width, "
            f"initial-scale=1'><style>{style}</style>"
            f"<script type='application/gzip' id='plotly'>{_plotly()}</script></head>\n"
            f"<body><main><header><h1>{escape(self.title)}</h1>"
            f"<p>{escape(self.subtitle)}</p></header><div class='cards'>{cards}</div>\n"
            f"{sections}</main>"
            f"<script>{script}</script></body></html>\n"
        )

    def write(self, path: Path) -> Path:
        write({path: self.html()})
        return path


def folded(title: str, body: str) -> str:
    """`body` (HTML) behind a line that opens it; paper has it open."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def html_table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    text_columns: int | Collection[int] = 1,
) -> str:
    """A table; the first `text_columns`, or those of these places, are text, the others numbers. A
    Chip is drawn as one.
    """
    texts = range(text_columns) if isinstance(text_columns, int) else text_columns
    kinds = ["" if i in texts else " class='number'" for i in range(len(header))]
    head = "".join(
        f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, header, strict=True)
    )
    stated = 2 < len(header) <= LISTED and any(
        len(str(cell)) >= SENTENCE for row in rows for cell in row
    )
    names = header if stated else ("",) * len(header)
    cells = (
        "".join(_cell(cell, kind, name) for kind, cell, name in zip(kinds, row, names, strict=True))
        for row in rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    look = ("listed" if stated else "plain") + (" wide" if len(header) > WIDE else "")
    return (
        "<div class='scroll'><table "
        f"class='{look}'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def words_section() -> Section:
    """What the words of a page mean, for its end."""
    table = html_table(
        ("word", "meaning"), [(word, WORDS[word]) for word in OF_A_PAGE], text_columns=2
    )
    return Section("Words", "", (), folded(f"{len(OF_A_PAGE)} words of this page", table))


@dataclass(frozen=True, slots=True)
class Chip:
    """A word on a coloured ground: the kind of a number."""

    word: str


def _card(card: tuple[str, str]) -> str:
    value, name = card
    stated = "".join(f"<span>{escape(line)}</span>" for line in name.split("\n"))
    return f"<div class='card'><b>{escape(value)}</b>{stated}</div>"


@lru_cache(maxsize=1)
def _plotly() -> str:
    """plotly.js, packed; page.js unpacks it."""
    from plotly.offline import get_plotlyjs  # slow to load, and most commands write no page

    return b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _cell(cell: object, kind: str, name: str) -> str:
    named = f" data-name='{escape(name)}'" if name else ""
    if isinstance(cell, Chip):
        return f"<td{named}><span class='chip {escape(cell.word)}'>{escape(cell.word)}</span></td>"
    text = "" if cell is None else str(cell)
    return f"<td{kind or _length(text)}{named}>{escape(text)}</td>"


def _length(text: str) -> str:
    """How a cell of text may be broken over lines."""
    if len(text) > SHORT:
        return " class='sentence'" if len(text) >= SENTENCE else ""
    return " class='short tiny'" if len(text) <= TINY else " class='short'"


def _section(index: int, section: Section) -> str:
    figures = "".join(
        _figure(f"figure-{index}-{i}", figure) for i, figure in enumerate(section.figures)
    )
    long = " class='long'" if section.long else ""
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return (
        f"<section{long}><h2>{escape(section.title)}</h2>{text}{figures}{section.body}</section>\n"
    )


def _figure(name: str, figure: Figure) -> str:
    """The legend stands above the figure as text: plotly's own covers bars where a screen is
    narrow.
    """
    layout = LAYOUT | figure["layout"] | {"showlegend": False}
    content = json.dumps({"data": figure["data"], "layout": layout}).replace("</", "<\\/")
    return (
        f"{_legend(name, figure)}<div class='figure' id='{name}' "
        f"style='height:{layout['height']}px'></div><script type='application/json' "
        f"data-figure='{name}'>{content}</script>"
    )


def _legend(name: str, figure: Figure) -> str:
    """What each colour is; empty for a figure of one series."""
    shown = [
        (at, trace)
        for at, trace in enumerate(figure["data"])
        if trace.get("showlegend", "name" in trace)
    ]
    if len(shown) < 2:
        return ""
    entries = "".join(
        f"<button type='button' data-of='{name}' data-trace='{at}'><i class='{_sign(trace)}' "
        f"style='--colour:{escape(trace['marker']['color'])}'></i>{escape(trace['name'])}</button>"
        for at, trace in shown
    )
    return f"<div class='legend'>{entries}</div>"


def _sign(trace: Mapping[str, Any]) -> str:
    mode = trace.get("mode", "bar")
    if mode == "markers":
        return f"mark {trace['marker'].get('symbol', 'circle')}"
    return "line" if "lines" in mode else "bar"


def _next_to(name: str) -> str:
    """A file of this folder: what every page carries."""
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
