"""Publications and who waits for them: one record per value, step, reading rank and wait group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twin.cost.causes import COLLECTIVE
from twin.cost.program import Program, Publication
from twin.cost.wiring import Channel
from twin.sim.links import Links
from twin.sim.place import Binder, Place
from twin.sim.times import Times

if TYPE_CHECKING:
    import simpy

    from twin.sim.events import Clock

NEVER = -1


class Record:
    """Arrivals of one publication at one rank. Knows, once complete, when each die sees it, why,
    and thanks to whom.
    """

    __slots__ = ("arrivals", "events", "local", "pending", "remote", "seen")

    def __init__(self, pending: int, dies: int) -> None:
        self.pending = pending
        # last publication by a block of that die
        self.local: list[tuple[int, Binder | None]] = [(NEVER, None)] * dies
        self.remote: tuple[int, Binder | None] = (NEVER, None)
        # at a counter: (time, sequence, remote, who)
        self.arrivals: list[tuple[int, int, bool, Binder]] = []
        self.seen: list[tuple[int, int, Binder]] | None = None  # per die: (time, cause, who)
        self.events: dict[int, simpy.Event] = {}


class HandOffs:
    """All records of the machine."""

    env: Clock  # while the machine runs

    def __init__(self, program: Program, times: Times, dies: int, links: Links | None) -> None:
        plan = program.plan
        self.program = program
        self.times = times
        self.dies = dies
        self.links = links
        self.gpu_of = [plan.gpu_of_rank(rank) for rank in range(plan.ranks)]
        self.records: list[dict[tuple[int, int], Record]] = [{} for _ in range(plan.ranks)]

    def record(self, rank: int, step: int, channel: int) -> Record:
        key = (step, channel)
        records = self.records[rank]
        found = records.get(key)
        if found is None:
            found = records[key] = Record(self.program.channels[channel].arrivals, self.dies)
        return found

    def publish(self, place: Place, step: int, stage: int, publication: Publication) -> int:
        """Make a block's elements known everywhere; the last arrival of its pushed data."""
        now = self.env.now
        binder = (place.number, stage, now)
        stored = now
        for pipe in place.exchange:
            through = pipe.share(now, publication.size)
            if through > stored:
                stored = through
        if place.slice is not None:
            stored += place.slice.crowding()
        late = stored + place.package.queueing(now)
        wires = self.program.wiring.blocks[place.index][stage]
        for channel in wires.own:
            self._arrive(place.rank, step, channel, place.die, late, binder)
        return (
            self._push(place, step, publication.size, wires.others, stored, late, binder)
            if publication.pushed
            else stored
        )

    def wait(self, place: Place, step: int, channel: int) -> tuple[Record, simpy.Event | None]:
        """The record, and what to yield until the block's die sees it; None if it already does."""
        record = self.record(place.rank, step, channel)
        now = self.env.now
        if record.seen is not None:
            delay = record.seen[place.die][0] - now
            return record, (self.env.timeout(delay) if delay > 0 else None)
        event = record.events.get(place.die)
        if event is None:
            event = record.events[place.die] = self.env.event()
        return record, event

    def _push(
        self,
        place: Place,
        step: int,
        size: int,
        channels: tuple[int, ...],
        stored: int,
        late: int,
        binder: Binder,
    ) -> int:
        """`late`: when a store inside this GPU is as good as `stored` without a load."""
        links = self.links
        last = stored
        source = self.gpu_of[place.rank]
        for rank, target in enumerate(self.gpu_of):
            if rank == place.rank:
                continue
            if target == source:
                for channel in channels:
                    self._arrive(rank, step, channel, place.die, late, binder)
                continue
            assert links is not None  # the machine refuses a plan of several GPUs without links
            arrival = links.send(source, target, stored, size)
            last = max(last, arrival)
            for channel in channels:
                self._arrive_remote(rank, step, channel, arrival, binder)
        return last

    def _arrive(
        self, rank: int, step: int, channel: int, die: int, time: int, binder: Binder
    ) -> None:
        record = self.record(rank, step, channel)
        if self.program.channels[channel].counted:
            travel = self.times.hop + self.times.cross
            record.arrivals.append((time + travel, len(record.arrivals), False, binder))
        elif time > record.local[die][0]:
            record.local[die] = (time, binder)
        self._count(record, channel)

    def _arrive_remote(self, rank: int, step: int, channel: int, time: int, binder: Binder) -> None:
        record = self.record(rank, step, channel)
        if self.program.channels[channel].counted:
            record.arrivals.append((time, len(record.arrivals), True, binder))
        elif time > record.remote[0]:
            record.remote = (time, binder)
        self._count(record, channel)

    def _count(self, record: Record, channel: int) -> None:
        record.pending -= 1
        if record.pending == 0:
            self._complete(record, self.program.channels[channel])

    def _complete(self, record: Record, channel: Channel) -> None:
        record.seen = (
            self._counted(record, channel) if channel.counted else self._seen(record, channel)
        )
        for die, event in record.events.items():
            self.env.trigger(event, record.seen[die][0])

    def _seen(self, record: Record, channel: Channel) -> list[tuple[int, int, Binder]]:
        """Sentinel: when the last needed element reaches each die."""
        times = self.times
        poll = times.near_poll if channel.near else times.poll
        seen = []
        remote, last = record.remote
        if last is not None and self.links is not None:
            remote += self.links.spread_of(channel.sectors)
        for die in range(self.dies):
            best, cause, who = remote, COLLECTIVE, last
            for producer, (time, binder) in enumerate(record.local):
                if time == NEVER:
                    continue
                cross = times.cross if producer != die else 0
                if channel.near:
                    cross = times.crossings[producer][die]
                arrival = time + times.hop + cross
                if arrival > best:
                    best, cause, who = arrival, channel.cause, binder
            assert who is not None
            seen.append((best + poll, cause, who))
        return seen

    def _counted(self, record: Record, channel: Channel) -> list[tuple[int, int, Binder]]:
        """Counter: arrivals are served one after the other; all dies see it complete at once."""
        free = 0
        record.arrivals.sort(key=lambda arrival: arrival[:2])
        for time, _, _, _ in record.arrivals:
            free = max(free, time) + self.times.atomic
        _, _, remote, who = record.arrivals[-1]
        visible = free + self.times.hop + self.times.cross + self.times.poll
        return [(visible, COLLECTIVE if remote else channel.cause, who)] * self.dies
