"""The simulation clock: simpy's environment with whole picoseconds, and events at a known time.
Loaded where SimPy runs a machine: compiled code does without.
"""

from __future__ import annotations

import simpy
from simpy.events import NORMAL, EventPriority

from twin.sim.clock import in_time


class Clock(simpy.Environment):
    """Events of equal time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> int:
        return super().now  # type: ignore[return-value]  # simpy allows floats; here every delay is an integer

    def schedule(
        self, event: simpy.Event, priority: EventPriority = NORMAL, delay: float = 0
    ) -> None:
        in_time(self.now + delay)  # type: ignore[arg-type]  # here every delay is an integer
        super().schedule(event, priority, delay)

    def trigger(self, event: simpy.Event, at: int) -> None:
        """Let an event happen at a time not before now: whoever waits for it, or will until then,
        waits for a timeout. Event.succeed knows no delay.
        """
        self.timeout(at - self.now).callbacks = event.callbacks
