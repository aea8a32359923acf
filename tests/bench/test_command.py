"""What `twin bench` refuses before it spends time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.flow import Quiet, shrink
from tests.command_line import Twin
from twin.bench import record
from twin.calibrate import store
from twin.commands import bench
from twin.engine.host import HostEngine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--fidelity", "3"), "--fidelity needs a GPU"),
        (("--no-peers",), "--peers needs a GPU"),
        (("--node", "mi355x"), "mi355x"),
        (("--node", "h200-sxm", "--gpus", "2"), "name the GPUs as 2xh200-sxm"),
        (("--node", "4xh100", "--gpus", "4"), "name the GPUs as 4xh100-sxm"),
        (("--context", "0"), "at least 1"),
        (("--tokens", "1"), "at least 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_refused(words: tuple[str, ...], says: str, twin: Twin, checkpoint: Path) -> None:
    outcome = twin("bench", checkpoint, *words)
    assert outcome.code == 2
    assert says in outcome.err
    assert outcome.out == ""


def test_a_gpu_machine_needs_no_simulator() -> None:
    blocked = (
        "import sys; sys.modules['simpy'] = None\n"
        "from twin.cli import build_parser; build_parser(['bench'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", blocked], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def _host_for_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's engine where the GPU's would be."""
    shrink(monkeypatch)
    monkeypatch.setattr(bench, "check_present", lambda device, gpus: None)
    monkeypatch.setattr(bench, "compile_all", lambda device, plans, show: {})
    monkeypatch.setattr(bench, "gpu_states", lambda: [{"driver": "580.1"}])
    monkeypatch.setattr(
        bench, "open_engine", lambda device, plan, weights: HostEngine(plan, weights)
    )
    monkeypatch.setattr(bench, "Clocks", lambda gpus: Quiet())


SHORT = (
    "--node",
    "h200-sxm",
    "--no-peers",
    "--context",
    "5",
    "--tokens",
    "6",
    "--repeats",
    "2",
    "--blocks",
    "2",
    "--commit",
    "abc",
)


@pytest.mark.usefixtures("_host_for_gpu")
def test_a_benchmark_is_recorded(twin: Twin, checkpoint: Path, tmp_path: Path) -> None:
    outcome = twin("bench", checkpoint, *SHORT, "--out", tmp_path / "runs", "--json")
    assert outcome.code == 0, outcome.err
    (folder,) = (tmp_path / "runs").iterdir()
    stored, shown = record.read(folder), json.loads(outcome.out)
    assert shown == stored | {"record": str(folder)}
    assert (stored["model"], stored["node"], stored["context"], stored["commit"]) == (
        "tiny",
        "1xh200-sxm",
        5,
        "abc",
    )
    assert (stored["driver"], stored["clocks"], stored["weights"]) == (
        "580.1",
        {"rounds": 2},
        "checkpoint tiny",
    )
    assert stored["predicted_tokens_per_s"] > 0
    text = twin("bench", checkpoint, *SHORT, "--out", tmp_path / "again", "--fill", "steps").out
    assert "resident" in text
    assert "stream fraction" in text


@pytest.mark.slow
@pytest.mark.usefixtures("_host_for_gpu")
def test_a_benchmark_of_two_gpus_lies_in_their_node_s_folder(
    twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.HOME_VARIABLE, str(tmp_path))
    words = [*SHORT[:1], "2xh100", *SHORT[2:], "--no-peers"]
    outcome = twin("bench", checkpoint, *words)
    assert outcome.code == 0, outcome.err
    (folder,) = (tmp_path / "runs" / "2xh100-sxm").iterdir()
    stored = record.read(folder)
    assert (stored["node"], stored["gpus"]) == ("2xh100-sxm", 2)
    assert set(stored["all_reduce"]["us"]) == {"reduce-idle", "reduce-loaded"}
    assert "of each of 2 GPUs" in outcome.out
    assert "us of reduce-loaded" in outcome.out


@pytest.mark.usefixtures("_host_for_gpu")
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--execution", "graph"), "--execution graph: a benchmark on a GPU settles it"),
        (("--max-context", "8"), "--max-context 8: the benchmark needs 11 positions"),
        (("--context", "300"), "306 positions, tiny reaches 256"),
        (("--fidelity-context", "6"), "--fidelity-context 6: at most --context 5"),
    ],
)
def test_refused_before_anything_is_loaded(
    words: tuple[str, ...], says: str, twin: Twin, checkpoint: Path, tmp_path: Path
) -> None:
    outcome = twin("bench", checkpoint, *SHORT, "--out", tmp_path / "runs", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert says in outcome.err
    assert not (tmp_path / "runs").exists()
