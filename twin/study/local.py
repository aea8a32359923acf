"""Batches of points on this computer's cores."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.context import BaseContext

from twin.errors import EngineError
from twin.study.point import Point, Row, compute
from twin.workers import end_with_parent

Batch = tuple[Point, ...]
LOSSES = 3  # workers that may be lost without any batch done in between


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_process(batches: Sequence[Batch]) -> Iterator[tuple[int, list[Row]]]:
    """One after the other, here."""
    for index, batch in enumerate(batches):
        yield index, compute(batch)


def on_cores(batches: Sequence[Batch], workers: int) -> Iterator[tuple[int, list[Row]]]:
    """(index, rows) of every batch as they are done. What a killed worker (out of memory) was doing
    is done again.
    """
    left, losses = dict(enumerate(batches)), 0
    while left:
        try:
            for index, rows in _attempt(left, workers):
                del left[index]
                losses = 0
                yield index, rows
        except BrokenProcessPool as error:
            losses += 1
            if losses > LOSSES:
                first = next(iter(left.values()))[0]
                raise EngineError(
                    f"workers died {losses} times in a row, {len(left)} batches are left "
                    f"({first.model} on {first.node} is the next); is there memory for them? try "
                    "fewer workers"
                ) from error


def _attempt(left: dict[int, Batch], workers: int) -> Iterator[tuple[int, list[Row]]]:
    before = set(multiprocessing.active_children())
    with pool_of(workers) as pool:
        futures = {pool.submit(compute, batch): index for index, batch in left.items()}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - before:
                worker.terminate()  # else leaving would wait for what they are doing
            raise


def pool_of(workers: int) -> ProcessPoolExecutor:
    """Processes with the environment that this one has."""
    return ProcessPoolExecutor(
        workers, _context(), initializer=_begin, initargs=(dict(os.environ),)
    )


def _context() -> BaseContext:
    """Not fork: the threads of Arrow and of a cluster's client do not survive it. On Linux a server
    without threads loads the simulator once and forks every worker; elsewhere each worker loads it.
    """
    if sys.platform.startswith("linux"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([compute.__module__])
        with suppress(OSError):  # no folder, or one with too long a name, for the server's socket
            forkserver.ensure_running()
            return context
    return multiprocessing.get_context("spawn")


def _begin(environment: dict[str, str]) -> None:
    """The environment is the parent's, not what it was when the server of workers began. Ctrl-C
    reaches the whole group: a worker ends without a word, the parent keeps what is done.
    """
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
