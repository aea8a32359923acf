"""The script that measures the server on a GPU, tried on a CPU with a tiny model, and its page."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from served import MODELS, SIZES

from tests.studies.scripts import loaded

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "studies" / "server"
CELLS = {
    "stream",
    "engine",
    "first token",
    "second turn, kept",
    "second turn, read",
    "sampler",
}
WITHOUT = ("simpy", "pandas", "plotly", "scipy", "pyarrow", "distributed")


def script(*words: object, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As on a GPU machine: neither the simulator nor what pages need."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({WITHOUT}))\n"
    )
    return folder


@pytest.fixture(scope="module")
def measured(bare: Path) -> tuple[Path, dict[str, Any]]:
    out = bare / "made.json"
    done = script("1xhost", "--out", out, path=bare)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["models"]["tiny"]
    assert not [cell for cell, one in found.items() if "failed" in one], done.stderr
    return out, found


@pytest.mark.slow
def test_every_question_is_answered_in_one_run(measured: tuple[Path, dict[str, Any]]) -> None:
    _, found = measured
    assert set(found) == CELLS
    assert found["engine"]["same_text"] is True  # the server's
    assert found["stream"]["same_each_time"]
    assert found["stream"]["cpu"]["seconds"] > 0
    assert len(found["stream"]["prompt"]) == 24
    for prompt in found["first token"]["prompts"].values():
        assert set(prompt["kept"]) == {0}
        assert all(s > 0 for s in prompt["first_token_s"])
    # the first turn's prompt, and its answer but for the token that was not read
    assert {one["kept"] for one in found["second turn, kept"]["chats"]} <= set(range(64, 76))
    assert {one["kept"] for one in found["second turn, read"]["chats"]} == {0}
    drawn = {
        temperature: found["sampler"][temperature]["text"]
        for temperature in ("temperature 1", "temperature 0")
    }
    assert drawn["temperature 1"] != drawn["temperature 0"] == found["stream"]["text"]


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_cut_off(
    measured: tuple[Path, dict[str, Any]], bare: Path
) -> None:
    out, found = measured
    kept = json.loads(out.read_text(encoding="utf-8"))
    kept["models"]["tiny"] = {"stream": found["stream"], "engine": {"failed": "cut off"}}
    cut = bare / "cut.json"
    cut.write_text(json.dumps(kept), encoding="utf-8")
    done = script("1xhost", "--out", cut, path=bare)
    assert done.returncode == 0, done.stderr
    again = json.loads(cut.read_text(encoding="utf-8"))["models"]["tiny"]
    assert again["stream"] == found["stream"]
    assert set(again) == CELLS
    assert again["engine"]["same_text"] is True


def test_kernels_can_be_compiled_alone(bare: Path) -> None:
    done = script("1xhost", "--compile-only", path=bare)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 plans are ready" in done.stderr


@pytest.fixture
def page() -> ModuleType:
    return loaded("server/page.py")


@pytest.mark.slow
def test_a_record_fills_the_page(page: ModuleType, measured: tuple[Path, dict[str, Any]]) -> None:
    made = json.loads((FOLDER / "predictions.json").read_text(encoding="utf-8"))
    slower = copy.deepcopy(measured[1])
    slower["stream"]["cpu"]["tokens"] //= 2
    found = dict(zip(made["models"], (measured[1], slower), strict=True))
    rows = [line.split(" | ") for line in page.rows_table(made, found, {}).splitlines()[2:]]
    empty = {row[1] for row in rows if not row[3].strip()}
    assert empty == {  # a CPU gets shorter prompts
        f"first token after {tokens} tokens" for tokens in ("32", "1,024", "8,192")
    }
    assert page.checks_table({"CPU": found}).count("| yes | yes |") == len(found)
    assert all(page.chart(made["models"], found).series[1].values)


def test_what_was_predicted_is_what_is_requested() -> None:
    made = json.loads((FOLDER / "predictions.json").read_text(encoding="utf-8"))
    assert tuple(made["models"]) == MODELS
    for guess in made["models"].values():
        assert [int(tokens) for tokens in guess["first_token_s"]] == list(SIZES.first)
        assert guess["of_run"] < guess["of_engine"] < 1
        assert guess["second_turn"]["kept_s"] < guess["second_turn"]["read_s"]
