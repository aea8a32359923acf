"""How a job's events reach the event loop."""

from __future__ import annotations

import asyncio
import threading

from tests.patience import PATIENCE_S
from twin.server.job import Event, Job, Text

LONG_S = 100 * PATIENCE_S  # between two batches; no test waits for it


def test_the_end_waits_for_no_gap() -> None:
    async def heard() -> list[Event]:
        job = Job([], asyncio.get_running_loop())
        first, last = Text(0, "a", 1), Text(0, "b", 1)
        job.put(first)
        found: list[Event] = []
        async for batch in job.batches(LONG_S, LONG_S):
            found += batch
            if found == [first]:
                threading.Timer(0.05, lambda: (job.put(last), job.end())).start()
        assert found == [first, last]
        return found

    asyncio.run(asyncio.wait_for(heard(), PATIENCE_S))


def test_what_comes_within_a_gap_is_one_batch() -> None:
    async def sizes() -> list[int]:
        job = Job([], asyncio.get_running_loop())
        found: list[int] = []
        job.put(Text(0, "a", 1))
        async for batch in job.batches(0.05, LONG_S):
            found.append(len(batch))
            if len(found) == 1:
                for _ in range(5):
                    job.put(Text(0, "b", 1))
            elif len(found) == 2:
                job.end()
        return found

    assert asyncio.run(asyncio.wait_for(sizes(), PATIENCE_S)) == [1, 5]


def test_silence_gives_empty_batches() -> None:
    async def first() -> list[Event]:
        job = Job([], asyncio.get_running_loop())
        return await anext(job.batches(LONG_S, 0.01))

    assert asyncio.run(asyncio.wait_for(first(), PATIENCE_S)) == []
