"""Memory of compiled simulations, lent from one to the next: a simulation's first touch of new
pages took longer than its events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

KEPT = 1  # rooms between simulations: one for each process that runs point after point
LARGEST_BYTES = 1 << 30  # a room that has grown beyond this is not kept


class Room:
    """Arrays by name; a name's memory is used again by the next array of that name."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[np.uint8]] = {}

    def take(self, name: str, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """[count] items with whatever values were left there. Ends the use of the array of that
        name before.
        """
        size = count * dtype.itemsize
        if name not in self._held or self._held[name].nbytes < size:
            self._held[name] = np.empty(size, np.uint8)
        return self._held[name][:size].view(dtype)

    def size(self) -> int:
        """Bytes held."""
        return sum(array.nbytes for array in self._held.values())


_free: list[Room] = []


@contextmanager
def lent() -> Iterator[Room]:
    """A room for one simulation, until all that it left in it has been read; threads never share
    one.
    """
    try:
        room = _free.pop()
    except IndexError:
        room = Room()
    try:
        yield room
    finally:
        if len(_free) < KEPT and room.size() <= LARGEST_BYTES:
            _free.append(room)
