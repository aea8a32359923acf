"""Batches of points on a Dask cluster."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress

from distributed import Client, as_completed
from distributed.client import Future

from twin.errors import ConfigError, EngineError
from twin.study.local import Batch
from twin.study.point import Row, code_version, compute
from twin.text import shown

PATIENCE_S = 15.0  # to find the scheduler, and its first worker
LOGGERS = ("distributed", "distributed.client")
LOST = ("cancelled", "lost")  # what a future becomes when nobody knows of it any more
LOSSES = 10  # workers that may be lost under one batch before it is given up


def connect(address: str) -> Client:
    """A client of the scheduler at `address` ("tcp://10.0.0.1:8786"), whose workers run this very
    code. Raises ConfigError.
    """
    for name in LOGGERS:
        # a lost scheduler is said in our words, not in tracebacks
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        client = Client(address, timeout=PATIENCE_S)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--scheduler {shown(address)[1:-1]}: no Dask scheduler answers there ({error}); "
            "start one with `dask scheduler`"
        ) from error
    try:
        client.wait_for_workers(1, timeout=PATIENCE_S)
        _same_code(client, address)
    except TimeoutError as error:
        client.close()
        raise ConfigError(
            f"--scheduler {address}: no worker within {PATIENCE_S:.0f} s; start some with `dask "
            f"worker {address}`"
        ) from error
    except BaseException:
        client.close()
        raise
    return client


def _same_code(client: Client, address: str) -> None:
    """Results are kept under this code's version: another one's must not be among them."""
    ours = code_version()
    for worker, theirs in client.run(_version, on_error="return").items():
        if theirs != ours:
            raise ConfigError(
                f"--scheduler {address}: worker {worker} has another simulator ({theirs}; here "
                f"{ours}); install the same version there"
            )


def _version() -> str:
    return code_version()


def _task(batch: Batch) -> str:
    """The same name for the same work: what two programs ask of a cluster at the same time is done
    once.
    """
    return f"twin-{code_version()}-{hashlib.sha256(repr(batch).encode()).hexdigest()[:20]}"


def on_cluster(batches: Sequence[Batch], client: Client) -> Iterator[tuple[int, list[Row]]]:
    """(index, rows) of every batch as they are done. The scheduler gives the batches of a lost
    worker to others.

    Leaving early (an error, Ctrl-C) takes back what has not been done.
    """
    futures: dict[Future, int] = {
        client.submit(compute, batch, key=_task(batch), retries=LOSSES): index
        for index, batch in enumerate(batches)
    }
    try:
        for future in as_completed(list(futures)):
            if future.status in LOST:
                raise EngineError(
                    "the Dask scheduler is gone: what is done is kept, so start it and run the "
                    "same command again"
                )
            if future.status != "finished":
                error = future.exception()
                raise EngineError(
                    f"the cluster gave up a batch ({batches[futures[future]][0]}): {error}; see "
                    "the workers' logs"
                )
            yield futures[future], future.result()
            future.release()
    except BaseException:
        # nobody may be there any more
        with suppress(OSError, CancelledError, asyncio.CancelledError):
            client.cancel(list(futures), force=True)
        raise
