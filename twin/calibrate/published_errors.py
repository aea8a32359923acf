"""Held-out figures of others beside what the twin says of each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from twin.calibrate import store
from twin.calibrate.published import Figure, figures
from twin.calibrate.published_plans import predicted_s

FEW = 4  # figures that one process predicts sooner than it starts others


@dataclass(frozen=True, slots=True)
class Beside:
    figure: Figure
    predicted_s: float

    @property
    def predicted(self) -> float:
        """In the figure's unit."""
        return self.figure.in_unit(self.predicted_s)

    @property
    def error(self) -> float:
        """Of the speed against the middle of what was published, positive where the twin is too
        fast.
        """
        return self.figure.middle_s / self.predicted_s - 1.0

    @property
    def inside(self) -> bool:
        """Does the prediction lie in the range that was published?"""
        return min(self.figure.seconds) <= self.predicted_s <= max(self.figure.seconds)


def compared(record: store.Run, progress: Callable[[str], None]) -> list[Beside]:
    """Every figure of a record, in its order, on all cores."""
    asked = figures(record.folder, record.meta)
    found = []
    for done, (figure, seconds) in enumerate(zip(asked, _predictions(asked), strict=True), start=1):
        progress(f"predicting published figures: {done}/{len(asked)} {figure.name}")
        found.append(Beside(figure, seconds))
    return found


def _predictions(asked: Sequence[Figure]) -> Iterator[float]:
    workers = min(len(asked) // FEW, len(os.sched_getaffinity(0)))
    if workers <= 1:
        yield from map(predicted_s, asked)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(predicted_s, asked)
