"""Requests on nodes of their own or in shared batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.errors import ConfigError
from twin.study.kinds import read_study
from twin.study.outcome import Outcome, Table
from twin.study.runner import Runner

PRICES = "".join(
    f"  {name}: {{value: {value}, kind: third-party, source: x}}\n"
    for name, value in (
        ("cents_per_hour", 400),
        ("busy_w", "600 W"),
        ("idle_w", "100 W"),
        ("host_w", "200 W"),
    )
)
BODY = f"""kind: mixed-load
title: t
question: q
prediction: p
model: llama-3.2-1b
context: 512
classes:
  - {{name: long, tokens: 2000, per_hour: 400}}
  - {{name: short, tokens: 100, per_hour: 2000}}
loads: [1, 4, 400]
policies:
  - name: shared
    groups:
      - {{node: 1xh200, nodes: 2, stack: vllm, batch: 16, serves: [long, short]}}
  - name: alone
    groups:
      - {{node: 1xh200, nodes: 1, stack: ideal, serves: [long]}}
      - {{node: 1xh200, nodes: 1, stack: vllm, batch: 16, serves: [short]}}
hours: 0.5
seeds: [1]
prices:
{PRICES}"""


def study(folder: Path, body: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(body)
    return path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return read_study(study(tmp_path_factory.mktemp("mixed"), BODY)).body.run(Runner.inline())


def table(outcome: Outcome, name: str) -> Table:
    return next(table for table in outcome.tables() if table.name == name)


def test_a_node_alone_is_faster_and_sooner_overloaded(outcome: Outcome) -> None:
    shared, alone = table(outcome, "long").rows[:3], table(outcome, "long").rows[3:]
    assert alone[0][8] > shared[0][8]  # what a user sees
    assert alone[2][3] > shared[2][3] > 1  # what is used of the busiest group
    assert alone[2][4:] == (None,) * 5


def test_more_load_waits_longer_and_costs_less(outcome: Outcome) -> None:
    alone, costs = table(outcome, "long").rows[3:], table(outcome, "cost").rows
    assert alone[0][5] < alone[1][5]
    assert costs[0][3] > costs[1][3]
    assert costs[0][4] < costs[0][3] < costs[0][5]
    assert costs[0][6] > costs[1][6]  # energy: idle hours are shared by more tokens


def test_generated_is_what_was_requested(outcome: Outcome) -> None:
    offered = (400 * 2000 + 2000 * 100) / 3600
    assert [row[2] for row in table(outcome, "cost").rows[:2]] == pytest.approx(
        [offered, 4 * offered], rel=0.15
    )


def test_the_queue_of_single_nodes_is_held_to_theory(outcome: Outcome) -> None:
    assert len(table(outcome, "theory").rows) == 2
    for row in table(outcome, "theory").rows:
        assert row[3] == pytest.approx(row[4], rel=0.1)


def test_resident_kernels_are_simulated_alone_and_in_batches(tmp_path: Path) -> None:
    body = BODY.replace("stack: ideal,", "stack: resident, batch: 2,").replace(
        "loads: [1, 4, 400]", "loads: [1]"
    )
    steps = table(read_study(study(tmp_path, body)).body.run(Runner.inline()), "steps").rows
    resident = {row[2]: row for row in steps if row[0] == "resident"}
    assert sorted(resident) == [1, 2]
    assert resident[1][3] < resident[2][3]


def test_same_seeds_same_answer(outcome: Outcome, tmp_path: Path) -> None:
    again = read_study(study(tmp_path, BODY)).body.run(Runner.inline())
    assert again == outcome


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("serves: [short]", "serves: [long]", "exactly one group"),
        ("serves: [long, short]", "serves: [long, short, other]", "'other' is not a class"),
        ("stack: ideal,", "stack: resident, batch: 40,", "up to 16 sequences"),
        ("batch: 16", "batch: 500", "1 to 128"),
        ("loads: [1, 4, 400]", "loads: [0]", "must be a number, 1e-06 to 1e"),
        ("seeds: [1]", "seeds: [a]", "must be a whole number"),
        ("per_hour: 400", "per_hour: 0", "per_hour"),
        ("context: 512", "context: 999999", "exceeds the 131072"),
        ("model: llama-3.2-1b", "model: deepseek-v3", "needs .* GB"),
        (
            "kind: third-party, source: x}\n  busy",
            "kind: guess, source: x}\n  busy",
            "'guess' is unknown",
        ),
        ("{value: 600 W", "{value: -600 W", "busy_w.value: .*out of range"),
    ],
)
def test_bad_studies_are_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in BODY
    with pytest.raises(ConfigError, match=reason):
        read_study(study(tmp_path, BODY.replace(old, new)))


@pytest.mark.parametrize(
    "name",
    [
        "../../escape",
        "a/b",
        "cost",
        "Cost",
        "steps",
        "theory",
        "größe",
        "..",
        "a" * 300,
        ".hidden",
        '"\\0"',
        "long",
    ],
)
def test_a_class_cannot_name_a_file_elsewhere_or_another_table(name: str, tmp_path: Path) -> None:
    file = study(
        tmp_path, BODY.replace("name: short", f"name: {name}").replace("short]", f"{name}]")
    )
    with pytest.raises(
        ConfigError,
        match=r"each is a table with a file of its name|classes\[1\]\.name.*a line of text",
    ):
        read_study(file)


def test_a_study_writes_into_its_folder_alone(twin: Twin, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    file = study(
        tmp_path / "in",
        BODY.replace("loads: [1, 4, 400]", "loads: [1]").replace("hours: 0.5", "hours: 0.05"),
    )
    outcome = twin(
        "project", file, "--out", tmp_path / "out", "--store", tmp_path / "store", "--workers", 1
    )
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]  # no points to keep
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "report.html",
        "result.json",
        "tables.md",
        "long.csv",
        "short.csv",
        "cost.csv",
        "steps.csv",
        "theory.csv",
    }


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("hours: 0.5", "hours: 1.0e+5", "requests arrive"),
        ("hours: 0.5", "hours: 1.0e+12", "hours pass"),
        ("loads: [1, 4, 400]", "loads: [1.0e-300]", "must be a number"),
        ("per_hour: 2000", "per_hour: 1.0e+12", "requests arrive"),
        ("per_hour: 400", "per_hour: 2.0e-6", "hours pass"),
        ("hours: 0.5", "hours: .inf", "must be a number"),
        ("loads: [1, 4, 400]", "loads: [.inf]", "must be a number"),
        ("nodes: 2", "nodes: 1000000000", "must be a whole number"),
        ("seeds: [1]", f"seeds: [{10**30}]", "no whole number"),
    ],
)
def test_a_load_without_end_is_refused(old: str, new: str, says: str, tmp_path: Path) -> None:
    assert old in BODY
    with pytest.raises(ConfigError, match=says):
        read_study(study(tmp_path, BODY.replace(old, new)))
