"""Processes that work for another one."""

from __future__ import annotations

import multiprocessing
import os
import threading


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
