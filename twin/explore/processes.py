"""Processes that simulate, so that a long point holds up nobody's first answer."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

from twin.study.local import cores
from twin.study.point import Point, Row, compute
from twin.workers import end_with_parent


@dataclass(frozen=True, slots=True)
class Waiting:
    """What an answer waits for; meanwhile its thread serves others."""

    future: Future[Row]

    def then(self, again: Callable[[], None]) -> None:
        self.future.add_done_callback(lambda _: again())


class Processes:
    """One process less than there are cores, begun when the first point comes."""

    def __init__(self) -> None:
        self.workers = max(1, cores() - 1)
        self._pool: ProcessPoolExecutor | None = None
        self._under_way = 0
        self._lock = threading.Lock()

    def idle(self) -> int:
        """Processes that have begun and have nothing to do."""
        with self._lock:
            return max(0, self.workers - self._under_way) if self._pool is not None else 0

    def submit(self, point: Point) -> Future[Row]:
        with self._lock:
            if self._pool is None:
                # Not fork: threads of the server and of Arrow do not survive it.
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(self.workers, context, end_with_parent)
            try:
                future = self._pool.submit(_compute, point)
                self._under_way += 1
            except BrokenProcessPool:  # a worker was killed, such as for its memory
                self._pool, future = None, None
        if future is None:
            return self.submit(point)
        future.add_done_callback(self._done)
        return future

    def _done(self, _: Future[Row]) -> None:
        with self._lock:
            self._under_way -= 1

    def close(self) -> None:
        with self._lock:
            if self._pool is not None:
                workers = list((self._pool._processes or {}).values())
                self._pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.terminate()  # else the server's end would wait for what they are doing
                self._pool = None


def _compute(point: Point) -> Row:
    return compute([point])[0]
