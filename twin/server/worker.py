"""The one thread that owns the engine: a bounded queue before it, one request in the kernel."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from twin.engine.generate import Completion, Piece, Request, Stop, complete
from twin.engine.session import Session
from twin.engine.tokenizer import Tokenizer
from twin.errors import TwinError
from twin.server.job import Ended, Failed, Job
from twin.server.problem import Problem

LOG = logging.getLogger("twin.server")
USUAL_S = 1.0  # of a request, before any has ended


class Watcher(Protocol):
    """Hears of every generation that ended, in the worker's thread."""

    def ended(self, job: Job, request: Request, completion: Completion, tokens: int) -> float:
        """Returns what kept tokens saved, in seconds."""
        ...

    def failed(self) -> None: ...


class Worker:
    """Starts with its thread; `close` ends both. Requests are checked before they come here."""

    def __init__(
        self, session: Session, tokenizer: Tokenizer | None, watcher: Watcher, *, waiting: int
    ) -> None:
        self._session, self._tokenizer, self._watcher = session, tokenizer, watcher
        self._most = waiting
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._generating = False  # the kernel works for the running job
        self._changed = threading.Condition()
        self._closing = False
        self._broken = ""  # why the engine does not work, if it does not
        self._moved_s = time.monotonic()  # when the engine last did something
        self._mean_s = USUAL_S
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()

    # ---- from any thread -----------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Raises Problem where the queue is full or the engine cannot serve."""
        with self._changed:
            if self._closing:
                raise Problem("the server is going down; send it to another", status=503)
            # the one that runs is none of those that wait, also before the thread has taken it
            if len(self._queue) + self.running > self._most:
                wait_s = max(1, round(self._mean_s * (len(self._queue) + 1)))
                raise Problem(
                    f"{self._most} requests wait already; try again in about {wait_s} s",
                    status=429,
                    code="queue_full",
                    retry_s=wait_s,
                )
            self._queue.append(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: its place is free at once, also in the kernel."""
        with self._changed:
            job.cancelled = True
            if job in self._queue:
                self._queue.remove(job)
                job.end()
            elif self._running is job and self._generating:
                self._session.cancel()

    def close(self, patience_s: float = 10.0) -> None:
        with self._changed:
            self._closing = True
            for job in self._queue:
                job.put(Failed(Problem("the server is going down", status=503)))
                job.end()
            self._queue.clear()
            if self._running is not None:
                self._running.cancelled = True
                if self._generating:
                    self._session.cancel()
            self._changed.notify()
        self._thread.join(patience_s)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def running(self) -> int:
        return int(self._running is not None)

    def trouble(self, stall_s: float) -> str:
        """Why the engine does not serve; empty when it does."""
        if not self._thread.is_alive():
            return "the engine's thread has ended"
        silent_s = time.monotonic() - self._moved_s
        job = self._running
        # Before the first token the kernel's own watchdog looks: a prompt may take long.
        if job is not None and job.first_s is not None and silent_s > stall_s:
            return f"the engine made nothing for {silent_s:.0f} s"
        return self._broken

    # ---- the thread ----------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._closing:
                    self._changed.wait()
                if self._closing:
                    return
                job = self._running = self._queue.popleft()
                self._moved_s = job.begun_s = time.monotonic()
            try:
                self._run(job)
            finally:
                with self._changed:
                    self._running = None
                job.end()
                self._mean_s += 0.2 * (time.monotonic() - job.begun_s - self._mean_s)

    def _run(self, job: Job) -> None:
        for choice, request in enumerate(job.requests):
            try:
                if not self._generate(job, choice, request):
                    return
            except Problem as problem:  # of the request, which shows on the way
                job.put(Failed(problem))
                return
            except Exception as error:  # whatever one request met, the next one is served
                LOG.exception("a request failed")
                self._watcher.failed()
                said = str(error) if isinstance(error, TwinError) else type(error).__name__
                job.put(Failed(Problem(f"the engine failed: {said}", status=500, code="engine")))
                self._try()
                return

    def _generate(self, job: Job, choice: int, request: Request) -> bool:
        """False: nobody waits for the rest."""
        tokens = 0

        def take(piece: Piece) -> None:
            nonlocal tokens
            tokens += piece.token is not None
            self._moved_s = time.monotonic()
            job.take(choice, piece)
            if job.cancelled:  # perhaps before the engine could hear of it
                self._session.cancel()

        made = self._in_kernel(
            job, partial(complete, self._session, self._tokenizer, request, take)
        )
        if made is not None:
            self._broken = ""
            saved_s = self._watcher.ended(job, request, made, tokens)
            if made.stop is not Stop.CANCELLED:
                job.put(Ended(choice, made, tokens, saved_s))
                return True
        # also between two choices: a client that left reads it no more
        job.put(Failed(Problem("the server is going down", status=503, code="cancelled")))
        return False

    def _in_kernel(self, job: Job, run: Callable[[], Completion]) -> Completion | None:
        """None: the job was cancelled before."""
        with self._changed:
            if job.cancelled:
                return None
            self._generating = True
        try:
            return run()
        finally:
            with self._changed:
                self._generating = False

    def _try(self) -> None:
        """After a failure: does the engine still work? One token of nothing says so."""
        try:
            self._session.generate([0], max_tokens=1)
            self._broken = ""
        except Exception as error:
            self._broken = f"the engine does not work any more ({error}); start the server again"
