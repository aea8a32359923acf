"""A study's outcome for people and programs: terminal, Markdown, CSV, JSON and one HTML page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from twin.files import csv_text
from twin.files import write as write_files
from twin.report.figures import figure
from twin.report.html import Chip, Page, Section, html_table, words_section
from twin.report.tables import count, percent, table
from twin.study.kinds import Study
from twin.study.outcome import Cell, Column, Outcome, Part, Shown, Table
from twin.units import format_quantity

UNCORRECTED = "not corrected afterwards"
NUMBERS = "The numbers of this study are its outcome."  # where nobody has written one
JUDGED = "What was predicted before it ran, and what came out"
RANGE = re.compile(r"(?<=\d)-(?=\d)")  # must not be broken over lines


def shown(column: Column, cell: Cell) -> str:
    """A cell as people read it; empty when there is no such number."""
    if cell is None:
        return ""
    if isinstance(cell, str):
        return cell
    match column.shown:
        case Shown.PERCENT:
            return percent(cell)
        case Shown.CHANGE:
            return percent(cell, signed=True)
        case Shown.MICROSECONDS:
            return f"{cell * 1e6:,.1f}"
        case Shown.QUANTITY:
            return format_quantity(cell, column.unit)
        case _:
            return count(cell)


def text(study: Study, outcome: Outcome) -> str:
    """For a terminal: the tables that are meant for one, and the notes."""
    pieces = [study.title, study.question]
    if study.prediction:
        pieces += [
            f"predicted before it ran: {study.prediction} ({UNCORRECTED})",
            f"outcome: {study.outcome or NUMBERS}",
        ]
    for part in outcome.parts:
        tables = [_plain(one) for one in part.tables if one.terminal]
        if tables:
            pieces += [part.title.upper(), *tables]
    return "\n\n".join([*pieces, *(f"- {note}" for note in outcome.notes)])


def _plain(one: Table) -> str:
    """Without the columns that no row has anything in."""
    kept = [
        at
        for at in range(len(one.columns))
        if not one.rows or any(row[at] not in (None, "") for row in one.rows)
    ]
    columns = [one.columns[at] for at in kept]
    rows = [[shown(one.columns[at], row[at]) for at in kept] for row in one.rows]
    textual = [at for at, column in enumerate(columns) if column.textual]
    return table([column.name for column in columns], rows, text_columns=textual)


def markdown(study: Study, outcome: Outcome) -> str:
    """All tables and notes."""
    pieces = [f"# {study.title}", study.question]
    if study.prediction:
        pieces.append(
            f"**Predicted before it ran.** {study.prediction} ({UNCORRECTED.capitalize()}.)"
        )
        pieces.append(f"**Outcome.** {study.outcome or NUMBERS}")
    for part in outcome.parts:
        tables = [_markdown_table(one) for one in part.tables if one.page]
        if tables:
            pieces += [f"## {part.title}", *([part.text] if part.text else []), *tables]
    pieces += (
        ["## Notes", "\n".join(f"- {note}" for note in outcome.notes)] if outcome.notes else []
    )
    return "\n\n".join(pieces) + "\n"


def _markdown_table(one: Table) -> str:
    head = [column.name for column in one.columns]
    lines = [head, ["---" if column.textual else "---:" for column in one.columns]]
    lines += [
        [
            shown(column, cell).replace("|", "\\|")
            for column, cell in zip(one.columns, row, strict=True)
        ]
        for row in one.rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def to_csv(one: Table) -> str:
    """The full numbers, in SI base units (fractions as fractions, times in seconds)."""
    header = [_csv_name(column) for column in one.columns]
    return csv_text(header, (["" if cell is None else cell for cell in row] for row in one.rows))


def _csv_name(column: Column) -> str:
    if column.shown is Shown.MICROSECONDS:
        return f"{column.name.removesuffix(', us').removeprefix('us ')} (s)"
    return f"{column.name} ({column.unit})" if column.unit else column.name


def to_json(study: Study, outcome: Outcome) -> dict[str, Any]:
    """Tables as lists of objects by column, and the notes."""
    return {
        "study": study.name,
        "kind": study.kind,
        "title": study.title,
        "question": study.question,
        "prediction": study.prediction,
        "outcome": study.outcome,
        "tables": {
            one.name: [dict(zip(map(_csv_name, one.columns), row, strict=True)) for row in one.rows]
            for one in outcome.tables()
        },
        "charts": [
            {"part": part.title, "kind": type(chart).__name__} | asdict(chart)
            for part in outcome.parts
            for chart in part.charts
        ],
        "notes": list(outcome.notes),
    }


def page(study: Study, outcome: Outcome) -> Page:
    """Self-contained HTML."""
    sections = [*map(_section, outcome.parts)]
    if study.prediction:
        rows = [
            (f"predicted before it ran, {UNCORRECTED}", study.prediction),
            ("outcome", study.outcome or NUMBERS),
        ]
        sections.append(Section(JUDGED, "", (), html_table(("", ""), rows, text_columns=2)))
    if outcome.notes:
        sections.append(
            Section(
                "Notes",
                "",
                (),
                f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in outcome.notes)}</ul>",
            )
        )
    return Page(study.title, study.question, outcome.headline, (*sections, words_section()))


def _section(part: Part) -> Section:
    figures = tuple(map(figure, part.charts))
    return Section(part.title, part.text, figures, "".join(_html_tables(part)), long=part.long)


def _html_tables(part: Part) -> Iterator[str]:
    for one in part.tables:
        if not one.page:
            continue
        textual = [at for at, column in enumerate(one.columns) if column.textual]
        rows = [
            [_html_cell(column, cell) for column, cell in zip(one.columns, row, strict=True)]
            for row in one.rows
        ]
        yield html_table([column.name for column in one.columns], rows, text_columns=textual)


def _html_cell(column: Column, cell: Cell) -> Chip | str:
    if column.shown is Shown.CHIP and isinstance(cell, str):
        return Chip(cell)
    return RANGE.sub("\u2011", shown(column, cell))


def write(study: Study, outcome: Outcome, folder: Path) -> list[Path]:
    """report.html, result.json, tables.md, and NAME.csv for each table: all of them, or none.
    Raises OutputError.
    """
    contents = {
        "report.html": page(study, outcome).html(),
        "result.json": json.dumps(to_json(study, outcome), indent=1) + "\n",
        "tables.md": markdown(study, outcome),
    }
    contents |= {f"{one.name}.csv": to_csv(one) for one in outcome.tables()}
    write_files({folder / name: content for name, content in contents.items()})
    return [folder / name for name in contents]
