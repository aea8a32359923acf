"""Processes that are started together end together, and say why."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from twin.bench import hf_parallel, nccl, ranks
from twin.bench.ranks import Rank, run_ranks
from twin.errors import EngineError

ROOT = Path(__file__).resolve().parents[2]
OWN = "tests.bench.test_ranks"


def work(rank: Rank, request: dict[str, Any]) -> None:
    """What this module does as one of the processes."""
    if request["then"] == "silent":
        (rank.folder / f"begun-{rank.number}").touch()
        time.sleep(600)
    rank.answer({"environment": {name: os.environ.get(name) for name in request["names"]}})
    if request["then"] == "fail" and rank.number == 1:
        # a failure before any answer is another case
        soon(lambda: (rank.folder / ranks.ANSWER).is_file())
        raise EngineError("rank 1 gave up\nand said more")
    if request["then"] == "fail":
        time.sleep(600)


def run(folder: Path, then: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
    request = {"names": list(ranks.WITHOUT_MULTICAST), "then": then}
    return run_ranks(OWN, 2, request, backend="gloo", timeout_s=timeout_s, folder=folder)


def alive(folder: Path) -> list[int]:
    found = [int(file.read_text()) for file in folder.glob("pid-*")]
    return [pid for pid in found if Path(f"/proc/{pid}").exists()]


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra 'hf')")


@pytest.mark.slow  # that all are ended, the next one says in a third of the time
@pytest.mark.hf
def test_one_that_fails_ends_all_and_is_heard_behind_an_answer(tmp_path: Path) -> None:
    """Whose environment has NVLink multicast off. Runs that end: tests/bench/test_measure.py."""
    made = run(tmp_path, "fail")
    assert made.pop("failed") == "EngineError: rank 1 gave up"
    assert made == {"environment": ranks.WITHOUT_MULTICAST}
    assert ranks.WITHOUT_MULTICAST["NCCL_NVLS_ENABLE"] == "0"
    assert alive(tmp_path) == []


@pytest.mark.hf
def test_nobody_outlives_the_time_limit(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"took more than 0\.5 s and was ended"):
        run(tmp_path, "silent", timeout_s=0.5)
    assert alive(tmp_path) == []


@pytest.mark.slow  # three processes that load torch
@pytest.mark.hf
def test_they_end_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.bench.test_ranks import run; "
        "run(Path(sys.argv[1]), 'silent', 300)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT) as caller:
        begun = tmp_path / "begun-0", tmp_path / "begun-1"
        assert soon(lambda: all(file.exists() for file in begun))
        caller.kill()
    assert soon(lambda: alive(tmp_path) == [])


def soon(happens: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not happens() and time.monotonic() < end:
        time.sleep(0.1)
    return happens()


@pytest.mark.slow
@pytest.mark.hf
def test_a_failure_before_any_answer_is_raised() -> None:
    with pytest.raises(EngineError, match=r"No module named twin\.bench\.no_such"):
        run_ranks("twin.bench.no_such", 1, {}, backend="gloo", timeout_s=PATIENCE_S)
    request = {"folder": "/nowhere", "dtype": "float32", "prompts": [[1]], "tokens": 1}
    with pytest.raises(EngineError, match="nowhere"):
        run_ranks(hf_parallel.__name__, 1, request, backend="gloo", timeout_s=PATIENCE_S)


@pytest.mark.hf
@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_sums_are_checked_before_they_are_timed(count: int) -> None:
    request = {"elements": 24, "repeats": 2, "times": 2, "replays": 3}
    made = run_ranks(nccl.__name__, count, request, backend="gloo", timeout_s=PATIENCE_S)
    assert set(made["ns"]) == {"nccl-bf16", "nccl-fp32", nccl.EDGE}
    assert all([len(spans) for spans in runs] == [3, 3] for runs in made["ns"].values())
    assert (made["captured"], "failed" in made) == (False, False)


@pytest.mark.gpu
@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_nccl_s_sums_in_a_graph_are_exact_and_timed(gpus: int) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{torch.cuda.device_count()} GPUs, {gpus} are needed")
    request = {"elements": 2048, "repeats": 2, "times": 100, "replays": 5}
    made = run_ranks(nccl.__name__, gpus, request, backend="nccl", timeout_s=PATIENCE_S)
    assert (made["captured"], "failed" in made) == (True, False)
    assert min(min(spans) for spans in made["ns"]["nccl-bf16"]) > 1000
    assert max(max(spans) for spans in made["ns"]["nccl-fp32"]) < 10**6


if __name__ == "__main__":
    (Path(sys.argv[4]) / f"pid-{sys.argv[1]}").write_text(str(os.getpid()))
    sys.exit(ranks.main(work, sys.argv[1:]))
