"""The loader of a block whose stream holds experts: their weights cannot be requested before the
routing is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from twin.cost.program import StageWork
from twin.sim.memory import Path
from twin.sim.ring import Ring

Gate = tuple[int, int]  # (step, stage that the block must have finished)
KNOWN: Gate = (-1, -1)


class Stream:
    """The slots of a block for several steps, and behind which gates they lie. Ranks that do the
    same share one.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Sequence[StageWork], Sequence[int]]],
        gates: Sequence[int | None],
    ) -> None:
        """`steps[step]`: works and slot sizes, of one step more than the block walks.
        `gates[stage]`: behind which stage's end its weights are known.
        """
        self.first = steps[0][1]  # sizes of the first step
        # first slot of each step
        self.starts = list(accumulate((len(sizes) for _, sizes in steps), initial=0))
        self.slots = [size for _, sizes in steps for size in sizes]  # bytes
        self.bounds: list[int] = []  # where stretches of slots with one gate end
        self.gates: list[Gate] = []  # of each stretch
        for step, (works, _) in enumerate(steps):
            self._add_runs(step, works, gates)

    def _add_runs(self, step: int, works: Sequence[StageWork], gates: Sequence[int | None]) -> None:
        end = self.starts[step]
        for work, behind in zip(works, gates, strict=True):
            if not work.slots:
                continue
            end += len(work.slots)
            gate = KNOWN if behind is None else (step, behind)
            if self.gates and self.gates[-1] == gate:
                self.bounds[-1] = end
            else:
                self.bounds.append(end)
                self.gates.append(gate)


class GatedRing(Ring):
    """A ring whose slots keep the order of consumption, but need not be requested in it.

    The next request is the first slot of all whose gate is open. While the gate of an earlier slot
    is closed, at most `ahead` slots behind it may hold or await weights: the ring keeps room for
    those that are consumed before them.
    """

    __slots__ = (
        "ahead",
        "beyond",
        "bounds",
        "finished",
        "gates",
        "head",
        "order",
        "slots",
        "starts",
        "stretch",
        "there",
    )

    def __init__(
        self,
        stream: Stream,
        *,
        ahead: int,
        capacity: int,
        window: int,
        memory: Path,
        cached: tuple[Path, float] | None,
        open_from_start: bool,
        pace: int,
    ) -> None:
        """`open_from_start`: no border opens the stream."""
        super().__init__(
            stream.first,
            capacity=capacity,
            window=window,
            memory=memory,
            cached=cached,
            limit=0,
            pace=pace,
        )
        self.starts, self.slots, self.bounds, self.gates = (
            stream.starts,
            stream.slots,
            stream.bounds,
            stream.gates,
        )
        self.warm = self.starts[1]
        self.limit = self.starts[-1] if open_from_start else 0
        self.ahead = ahead
        self.finished: dict[Gate, int] = {KNOWN: 0}  # open gates, and since when
        self.head = 0  # the first slot that is not requested
        self.stretch = 0  # and its stretch
        self.beyond: set[int] = set()  # requested slots behind it
        self.there: dict[int, int] = {}  # arrivals of requested slots that are not freed
        self.order: list[int] = []  # arrivals in the order of requests

    def first_slot(self, step: int) -> int:
        return self.starts[step]

    def _sizes(self, step: int) -> Sequence[int]:
        return self.slots[self.starts[step] : self.starts[step + 1]]

    def finish(self, step: int, stage: int) -> None:
        self.finished[step, stage] = self.env.now
        self.pump()

    def opened_at(self, step: int, stage: int) -> int:
        return self.finished[step, stage]

    def pump(self) -> None:
        """As in a plain ring, but for the choice of the slot."""
        slot = None if self.paused else self._next()
        if slot is None:
            return
        now = self.env.now
        earliest = max(self.open_at, self._window_opens())
        if earliest > now:
            self._wake_at(earliest)
            return
        self._take(slot, now)
        if self._next() is not None:
            self._wake_at(max(now, self._window_opens()))

    def arrival(self) -> int | None:
        if self.freed not in self.there:
            self.pump()
        return self.there.get(self.freed)

    def wait_ps(self) -> int:
        wait = max(self.open_at, self._window_opens()) - self.env.now
        if self.paused or wait <= 0 or self.freed >= self.limit:
            raise self.starved()
        return wait

    def free(self) -> None:
        del self.there[self.freed]
        self.freed += 1
        self.pump()

    def in_flight_bytes(self) -> int:
        return sum(self.slots[slot] for slot in self.there)

    def consumed_bytes(self) -> int:
        return sum(self.slots[: self.freed])

    def _next(self) -> int | None:
        """The slot to request next, if there is one and a place for it."""
        if self.issued - self.freed >= self.capacity or self.head >= self.limit:
            return None
        if self.gates[self.stretch] in self.finished:
            return self.head
        if len(self.beyond) >= self.ahead:
            return None
        for stretch in range(self.stretch + 1, len(self.gates)):
            if self.gates[stretch] not in self.finished:
                continue
            for slot in range(self.bounds[stretch - 1], min(self.bounds[stretch], self.limit)):
                if slot not in self.beyond:
                    return slot
            if self.bounds[stretch] >= self.limit:
                break
        return None

    def _take(self, slot: int, now: int) -> None:
        path = self.path_of(slot, warm=slot >= self.warm)
        arrived = self.answered(path, now, self.slots[slot])
        # in the order of requests, even when a cache answers sooner
        if self.order and self.order[-1] > arrived:
            arrived = self.order[-1]
        self.order.append(arrived)
        self.there[slot] = arrived
        self.issued += 1
        self.beyond.add(slot)
        while self.head in self.beyond:
            self.beyond.remove(self.head)
            self.head += 1
        while self.stretch < len(self.bounds) and self.bounds[self.stretch] <= self.head:
            self.stretch += 1
        if self.pace:
            self.copied = now + self.pace
        if self.history is not None:
            self.history.append((now, arrived))

    def _window_opens(self) -> int:
        if self.window == self.capacity or self.issued < self.window:
            return self.copied
        return max(self.copied, self.order[self.issued - self.window])
