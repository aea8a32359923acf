"""Pages of studies are of the fit and the inputs on file: their stamps are compared, nothing long
is computed again.
"""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest

from studies.common.blocks import Stamp, blocks
from studies.common.study_page import FIGURE, PAGE, RESULTS, current_stamp
from tests.rows import every
from twin.calibrate.on_record import rows
from twin.study.kinds import FILE

STUDIES = Path(__file__).resolve().parents[2] / "studies"
WANTED = sorted(file.parent for file in STUDIES.glob(f"*/{FILE}"))
SCRIPTED = sorted(file.parent for file in STUDIES.glob("*/page.py"))
MOST_LINES = 110  # two screens; the blocks of some hold tables of 20 rows
HISTORY, ITS_LINES = "h200-history", 200  # one page for what five studies measured
NOTHING = "0" * 12


@cache
def stamp_of(folder: Path) -> Stamp:
    """What the folder's blocks should be stamped with: by its own script, where it has one."""
    if folder in WANTED:
        return current_stamp(folder)
    found = runpy.run_path(str(folder / "page.py"))["stamp"]()
    assert isinstance(found, Stamp)
    return found


def generated(folder: Path) -> list[Path]:
    tables = [folder / RESULTS / "tables.md"] if folder in WANTED else []
    return [folder / PAGE, *tables]


@pytest.mark.parametrize("folder", [*WANTED, *SCRIPTED], ids=lambda folder: folder.name)
def test_every_block_was_made_from_the_fit_and_inputs_on_file(folder: Path) -> None:
    for file in generated(folder):
        found = list(blocks(file.read_text(encoding="utf-8")))
        assert found, f"{file} has no block that a script writes"
        for block in found:
            assert block.stamp == stamp_of(folder), (
                f"{file}: {block.name} is of other inputs: run `make studies`"
            )


@pytest.mark.parametrize("folder", [*WANTED, *SCRIPTED], ids=lambda folder: folder.name)
def test_every_figure_is_of_the_same_inputs(folder: Path) -> None:
    first = (folder / FIGURE).read_text(encoding="utf-8").partition("\n")[0]
    assert first == f"<!-- {stamp_of(folder).words()} -->", "run `make studies`"


PREDICTED, OUTCOME = "**Prediction, before it ran.**", "**Outcome.**"
NEAR = 1200  # characters: a prediction and its outcome are read together


@every("page", sorted(STUDIES.glob(f"*/{PAGE}")))
def test_every_prediction_has_its_outcome_next_to_it(page: Path) -> None:
    said, _, after = page.read_text(encoding="utf-8").partition(PREDICTED)
    assert OUTCOME not in said
    assert (OUTCOME in after[:NEAR]) == bool(after)
    assert after or page.parent not in WANTED


@every("page", sorted(STUDIES.glob(f"*/{PAGE}")))
def test_a_page_is_short_and_speaks_of_no_present(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("\n") <= (ITS_LINES if page.parent.name == HISTORY else MOST_LINES)
    assert not re.search(
        r"\b(?:the present (?:kernel|fit|one)|the kernel before|the tables before)\b", text
    )


@every("page", sorted(STUDIES.glob(f"*/{PAGE}")))
def test_what_a_page_links_exists(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_a_changed_question_changes_the_stamp_and_words_do_not(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    text = (STUDIES / "lanes" / FILE).read_text(encoding="utf-8")
    stamps = []
    for changed in (
        text,
        text.replace("where does", "how soon does"),
        text.replace("draws: 8", "draws: 9"),
    ):
        (folder / FILE).write_text(changed, encoding="utf-8")
        stamps.append(current_stamp(folder))
    assert stamps[0] == stamps[1] != stamps[2]
    assert stamps[0].inputs != NOTHING


ROOT = STUDIES.parent
BLOCK = re.compile(r"<!-- made.*?<!-- end -->", re.DOTALL)
CODE = re.compile(r"```.*?```", re.DOTALL)
SPEED = re.compile(r"(\d[\d,]*(?:\.\d+)?) tokens/s(?! and)")
ELSEWHERE = {"740", "4,167", "73"}  # limits that studies derive


def on_record() -> set[str]:
    """Speeds of calibration/measured.csv, as pages round them."""
    return {f"{run.tokens_per_s:,.0f}" for run in rows() if run.tokens_per_s}


@every("page", [ROOT / PAGE, *sorted(STUDIES.glob(f"*/{PAGE}"))])
def test_a_speed_in_prose_stands_in_a_table(page: Path) -> None:
    """One that a script made of the page, or a run on record."""
    text = page.read_text(encoding="utf-8")
    tables = " ".join(BLOCK.findall(text))
    known = set(re.findall(r"\d[\d,]*(?:\.\d+)?", tables)) | on_record() | ELSEWHERE
    said = SPEED.findall(CODE.sub("", BLOCK.sub("", text)))
    assert set(said) <= known, f"{page}: take it from a table"


def test_the_front_page_quotes_runs_on_record() -> None:
    text = " ".join((ROOT / PAGE).read_text(encoding="utf-8").split())
    said = re.search(
        r"One H200 makes ([\d,]+) tokens/s of GPT-OSS-20B and ([\d,]+) of GPT-OSS-120B.*?"
        r"Four H200 make ([\d,]+) of Laneformer-2B.*?, ([\d,]+) of Llama-3.2-1B "
        r"and ([\d,]+) of Llama-3.1-70B",
        text,
    )
    assert said
    runs = {(run.model, run.node, run.context): run.tokens_per_s for run in rows()}
    names = [
        ("gpt-oss-20b", "1xh200-sxm", 96),
        ("gpt-oss-120b", "1xh200-sxm", 96),
        ("laneformer-2b", "4xh200-sxm", 128),
        ("llama-3.2-1b", "4xh200-sxm", 128),
        ("llama-3.1-70b", "4xh200-sxm", 128),
    ]
    assert list(said.groups()) == [f"{runs[name]:,.0f}" for name in names]
