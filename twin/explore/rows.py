"""Results of points, from memory, from the shared store, or computed one after the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from twin.errors import ConfigError
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


Steps = Generator[Progress, None, T]


class Rows:
    """Owned by the one thread that computes."""

    def __init__(self, store: Store | None) -> None:
        self._store = store
        self._kept: OrderedDict[str, Row] = OrderedDict()
        self.computed = self.found = 0

    def of(self, points: Sequence[Point], what: str) -> Steps[list[Row]]:
        """In order. What is computed is kept in the store, also by a question that is given up."""
        keys = [key_of(point) for point in points]
        asked = dict(zip(keys, points, strict=True))
        missing = {key: point for key, point in asked.items() if key not in self._kept}
        if missing and self._store:
            for key, row in self._store.find(missing).items():
                self._keep(row)
                missing.pop(key)
                self.found += 1
        if len(missing) > MOST_POINTS:
            raise ConfigError(f"{len(missing)} simulations in one question; at most {MOST_POINTS}")
        rows = {key: self._kept[key] for key in keys if key in self._kept}
        try:
            for at, (key, point) in enumerate(missing.items()):
                yield Progress(what, at, len(missing))
                row = compute([point])[0]
                rows[key] = row
                self._keep(row)
                self.computed += 1
                if self._store:
                    self._store.add(point, row)
        finally:
            if self._store:
                self._store.flush()
        return [rows[key] for key in keys]

    def _keep(self, row: Row) -> None:
        self._kept[row.key] = row
        self._kept.move_to_end(row.key)
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
