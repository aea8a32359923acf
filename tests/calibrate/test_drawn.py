"""Shapes that a seed draws: the same ones for everybody, predicted before they run, run once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twin.calibrate import experiment, shape_record
from twin.calibrate.drawn import CPU, GPU, Scope, _specs, drawn_runs, weights_of
from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import TINY
from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.cli import main
from twin.data import data_dir
from twin.hardware.types import Node
from twin.plan.options import HandOffKind, Options
from twin.schedule.options import default_options

HOST, H200 = calibrated_node("1xhost"), calibrated_node("1xh200")
RING = ("slot_bytes", "ring_slots", "window_slots", "head_window_slots")
COMMAND = ["validate", "host", "--shapes", "1", "--seed", "5", "--json"]
Out = Callable[[], Any]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MONOTWIN_CALIBRATION", str(tmp_path))
    return tmp_path


def test_a_seed_names_its_shapes() -> None:
    two = drawn_runs(HOST, 2, 7)
    assert two[:4] == drawn_runs(HOST, 1, 7)
    assert [run.spec for run in two] != [run.spec for run in drawn_runs(HOST, 2, 8)]
    assert len({run.name for run in two}) == 8
    assert {(run.prompt, run.options.handoff) for run in two[:4]} == {
        (CPU.prompts[0], HandOffKind.SENTINEL),
        (CPU.prompts[1], HandOffKind.SENTINEL),
        (CPU.prompts[0], HandOffKind.COUNTER),
        (CPU.prompts[0], HandOffKind.GRID),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("node", [H200, calibrated_node("1xh100")], ids=["h200", "h100"])
def test_dense_shapes_of_a_seed_are_those_on_file(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were predicted and run in November 2026: nothing that is drawn besides may move them.
    Their rings are the defaults of then.
    """
    folder = shape_record.store.runs_folder(node.name) / "shapes-24-seed-58213"
    monkeypatch.setattr(experiment, "prove", lambda plan: None)  # others prove what is drawn

    def drawn(run: Experiment) -> Experiment:
        standard = {name: getattr(Options(), name) for name in RING}
        return replace(run, options=replace(run.options, **standard))

    on_file = shape_record.read(node, folder).runs[:8]
    assert [drawn(run) for run in drawn_runs(node, 2, 58213)] == [drawn(run) for run in on_file]


