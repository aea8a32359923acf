"""Processes of torch.distributed, one a GPU, for what is timed next to the engine: started
together, ended together, whatever one of them does.

They meet by a file and talk over the loopback device, so nothing listens on a network.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from twin.bench.peers import torch_module
from twin.errors import EngineError

# NVLink multicast (NVLS) stays off. A program that ends while it holds multicast memory can leave
# NVLink's switches in a state that takes a shared host's GPUs out of service for everybody.
WITHOUT_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
LOOPBACK = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
REQUEST, ANSWER, MEETING = "request.json", "answer.json", "meeting"
# for processes that are signalled to end, that part from each other; between two looks at them
GRACE_S, PART_S, LOOK_S = 3.0, 10.0, 0.05
DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
LONGEST_REASON = 300  # characters


@dataclass(frozen=True, slots=True)
class Rank:
    """What one of the processes knows of itself."""

    number: int
    count: int
    backend: str  # nccl on GPUs, gloo on a CPU
    folder: Path  # of the files of this run

    @property
    def on_gpu(self) -> bool:
        return self.backend == "nccl"

    @property
    def device(self) -> str:
        return f"cuda:{self.number}" if self.on_gpu else "cpu"

    def answer(self, made: Mapping[str, Any]) -> None:
        """What the caller gets, from rank 0; the last answer counts."""
        if self.number == 0:
            _write(self.folder / ANSWER, json.dumps(made, allow_nan=False))


def _write(file: Path, text: str) -> None:
    """Whole, or not yet there."""
    part = file.with_name(f"part-{file.name}")
    part.write_text(text)
    part.replace(file)


# ---- the caller ----------------------------------------------------------------------------------


def run_ranks(
    module: str,
    count: int,
    request: Mapping[str, Any],
    *,
    backend: str,
    timeout_s: float,
    folder: Path | None = None,
) -> dict[str, Any]:
    """`python -m module` in `count` processes, and what rank 0 answered; "failed" in it says what
    ended them after an answer.

    Raises EngineError for a failure before any answer, and beyond `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="twin-ranks-") as made:
        here = folder or Path(made)
        (here / REQUEST).write_text(json.dumps({**request, "timeout_s": timeout_s}))
        started: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                started.append(_start(module, Rank(number, count, backend, here)))
            failed = _wait(module, started, here, timeout_s)
        finally:
            _end(started)
        answer = here / ANSWER
        if not answer.is_file():
            raise EngineError(failed or f"{module}: ended without an answer; report this")
        found: dict[str, Any] = json.loads(answer.read_text())
        return found | ({"failed": failed} if failed else {})


def _start(module: str, rank: Rank) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C is the caller's, who ends them all."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    known = {
        "RANK": str(rank.number),
        "LOCAL_RANK": str(rank.number),
        "WORLD_SIZE": str(rank.count),
        "LOCAL_WORLD_SIZE": str(rank.count),
        "PYTHONPATH": os.pathsep.join(paths),
    }
    words = [str(rank.number), str(rank.count), rank.backend, str(rank.folder), str(os.getpid())]
    with (rank.folder / f"said-{rank.number}").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", module, *words],
            env={**os.environ, **known, **LOOPBACK, **WITHOUT_MULTICAST},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait(
    module: str, started: list[subprocess.Popen[bytes]], folder: Path, timeout_s: float
) -> str:
    """Until all have ended, or one failed: the reason, or nothing."""
    end = time.monotonic() + timeout_s
    late = f"{module} took more than {timeout_s:g} s and was ended"
    parting = False
    while True:
        codes = [one.poll() for one in started]
        failed = next((number for number, code in enumerate(codes) if code), None)
        # one that failed may wait for the others while it leaves NCCL
        if failed is not None or any(folder.glob("failed-*")):
            return _reason(folder, failed or 0) or f"{module} ended with {codes[failed or 0]}"
        if None not in codes:
            return ""
        if not parting and all((folder / f"done-{n}").exists() for n in range(len(started))):
            parting, end = True, min(end, time.monotonic() + PART_S)
            late = f"{module} had done its work, did not end within {PART_S:g} s and was ended"
        if time.monotonic() > end:
            return late
        time.sleep(LOOK_S)


def _reason(folder: Path, number: int) -> str:
    """The first error that a process wrote, since the others' follow from it; else the last line
    that this one said.
    """
    written = sorted(folder.glob("failed-*"), key=lambda file: file.stat().st_mtime_ns)
    for file in (*written[:1], folder / f"said-{number}"):
        lines = file.read_text(errors="replace").strip().splitlines() if file.is_file() else []
        if lines:
            return lines[-1].strip()[:LONGEST_REASON]
    return ""


def _end(started: list[subprocess.Popen[bytes]]) -> None:
    """All of them and what they started: signalled first, so that NCCL may leave its memory."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        left = [one for one in started if one.poll() is None]
        for one in left:
            try:
                os.killpg(one.pid, how)
            except ProcessLookupError:
                continue
        end = time.monotonic() + GRACE_S
        for one in left:
            try:
                one.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


# ---- one of the processes ------------------------------------------------------------------------


def main(work: Callable[[Rank, dict[str, Any]], None], words: list[str]) -> int:
    """Meets the others, does the work and parts; the exit code."""
    number, count, backend, folder, caller = words
    rank = Rank(int(number), int(count), backend, Path(folder))
    ctypes.CDLL(None).prctl(DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(caller):
        return 1  # it ended already
    try:
        request = json.loads((rank.folder / REQUEST).read_text())
        _meet(rank, float(request["timeout_s"]))
        work(rank, request)
        gc.collect()  # NCCL waits for graphs that hold its operations
        (rank.folder / f"done-{rank.number}").touch()
        torch_module().distributed.destroy_process_group()
    except Exception as error:
        said = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {said[0] if said else 'no reason given'}"
        _write(rank.folder / f"failed-{rank.number}", text)
        raise
    return 0


def _meet(rank: Rank, timeout_s: float) -> None:
    torch = torch_module()
    if rank.on_gpu:
        torch.cuda.set_device(rank.number)
    else:
        torch.set_num_threads(1)
    bound = {"device_id": torch.device(rank.device)} if rank.on_gpu else {}
    torch.distributed.init_process_group(
        rank.backend,
        init_method=(rank.folder / MEETING).as_uri(),
        rank=rank.number,
        world_size=rank.count,
        timeout=timedelta(seconds=timeout_s),
        **bound,
    )
