"""The script for whoever has an MI300X, as far as it goes without one: its kernels interpreted or
pretended, its order, its way on after a failure.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engine.hip_runtime import Runtime, installed
from tests.gfx942.code import compiled
from tests.gfx942.small import SPEC, small
from tests.gfx942.test_driver import Interpreted
from tests.gfx942.timed import Timed, otherwise
from tests.studies.scripts import loaded
from twin.calibrate import engine_runs, store
from twin.calibrate.held_out import held_out
from twin.hardware.load import load_node

SCRIPT = Path(__file__).resolve().parents[2] / "studies" / "mi300x" / "run.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return loaded("mi300x/run.py")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Runtime], Runtime]]:
    monkeypatch.setenv("MONOTWIN_CALIBRATION", "")  # which a step sets: back to what it was
    with ExitStack() as stack:
        yield lambda runtime: stack.enter_context(installed(runtime))


def small_setup(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in (
        ("MADE", 2),
        ("REPEATS", 2),
        ("PROMPT", [3, 1]),
        ("HOP_STEPS", 3),
        ("HOP_WARMUP", 1),
    ):
        monkeypatch.setattr(script, name, value)
    return script.Setup(folder / "out", blocks=4, quick=True, specs=(SPEC,), models=())


# ---- what steps find -----------------------------------------------------------------------------


@pytest.mark.slow
def test_checks_and_places_on_interpreted_gpus(
    script: ModuleType, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(small())  # skips without a compiler
    install(Interpreted(seed=3))
    setup = small_setup(script, tmp_path, monkeypatch)
    said = {name: script.run_step(name, setup) for name in ("about", "build", "check", "places")}
    assert {name: one["result"] for name, one in said.items()} == dict.fromkeys(said, "done"), said
    assert said["about"]["found"] == {"gpus": 1, "name": "AMD Instinct Fake"}
    assert said["build"]["found"]["kernels"] == 4
    assert said["check"]["found"]["worst"] < 1e-3
    assert sum(said["places"]["found"]["blocks_of_die"].values()) == 4
    assert said["places"]["found"]["neighbours_by_die"]
    rows = (setup.out / "places.csv").read_text().splitlines()
    assert rows[0] == "block,die,io_die"
    assert len(rows) == 5
    assert len(list((setup.out / "code").glob("*.hsaco"))) == 4


@pytest.mark.slow
def test_probes_are_measured_and_those_that_cannot_run_are_named(
    script: ModuleType, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their times are pretended: what is tested is that the commands reach the driver."""
    compiled(small())
    install(Runtime())
    setup = small_setup(script, tmp_path, monkeypatch)
    said = script.run_step("probes", setup)
    assert said["result"] == "done", said
    samples = (setup.out / "probes" / "samples.csv").read_text()
    assert "stream-window4" in samples
    meta = (setup.out / "probes" / "meta.yaml").read_text()
    assert "exceed a compute unit" in meta
    script.run_step("probes", setup)
    assert (setup.out / "probes-try1" / "samples.csv").read_text() == samples


HIDDEN = {
    "memory.stream_bytes_per_s": 4.5e12,
    "block.load_bytes_per_s": 1.7e10,
    "handoff.hop_s": 8e-7,
    "kernel.kv_bytes_per_s": 1e10,
}
BOUND = ("memory.stream_bytes_per_s", "block.load_bytes_per_s", "handoff.hop_s")
FEW_RUNS = ("llama-1b", "llama-1b-counter", "qwen2-0.5b", "laneformer-2b-grid")


@pytest.mark.slow
def test_probes_runs_fit_and_validation_work_on_each_others_files(
    script: ModuleType, install: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose times the twin makes with other numbers: the fit finds them, and the fitted twin
    predicts the runs.
    """
    node = load_node("1xmi300x")
    runtime = Timed(otherwise(node, HIDDEN))
    runtime.install(monkeypatch)
    install(runtime)
    few = [run for run in held_out(node) if run.name in FEW_RUNS]
    monkeypatch.setattr(engine_runs, "held_out", lambda node: few)
    setup = small_setup(script, tmp_path, monkeypatch)
    steps = ("about", "probes", "engine", "fit", "validate")
    said = {name: script.run_step(name, setup) for name in steps}
    assert {name: one["result"] for name, one in said.items()} == dict.fromkeys(said, "done"), said
    assert (runtime.held, runtime.mistakes) == ({}, [])
    found = store.read_fit(node.name)
    assert found is not None
    for path in BOUND:
        assert found[0][path].value == pytest.approx(HIDDEN[path], rel=0.02), path
    stated = json.loads((setup.out / "validation.json").read_text())
    assert {run["name"] for run in stated["runs"]} == {*FEW_RUNS}
    assert stated["worst_abs_error"] < 0.02
    assert stated["stages"]
    assert (setup.out / "calibration" / "fits" / "mi300x.yaml").is_file()
    assert "llama-1b" in (setup.out / "validation.html").read_text()


# ---- one after the other -------------------------------------------------------------------------


def stated(results: dict[str, str]) -> Callable[[str, Any], dict[str, Any]]:
    return lambda name, setup: {"result": results.get(name, "done"), "seconds": 0.0, "why": "so"}


def results(setup: Any) -> dict[str, str]:
    steps = json.loads((setup.out / "state.json").read_text())["steps"]
    return {name: one["result"] for name, one in steps.items()}


def test_what_needs_a_failed_step_waits_and_the_next_call_goes_on(
    script: ModuleType, tmp_path: Path
) -> None:
    setup, lines = script.Setup(tmp_path / "out"), []
    assert not script.run_all(setup, lines.append, stated({"probes": "FAILED"}))
    found = results(setup)
    assert {name for name, one in found.items() if one != "done"} == {"probes", "fit", "validate"}
    assert (found["probes"], found["fit"]) == ("FAILED", "not run")
    wanted: list[str] = []

    def second(name: str, setup: Any) -> dict[str, Any]:
        wanted.append(name)
        return {"result": "done", "seconds": 1.0}

    assert script.run_all(setup, lines.append, second)
    assert wanted == ["probes", "fit", "validate"]
    assert script.run_all(setup, lines.append, second, again=("bench",))
    assert wanted[3:] == ["bench"]
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert "out/state.json" in archive.getnames()
    assert lines[-1].startswith("please send back")


def test_a_folder_of_another_run_is_refused(script: ModuleType, tmp_path: Path) -> None:
    script.run_all(script.Setup(tmp_path / "out"), str, stated({}))
    with pytest.raises(script.Failed, match="holds a run with another quick"):
        script.run_all(script.Setup(tmp_path / "out", quick=True), str, stated({}))


@pytest.mark.slow
def test_without_a_gpu_the_first_step_says_so_and_no_other_runs(
    script: ModuleType, tmp_path: Path
) -> None:
    """In processes of their own, as a person calls it."""
    setup = script.Setup(tmp_path / "out")
    if Path("/dev/kfd").exists():
        pytest.skip("an AMD GPU is here")
    assert not script.run_all(setup, str)
    found = json.loads((setup.out / "state.json").read_text())["steps"]
    assert found["about"]["result"] == "FAILED"
    assert "AMD" in found["about"]["why"]
    assert {one["result"] for name, one in found.items() if name not in ("about", "build")} == {
        "not run"
    }
