"""Processes that work for another one."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def end_with_parent() -> None:
    """Of a pool's worker, as its initializer: it ends at once when its parent was killed, also
    while it waits for work. The pool's queue never says so: each worker holds both of its ends.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=leave, name="parent", daemon=True).start()


def each(work: Callable[[T], R], items: Sequence[T], *, few: int = 1) -> Iterator[R]:
    """The result of every item, in order, by processes on all cores; here where one core or no more
    than `few` items are there. The first failure, or Ctrl-C, drops what has not begun.
    """
    count = min(len(os.sched_getaffinity(0)), len(items))
    if count <= 1 or len(items) <= few:
        yield from map(work, items)
        return
    # slow to load, and one item needs none
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(count) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
