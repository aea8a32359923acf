"""The simulation clock: simpy's environment with whole picoseconds, and events at a known time."""

from __future__ import annotations

import simpy

from twin.errors import TwinError


class SimulationError(TwinError):
    """The simulated machine cannot go on: a mistake in the plan or in the twin."""


class Clock(simpy.Environment):
    """Events of equal time happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> int:
        return self._now  # type: ignore[return-value]  # simpy allows floats; here every delay is an integer

    def trigger(self, event: simpy.Event, at: int) -> None:
        """Let an event happen at a time not before now."""
        event._ok = True  # what simpy's own Timeout does; Event.succeed knows no delay
        event._value = None
        self.schedule(event, delay=at - self.now)
