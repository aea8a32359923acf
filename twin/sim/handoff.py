"""Publications and who waits for them: one record per value, step, reading rank and wait group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import simpy

from twin.hardware.types import QUEUE_S, Device, Number
from twin.sim.causes import COLLECTIVE, HAND_OFF
from twin.sim.clock import Clock, in_time
from twin.sim.links import Links
from twin.sim.memory import Package
from twin.sim.program import Program, Publication
from twin.sim.wiring import Channel
from twin.units import picoseconds

if TYPE_CHECKING:
    from twin.sim.block import Block

Binder = tuple["Block", int, int]  # who published last, in which stage, when
NEVER = -1
QUEUE = picoseconds(QUEUE_S)


class Timing:
    """Delays of the hand-off inside one package, in picoseconds."""

    __slots__ = ("atomic", "cross", "dies", "fetch_growth", "growth", "hop", "load", "poll")

    def __init__(self, device: Device) -> None:
        self.dies = int(device.structure.dies.value)
        self.hop = picoseconds(device.handoff.hop_s.value)
        self.cross = picoseconds(device.handoff.cross_die_s.value) if self.dies > 1 else 0
        self.atomic = picoseconds(device.handoff.atomic_s.value)
        self.poll = picoseconds(device.handoff.poll_s.value) // 2  # found half a period late, on average
        self.growth = _growth(device.handoff.hop_s, device.handoff.loaded_hop_s)
        self.fetch_growth = _growth(device.l2.latency_s, device.l2.loaded_latency_s)
        self.load = picoseconds(device.exchange.latency_s.value) if device.warps else 0  # the least that a look at exchanged elements takes

    def queueing(self, package: Package, now: int) -> int:
        """What a hand-off loses to the stream: its store and its polls wait among the bytes in flight (Little's law)."""
        return in_time(self.growth * package.queue(now) // QUEUE) if self.growth else 0

    def fencing(self, package: Package, now: int) -> int:
        """What a fence loses to the stream: the block's stores go there, and their answers come back."""
        return 2 * self.queueing(package, now)

    def fetching(self, package: Package, now: int) -> int:
        """What a load that somebody waits for loses to the stream."""
        return in_time(self.fetch_growth * package.queue(now) // QUEUE) if self.fetch_growth else 0

    def reading(self, package: Package, now: int) -> int:
        """What a load from memory loses to the stream: it comes behind all that is in flight."""
        return in_time(package.queue(now)) if self.fetch_growth else 0


def _growth(idle: Number, loaded: Number | None) -> int:
    """Of a time behind QUEUE of the stream."""
    return max(0, picoseconds(loaded.value) - picoseconds(idle.value)) if loaded else 0


class Record:
    """Arrivals of one publication at one rank. Knows, once complete, when each die sees it, why, and thanks to whom."""

    __slots__ = ("arrivals", "events", "local", "pending", "remote", "seen")

    def __init__(self, pending: int, dies: int) -> None:
        self.pending = pending
        self.local: list[tuple[int, Binder | None]] = [(NEVER, None)] * dies  # last publication by a block of that die
        self.remote: tuple[int, Binder | None] = (NEVER, None)
        self.arrivals: list[tuple[int, int, bool, Binder]] = []  # at a counter: (time, sequence, remote, who)
        self.seen: list[tuple[int, int, Binder]] | None = None  # per die: (time, cause, who)
        self.events: dict[int, simpy.Event] = {}


class HandOffs:
    """All records of the machine."""

    def __init__(self, env: Clock, program: Program, timing: Timing, links: Links | None) -> None:
        plan = program.plan
        self.env = env
        self.program = program
        self.timing = timing
        self.links = links
        self.gpu_of = [plan.gpu_of_rank(rank) for rank in range(plan.ranks)]
        self.records: list[dict[tuple[int, int], Record]] = [{} for _ in range(plan.ranks)]

    def record(self, rank: int, step: int, channel: int) -> Record:
        key = (step, channel)
        records = self.records[rank]
        found = records.get(key)
        if found is None:
            found = records[key] = Record(self.program.channels[channel].arrivals, self.timing.dies)
        return found

    def publish(self, block: Block, step: int, stage: int, publication: Publication) -> int:
        """Make a block's elements known everywhere; the last arrival of its pushed data."""
        now = self.env.now
        binder = (block, stage, now)
        stored = now
        for pipe in block.exchange:
            through = pipe.share(now, publication.size)
            if through > stored:
                stored = through
        late = stored + self.timing.queueing(block.package, now)
        for channel in publication.own:
            self._arrive(block.rank, step, channel, block.die, late, binder)
        return self._push(block, step, publication, stored, late, binder) if publication.pushed else stored

    def wait(self, block: Block, step: int, channel: int) -> tuple[Record, simpy.Event | None]:
        """The record, and what to yield until the block's die sees it; None if it already does."""
        record = self.record(block.rank, step, channel)
        now = self.env.now
        if record.seen is not None:
            delay = record.seen[block.die][0] - now
            return record, (self.env.timeout(delay) if delay > 0 else None)
        event = record.events.get(block.die)
        if event is None:
            event = record.events[block.die] = self.env.event()
        return record, event

    def _push(self, block: Block, step: int, publication: Publication, stored: int, late: int, binder: Binder) -> int:
        """`late`: when a store inside this GPU is as good as `stored` without a load."""
        links = self.links
        last = stored
        source = self.gpu_of[block.rank]
        for rank, target in enumerate(self.gpu_of):
            if rank == block.rank:
                continue
            if target == source:
                for channel in publication.others:
                    self._arrive(rank, step, channel, block.die, late, binder)
                continue
            assert links is not None  # the machine refuses a plan of several GPUs without links
            arrival = links.send(source, target, stored, publication.size)
            last = max(last, arrival)
            for channel in publication.others:
                self._arrive_remote(rank, step, channel, arrival, binder)
        return last

    def _arrive(self, rank: int, step: int, channel: int, die: int, time: int, binder: Binder) -> None:
        record = self.record(rank, step, channel)
        if self.program.channels[channel].counted:
            travel = self.timing.hop + self.timing.cross
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
        record.seen = self._counted(record, channel) if channel.counted else self._seen(record, channel)
        for die, event in record.events.items():
            self.env.trigger(event, record.seen[die][0])

    def _seen(self, record: Record, channel: Channel) -> list[tuple[int, int, Binder]]:
        """Sentinel: when the last needed element reaches each die."""
        timing = self.timing
        seen = []
        for die in range(timing.dies):
            best, cause, who = record.remote[0], COLLECTIVE, record.remote[1]
            for producer, (time, binder) in enumerate(record.local):
                if time == NEVER:
                    continue
                arrival = time + timing.hop + (timing.cross if producer != die else 0)
                if arrival > best:
                    best, cause, who = arrival, channel.cause, binder
            assert who is not None
            seen.append((best + timing.poll, cause, who))
        return seen

    def _counted(self, record: Record, channel: Channel) -> list[tuple[int, int, Binder]]:
        """Counter: arrivals are served one after the other; all dies see it complete at once."""
        free = 0
        record.arrivals.sort(key=lambda arrival: arrival[:2])
        for time, _, _, _ in record.arrivals:
            free = max(free, time) + self.timing.atomic
        _, _, remote, who = record.arrivals[-1]
        visible = free + self.timing.hop + self.timing.cross + self.timing.poll
        return [(visible, COLLECTIVE if remote else channel.cause, who)] * self.timing.dies


class Barrier:
    """Every block of a rank waits for all of them, and for all ranks when the stage pushed: one counter per rank,
    whose completion is told to the other GPUs by one store each."""

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

    def arrive(self, block: Block, stage: int, data: int) -> None:
        rank, now, timing = block.rank, self.handoffs.env.now, self.handoffs.timing
        self.data[rank] = max(self.data[rank], data)
        self.arrivals[rank].append((now + timing.queueing(block.package, now), (block, stage, now)))
        if len(self.arrivals[rank]) < self.blocks:
            return
        free = 0
        for time, _ in sorted(self.arrivals[rank], key=lambda arrival: arrival[0]):
            free = max(free, time + timing.hop + timing.cross) + timing.atomic
        self.complete[rank] = (free, self.arrivals[rank][-1][1])
        polled = timing.queueing(block.package, now)  # that all have arrived is a hand-off of its own
        if not self.across:
            self._release(rank, [rank], polled)
        elif all(done is not None for done in self.complete):
            for reader in range(len(self.complete)):
                self._release(reader, list(range(len(self.complete))), polled)

    def _release(self, reader: int, ranks: list[int], polled: int) -> None:
        timing, gpu_of, links = self.handoffs.timing, self.handoffs.gpu_of, self.handoffs.links
        last, cause, binder = NEVER, HAND_OFF, None
        for rank in ranks:
            done = self.complete[rank]
            assert done is not None
            time, who = done
            if gpu_of[rank] == gpu_of[reader] or links is None:
                seen, why = time + timing.hop + timing.cross + polled, HAND_OFF
            else:
                hop = links.hop_between(gpu_of[rank], gpu_of[reader], self.handoffs.env.now)
                seen, why = max(time + hop, self.data[rank]), COLLECTIVE
            if seen > last:
                last, cause, binder = seen, why, who
        assert binder is not None
        self.cause[reader] = (cause, binder)
        self.handoffs.env.trigger(self.events[reader], last + timing.poll)
