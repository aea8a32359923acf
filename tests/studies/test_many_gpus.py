"""The command for a machine of several GPUs, tried on emulated ones."""

from __future__ import annotations

import json
import tarfile
from concurrent.futures import Future
from pathlib import Path

import pytest
from many_gpus import (
    BY_TWO,
    KOG,
    ROWS,
    Row,
    Run,
    check_row,
    cut,
    measure_row,
    prepare,
    spec_of,
    study,
)

from studies.common.rows import Prepared
from tests.studies.scripts import loaded
from twin.calibrate.node import calibrated_node
from twin.errors import EngineError
from twin.models.load import load_model


def tried(folder: Path, node: str = "2xhost") -> Run:
    return Run(calibrated_node(node), folder, True, lambda text: None)


def test_a_step_is_made_once_and_what_was_refused_is_kept(tmp_path: Path) -> None:
    run, made = tried(tmp_path), []

    def refuses() -> dict[str, int]:
        made.append(1)
        raise EngineError("no such GPU: name another")

    for _ in range(2):
        assert run.step("one", refuses)["refused"] == "no such GPU: name another"
    assert made == [1]
    assert [file.name for file in tmp_path.iterdir()] == ["one.json"]


@pytest.mark.slow
def test_a_row_on_emulated_gpus_repeats_its_tokens_and_is_as_the_reference(tmp_path: Path) -> None:
    run, row = tried(tmp_path), Row("a", "llama-3.2-1b")
    assert measure_row(run, row)["same_tokens"]
    small: Future[Prepared] = Future()
    small.set_result(prepare(run, row))
    assert check_row(run, small)["correct"]


@pytest.mark.slow
@pytest.mark.parametrize("node", ["2xhost", "4xhost"])
def test_the_whole_command_runs_on_emulated_gpus_packs_and_tells(
    node: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for _ in range(2):  # the second time from the files
        assert loaded("many-gpus/run.py").main([node, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    for row in ROWS[:-1]:
        assert f"{row.name}  " in said
    assert "all-reduce, KiB" in said
    assert "NO" not in said
    with tarfile.open(tmp_path / "run.tar.gz") as archive:
        assert "run/soak.json" in archive.getnames()


def test_the_ordinary_model_of_laneformers_shapes_streams_as_many_bytes() -> None:
    lanes, plain = (
        load_model("laneformer-2b"),
        spec_of(next(r for r in ROWS if r.model == "shapes")),
    )
    for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
        assert getattr(lanes, name) == getattr(plain, name), name
    assert plain.lanes is None
    assert cut(plain).layers == 2


def test_predictions_hold_every_row_with_its_interval_and_kogs_figure() -> None:
    made = json.loads((study() / "predictions.json").read_text(encoding="utf-8"))
    assert made["published"] == {f"{row}, {node}": speed for (row, node), speed in KOG.items()}
    later = json.loads((study() / BY_TWO).read_text(encoding="utf-8"))
    for row in ROWS:
        added = row.name in later["later"]
        assert added or row.name in made["rows"], row.name
        for cell in (later if added else made)["rows"][row.name].values():
            assert 0 < cell["p10"] <= cell["p50"] <= cell["p90"]
            assert cell["limits"]
    for cell in made["all_reduce"].values():
        assert cell["6 KiB idle"]["nominal"] >= cell["bound_us"]
