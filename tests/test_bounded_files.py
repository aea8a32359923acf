"""Files that users exchange cost no more than reading them, whatever they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.refusals import refused
from twin.bench import record
from twin.calibrate import shape_record, store
from twin.commands.diff import read as read_result
from twin.cost.routing import read_routing
from twin.data import MOST_NODES, read_yaml
from twin.errors import TwinError
from twin.files import MOST_JSON_PARTS, read_json
from twin.hardware.load import load_node
from twin.machines.load import read_machine
from twin.models.load import load_model

TWIN = Path(__file__).resolve().parent.parent / "twin"
# Lists of eight lists each, nine deep: 300 bytes that mean 134 million entries.
LAUGHS = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 8)}]\n" for n in range(1, 9)
)
# The readers of each kind, and bytes that come from this program alone: requests of processes that
# it started, a GPU's tools, and its own files of build and speed.
OWN = {
    "data.py",
    "files.py",
    "models/files.py",
    "server/template_child.py",
    "server/template.py",
    "server/written.py",
    "engine/tokenizer.py",
    "engine/hip_build.py",
    "engine/choose.py",
    "engine/logprobs.py",
    "engine/cuda_build.py",
    "report/recording.py",
    "study/store.py",
    "bench/ranks.py",
}


def test_no_file_is_parsed_by_another_reader() -> None:
    """A new reader of a user's file takes read_yaml or read_json, or is looked at here."""
    parses = re.compile(r"yaml\.(safe_|unsafe_|full_)?load|yaml\.compose|json\.loads?\(")
    found = {
        str(file.relative_to(TWIN))
        for file in TWIN.rglob("*.py")
        if parses.search(file.read_text(encoding="utf-8"))
    }
    assert found <= OWN, found - OWN


def _stored(kind: str) -> Callable[[Path], object]:
    def act(folder: Path) -> object:
        file = folder / kind / "h200-sxm.yaml"
        file.parent.mkdir()
        (folder / "it.yaml").rename(file)
        return store.read_fit("h200-sxm") if kind == "fits" else store.read_held_out(file)

    return act


def _run(folder: Path) -> object:
    (folder / "it.yaml").rename(folder / "meta.yaml")
    return store.read_run(folder)


YAML: dict[str, Callable[[Path], object]] = {
    "fit": _stored("fits"),
    "held-out": _stored("held-out"),
    "run": _run,
    "node": lambda folder: load_node(str(folder / "it.yaml")),
    "machine": lambda folder: read_machine(folder / "it.yaml"),
    "model": lambda folder: load_model(folder / "it.yaml"),
    "any": lambda folder: read_yaml(folder / "it.yaml"),
}


@pytest.mark.parametrize("kind", YAML)
def test_aliases_do_not_multiply_what_a_file_costs(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    (tmp_path / "it.yaml").write_text(LAUGHS)
    says = "" if kind == "model" else f"more than {MOST_NODES} entries"  # a model's file is JSON
    refused(TwinError, lambda: YAML[kind](tmp_path), says)


DEEP, WIDE = "[" * 100_000, "[" + "[]," * MOST_JSON_PARTS + "[]]"
JSON: dict[str, Callable[[Path], object]] = {
    "bench": lambda folder: record.read(folder),
    "predictions": lambda folder: shape_record.read(load_node("1xh200"), folder),
    "result": lambda folder: read_result(folder / "result.json"),
    "routing": lambda folder: read_routing(str(folder / "result.json"), 1),
    "model": lambda folder: load_model(folder / "config.json"),
    "any": lambda folder: read_json(folder / "result.json", 2**24),
}


@pytest.mark.parametrize("text", [DEEP, WIDE], ids=["deep", "wide"])
@pytest.mark.parametrize("kind", JSON)
def test_json_is_read_to_a_depth_and_a_number_of_parts(
    kind: str, text: str, tmp_path: Path
) -> None:
    for name in ("result.json", "config.json", record.RESULT, shape_record.PREDICTIONS):
        (tmp_path / name).write_text(text)
    refused(TwinError, lambda: JSON[kind](tmp_path))
