"""The one thread that simulates, and the questions that wait for it: new ones first, then turns."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from twin.errors import TwinError
from twin.explore.answers import Answer, Part
from twin.explore.processes import Waiting
from twin.explore.rows import Progress, Rows
from twin.server.problem import Problem

LOG = logging.getLogger("twin.explore")


@dataclass(frozen=True, slots=True)
class Work:
    """How much of it one client may request."""

    at_once: int = 8  # questions of one client: four cases, a sweep, stages, and two that end
    waiting: int = 64  # of all clients
    seconds: float = 600.0  # from a question's first step to its last


@dataclass(eq=False)
class Job:
    """A question. Its parts reach `said` on the event loop; None is the end."""

    client: str
    begin: Callable[[], Answer]
    loop: asyncio.AbstractEventLoop
    said: asyncio.Queue[Part | Problem | None] = field(default_factory=asyncio.Queue)
    answer: Answer | None = None
    begun_s: float = 0.0  # by the monotonic clock
    gone: bool = False

    def tell(self, part: Part | Problem | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.said.put_nowait, part)


class Desk:
    """Questions are generators: between two of their steps another one gets its turn."""

    def __init__(self, work: Work, rows: Rows) -> None:
        self.rows = rows
        self._work = work
        self._new: deque[Job] = deque()
        self._begun: deque[Job] = deque()
        self._all: set[Job] = set()  # also those that wait for a process
        self._clients: Counter[str] = Counter()
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="desk", daemon=True)
        self._thread.start()

    def begin(self, client: str, begin: Callable[[], Answer]) -> Job:
        """Raises Problem where the client, or all of them, request too much at once."""
        job = Job(client, begin, asyncio.get_running_loop())
        with self._change:
            if self._closed:
                raise Problem("the server is ending", status=503)
            if self._clients[client] >= self._work.at_once:
                raise Problem(
                    f"{self._work.at_once} questions of this client are under way; wait for one",
                    status=429,
                    retry_s=1,
                )
            if sum(self._clients.values()) >= self._work.waiting:
                raise Problem("too many questions are waiting; try again", status=429, retry_s=5)
            self._clients[client] += 1
            self._all.add(job)
            self._new.append(job)
            self._change.notify()
        return job

    def leave(self, job: Job) -> None:
        """Nobody listens any more: the question ends after the point that is being simulated, and
        at once if it was not begun.
        """
        with self._change:
            job.gone = True
            if job in self._new:
                self._new.remove(job)
                self._forget(job)

    def close(self) -> None:
        with self._change:
            self._closed = True
            for job in self._all:
                job.tell(Problem("the server is ending", status=503))
            self._change.notify()
        self._thread.join(5)
        self.rows.close()

    def _run(self) -> None:
        while (job := self._next()) is not None:
            said = self._step(job)
            if isinstance(said, Waiting):
                said.then(lambda job=job: self._again(job))  # type: ignore[misc]
            elif said:
                self._again(job)
            else:
                job.tell(None)
                if job.answer is not None:
                    job.answer.close()
                with self._change:
                    self._forget(job)

    def _forget(self, job: Job) -> None:
        self._all.discard(job)
        self._clients[job.client] -= 1
        self._clients += Counter()  # without zeros

    def _again(self, job: Job) -> None:
        with self._change:
            self._begun.append(job)
            self._change.notify()

    def _next(self) -> Job | None:
        with self._change:
            while not self._new and not self._begun and not self._closed:
                self._change.wait()
            if self._closed:
                return None
            return (self._new or self._begun).popleft()

    def _step(self, job: Job) -> bool | Waiting:
        """Until the next part, or something to wait for; False at the end."""
        if job.gone:
            return False
        began = time.monotonic()
        job.begun_s = job.begun_s or began
        if began - job.begun_s >= self._work.seconds and job.answer is not None:
            job.tell(Problem(f"not done after {self._work.seconds:g} s; request less"))
            return False
        try:
            if job.answer is None:
                job.answer = job.begin()
            said = next(job.answer)
            while isinstance(said, Progress):
                job.tell(_shown(said))
                said = next(job.answer)
            if isinstance(said, Waiting):
                return said
            job.tell(said)
        except StopIteration:
            return False
        except TwinError as error:
            job.tell(Problem(str(error)))
            return False
        except Exception:
            LOG.exception("a question of %s", job.client)
            job.tell(Problem("an error of the server; see its log", status=500))
            return False
        return True


def _shown(said: Progress) -> Part:
    return {"part": "progress", "what": said.what, "done": said.done, "of": said.of}
