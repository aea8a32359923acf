"""Runs the points of a study: each is looked up first, what is missing is computed in parallel, and
what is done is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import mean

from twin.errors import EngineError
from twin.study.local import Batch, cores, in_process, on_cores
from twin.study.point import Point, Row, key_of
from twin.study.store import Store

Progress = Callable[[str], None]
Work = Callable[[Sequence[Batch]], Iterator[tuple[int, list[Row]]]]
LARGEST_BATCH = 16  # points: enough that a worker reuses a plan
SHARES = 6  # batches for each worker, so that a slow one at the end does not leave the others idle
KEEP_S = 5.0  # results are written at least this often


class Runner:
    """`work` computes batches in any order, `workers` of them at once; `store` keeps the rows
    (None: for this runner's life).
    """

    def __init__(
        self, work: Work, *, workers: int, store: Store | None, progress: Progress
    ) -> None:
        self._work = work
        self._workers = workers
        self._store = store
        self.progress = progress
        self._rows: dict[str, Row] = {}
        self._slow = ""  # why the reference simulator does the work, once that has been said
        self._timed, self._spent_s = 0, 0.0  # points simulated, and the time of all workers' work
        self.computed = 0
        self.found = 0

    @classmethod
    def inline(cls) -> Runner:
        """In this process, without a store, in silence."""
        return cls(in_process, workers=1, store=None, progress=lambda message: None)

    @classmethod
    def local(cls, store: Store | None, progress: Progress, workers: int | None = None) -> Runner:
        """On this computer's cores, all of them unless `workers` says how many."""
        count = workers or cores()
        if count == 1:
            return cls(in_process, workers=1, store=store, progress=progress)
        return cls(
            lambda batches: on_cores(batches, count), workers=count, store=store, progress=progress
        )

    def rows(self, points: Sequence[Point], what: str = "points") -> list[Row]:
        """The results of `points`, in order. Interrupted, it keeps what is done and can be called
        again.
        """
        keys = [key_of(point) for point in points]
        missing = {
            key: point for key, point in zip(keys, points, strict=True) if key not in self._rows
        }
        if self._store and missing:
            kept = self._store.find(missing)
            self.found += len(kept)
            self._rows |= kept
            missing = {key: point for key, point in missing.items() if key not in kept}
        if missing:
            self._compute(missing, what)
        return [self._rows[key] for key in keys]

    def known(self, point: Point) -> bool:
        """Whether the result is there already."""
        key = key_of(point)
        if key not in self._rows and self._store:
            self._rows |= self._store.find([key])
        return key in self._rows

    def _compute(self, missing: dict[str, Point], what: str) -> None:
        batches = self._batches(missing)
        before_s = self._spent_s
        clock = _Clock(len(missing), what, self.progress, self._expected_s(len(missing)))
        try:
            for index, rows in self._work(batches):
                for point, row in zip(batches[index], rows, strict=True):
                    if row.key not in missing:
                        raise EngineError(
                            f"the simulator's code has changed since this study began ({point}); "
                            "run it again"
                        )
                    self._rows[row.key] = row
                    if self._store:
                        self._store.add(point, row)
                self.computed += len(rows)
                self._say_once(next((row.why_simpy for row in rows if row.why_simpy), ""))
                clock.advance(len(rows))
                if rows[0].wall_s:  # simulated, not only planned
                    self._timed, self._spent_s = self._timed + len(rows), before_s + clock.spent_s()
                if self._store and clock.due():
                    self._store.flush()
        finally:
            if self._store:
                self._store.flush()

    def _expected_s(self, count: int) -> float:
        """How long `count` points take: as this runner's did, or the known ones by themselves. 0
        where none is known.
        """
        if self._timed:
            return self._spent_s / self._timed * count
        took = [row.wall_s for row in self._rows.values() if row.wall_s]
        return mean(took) * count / self._workers if took else 0.0

    def _say_once(self, slow: str) -> None:
        if slow and not self._slow:
            self._slow = slow
            self.progress(f"slowly, by SimPy: {slow}")

    def _batches(self, missing: dict[str, Point]) -> list[Batch]:
        """Neighbours share a plan, so a worker builds it once."""
        size = max(1, min(LARGEST_BATCH, len(missing) // (SHARES * self._workers)))
        ordered = sorted(
            missing.values(), key=lambda point: (point.model, point.node, repr(point.options))
        )
        return [tuple(ordered[at : at + size]) for at in range(0, len(ordered), size)]


def spoken_s(seconds: float) -> str:
    """A time to wait for: "45 s", "7 min"."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


class _Clock:
    """Progress with the time that is left, and when to write."""

    def __init__(self, total: int, what: str, progress: Progress, expected_s: float) -> None:
        self.total, self.what, self.progress = total, what, progress
        self.done = 0
        self.begun = self.kept = time.monotonic()
        about = f", about {spoken_s(expected_s)}" if expected_s else ""
        progress(f"{what}: 0/{total}{about}")

    def advance(self, count: int) -> None:
        self.done += count
        left = self.spent_s() / self.done * (self.total - self.done)
        self.progress(f"{self.what}: {self.done}/{self.total}, {spoken_s(left)} left")

    def spent_s(self) -> float:
        return time.monotonic() - self.begun

    def due(self) -> bool:
        now = time.monotonic()
        if now - self.kept < KEEP_S:
            return False
        self.kept = now
        return True


class Cluster:
    """A runner's work on a Dask cluster, for the length of a `with` block."""

    def __init__(self, address: str) -> None:
        from twin.study.cluster import connect  # half a second of imports that nobody else needs

        self.client = connect(address)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def runner(self, store: Store | None, progress: Progress) -> Runner:
        from twin.study.cluster import on_cluster

        workers = max(1, sum(self.client.nthreads().values()))
        return Runner(
            lambda batches: on_cluster(batches, self.client),
            workers=workers,
            store=store,
            progress=progress,
        )
