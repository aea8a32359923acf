"""A record of engine runs holds what it ran: it is read back as it was, whatever today's held-out
runs are.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from twin.calibrate import store
from twin.calibrate.engine_runs import runs_of
from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import held_out
from twin.calibrate.recorded import RUNS, model_read, model_written, recorded, written
from twin.errors import CalibrationError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.options import Options

HERE = Path("record")
HOST, H200 = load_node("1xhost"), load_node("1xh200")


@pytest.fixture(scope="module")
def today() -> dict[str, Experiment]:
    """What is held out of an H200, by name."""
    return {run.name: run for run in held_out(H200)}


def test_runs_come_back_as_they_were_written(today: dict[str, Experiment]) -> None:
    for run in (*held_out(HOST), *today.values()):
        kept = yaml.safe_load(yaml.safe_dump({RUNS: {run.name: written(run)}}))
        assert recorded(HERE, kept) == [run], run.name


def test_a_model_on_file_is_called_by_name_and_options_are_whole(
    today: dict[str, Experiment],
) -> None:
    said = written(today["qwen3-8b-1k"])
    assert said["model"] == "qwen3-8b"
    assert set(said["options"]) == set(Options.__slots__)


def test_a_mixed_model_on_file_is_called_by_name_in_any_format_and_read_back() -> None:
    for name in ("qwen3.6-35b-a3b", "qwen3.6-27b@fp8-128x128"):
        assert model_written(load_model(name)) == name
        assert model_read(name) == load_model(name)
    odd = replace(load_model("qwen3-8b"), name="qwen3-8b@mine")
    assert model_read(model_written(odd)) == odd


def test_a_shape_that_cannot_be_written_out_is_refused() -> None:
    spec = replace(load_model("deepseek-v3"), name="x")
    with pytest.raises(CalibrationError, match="only a dense shape"):
        written(Experiment("x", spec, Options(), 16))


def record(meta: dict[str, Any]) -> store.Run:
    return store.Run(HERE, meta, {"llama-1b": [1e-3]})


def test_what_a_record_says_it_ran_comes_before_todays_runs(
    today: dict[str, Experiment],
) -> None:
    changed = written(today["llama-1b"]) | {"prompt": 99}
    assert [
        run.prompt
        for run in runs_of(record({RUNS: {"llama-1b": changed, "not-run": changed}}), H200)
    ] == [99]
    assert runs_of(record({}), H200) == [today["llama-1b"]]


@pytest.mark.parametrize(
    "runs",
    [
        [],
        {"a": {}},
        {"a": 3},
        {"a": {"model": "llama-3.2-1b", "options": {"nothing": 1}, "prompt": 1}},
    ],
)
def test_damaged_runs_of_a_record_are_named(runs: Any) -> None:
    with pytest.raises(CalibrationError, match=r"meta.yaml: runs hold no engine runs"):
        recorded(HERE, {RUNS: runs})
