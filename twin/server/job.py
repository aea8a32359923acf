"""A request's way through the engine: what goes in, and what the event loop gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from twin.engine.generate import Completion, Piece, Request
from twin.engine.logprobs import Scored
from twin.server.problem import Problem


@dataclass(frozen=True, slots=True)
class Text:
    """What a choice said since the last one."""

    choice: int
    text: str
    tokens: int
    scored: tuple[Scored, ...] = ()  # of these tokens, where they were requested


@dataclass(frozen=True, slots=True)
class Ended:
    """A choice's end. `tokens` counts up to the stop text, not what the engine made beyond it."""

    choice: int
    completion: Completion
    tokens: int
    saved_s: float  # what kept tokens saved, about


@dataclass(frozen=True, slots=True)
class Failed:
    problem: Problem


Event = Text | Ended | Failed


@dataclass(eq=False, slots=True)
class Job:
    """All generations of one HTTP request in turn. The worker writes, one coroutine reads."""

    requests: Sequence[Request]
    loop: asyncio.AbstractEventLoop
    cancelled: bool = False
    born_s: float = field(default_factory=time.monotonic)
    begun_s: float | None = None
    first_s: float | None = None  # when the first token came
    ended_s: float | None = None
    _events: deque[Event | None] = field(default_factory=deque)  # None: no more of them
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _woken: bool = False  # the loop knows already that there is something to read
    _next_s: float = 0.0  # by the loop's clock: before, only the end is read

    # ---- the worker's side ----------------------------------------------------------------------

    def take(self, choice: int, piece: Piece) -> None:
        if self.first_s is None:
            self.first_s = time.monotonic()
        found = () if piece.scored is None else (piece.scored,)
        self.put(Text(choice, piece.text, int(piece.token is not None), found))

    def put(self, event: Event | None) -> None:
        self._events.append(event)
        if not self._woken:
            self._woken = True
            self._tell(self._wake)

    def end(self) -> None:
        self.ended_s = time.monotonic()
        self.put(None)
        self._tell(self._ready.set)

    def _tell(self, what: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(what)

    # ---- the event loop's side -----------------------------------------------------------------

    def _wake(self) -> None:
        """By a timer: a wait that times out cancels its task, which takes longer."""
        left_s = self._next_s - self.loop.time()
        if left_s > 0:
            self.loop.call_later(left_s, self._ready.set)
        else:
            self._ready.set()

    async def batches(self, gap_s: float, ping_s: float) -> AsyncIterator[list[Event]]:
        """What came since, at most every `gap_s`; an empty batch after `ping_s` of silence. The end
        waits for no gap: 8 ms are 3 % of an answer that takes a quarter of a second.
        """
        while True:
            try:
                async with asyncio.timeout(ping_s):
                    await self._ready.wait()
            except TimeoutError:
                yield []
                continue
            self._ready.clear()
            self._woken = False  # before the events are taken: what comes later wakes again
            batch = [self._events.popleft() for _ in range(len(self._events))]
            if there := [event for event in batch if event is not None]:
                yield there
            if None in batch:
                return
            self._next_s = self.loop.time() + gap_s

    @property
    def age_s(self) -> float:
        return (self.ended_s or time.monotonic()) - self.born_s

    @property
    def queued_s(self) -> float:
        return (self.begun_s or time.monotonic()) - self.born_s
