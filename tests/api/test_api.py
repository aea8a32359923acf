"""The Python API says what the command line says, lazily, and refuses in one line."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import twin
from tests.command_line import TINY, Twin

NODE = "1xh200"
SMALL = {"blocks": 16}  # more than TINY has rows for are refused


def test_importing_it_loads_nothing() -> None:
    code = (
        "import sys, twin\n"
        "early = [name for name in sys.modules if name.startswith('twin.') or name == 'numpy']\n"
        "assert early == [], early\n"
        "assert set(twin.__all__) <= set(dir(twin))\n"
        "assert not hasattr(twin, 'simulatte')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_explains_itself_and_its_page_names_it() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "python.md").read_text()
    for name in twin.__all__:
        found = getattr(twin, name)
        assert inspect.getdoc(found), name
        assert f"`{name}" in page or f"twin.{name}" in page, name


def test_a_prediction_is_that_of_the_command_line(checkpoint: Path, twin_cli: Twin) -> None:
    said = json.loads(twin_cli("simulate", checkpoint, NODE, "--blocks", 16, "--json").out)
    found = twin.simulate(checkpoint, NODE, **SMALL)
    assert found.tokens_per_s == said["tokens_per_s"]
    assert found.interval == tuple(said["held_out"]["tokens_per_s"])
    assert (found.step_s, found.floor_s, found.mbu) == (
        said["step_s"],
        said["floor_s"],
        said["mbu"],
    )
    assert found.assumed == tuple(said["assumed"])
    assert found.prompt_s is None


def test_what_a_notebook_shows_is_a_few_lines() -> None:
    found = twin.what_if(TINY, NODE, {"clock": "x0.9"}, **SMALL)
    model, node = twin.load_model("llama-3.2-1b"), twin.load_node("8xh200")
    for one in (model, node, twin.make_plan(model, node), found.before):
        assert len(repr(one)) < 2200, type(one)
    assert len(repr(found)) < 3000


def test_models_and_nodes_may_be_objects() -> None:
    node = twin.load_node(NODE)
    assert twin.simulate(TINY, node, **SMALL) == twin.simulate(TINY, NODE, blocks=16)
    assert twin.make_plan(TINY, node, handoff="grid", **SMALL).options.handoff.value == "grid"


def test_a_change_of_nothing_changes_nothing_and_a_faster_memory_is_no_slower() -> None:
    same = twin.what_if(TINY, NODE, {"memory.stream": "x1"}, **SMALL)
    assert same.speedup == 1
    assert twin.what_if(TINY, NODE, {"memory.stream": "x2"}, **SMALL).speedup >= 1
    more = twin.what_if(TINY, NODE, {"gpus": 2, "link.hop": "x2", "handoff": "grid"}, **SMALL)
    assert more.after.node == "2xh200-sxm"


@pytest.mark.parametrize(
    ("changes", "options", "needle"),
    [
        ({}, {}, "changes is empty"),
        ({"memory.steam": "x2"}, {}, "did you mean"),
        ({"memory.stream": "x-2"}, {}, "memory.stream"),
        ({"handoff": "gird"}, {}, "did you mean grid"),
        ({"handoff": "grid"}, {"handof": "grid"}, "did you mean handoff"),
        ({"handoff": "grid"}, {"gpus": 2}, "nodes say how many GPUs"),
        ({"handoff": "grid"}, {"context": 10**9}, "context"),
    ],
)
def test_what_cannot_be_is_refused(
    changes: dict[str, str], options: dict[str, object], needle: str
) -> None:
    with pytest.raises(twin.TwinError, match=needle):
        twin.what_if(TINY, NODE, changes, **SMALL, **options)


@pytest.mark.parametrize(
    "act",
    [
        lambda: twin.load_model(None),
        lambda: twin.load_node(5),
        lambda: twin.load_node([]),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", steps=10**9),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", steps="x"),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", prompt="x"),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", prompt=0),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", routing=5),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", seed=-1),
        lambda: twin.simulate("llama-3.2-1b", "1xh200", seed=True),
        lambda: twin.what_if("llama-3.2-1b", "1xh200", 5),
        lambda: twin.what_if("llama-3.2-1b", "1xh200", {5: 6}),
        lambda: twin.sweep("llama-3.2-1b", "1xh200", 5),
        lambda: twin.sweep([5], "1xh200"),
        lambda: twin.sweep("llama-3.2-1b", "1xh200", {"context": [64]}, workers=1.5),
        lambda: twin.open_engine("llama-3.2-1b", random="x"),
        lambda: twin.open_engine(5),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(act: Callable[[], object]) -> None:
    with pytest.raises(twin.TwinError, match="must be"):
        act()


def test_numbers_and_paths_may_come_from_elsewhere(tmp_path: Path) -> None:
    assert twin.load_node(Path("1xh200")) == twin.load_node("1xh200")
    one, other = (
        twin.simulate("llama-3.2-1b", "1xh200", blocks=8, steps=steps) for steps in (3, np.int64(3))
    )
    assert one.step_s == other.step_s


def test_a_cold_step_alone_is_no_prediction() -> None:
    with pytest.raises(twin.TwinError, match="steps=1: must be a whole number, at least 2"):
        twin.simulate(TINY, NODE, steps=1, **SMALL)


def test_a_sweep_has_a_row_for_each_case_also_for_one_that_cannot_be(checkpoint: Path) -> None:
    axes = {"context": pd.Series([16, 100_000]), "clock": ["x1", "x0.5"]}
    table = twin.sweep(checkpoint, [NODE], axes, keep=False, **SMALL)
    assert [*zip(table.context, table.clock, strict=True)] == [
        (16, "x1"),
        (16, "x0.5"),
        (100_000, "x1"),
        (100_000, "x0.5"),
    ]
    one = twin.simulate(checkpoint, NODE, context=16, **SMALL)
    assert table.tokens_per_s[0] == one.tokens_per_s
    assert table.mbu[0] == pytest.approx(one.mbu)
    assert (table.low[0], table.high[0]) == one.interval
    assert table.tokens_per_s[1] < table.tokens_per_s[0]
    assert table.tokens_per_s[2:].isna().all()
    assert table.problem[2].startswith("context=100000")


def test_a_sweep_refuses_what_no_case_could_take() -> None:
    with pytest.raises(twin.TwinError, match="no number 'contxt'; allowed"):
        twin.sweep("llama-3.2-1b", NODE, {"contxt": [1]})
    with pytest.raises(twin.TwinError, match="workers=0"):
        twin.sweep("llama-3.2-1b", NODE, workers=0)


@pytest.fixture
def twin_cli(capsys: pytest.CaptureFixture[str]) -> Twin:
    return Twin(capsys)
