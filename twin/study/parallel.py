"""Independent simulations spread over this computer's cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R], items: Sequence[T], *, workers: int | None = None
) -> Iterator[tuple[int, R]]:
    """(index, result) of every item, as they are done. The first failure, or Ctrl-C, drops what has
    not begun.
    """
    count = min(workers or len(os.sched_getaffinity(0)), len(items))
    if count <= 1:
        yield from ((index, work(item)) for index, item in enumerate(items))
        return
    # slow to load, and one simulation needs none
    from concurrent.futures import ProcessPoolExecutor, as_completed

    with ProcessPoolExecutor(count) as pool:
        futures = {pool.submit(work, item): index for index, item in enumerate(items)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
