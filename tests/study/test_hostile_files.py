"""Study files that are wrong anywhere: refused by field and file, before names are tried or cells
expanded.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.refusals import refused
from twin.errors import ConfigError
from twin.reading import read
from twin.study.grid import MOST_CELLS, Axis, Grid, Model
from twin.study.interval import Draws
from twin.study.kinds import read_study
from twin.study.store import Store

HEAD = "kind: projection\ntitle: t\nquestion: q\n"
GRID = "models: [llama-3.2-1b]\nnodes: [1xh200]\n"


def refused_study(folder: Path, text: str) -> str:
    file = folder / "study.yaml"
    file.write_text(text)
    return refused(ConfigError, lambda: read_study(file), str(file))


def test_a_short_file_cannot_ask_for_more_cells_than_there_is_time_for(tmp_path: Path) -> None:
    axes = "".join(f"  axis{i}: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]\n" for i in range(9))
    assert "10 x 10 x 10" in refused_study(tmp_path, f"{HEAD}{GRID}axes:\n{axes}")


def test_a_grid_of_too_many_cells_cannot_be_made() -> None:
    axes = tuple(Axis(name, tuple(range(100)), True) for name in ("a", "b", "c"))
    with pytest.raises(ConfigError, match=f"1000000 combinations.*at most {MOST_CELLS:,}"):
        Grid((Model("m", "m"),), ("1xh200",), axes, (), ())


def test_draws_of_many_cells_are_refused(tmp_path: Path) -> None:
    values = ", ".join(map(str, range(1, 1001)))
    said = refused_study(
        tmp_path, f"{HEAD}{GRID}axes: {{context: [{values}]}}\nintervals: {{draws: 5000}}\n"
    )
    assert "5,000 draws of 1,000 cells" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("models: [llama-3.2-1b]\nnodes: [2026-01-01]\n", "unknown node '2026-01-01"),
        ("models: [[llama-3.2-1b]]\nnodes: [1xh200]\n", "must be a mapping"),
        ("models: {a: 1}\nnodes: [1xh200]\n", "must be a list"),
        (GRID + "options: {blocks: [1]}\n", "blocks"),
        (GRID + "options: {batch: 1000000}\n", "at most 1024"),
        (GRID + "options: {seed: -1}\n", "at least 0"),
        (GRID + f"options: {{context: {10**400}}}\n", "whole number of at most 63 bits"),
        (GRID + f"options: {{acceptance: {10**400}}}\n", "whole number of at most 63 bits"),
        (GRID + "options: {draft_step: .inf}\n", "draft_step_s"),
        (GRID + "axes: {context: [1, 1]}\n", "given twice"),
        (GRID + "axes: {context: [[1], [1]]}\n", "context"),
        (GRID + "axes: {1: [1]}\n", "must be text; put it in quotes"),
        (GRID + "settings: {gpus: .inf}\n", "gpus"),
        (GRID + "settings: {gpus: .nan}\n", "gpus"),
        (GRID + "settings: {l2.latency: 2026-01-01}\n", "2026-01-01"),
        (GRID + "published: [{model: llama-3.2-1b, at: []}]\n", "must be a mapping"),
        (GRID + "steps: 1.0e+300\n", "must be a whole number"),
        (GRID + "columns: [1]\n", "must be text"),
        (GRID + "machines: [[]]\n", "must be text"),
        (GRID + "closely: [{model: llama-3.2-1b, node: {}}]\n", "must be text"),
        (f"title: {'x' * 20_000}\n", "given twice"),
    ],
)
def test_a_wrong_type_anywhere_is_refused_by_field(text: str, says: str, tmp_path: Path) -> None:
    assert says in refused_study(tmp_path, HEAD + text)


def test_a_key_that_is_no_text_is_shown(tmp_path: Path) -> None:
    for key in (1, None, True, 10**5000, ("a",), "x" * 10**6):
        with pytest.raises(ConfigError) as error:
            read({key: 1}, Draws, tmp_path / "f")
        assert len(str(error.value)) < 500


def test_the_names_of_studies_stay_below_the_default_folder(
    twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    Path("...yaml").write_text(
        "kind: launch-tax\ntitle: t\nquestion: q\nlayers: 2\nkernels: [1]\nlaunch_s: 1 us\n"
        "goal_tokens_per_s: 10\ndevices: [h200]\n"
    )
    outcome = twin("project", "...yaml", "--store", tmp_path / "store")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--out" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["work"]


@pytest.mark.parametrize("name", ["~", "s3:", "file:", "a b"])
def test_a_store_is_the_folder_that_was_named(
    name: str, twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = (
        "whatif",
        checkpoint,
        "1xh200",
        "--blocks",
        "4",
        "--sweep",
        "context=1,2",
        "--workers",
        1,
        "--store",
        name,
    )
    assert twin(*words).code == 0
    assert Store(Path(name)).count() >= 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("data", [b"", b"PAR1", b"no table"])
def test_a_broken_file_among_the_results_is_named(
    data: bytes, twin: Twin, checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.parquet").write_bytes(data)
    outcome = twin(
        "whatif",
        checkpoint,
        "1xh200",
        "--blocks",
        "4",
        "--sweep",
        "context=1,2",
        "--workers",
        1,
        "--store",
        tmp_path,
    )
    assert (outcome.code, outcome.out) == (2, "")
    assert "broken.parquet" in outcome.err
    assert outcome.err.splitlines()[-1].startswith("twin: ")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"\x93NUMPY", b"x" * 100])
def test_a_file_that_is_no_recording_is_refused(data: bytes, twin: Twin, tmp_path: Path) -> None:
    (tmp_path / "steps.npz").write_bytes(data)
    outcome = twin("trace", tmp_path / "steps.npz", "1xh200")
    assert (outcome.code, outcome.out) == (2, "")
    assert "steps.npz" in outcome.err
