"""Sweeps on a Dask cluster: a real scheduler and real workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.patience import PATIENCE_S
from twin.study.point import Point
from twin.study.runner import Cluster, Runner
from twin.study.store import Store

ROOT = Path(__file__).resolve().parents[2]
POINTS = 24


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "distributed.cli." + words[0], *words[1:]]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def worker(address: str) -> subprocess.Popen[str]:
    """One that nobody restarts."""
    return start("dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard")


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """A scheduler, and as many workers as the test says, or one."""
    scheduler = start(
        "dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"
    )
    assert scheduler.stdout
    address = next(
        found[1]
        for line in scheduler.stdout
        if (found := re.search(r"Scheduler at:\s+(tcp://\S+)", line))
    )
    workers = [worker(address) for _ in range(getattr(request, "param", 1))]
    yield address, workers
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_worker_killed_in_the_middle_loses_nothing(
    cluster: tuple[str, list[subprocess.Popen[str]]], checkpoint: Path, tmp_path: Path
) -> None:
    address, workers = cluster
    points = [
        Point(str(checkpoint), "1xh200").with_options(blocks=4, context=16 + i)
        for i in range(POINTS)
    ]
    killed: list[int] = []

    def show(message: str) -> None:
        if not killed and not message.startswith("points: 0"):
            killed.append(workers[0].pid)
            os.kill(workers[0].pid, signal.SIGKILL)

    with Cluster(address) as found:
        found.client.wait_for_workers(2, timeout=PATIENCE_S)
        runner = found.runner(Store(tmp_path), show)
        rows = runner.rows(points)
    assert killed
    assert runner.computed == POINTS
    assert Store(tmp_path).count() == POINTS
    assert rows[:2] == Runner.inline().rows(points[:2])  # the same results as here


def test_the_command_uses_it(
    cluster: tuple[str, list[subprocess.Popen[str]]], checkpoint: Path, tmp_path: Path, twin: Twin
) -> None:
    words = (
        "whatif",
        checkpoint,
        "1xh200",
        "--blocks",
        4,
        "--sweep",
        "context=1,2",
        "--store",
        tmp_path,
    )
    outcome = twin(*words, "--scheduler", cluster[0])
    assert outcome.code == 0, outcome.err
    assert "tiny, context" in outcome.out or "context 1" in outcome.out or "tiny" in outcome.out


def test_no_scheduler_is_said(
    twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twin.study.cluster.PATIENCE_S", 0.5)
    address = "tcp://127.0.0.1:9"
    outcome = twin(
        "whatif",
        checkpoint,
        "1xh200",
        "--blocks",
        4,
        "--sweep",
        "context=1,2",
        "--store",
        tmp_path,
        "--scheduler",
        address,
    )
    assert outcome.code == 2
    assert f"--scheduler {address}: no Dask scheduler answers" in outcome.err


@pytest.mark.slow
def test_a_scheduler_that_dies_is_one_line_and_what_is_done_stays(
    checkpoint: Path, tmp_path: Path
) -> None:
    scheduler = start(
        "dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--no-show"
    )
    assert scheduler.stdout
    address = next(
        found[1]
        for line in scheduler.stdout
        if (found := re.search(r"Scheduler at:\s+(tcp://\S+)", line))
    )
    helper = worker(address)
    words = [
        "whatif",
        str(checkpoint),
        "1xh200",
        "--blocks",
        "4",
        "--store",
        str(tmp_path),
        "--scheduler",
        address,
    ]
    words += ["--sweep", f"context={','.join(map(str, range(1, 200)))}"]
    twin = subprocess.Popen(
        [sys.executable, "-m", "twin.cli", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    try:
        assert twin.stderr
        for line in twin.stderr:
            if line.startswith("twin: cells: 1"):
                break
        scheduler.kill()
        out, err = twin.communicate(timeout=PATIENCE_S)
    finally:
        for process in (twin, helper, scheduler):
            process.kill()
            process.wait()
    last = err.splitlines()[-1]
    assert (twin.returncode, out) == (2, "")
    assert last.startswith("twin: the Dask scheduler is gone: what is done is kept")
    assert "Traceback" not in err
    assert Store(tmp_path).count()
