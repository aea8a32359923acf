"""Where blocks wait for each other without data: kernel borders and full barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twin.cost.causes import COLLECTIVE, HAND_OFF
from twin.sim.handoff import NEVER, HandOffs
from twin.sim.place import Binder, Place

if TYPE_CHECKING:
    import simpy

    from twin.sim.events import Clock


class Border:
    """Between two kernels: all blocks of a GPU (of all, before a library collective) have finished,
    then a launch.
    """

    def __init__(self, env: Clock, blocks: int, launch: int) -> None:
        self.env = env
        self.pending = blocks
        self.launch = launch
        self.event = env.event()
        self.binder: Binder | None = None

    def arrive(self, place: Place, stage: int) -> simpy.Event:
        self.pending -= 1
        if self.pending == 0:
            self.binder = (place.number, stage - 1, self.env.now)
            self.env.trigger(self.event, self.env.now + self.launch)
        return self.event


class Barrier:
    """Every block of a rank waits for all of them, and for all ranks when the stage pushed: one
    counter per rank, whose completion the other GPUs learn by one store each.
    """

    def __init__(self, handoffs: HandOffs, *, across: bool) -> None:
        plan = handoffs.program.plan
        self.handoffs = handoffs
        self.across = across
        self.blocks = plan.blocks
        self.arrivals: list[list[tuple[int, Binder]]] = [[] for _ in range(plan.ranks)]
        self.data: list[int] = [0] * plan.ranks  # last arrival of each rank's pushed data
        self.complete: list[tuple[int, Binder] | None] = [None] * plan.ranks
        self.events = [handoffs.env.event() for _ in range(plan.ranks)]
        self.cause: list[tuple[int, Binder] | None] = [None] * plan.ranks

    def arrive(self, place: Place, stage: int, data: int) -> None:
        rank, now, times = place.rank, self.handoffs.env.now, self.handoffs.times
        self.data[rank] = max(self.data[rank], data)
        self.arrivals[rank].append((now + place.package.queueing(now), (place.number, stage, now)))
        if len(self.arrivals[rank]) < self.blocks:
            return
        free = 0
        for time, _ in sorted(self.arrivals[rank], key=lambda arrival: arrival[0]):
            free = max(free, time + times.hop + times.cross) + times.atomic
        self.complete[rank] = (free, self.arrivals[rank][-1][1])
        polled = place.package.queueing(now)  # that all have arrived is a hand-off of its own
        if not self.across:
            self._release(rank, [rank], polled)
        elif all(done is not None for done in self.complete):
            for reader in range(len(self.complete)):
                self._release(reader, list(range(len(self.complete))), polled)

    def _release(self, reader: int, ranks: list[int], polled: int) -> None:
        times, gpu_of, links = self.handoffs.times, self.handoffs.gpu_of, self.handoffs.links
        last, cause, binder = NEVER, HAND_OFF, None
        for rank in ranks:
            done = self.complete[rank]
            assert done is not None
            time, who = done
            if gpu_of[rank] == gpu_of[reader] or links is None:
                seen, why = time + times.hop + times.cross + polled, HAND_OFF
            else:
                hop = links.hop_between(gpu_of[rank], gpu_of[reader], self.handoffs.env.now)
                seen, why = max(time + hop, self.data[rank]), COLLECTIVE
            if seen > last:
                last, cause, binder = seen, why, who
        assert binder is not None
        self.cause[reader] = (cause, binder)
        self.handoffs.env.trigger(self.events[reader], last + times.poll)


class Meetings:
    """All borders and barriers of the machine, each made by whoever comes first."""

    def __init__(self, handoffs: HandOffs) -> None:
        self.handoffs = handoffs
        self.plan = handoffs.program.plan
        self.borders: dict[tuple[int, int, int], Border] = {}
        self.barriers: dict[tuple[int, int], Barrier] = {}

    def border(self, place: Place, step: int, stage: int, launch: int, *, library: bool) -> Border:
        """All GPUs meet before a library collective; else each for itself."""
        key = (step, stage, -1 if library else place.gpu)
        if key not in self.borders:
            options = self.plan.options
            self.borders[key] = Border(
                self.handoffs.env, options.blocks * (options.gpus if library else 1), launch
            )
        return self.borders[key]

    def barrier(self, step: int, stage: int) -> Barrier:
        key = (step, stage)
        if key not in self.barriers:
            published = self.plan.stages[stage].publishes
            across = (
                published is not None and self.plan.values[published].pushed and self.plan.ranks > 1
            )
            self.barriers[key] = Barrier(self.handoffs, across=across)
        return self.barriers[key]
