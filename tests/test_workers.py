"""Processes that work for another one end with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
POOLS = {
    "study": "from twin.study.local import pool_of\n    pool = pool_of(2)",
    "explorer": "from twin.explore.processes import Processes\n    some = Processes()\n"
    "    some.workers = 2\n    some.submit(None).exception()\n    pool = some._pool",
    "compilers": "from twin.workers import end_with_parent\n"
    "    pool = ProcessPoolExecutor(2, get_context('spawn'), end_with_parent)",
}


def alive(pid: int) -> bool:
    try:  # one that ended, whom nobody has waited for, is none
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.few(1)
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")
@pytest.mark.parametrize("pool", POOLS)
def test_workers_end_when_their_parent_is_killed(pool: str, tmp_path: Path) -> None:
    """One that works for longer than the test waits, and one that waits for work."""
    file = tmp_path / "parent.py"
    file.write_text(
        "import os, signal, time\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import active_children, get_context\n"
        f"if __name__ == '__main__':\n    {POOLS[pool]}\n"
        "    first = [pool.submit(time.sleep, 0.5), pool.submit(time.sleep, 0.5)]\n"
        "    [one.result() for one in first]\n"
        f"    busy = pool.submit(time.sleep, {2 * PATIENCE_S})\n"
        "    while not busy.running(): time.sleep(0.01)\n"
        "    print(*(child.pid for child in active_children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.Popen(
        [sys.executable, file],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert ran.stdout is not None
    workers = [int(pid) for pid in ran.stdout.readline().split()]
    ran.wait(PATIENCE_S)
    assert len(workers) == 2
    late = time.monotonic() + PATIENCE_S
    while any(map(alive, workers)):
        assert time.monotonic() < late, "work goes on for nobody"
        time.sleep(0.02)