@pytest.mark.parametrize("scope", [CPU, GPU], ids=["cpu", "gpu"])
def test_shapes_fill_their_scope_and_stay_in_it(scope: Scope) -> None:
    drawn = (spec for spec in _specs(scope, np.random.default_rng(1)) if spec is not None)
    found = list(islice(drawn, 60))
    low, high = scope.weights
    assert all(low <= weights_of(spec) <= high for spec in found)
    assert all(scope.hidden[0] <= spec.hidden <= scope.hidden[1] for spec in found)
    assert all(spec.heads % spec.kv_heads == 0 and spec.hidden % 64 == 0 for spec in found)
    for name in ("family", "dtype", "tied", "head_dim"):
        assert len({getattr(spec, name) for spec in found}) > 1, name
    assert {spec.heads // spec.kv_heads for spec in found} >= {1, 2, 3, 4, 6, 7, 8}
    assert max(map(weights_of, found)) > 4 * min(map(weights_of, found))


def test_predictions_are_written_before_the_first_run_and_stopping_loses_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever stops the second run goes on with it; a third call only judges."""
    file = home / "runs" / "host" / "shapes-1-seed-5" / "predictions.json"
    ran: list[str] = []
    really = shape_record.timed

    def seconds(node: Any, run: Experiment, plan: Any) -> list[float]:
        assert run.name in json.loads(file.read_text())["predicted"]
        ran.append(run.name)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return really(node, run, plan)

    monkeypatch.setattr(shape_record, "timed", seconds)
    assert main(COMMAND) != 0
    before = file.read_bytes()
    assert main(COMMAND) == 0
    assert main(COMMAND) == 0
    names = list(json.loads(before)["predicted"])
    assert ran == [names[0], names[1], *names[1:]]
    assert file.read_bytes() == before
    lines = capsys.readouterr().out.strip()
    said = json.loads(lines[lines.rindex("\n{") :]) if "\n{" in lines else json.loads(lines)
    assert all(row["measured_tokens_per_s"] > 0 for row in said["runs"])
    assert said["median_abs_error"] <= abs(said["worst_error"])
    assert said["share_inside_p10_p90"] is None  # no held-out runs of this computer are on file


def test_without_the_gpu_it_says_what_to_run_where(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Experiment("s3-01-short", TINY, default_options(TINY, H200, max_context=256), 48, 8, 1)
    monkeypatch.setattr(shape_record, "drawn_runs", lambda *_, kind: [run])
    monkeypatch.setattr("twin.commands.validate_shapes.present", lambda _: "no GPU here")
    command = ["validate", "1xh200", "--shapes", "1", "--seed", "3"]
    assert main(command) == 0
    out, err = capsys.readouterr()
    assert "no p10 to p90" in err  # no held-out runs of this fit are on file here
    assert "s3-01-short" in out
    assert "twin validate 1xh200-sxm --shapes 1 --seed 3" in out
    folder = home / "runs" / "h200-sxm" / "shapes-1-seed-3"
    text = json.loads((folder / "predictions.json").read_text())
    assert text["fit"]["run"]
    # Records that come back are judged, by what was predicted.
    speed = text["predicted"]["s3-01-short"]["tokens_per_s"]
    shape_record.store.save_run(
        folder, {"node": H200.name, "failed": {}}, {"s3-01-short": [1.25 / speed]}
    )
    assert shape_record.read(H200, folder).measured.median == pytest.approx(0.25)


def test_errors_of_shapes_that_all_ran_stand_next_to_the_held_out_runs(home: Path) -> None:
    for folder in ("fits", "kernels", "held-out"):
        shutil.copytree(data_dir("calibration") / folder, home / folder)
    options = default_options(TINY, H200, max_context=256)
    runs = [Experiment(name, TINY, options, 48, 8, 1) for name in ("first", "second")]
    folder = home / "runs" / "h200-sxm" / "shapes-1-seed-3"
    about = {"shapes": 1, "seed": 3}
    shape_record.predict(H200, runs, about, folder / shape_record.PREDICTIONS, lambda _: None)
    record = shape_record.read(H200, folder)
    speed = record.runs[0].predicted_tokens_per_s
    meta = {"node": H200.name, "failed": {}}
    shape_record.store.save_run(folder, meta, {"first": [1.25 / speed]})
    shape_record.keep_errors(H200, shape_record.read(H200, folder), lambda _: None)
    known = known_error(H200)
    assert known is not None
    assert folder.name not in known.drawn  # one is left to run
    meta["failed"] = {"second": "no room"}
    shape_record.store.save_run(folder, meta, {"first": [1.25 / speed]})
    shape_record.keep_errors(H200, shape_record.read(H200, folder), lambda _: None)
    known = known_error(H200)
    assert known is not None
    assert known.drawn[folder.name] == {"first": pytest.approx(0.25, abs=1e-5)}
    assert known.worst == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--shapes", "2"), "belong together"),
        (("--seed", "2"), "belong together"),
        (("--shapes", "0", "--seed", "1"), "--shapes 0: from 1 to 256"),
        (("--shapes", "1", "--seed", "-1"), "--seed -1: from 0"),
        (("--shapes", "1", "--seed", "1", "--from", "runs"), "--from does not go with --shapes"),
        (("--kind", "experts"), "--kind goes with --shapes N and --seed S"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "host", *words]) != 0
    assert said in capsys.readouterr().err


def test_a_broken_file_of_predictions_is_refused(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = home / "runs" / "host" / "shapes-1-seed-5"
    folder.mkdir(parents=True)
    (folder / "predictions.json").write_text("{")
    assert main(COMMAND) != 0
    assert "holds no predictions" in capsys.readouterr().err
