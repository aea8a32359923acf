"""A core that several blocks share."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import simpy

    from twin.sim.events import Clock


class Core:
    """One block runs at a time, first come first served. Blocks are known by their numbers."""

    env: Clock  # while the machine runs

    def __init__(self, switch: int) -> None:
        self.switch = switch  # ps
        self.queue: deque[simpy.Event] = deque()
        self.running: int | None = None
        self.last: int | None = None

    def acquire(self, block: int) -> Generator[simpy.Event, Any, None]:
        if self.running is not None or self.queue:
            turn = self.env.event()
            self.queue.append(turn)
            yield turn
        self.running = block
        if self.last is not None and self.last != block and self.switch:
            yield self.env.timeout(self.switch)
        self.last = block

    def release(self) -> None:
        self.running = None
        if self.queue:
            self.running = self.last  # taken: the next in line runs before any newcomer
            self.queue.popleft().succeed()
