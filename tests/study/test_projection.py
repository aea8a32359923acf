"""Study files of kind `projection`: what they refuse, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.command_line import Twin
from twin.errors import TwinError
from twin.study.kinds import KINDS, read_study
from twin.study.outcome import Bars, Outcome, Waterfall
from twin.study.runner import Runner

STUDIES = Path(__file__).resolve().parents[2] / "studies"


def study(folder: Path, **changes: Any) -> Path:
    """A small study file with some keys changed; None removes one."""
    data: dict[str, Any] = {
        "kind": "projection",
        "title": "T",
        "question": "Q?",
        "models": ["laneformer-2b"],
        "nodes": ["8xh200"],
    }
    data = {key: value for key, value in (data | changes).items() if value is not None}
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return file


@dataclass(frozen=True, slots=True)
class Bad:
    name: str
    changes: dict[str, Any]
    says: tuple[str, ...]


BAD = (
    Bad(
        "an unknown kind",
        {"kind": "projektion"},
        ("kind", "'projektion'", "did you mean projection"),
    ),
    Bad("no question", {"question": None}, ("question", "missing")),
    Bad("an unknown key", {"mdels": ["x"]}, ("mdels", "unknown key", "did you mean models")),
    Bad(
        "a misspelt key that need not be given",
        {"intervalls": {}},
        ("intervalls", "unknown key", "did you mean intervals"),
    ),
    Bad(
        "a misspelt key that is needed",
        {"title": None, "titel": "x"},
        ("title: missing", "titel: unknown key; did you mean title"),
    ),
    Bad(
        "an unknown model",
        {"models": ["laneformer-3b"]},
        ("models[0]", "'laneformer-3b'", "did you mean laneformer-2b"),
    ),
    Bad("no models", {"models": []}, ("models", "at least one entry")),
    Bad("an unknown node", {"nodes": ["8xh200", "9xh200"]}, ("nodes[1]", "'9xh200'", "8xh200")),
    Bad("a node twice", {"nodes": ["8xh200", "8xh200"]}, ("nodes", "twice")),
    Bad("an empty sweep", {"axes": {"delay": []}}, ("axes.delay", "at least one entry")),
    Bad("a value twice", {"axes": {"delay": [1, 1]}}, ("axes.delay", "1 is given twice")),
    Bad(
        "an axis that nothing has",
        {"axes": {"link.hopp": ["x2"]}},
        ("axes.link.hopp[0]", "did you mean", "link.hop"),
    ),
    Bad(
        "a negative bandwidth",
        {"axes": {"memory.stream": ["5 TB/s", "-5 TB/s"]}},
        ("axes.memory.stream[1]", "'-5 TB/s'", "not negative"),
    ),
    Bad(
        "a bandwidth of nothing",
        {"settings": {"memory.stream": "x0"}},
        ("settings.memory.stream", "greater than zero"),
    ),
    Bad(
        "an option's value",
        {"options": {"handoff": "gird"}},
        ("options.handoff", "'gird'", "did you mean grid"),
    ),
    Bad("an unknown option", {"options": {"speed": 3}}, ("options.speed", "not an engine option")),
    Bad("GPUs besides nodes", {"options": {"gpus": 4}}, ("options.gpus", "nodes say")),
    Bad(
        "set and swept",
        {"options": {"delay": 1}, "axes": {"delay": [0, 2]}},
        ("axes.delay", "for all cells as well"),
    ),
    Bad("a clock of nothing", {"axes": {"clock": ["x0"]}}, ("axes.clock[0]", "greater than 0")),
    Bad(
        "too few draws",
        {"intervals": {"draws": 1}},
        ("intervals.draws", "1 must be a whole number, 4 to"),
    ),
    Bad("a column that is no axis", {"columns": "delay"}, ("columns", "'delay'", "model, node")),
    Bad(
        "a share above one",
        {"roofline": {"utilisation": "136%"}},
        ("roofline.utilisation", "0.001 to 1"),
    ),
    Bad(
        "a bandwidth of a node that is not there",
        {"roofline": {"utilisation": "36%", "bytes_per_s": {"8xb200": "5 TB/s"}}},
        ("roofline.bytes_per_s.8xb200", "unknown key"),
    ),
    Bad(
        "a published figure of no cell",
        {
            "published": [
                {"model": "llama-3.1-8b", "node": "8xh200", "tokens_per_s": 1}
                | {"kind": "vendor", "source": "x"}
            ]
        },
        ("published[0].model", "'llama-3.1-8b'"),
    ),
    Bad(
        "an unknown machine",
        {"machines": ["groq"]},
        ("machines[0]", "unknown machine 'groq'", "did you mean groq"),
    ),
)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_bad_study_is_refused_with_field_and_reason(bad: Bad, tmp_path: Path) -> None:
    with pytest.raises(TwinError) as refusal:
        read_study(study(tmp_path, **bad.changes))
    for part in ("study.yaml", *bad.says):
        assert part in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"models": ["llama-3.1-405b"], "nodes": ["1xh200"]},
            ("llama-3.1-405b on 1xh200", "GB of memory per GPU", "150 GB", "more GPUs"),
        ),
        ({"models": ["qwen2.5-coder-1.5b"]}, ("qwen2.5-coder-1.5b on 8xh200", "heads")),
    ],
)
def test_impossible_cell_ends_the_command_before_anything_is_simulated(
    changes: dict[str, Any], says: tuple[str, ...], twin: Twin, tmp_path: Path
) -> None:
    outcome = twin(
        "project",
        study(tmp_path, **changes),
        "--store",
        tmp_path / "points",
        "--out",
        tmp_path / "out",
        "--workers",
        1,
    )
    assert outcome.code == 2
    for part in (*says, "impossible: show"):
        assert part in outcome.err
    assert "cells: " not in outcome.err
    assert not (tmp_path / "out").exists()


def test_impossible_cells_can_be_shown_empty_with_the_reason(
    checkpoint: Path, tmp_path: Path
) -> None:
    file = study(
        tmp_path,
        models=[tiny(checkpoint), "qwen2.5-coder-1.5b"],
        nodes=["8xh200"],
        impossible="show",
    )
    outcome = read_study(file).body.run(Runner.inline())
    assert any("qwen2.5-coder-1.5b on 8xh200: not possible" in note for note in outcome.notes)
    assert "not possible" in str(table(outcome, "scaling"))


# ---- answers -------------------------------------------------------------------------------------


def tiny(checkpoint: Path) -> dict[str, Any]:
    return {"model": str(checkpoint), "label": "tiny", "options": {"blocks": 4}}


def table(outcome: Outcome, name: str) -> list[dict[str, Any]]:
    found = next(one for one in outcome.tables() if one.name == name)
    return [
        dict(zip((column.name for column in found.columns), row, strict=True)) for row in found.rows
    ]


@pytest.fixture(scope="module")
def answer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("study")
    changes: dict[str, Any] = {
        "models": [tiny(checkpoint)],
        "nodes": ["1xh200", "1xmi300x"],
        "options": {"blocks": 8},
        "axes": {"context": [16, 128]},
        "columns": "context",
        "intervals": {"draws": 4, "seed": 3},
        "roofline": {"utilisation": "50%", "bytes_per_s": {"1xh200": "1 TB/s"}},
        "closely": [{"model": "tiny", "node": "1xmi300x"}],
        "published": [
            {
                "model": "tiny",
                "node": "1xh200",
                "tokens_per_s": 1000,
                "kind": "vendor",
                "source": "a slide",
                "bytes": "1 kB",
            }
        ],
    }
    return read_study(study(folder, **changes)).body.run(Runner.inline())


def test_every_combination_is_a_row(answer: Outcome) -> None:
    rows = table(answer, "cells")
    assert [(row["node"], row["context"]) for row in rows] == [
        ("1xh200", "16"),
        ("1xh200", "128"),
        ("1xmi300x", "16"),
        ("1xmi300x", "128"),
    ]
    assert all(row["p10"] <= row["tokens/s, predicted"] <= row["p90"] for row in rows)
    assert [row["interval from"].split()[0] for row in rows] == ["held-out"] * 2 + ["4"] * 2
    assert all(0 < row["stream fraction"] < 1 for row in rows)


def test_roofline_is_share_times_bandwidth_over_the_models_bytes(answer: Outcome) -> None:
    row = next(row for row in table(answer, "published"))
    assert row["our 50% roofline"] == pytest.approx(0.5e12 / row["our bytes a step"])
    assert row["their bytes a step"] == 1000
    assert row["predicted against published"] == pytest.approx(
        row["predicted, tokens/s"] / 1000 - 1
    )


def test_ladder_ends_at_the_cell_itself(answer: Outcome) -> None:
    cell = next(
        row
        for row in table(answer, "cells")
        if (row["node"], row["context"]) == ("1xmi300x", "128")
    )
    ladder = table(answer, "ladder-tiny-1xmi300x-context-128")
    assert ladder[-1]["tokens/s, predicted"] == cell["tokens/s, predicted"]
    assert (
        ladder[0]["tokens/s, predicted"]
        < ladder[1]["tokens/s, predicted"]
        < ladder[-1]["tokens/s, predicted"]
    )
    assert any(isinstance(chart, Waterfall) for part in answer.parts for chart in part.charts)


def test_few_columns_make_bars(answer: Outcome) -> None:
    assert isinstance(answer.parts[0].charts[0], Bars)
    assert any(
        isinstance(chart, Bars) and chart.stacked for part in answer.parts for chart in part.charts
    )


def test_cells_on_assumed_numbers_say_so_with_range_and_source(answer: Outcome) -> None:
    assumed = table(answer, "assumed")
    rows = [row for row in table(answer, "cells") if row["node"] == "1xmi300x"]
    assert all(row["assumed numbers"] for row in rows)
    assert {row["node"] for row in assumed} == {
        row["node"] for row in table(answer, "cells") if row["assumed numbers"]
    }
    assert all(
        row["kind"] in ("assumed", "unbound") and ".." in row["range"] and row["source"]
        for row in assumed
    )


# ---- what comes with MonoTwin --------------------------------------------------------------------


@pytest.mark.parametrize(
    "file", sorted(STUDIES.glob("*/study.yaml")), ids=lambda file: file.parent.name
)
def test_shipped_study_can_be_read_and_states_question_and_prediction_first(file: Path) -> None:
    found = read_study(file.parent)
    assert found.kind in KINDS
    assert found.name == file.parent.name
    assert found.question
    assert found.prediction
    assert (file.parent / "README.md").is_file()


def test_a_table_by_the_best_plans_names_them_and_is_nowhere_slower(
    tmp_path: Path, checkpoint: Path
) -> None:
    """One GPU has one plan, and a cell whose plan the study names keeps it."""

    def cells(other: str = "1xh200", **changes: Any) -> list[dict[str, Any]]:
        grid = {"models": [str(checkpoint)], "nodes": [other, "2xh200"]}
        options = {"context": 64, "blocks": 8} | changes.pop("options", {})
        projection = read_study(study(tmp_path, **grid, options=options, **changes)).body
        outcome = projection.run(Runner.inline())
        (table,) = (t for part in outcome.parts for t in part.tables if t.name == "cells")
        names = [column.name for column in table.columns]
        return [dict(zip(names, row, strict=True)) for row in table.rows]

    fixed, best = cells(), cells(plans="best")
    assert "plan" not in fixed[0]
    assert best[0]["plan"] == "default options"
    assert best[1]["plan"].startswith(("1 GPU", "2 GPUs"))
    speed = "tokens/s, predicted"
    assert all(b[speed] >= f[speed] * 0.997 for b, f in zip(best, fixed, strict=True))
    assert "plan" not in cells(plans="best", options={"residual": "replicated"})[1]
    assert cells(plans="best-of-all-gpus")[1]["plan"].startswith("2 GPUs")
    elsewhere = cells("2xb200", plans="best", searched=["2xh200"])
    assert elsewhere[0]["plan"] in ("2 GPUs", best[1]["plan"])
    assert elsewhere[1] == best[1]
