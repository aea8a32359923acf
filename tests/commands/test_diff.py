"""Two results side by side, and a sweep of two numbers as a map."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from studies.common import svg
from tests.command_line import Twin
from tests.refusals import refused_command
from twin.report import figures
from twin.study import heat
from twin.study.grid import Axis, Grid, Model
from twin.study.outcome import Heat
from twin.study.point import Point
from twin.study.runner import Runner


def result(path: Path, *, slow: float, extra: bool = False) -> Path:
    stages = [("qkv[0]", "qkv", 1.0 * slow), ("down[0]", "down", 2.0)]
    stages += [("late[0]", "reduce", 0.5)] if extra else []
    total = sum(us for _, _, us in stages)
    content = {
        "model": "m",
        "node": "n",
        "tokens_per_s": 1e6 / total,
        "step_s": total * 1e-6,
        "attribution": {"streaming": total * 1e-6},
        "stages": [
            {"name": name, "kind": kind, "dominant": "streaming", "ps": us * 1e6}
            for name, kind, us in stages
        ],
    }
    path.write_text(json.dumps(content))
    return path


def test_a_diff_says_what_takes_longer_and_adds_up(twin: Twin, tmp_path: Path) -> None:
    files = result(tmp_path / "a.json", slow=1), result(tmp_path / "b.json", slow=3, extra=True)
    printed = twin("diff", *files).out
    assert re.search(r"qkv\[0\] +streaming +streaming +1.00 +3.00 +\+2.00 +\+200.0%", printed)
    assert re.search(r"late\[0\] .*new", printed)
    assert "down[0]" not in printed, "it is as long as it was"
    data = json.loads(twin("diff", *files, "--json").out)
    by = sum((one["us"][1] or 0) - (one["us"][0] or 0) for one in data["stages"])
    assert by == pytest.approx(data["step_us"][1] - data["step_us"][0])
    assert "no stage differs" in twin("diff", files[0], files[0]).out


@pytest.mark.parametrize(
    ("printed", "says"),
    [("{", "no JSON"), ("{}", "stages: missing"), ("[]", "twin simulate"), ("1", "printed")],
)
def test_what_is_no_result_is_refused(twin: Twin, tmp_path: Path, printed: str, says: str) -> None:
    good, wrong = result(tmp_path / "a.json", slow=1), tmp_path / "wrong.json"
    wrong.write_text(printed)
    refused_command(twin, "diff", good, wrong, says=("wrong.json", says))


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("tokens_per_s", "NaN", "tokens_per_s: nan must be a number, 0 to 1e+18"),
        ("tokens_per_s", "1" + "0" * 400, "<integer of"),
        ("step_s", "Infinity", "step_s: inf must be a number"),
        ("step_s", "-1", "step_s: -1 must"),
        ("step_s", "true", "step_s: True must"),
        ("step_s", '"0.1"', "step_s: '0.1' must"),
        ("model", "[1]", "model: [1] must be text"),
        ("attribution", "[]", "attribution: [] must be a mapping"),
        ("attribution", '{"streaming": null}', "attribution.streaming: None must be a number"),
        ("stages", "{}", "stages: {} must be a list"),
        ("stages", "[1]", "stages[0]: must be a mapping with name"),
        ("stages", '[{"name": "a"}]', "stages[0].kind, stages[0].dominant, stages[0].ps: missing"),
        ("stages", "[" * 3000 + "]" * 3000, "nested too deeply"),
    ],
)
def test_a_wrong_number_is_refused_with_its_place(
    twin: Twin, tmp_path: Path, field: str, value: str, says: str
) -> None:
    good, wrong = result(tmp_path / "a.json", slow=1), tmp_path / "wrong.json"
    whole = json.loads(good.read_text()) | {field: "@"}
    wrong.write_text(json.dumps(whole).replace('"@"', value))
    refused_command(twin, "diff", wrong, good, says=("wrong.json", says, "twin simulate"))


def test_a_stage_that_stands_twice_is_refused(twin: Twin, tmp_path: Path) -> None:
    good = result(tmp_path / "a.json", slow=1)
    whole = json.loads(good.read_text())
    whole["stages"] *= 2
    good.write_text(json.dumps(whole))
    refused_command(twin, "diff", good, good, says=("'qkv[0]' stands there twice",))


def test_names_of_a_result_break_no_line(twin: Twin, tmp_path: Path) -> None:
    good = result(tmp_path / "a.json", slow=1)
    whole = json.loads(good.read_text()) | {"model": "a\nb\x1b[31m"}
    good.write_text(json.dumps(whole))
    assert "A: a b\\x1b[31m on n" in twin("diff", good, good).out


GRID = Grid(
    (Model("llama-3.2-1b", "llama-3.2-1b"),),
    ("1xh200",),
    (Axis("clock", ("x0.5", "x1"), False), Axis("blocks", (66, 132, 999), True)),
    (("layers", 1),),
    (),
)


def test_a_sweep_of_two_numbers_is_a_map_with_its_gaps() -> None:
    rows = Runner.inline().rows([cell.point for cell in GRID.cells()])
    found = heat.part(GRID, rows)
    assert found is not None
    (chart,) = found.charts
    assert isinstance(chart, Heat)
    assert chart.values[1][1] == rows[4].tokens_per_s
    assert chart.values[0][2] is None, "more blocks than the device has"
    shown = figures.figure(chart)["data"][0]
    assert [len(row) for row in shown["z"]] == [3, 3]
    assert svg.figure(chart).count("<rect") == 1 + 6
    assert heat.part(Grid(GRID.models, GRID.nodes, GRID.axes[:1], (), ()), rows) is None
    assert Point("llama-3.2-1b", "1xh200").spec().layers > 1
