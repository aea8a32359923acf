"""Computes the shipped studies again and writes their pages:
`python -m studies.common.study_page [NAME...]`.

A study's folder keeps its tables in results/, one figure, and a README.md whose marked blocks
(studies.common.blocks) are filled here.
"""

from __future__ import annotations

import resource
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from studies.common import svg
from studies.common.blocks import Block, Stamp, blocks, filled, marked
from studies.common.inputs import study_digest, study_fits
from twin.data import data_dir
from twin.errors import ConfigError, TwinError
from twin.files import write
from twin.report import outcome as report
from twin.report.outcome import shown as as_read
from twin.study.kinds import FILE, Study, read_study
from twin.study.outcome import Bars, Cell, Chart, Outcome, Series, Table
from twin.study.runner import Runner
from twin.study.store import Store, default_folder
from twin.text import shown

PAGE, RESULTS, FIGURE = "README.md", "results", "figure.svg"
LINE = 100  # characters
WORDS = "words"  # the block of question, prediction and outcome
TABLES = "tables"  # the block that tables.md is


@dataclass(frozen=True, slots=True)
class Made:
    """A study that has been computed."""

    study: Study
    outcome: Outcome
    stamp: Stamp

    def table(self, name: str) -> Table:
        known = {one.name: one for one in self.outcome.tables()}
        if name not in known:
            raise ConfigError(
                f"block {shown(name)}: no table of that name; the study has {', '.join(known)}"
            )
        return known[name]


def current_stamp(folder: Path) -> Stamp:
    """What a study's blocks must be stamped with to be up to date."""
    return Stamp(study_fits(folder), study_digest(folder))


def make(folder: Path, runner: Runner) -> list[Path]:
    """Computes a study and writes its results and its page. Raises TwinError."""
    study = read_study(folder)
    made = Made(study, study.body.run(runner), current_stamp(folder))
    page = folder / PAGE
    text = page.read_text(encoding="utf-8")
    contents = {
        folder / RESULTS / f"{one.name}.csv": report.to_csv(one) for one in made.outcome.tables()
    }
    tables = marked(Block(TABLES, {}, None, ""), report.markdown(study, made.outcome), made.stamp)
    contents[folder / RESULTS / "tables.md"] = tables + "\n"
    contents[page] = filled(text, lambda block: body(made, block), made.stamp)
    for block in _figures(text):
        contents[folder / FIGURE] = drawing(made, block)
    write(contents)
    return list(contents)


def write_page(
    folder: Path,
    stamp: Stamp,
    bodies: Mapping[str, str],
    chart: Chart,
    *,
    pages: Sequence[str] = (PAGE,),
) -> None:
    """What the script of a study without a study file writes: its pages' blocks by their names, and
    its figure.
    """
    made = {folder / FIGURE: f"<!-- {stamp.words()} -->\n{svg.figure(chart)}"}
    for page in (folder / name for name in pages):
        text = page.read_text(encoding="utf-8")
        if unknown := sorted({block.name for block in blocks(text)} - set(bodies)):
            raise ConfigError(f"{page}: block {shown(unknown[0])}; there are {', '.join(bodies)}")
        made[page] = filled(text, lambda block: bodies[block.name], stamp)
    write(made)


def errors_chart(names: Sequence[str], errors: Mapping[str, Sequence[float]]) -> Bars:
    """Errors of predicted speeds: runs by their names, a series a label."""
    series = tuple(Series(label, tuple(some)) for label, some in errors.items())
    axis = "error of the predicted speed (right: the twin is too fast)"
    return Bars(tuple(names), series, axis)


def body(made: Made, block: Block) -> str:
    """What a block of the page says."""
    if block.name == WORDS:
        return _words(made.study)
    if block.name == "figure":
        return f"![{made.study.title}]({FIGURE})\n\nFit: {made.stamp.fit}."
    return _table(made.table(block.name), block, made.stamp.fit)


def drawing(made: Made, block: Block) -> str:
    """The chart of the page: the first one, or that of place `chart`."""
    charts = list(chain.from_iterable(part.charts for part in made.outcome.parts))
    at = int(block.choices.get("chart", "1")) - 1
    if not 0 <= at < len(charts):
        raise ConfigError(f"block figure: chart={at + 1}; the study has {len(charts)}")
    return f"<!-- {made.stamp.words()} -->\n{svg.figure(charts[at])}"


def _figures(text: str) -> list[Block]:
    return [block for block in blocks(text) if block.name == "figure"]


def _words(study: Study) -> str:
    said = (
        ("Question.", study.question),
        ("Prediction, before it ran.", study.prediction),
        ("Outcome.", study.outcome),
    )
    return "\n\n".join(textwrap.fill(f"**{head}** {text}", LINE) for head, text in said if text)


def _table(one: Table, block: Block, fit: str) -> str:
    """The columns whose places are chosen, of the rows that are chosen, with the fit below."""
    places = block.places("columns") or list(range(len(one.columns)))
    columns = [one.columns[place] for place in places]
    lines = [
        [column.name for column in columns],
        ["---" if column.textual else "---:" for column in columns],
    ]
    for row in one.rows:
        if _wanted(one, row, block):
            lines.append(
                [as_read(one.columns[place], row[place]).replace("|", "\\|") for place in places]
            )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\nFit: {fit}."


def _wanted(one: Table, row: Sequence[Cell], block: Block) -> bool:
    """Whether a row is chosen: `rows=3:1,2` are those with 1 or 2 in the third column, as people
    read it; "_" is a space.
    """
    if "rows" not in block.choices:
        return True
    place, _, values = block.choices["rows"].partition(":")
    read = as_read(one.columns[int(place) - 1], row[int(place) - 1])
    return read in values.replace("_", " ").split(",")


def main(names: Sequence[str]) -> int:
    """All studies, or those named. 0 when all could be made."""
    folders = sorted(file.parent for file in data_dir("studies").glob(f"*/{FILE}"))
    unknown = sorted(set(names) - {folder.name for folder in folders})
    if unknown:
        print(
            f"study_page: no study {unknown[0]}; there are "
            f"{', '.join(folder.name for folder in folders)}",
            file=sys.stderr,
        )
        return 2
    for folder in folders:
        if names and folder.name not in names:
            continue
        before = _core_s()
        runner = Runner.local(Store(default_folder()), lambda message: None)
        try:
            make(folder, runner)
        except TwinError as error:
            print(f"{folder.name}: {error}", file=sys.stderr)
            return 1
        took = f"{(_core_s() - before) / 60:.1f} core-minutes"
        print(
            f"{folder.name}: {runner.computed} points computed, {runner.found} found, {took}",
            flush=True,
        )
    return 0


def _core_s() -> float:
    """Processor time of this process and of its finished workers."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
