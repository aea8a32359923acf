"""Numbers as runs that the compiler expands (native/platform/tables.h): tables of a plan repeat
themselves from layer to layer, and from block to block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FARTHEST = 64  # numbers before a run that it may repeat: the stages of some layers
LEAST = 6  # numbers of a run, which takes three, and divides those that stand as they are


def runs(numbers: NDArray[np.float64]) -> list[float]:
    """`count, distance, step` for `count` numbers that are each `step` more than the number
    `distance` before; distance 0: `count` numbers follow.
    """
    length = _lengths(numbers)
    made: list[float] = []
    at = plain = 0  # numbers that are written; those as they are begin there
    while at < len(numbers):
        distance = int(length[:, at].argmax())
        count = int(length[distance, at])
        if count < LEAST:
            at += 1
            continue
        made += _plain(numbers[plain:at])
        made += [count, distance, float(numbers[at] - numbers[at - distance])]
        plain = at = at + count
    return made + _plain(numbers[plain:])


def _lengths(numbers: NDArray[np.float64]) -> NDArray[np.int32]:
    """[distances][numbers] how many numbers a run of a distance has from each number on."""
    length = np.zeros((min(FARTHEST, len(numbers) - 1) + 1, len(numbers)), np.int32)
    for distance in range(1, len(length)):
        steps = numbers[distance:] - numbers[:-distance]
        ends = np.append(np.flatnonzero(np.diff(steps)) + 1, len(steps))
        at = np.arange(len(steps))
        length[distance, distance:] = ends[np.searchsorted(ends, at, side="right")] - at
    return length


def _plain(numbers: NDArray[np.float64]) -> list[float]:
    return [len(numbers), 0, *map(float, numbers)] if len(numbers) else []
