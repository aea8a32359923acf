"""What the host makes for a GPU's next runs while the present one is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def made_ahead(
    make: Callable[[Item], Made], items: Iterable[Item], ahead: int
) -> Iterator[tuple[Item, Future[Made]]]:
    """Each item with what is made of it, in order; threads make those of the next `ahead` items
    meanwhile, and no more: memory holds so many. A failure is raised where the result is asked for.
    """
    with ThreadPoolExecutor(ahead) as pool:
        waiting: deque[tuple[Item, Future[Made]]] = deque()
        for item in items:
            waiting.append((item, pool.submit(make, item)))
            if len(waiting) > ahead:
                yield waiting.popleft()
        yield from waiting
