"""One self-contained HTML file: text, tables and plotly figures, readable offline and on paper."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from twin.files import write
from twin.report.words import OF_A_PAGE, WORDS

WIDE = 7  # columns from which a table is set smaller
SHORT = 28  # characters of a cell that must not be broken over lines
Figure = dict[str, Any]  # plotly's own JSON: {"data": [...], "layout": {...}}

STYLE = """
:root { --ink: #1b2433; --soft: #5b6678; --line: #dde2ea; --paper: #ffffff; --wash: #f5f7fa; --accent: #1f5fbf; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 24px 64px; }
header h1 { margin: 0; font-size: 28px; line-height: 1.25; }
header p { margin: 4px 0 20px; color: var(--soft); }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 18px 22px; margin: 0 0 18px; }
h2 { margin: 0 0 6px; font-size: 18px; }
section > p { margin: 0 0 10px; color: var(--soft); max-width: 90ch; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: 12px; margin: 0 0 18px; }
.card { background: var(--paper); border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px; }
.card b { display: block; font-size: 24px; line-height: 1.2; font-weight: 650; }
.card span { color: var(--soft); font-size: 13px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; margin: 8px 0 4px; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; }
td.short { white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
table.wide { font-size: 12.5px; }
table.wide th, table.wide td { padding-right: 8px; }
table.wide td.short { white-space: normal; }
table.wide td.short:first-child { white-space: nowrap; }
ul { margin: 4px 0; padding-left: 20px; max-width: 100ch; }
.chip { display: inline-block; padding: 0 7px; border-radius: 9px; background: var(--wash); border: 1px solid var(--line);
  font-size: 12px; white-space: nowrap; }
.chip.assumed, .chip.unbound { background: #fff3d6; border-color: #e8c877; }
.chip.measured, .chip.fitted { background: #e2f3e6; border-color: #9fcfab; }
@page { size: A4 landscape; margin: 12mm; }
@media print {
  body { background: none; font-size: 11px; }
  table, table.wide { font-size: 9.5px; }
  th, td { padding: 3px 7px 3px 0; }
  td.short { white-space: normal; }
  tr, .figure { break-inside: avoid; }
  h2, section > p { break-after: avoid; }
  .scroll { overflow: visible; }
  main { max-width: none; padding: 0; }
  section, .card { border-color: #bbb; break-inside: avoid; }
  section.long { break-inside: auto; }
}
"""
LAYOUT: Figure = {
    "font": {"family": "system-ui, Segoe UI, Roboto, Helvetica, Arial, sans-serif", "size": 12, "color": "#1b2433"},
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 10, "r": 20, "t": 10, "b": 40},
    "hoverlabel": {"align": "left"},
}
SCRIPT = """
for (const holder of document.querySelectorAll("script[type='application/json'][data-figure]")) {
  const figure = JSON.parse(holder.textContent);
  Plotly.newPlot(holder.dataset.figure, figure.data, figure.layout, {responsive: true, displayModeBar: false});
}
window.addEventListener("beforeprint", () => { for (const e of document.querySelectorAll(".figure")) Plotly.Plots.resize(e); });
"""


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
    cards: tuple[tuple[str, str], ...]  # (value, what it is)
    sections: tuple[Section, ...]

    def html(self) -> str:
        """The whole document, plotly.js included."""
        from plotly.offline import get_plotlyjs  # slow to load, and most commands write no page

        cards = "".join(f"<div class='card'><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in self.cards)
        sections = "".join(_section(i, section) for i, section in enumerate(self.sections))
        return (
            f"<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><title>{escape(self.title)}</title>"
            f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{STYLE}</style>"
            f"<script>{get_plotlyjs()}</script></head>\n<body><main><header><h1>{escape(self.title)}</h1>"
            f"<p>{escape(self.subtitle)}</p></header><div class='cards'>{cards}</div>\n{sections}</main>"
            f"<script>{SCRIPT}</script></body></html>\n"
        )

    def write(self, path: Path) -> Path:
        write({path: self.html()})
        return path


def html_table(header: Sequence[str], rows: Sequence[Sequence[object]], *, text_columns: int | Collection[int] = 1) -> str:
    """A table; the first `text_columns`, or those of these places, are text, the others numbers. A Chip is drawn as one."""
    texts = range(text_columns) if isinstance(text_columns, int) else text_columns
    kinds = ["" if i in texts else " class='number'" for i in range(len(header))]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, header, strict=True))
    cells = ("".join(_cell(cell, kind) for kind, cell in zip(kinds, row, strict=True)) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    wide = " class='wide'" if len(header) > WIDE else ""
    return f"<div class='scroll'><table{wide}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def words_section() -> Section:
    """What the words of a page mean, for its end."""
    return Section("Words", "", (), html_table(("word", "meaning"), [(word, WORDS[word]) for word in OF_A_PAGE], text_columns=2))


@dataclass(frozen=True, slots=True)
class Chip:
    """A word on a coloured ground: the kind of a number."""

    word: str


def _cell(cell: object, kind: str) -> str:
    if isinstance(cell, Chip):
        return f"<td><span class='chip {escape(cell.word)}'>{escape(cell.word)}</span></td>"
    text = "" if cell is None else str(cell)
    short = " class='short'" if not kind and len(text) <= SHORT else kind
    return f"<td{short}>{escape(text)}</td>"


def _section(index: int, section: Section) -> str:
    figures = "".join(_figure(f"figure-{index}-{i}", figure) for i, figure in enumerate(section.figures))
    long = " class='long'" if section.long else ""
    text = f"<p>{escape(section.text)}</p>" if section.text else ""
    return f"<section{long}><h2>{escape(section.title)}</h2>{text}{figures}{section.body}</section>\n"


def _figure(name: str, figure: Figure) -> str:
    layout = LAYOUT | figure["layout"]
    content = json.dumps({"data": figure["data"], "layout": layout}).replace("</", "<\\/")
    height = layout.get("height", 320)
    return (
        f"<div class='figure' id='{name}' style='height:{height}px'></div>"
        f"<script type='application/json' data-figure='{name}'>{content}</script>"
    )
