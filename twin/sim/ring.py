"""The loader of one block: fills the ring in stream order, as far ahead as slots and window
allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twin.sim.clock import SimulationError
from twin.sim.memory import Path

if TYPE_CHECKING:
    import simpy

    from twin.sim.events import Clock

NOWHERE = range(0)
SHARES = 10**6  # a cache's share of the stream is counted in millionths


class Ring:
    """Slots of a block's stream. Weights do not depend on activations, so the stream crosses stage,
    layer and step borders.

    A slot is requested as soon as (a) it is open: its kernel has started, (b) one of `capacity`
    ring slots is free and (c) fewer than `window` are in flight. The consumer frees slots in order.
    """

    __slots__ = (
        "answers",
        "arrivals",
        "cached",
        "capacity",
        "copied",
        "env",
        "first_answer",
        "freed",
        "history",
        "issued",
        "kept",
        "limit",
        "loaded",
        "open_at",
        "pace",
        "paused",
        "per_step",
        "sizes",
        "waiting",
        "warm",
        "wide",
        "wide_window",
        "window",
    )

    env: Clock  # while the machine runs

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        capacity: int,
        window: int,
        memory: Path,
        cached: tuple[Path, float] | None,
        limit: int,
        pace: int = 0,
        wide: range = NOWHERE,
        wide_window: int = 1,
    ) -> None:
        """`cached` serves its share of every step after the first; `limit` is the first slot that
        may not be requested yet; `pace` is the time from one request to the next. `wide`: slots of
        a step for which `wide_window` counts.
        """
        self.sizes = sizes
        self.per_step = len(sizes)
        self.capacity = capacity
        self.window = min(window, capacity)
        self.wide, self.wide_window = wide, min(wide_window, capacity)
        self.loaded = memory
        self.cached, share = cached or (memory, 0.0)
        self.kept = int(share * SHARES)
        self.warm = self.per_step  # first slot of the second step
        self.limit = limit
        self.open_at = 0  # no request before this time
        self.pace = pace
        self.copied = 0  # when the loader is done with its last request
        self.paused = False  # a block without its core requests nothing
        self.issued = 0
        self.freed = 0
        self.arrivals = [0] * capacity  # of slot k at k % capacity
        self.waiting = False  # a wake-up for (c) or open_at is under way
        # ps by which memory answers later or sooner, from `first_answer` on
        self.answers: NDArray[np.int64] | None = None
        self.first_answer = 0
        # (issued, arrived) of each slot, for traces
        self.history: list[tuple[int, int]] | None = None

    def open(self, limit: int, at: int) -> None:
        """Allow slots below `limit`, from `at` on."""
        self.limit = limit
        self.open_at = at
        self.pump()

    def resume(self) -> None:
        """The block has its core again."""
        self.paused = False
        self.pump()

    def pump(self) -> None:
        """Request the next slot if it may be requested now; come back for the one after it.

        One at a time: blocks that start together take turns. With all slots of one block first, the
        last block would get its first slot only after everybody's last, which no arbiter does.
        """
        if self.paused:
            return
        now = self.env.now
        if now < self.open_at:
            if self.issued < self.limit:
                self._wake_at(self.open_at)
            return
        if self.issued < self.limit and self.issued - self.freed < self.capacity:
            earliest = self._window_opens()
            if earliest > now:
                self._wake_at(earliest)
                return
            self._request(now)
            if self.issued < self.limit and self.issued - self.freed < self.capacity:
                self._wake_at(max(now, self._window_opens()))

    def arrival(self) -> int | None:
        """When the slot that the consumer needs next is there; None if it is not even requested."""
        if self.freed == self.issued:
            self.pump()
            if self.freed == self.issued:
                return None
        return self.arrivals[self.freed % self.capacity]

    def wait_ps(self) -> int:
        """Until the next slot can be requested. Raises SimulationError if that is not a matter of
        time.
        """
        wait = max(self.open_at, self.copied) - self.env.now
        if self.paused or wait <= 0 or self.freed >= self.limit:
            raise self.starved()
        return wait

    def starved(self) -> SimulationError:
        return SimulationError(
            f"slot {self.freed} of {self.limit} will never be requested: the plan streams less "
            "than it consumes"
        )

    def free(self) -> None:
        """The consumer is done with its slot."""
        self.freed += 1
        self.pump()

    def path_of(self, number: int, *, warm: bool) -> Path:
        """Where request `number` is served: hits are spread evenly over the requests."""
        hit = warm and (number + 1) * self.kept // SHARES > number * self.kept // SHARES
        return self.cached if hit else self.loaded

    def answered(self, path: Path, now: int, size: int) -> int:
        """Arrival of a slot that is requested now. Memory takes longer for one than for another: a
        block's stream is a random walk, but nothing is there before the slowest pipe has let it
        through.
        """
        arrived = path.request(now, size)
        if self.answers is None or path is not self.loaded:
            return arrived
        answer = int(self.answers[(self.first_answer + self.issued) % len(self.answers)])
        return arrived + max(answer, -path.latency)

    def first_slot(self, step: int) -> int:
        return step * self.per_step

    def kept_bytes(self, step: int) -> int:
        """Of a step's slots, those that a cache serves."""
        if not step or not self.kept:
            return 0
        numbers = np.arange(self.first_slot(step), self.first_slot(step + 1))
        hits = (numbers + 1) * self.kept // SHARES > numbers * self.kept // SHARES
        return int(np.asarray(self._sizes(step), np.int64)[hits].sum())

    def _sizes(self, step: int) -> Sequence[int]:
        return self.sizes

    def finish(self, step: int, stage: int) -> None:
        """The block is done with a stage behind which other slots may be requested: here all may be
        anyway.
        """

    def opened_at(self, step: int, stage: int) -> int:
        """When `stage` of `step` was finished and slots behind it could be requested."""
        return 0

    def consumed_bytes(self) -> int:
        """Bytes of all slots that were freed."""
        steps, slots = divmod(self.freed, max(1, self.per_step))
        return steps * sum(self.sizes) + sum(self.sizes[:slots])

    def in_flight_bytes(self) -> int:
        """Bytes requested and not yet consumed."""
        return sum(self.sizes[slot % self.per_step] for slot in range(self.freed, self.issued))

    def _window_opens(self) -> int:
        """When fewer than `window` slots are in flight, and the loader is done with the request
        before.
        """
        window = self.window
        if self.wide and self.issued % self.per_step in self.wide:
            window = self.wide_window
        if window == self.capacity or self.issued < window:
            return self.copied
        return max(self.copied, self.arrivals[(self.issued - window) % self.capacity])

    def _request(self, now: int) -> None:
        slot = self.issued
        path = self.path_of(slot, warm=slot >= self.warm)
        arrived = self.answered(path, now, self.sizes[slot % self.per_step])
        if slot:  # in order, even when a cache answers sooner than memory did
            before = self.arrivals[(slot - 1) % self.capacity]
            if before > arrived:
                arrived = before
        self.arrivals[slot % self.capacity] = arrived
        self.issued = slot + 1
        if self.pace:
            self.copied = now + self.pace
        if self.history is not None:
            self.history.append((now, arrived))

    def _wake_at(self, time: int) -> None:
        if not self.waiting:
            self.waiting = True
            timeout = self.env.timeout(time - self.env.now)
            assert timeout.callbacks is not None
            timeout.callbacks.append(self._woken)

    def _woken(self, _: simpy.Event) -> None:
        self.waiting = False
        self.pump()
