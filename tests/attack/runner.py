"""Runs attacks in processes of their own: a case may crash, hang or take all memory, and the others
go on.

Each case is drawn from (attack, seed, number) alone, so that a report can be repeated.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from tests.attack.defect import Defect

FOLDER = Path(__file__).resolve().parent
CASE_CPU_S = 20.0  # of one case
# compiling a kernel and other processes included; twenty times what a case takes by itself
CASE_WALL_S = 600.0
CASE_BYTES = 1 << 30  # that one case may add to what its process holds
PROCESS_BYTES = 6 << 30  # so that no case takes the computer's memory


def attacks() -> list[str]:
    """The names of all attacks: the modules of this folder that have a function of this name."""
    return sorted(
        p.stem for p in FOLDER.glob("*.py") if "\ndef attack(" in p.read_text(encoding="utf-8")
    )


# forked from one that has imported all attacks, so that none has anything of this process
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload([f"tests.attack.{name}" for name in attacks()])


@dataclass(frozen=True, slots=True)
class Case:
    attack: str
    seed: int
    number: int

    def __str__(self) -> str:
        return f"{self.attack}:{self.seed}:{self.number}"


@dataclass(slots=True)
class Tally:
    """What came of the cases so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[tuple[Case, str]] = field(default_factory=list)
    slowest_s: float = 0.0
    largest_bytes: int = 0


def run(
    names: list[str],
    *,
    seed: int,
    jobs: int = 1,
    seconds: float | None = None,
    cases: int | None = None,
    first: int = 0,
    tell: Callable[[dict[str, Tally]], None] = lambda tallies: None,
) -> dict[str, Tally]:
    """Cases of all attacks in turn, until `seconds` are over or each has had `cases`. `tell` hears
    of the tallies every few seconds.
    """
    tallies = {name: Tally() for name in names}
    todo = _turns(names, seed, first, cases)
    workers: list[_Worker] = []
    end, next_word = (
        time.monotonic() + (seconds if seconds is not None else float("inf")),
        time.monotonic() + 10,
    )
    try:
        while True:
            while (
                len(workers) < jobs
                and time.monotonic() < end
                and (case := next(todo, None)) is not None
            ):
                workers.append(_Worker(case))
            if not workers:
                return tallies
            wait([worker.pipe for worker in workers], timeout=1.0)
            for worker in list(workers):
                report = worker.report()
                if report is None:
                    continue
                _count(tallies[worker.case.attack], worker.case, report)
                case = next(todo, None) if time.monotonic() < end else None
                if case is None or not worker.go_on(case):
                    worker.stop()
                    workers.remove(worker)
                    if case is not None:
                        workers.append(_Worker(case))
            if time.monotonic() > next_word:
                next_word += 10
                tell(tallies)
    finally:
        for worker in workers:
            worker.stop()


def _turns(names: list[str], seed: int, first: int, cases: int | None) -> Iterator[Case]:
    number = first
    while cases is None or number < first + cases:
        yield from (Case(name, seed, number) for name in names)
        number += 1


@dataclass(frozen=True, slots=True)
class Report:
    outcome: str
    defect: str | None = None
    cpu_s: float = 0.0
    added_bytes: int = 0


def _count(tally: Tally, case: Case, report: Report) -> None:
    defect = report.defect
    if defect is None and report.cpu_s > CASE_CPU_S:
        defect = f"took {report.cpu_s:.1f} s of processor time, the limit is {CASE_CPU_S:g}"
    if defect is None and report.added_bytes > CASE_BYTES:
        defect = f"took {report.added_bytes / 1e9:.2f} GB more, the limit is {CASE_BYTES / 1e9:.2f}"
    tally.outcomes["defect" if defect else report.outcome] += 1
    tally.slowest_s, tally.largest_bytes = (
        max(tally.slowest_s, report.cpu_s),
        max(tally.largest_bytes, report.added_bytes),
    )
    if defect:
        tally.defects.append((case, defect))


class _Worker:
    """A process that runs one case after the other."""

    def __init__(self, case: Case) -> None:
        self.pipe, theirs = PROCESSES.Pipe()
        # not a daemon: those may have no children
        self.scratch = Path(tempfile.mkdtemp(prefix="attack-"))
        self.process = PROCESSES.Process(target=_work, args=(theirs, self.scratch))
        self.process.start()
        theirs.close()
        self.alive = True
        self._give(case)

    def _give(self, case: Case) -> None:
        self.case = case
        self.deadline = time.monotonic() + CASE_WALL_S
        self.pipe.send(case)

    def report(self) -> Report | None:
        """What came of the case; None: it runs."""
        try:
            if self.pipe.poll():
                got: Report = self.pipe.recv()
                # what one case left behind is not counted as another's
                self.alive = got.added_bytes <= CASE_BYTES // 4
                return got
        except (EOFError, ConnectionError):
            self.process.join(10)
            self.alive = False
            code = self.process.exitcode or 0
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return Report("died", f"the process died: {name}")
        if time.monotonic() > self.deadline:
            self.alive = False
            return Report("hung", f"no end after {CASE_WALL_S:g} s")
        return None

    def go_on(self, case: Case) -> bool:
        """False: another process has to take it."""
        if self.alive:
            self._give(case)
        return self.alive

    def stop(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join(10)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _work(pipe: Connection, scratch: Path) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (PROCESS_BYTES, PROCESS_BYTES))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        while True:
            case = pipe.recv()
            pipe.send(run_case(case, scratch / "case"))
    except (EOFError, ConnectionError):
        pass


def run_case(case: Case, folder: Path) -> Report:
    """One case, in a folder that is empty before and gone afterwards."""
    attack = importlib.import_module(f"tests.attack.{case.attack}").attack
    folder.mkdir(parents=True)
    before_s, before_bytes = time.process_time(), _peak_bytes()
    defect, outcome = None, "defect"
    try:
        outcome = attack(random.Random(f"{case}"), folder)
    except Defect as error:
        defect = str(error)
    except (KeyboardInterrupt, SystemExit) as error:
        defect = f"left by {type(error).__name__}: {error}"
    except BaseException as error:  # a panic of a library is no Exception
        where = "".join(traceback.format_tb(error.__traceback__)[-3:])
        defect = f"{type(error).__name__}: {error}\n{where}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Report(outcome, defect, time.process_time() - before_s, _peak_bytes() - before_bytes)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
