"""Results of points, from memory, from the shared store, or simulated, here or by others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import TypeVar

from twin.errors import ConfigError
from twin.explore.processes import Processes, Waiting
from twin.study.point import Point, Row, compute, key_of
from twin.study.store import Store

T = TypeVar("T")
KEPT = 20_000  # rows in memory
MOST_POINTS = 600  # that one question may compute


@dataclass(frozen=True, slots=True)
class Progress:
    """So far of one part of an answer; between two of them somebody else's work may be done."""

    what: str
    done: int
    of: int


Ahead = dict[str, Future[Row]]  # by the points' keys
Steps = Generator[Progress | Waiting, None, T]


class Rows:
    """Owned by the one thread that answers. Without `processes` it simulates everything itself."""

    def __init__(self, store: Store | None, processes: Processes | None = None) -> None:
        self._store = store
        self._processes = processes
        self._kept: OrderedDict[str, Row] = OrderedDict()
        self.computed = self.found = 0

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()

    def known(self, point: Point) -> bool:
        """Has it been simulated before, by whomever?"""
        key = key_of(point)
        if key not in self._kept and self._store:
            for row in self._store.find({key: point}).values():
                self._keep(row)
                self.found += 1
        return key in self._kept

    def ahead(self, points: Sequence[Point]) -> Ahead:
        """Lets idle processes begin with what `of` will need here and now."""
        if self._processes is None:
            return {}
        left = [point for point in points if not self.known(point)]
        return {
            key_of(point): self._processes.submit(point) for point in left[: self._processes.idle()]
        }

    def of(
        self,
        points: Sequence[Point],
        what: str,
        *,
        parallel: bool = True,
        ahead: Ahead | None = None,
    ) -> Steps[list[Row]]:
        """In order. What is computed is kept in the store, also by a question that is given up.
        Not `parallel`: here and now, for what somebody waits to see, unless a process is `ahead`.
        """
        keys = [key_of(point) for point in points]
        wanted = dict(zip(keys, points, strict=True))
        missing = {key: point for key, point in wanted.items() if key not in self._kept}
        if missing and self._store:
            for key, row in self._store.find(missing).items():
                self._keep(row)
                missing.pop(key)
                self.found += 1
        if len(missing) > MOST_POINTS:
            raise ConfigError(f"{len(missing)} simulations in one question; at most {MOST_POINTS}")
        rows = {key: self._kept[key] for key in keys if key in self._kept}
        processes, left = self._processes if parallel else None, deque(missing.values())
        under_way: deque[Future[Row]] = deque()
        try:
            for at, (key, point) in enumerate(missing.items()):
                yield Progress(what, at, len(missing))
                if processes is None:
                    begun = ahead.get(key) if ahead else None
                    if begun is not None:
                        yield Waiting(begun)
                    row = compute([point])[0] if begun is None else _result(begun, point)
                else:
                    while left and len(under_way) < processes.workers:
                        under_way.append(processes.submit(left.popleft()))
                    future = under_way.popleft()
                    yield Waiting(future)
                    row = _result(future, point)
                rows[key] = row
                self._keep(row)
                self.computed += 1
                if self._store:
                    self._store.add(point, row)
        finally:
            for future in under_way:
                future.cancel()
            if self._store:
                self._store.flush()
        return [rows[key] for key in keys]

    def _keep(self, row: Row) -> None:
        self._kept[row.key] = row
        self._kept.move_to_end(row.key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)


def _result(future: Future[Row], point: Point) -> Row:
    """What a process that was killed has not done is done here."""
    try:
        return future.result()
    except (BrokenProcessPool, CancelledError):
        return compute([point])[0]
