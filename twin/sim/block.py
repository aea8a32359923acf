"""One resident block: its consumer walks the plan, its loader (the ring) runs ahead of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from twin.cost.causes import (
    ATTENTION,
    COLLECTIVE,
    CONSUMER,
    HAND_OFF,
    LAUNCH,
    OTHER,
    ROUTING,
    SAMPLING,
    STREAMING,
)
from twin.cost.program import Program, ReadWork, StageWork
from twin.cost.wiring import BlockWires
from twin.frozen import frozen
from twin.plan.catalogue import StageKind
from twin.sim.clock import in_time
from twin.sim.core import Core
from twin.sim.handoff import HandOffs
from twin.sim.meetings import Meetings
from twin.sim.place import Binder, Place
from twin.sim.ring import Ring
from twin.sim.slices import polled_bytes
from twin.sim.times import Times

if TYPE_CHECKING:
    import simpy

    from twin.sim.events import Clock

Process: TypeAlias = "Generator[simpy.Event, Any, None]"
# returns the block's own clock, which may run ahead of the machine's
Timed: TypeAlias = "Generator[simpy.Event, Any, int]"
# (end, cause, whom it waited for); starts where the one before it ends
Segment = tuple[int, int, Binder | None]


@frozen
class Shared:
    """What all blocks of a machine use and none owns."""

    program: Program
    handoffs: HandOffs
    meetings: Meetings
    steps: int
    kept_from: int  # the first step whose log is needed
    gates: frozenset[int]  # stages behind which slots may be requested
    has_schedulers: bool  # schedulers sum late parts
    on_demand: bool  # the cores load what they need when they need it
    times: Times
    library: int  # ps
    far_fence: int  # ps, of all GPUs
    further: int  # ps of a block that pushes, for all ranks beyond the other one of two


class SchedulerWarp:
    """A warp of a block that sums late parts next to its consumers, in the order of the plan."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.queue: deque[tuple[int, int, StageWork, list[Segment]]] = deque()
        self.idle: simpy.Event | None = None
        self.due = 0
        self.done = 0
        self.last: Binder = (block.place.number, 0, 0)  # what it made last
        self.waiting: tuple[int, simpy.Event] | None = None  # the block, until so many are done

    def begin(
        self, step: int, works: Sequence[tuple[int, StageWork]], logs: Sequence[list[Segment]]
    ) -> None:
        """`works` and the places of their stages."""
        self.queue += [
            (step, index, work, log) for (index, work), log in zip(works, logs, strict=True)
        ]
        self.due += len(works)
        if self.idle is not None:
            self.block.env.trigger(self.idle, self.block.env.now)
            self.idle = None

    def run(self) -> Process:
        env, block = self.block.env, self.block
        while True:
            if not self.queue:
                self.idle = env.event()
                yield self.idle
            step, index, work, log = self.queue.popleft()
            log.append((env.now, OTHER, None))  # where its time begins
            for read, channel in zip(work.reads, block.wires[index].reads, strict=True):
                yield from block._read(step, read, channel, log)
            clock = env.now + work.fixed_ps
            log.append((clock, work.fixed_cause, None))
            if clock > env.now:
                yield env.timeout(clock - env.now)
            if work.publication is not None:
                block.shared.handoffs.publish(block.place, step, index, work.publication)
            self.done += 1
            self.last = (block.place.number, index, env.now)
            if self.waiting is not None and self.done >= self.waiting[0]:
                env.trigger(self.waiting[1], env.now)
                self.waiting = None

    def until(self, count: int, log: list[Segment]) -> Process:
        """The block publishes only when the sums of the stages before are made."""
        if self.done < count:
            self.waiting = count, self.block.env.event()
            yield self.waiting[1]
            log.append((self.block.env.now, HAND_OFF, self.last))


class Block:
    """State of one block, and its log: per step and stage, how its time was spent."""

    env: Clock  # while the machine runs

    def __init__(self, place: Place, shared: Shared, ring: Ring, core: Core | None) -> None:
        self.place = place
        self.shared = shared
        self.ring = ring
        self.core = core
        self.scheduler = SchedulerWarp(self) if shared.has_schedulers else None
        # logs of the sums that the scheduler had to make in this step
        self.sums: deque[list[Segment]] = deque()
        # [step][stage]; only the steps that the machine keeps
        self.log: Sequence[Sequence[Sequence[Segment]]] = []
        self.ended: list[int] = []  # ps, per step
        self.consumed = 0  # bytes of cached keys and values

    def consumed_bytes(self) -> int:
        """Weights, and caches read and written, since the start."""
        return self.consumed + self.ring.consumed_bytes()

    def kept_bytes(self, step: int) -> int:
        """What a cache serves of a step: of its weights, and of its cached keys and values."""
        if not step or not self.ring.kept:
            return 0
        requests = (request for work in self.works(step) for request in enumerate(work.kv))
        served = sum(
            size
            for number, (size, _) in requests
            if self.ring.path_of(number, warm=True) is self.ring.cached
        )
        return self.ring.kept_bytes(step) + served

    def works(self, step: int) -> tuple[StageWork, ...]:
        return self.shared.program.variant(step, self.place.rank).stages[self.place.index]

    @property
    def wires(self) -> list[BlockWires]:
        """[stage]"""
        return self.shared.program.wiring.blocks[self.place.index]

    def last_slot(self, step: int, index: int) -> int:
        """Slots up to and including a stage."""
        return (
            self.ring.first_slot(step)
            + self.shared.program.variant(step, self.place.rank).ends[self.place.index][index]
        )

    @property
    def program(self) -> tuple[StageWork, ...]:
        """The works of the first step."""
        return self.works(0)

    def run(self) -> Process:
        log: list[list[list[Segment]]] = []
        self.log = log
        segments: list[Segment] = []
        # its first turn on a shared core belongs to the first stage
        yield from self._resume(segments)
        for step in range(self.shared.steps):
            stages: list[list[Segment]] = []
            for index, work in enumerate(self.works(step)):
                if work.by_scheduler:
                    stages.append(self.sums.popleft())
                    continue
                yield from self._stage(step, index, work, segments)
                stages.append(segments)
                segments = []
            self.ended.append(self.env.now)
            log.append(stages if step >= self.shared.kept_from else [])
        self._suspend()

    # ---- one stage -------------------------------------------------------------------------------

    def _stage(self, step: int, index: int, work: StageWork, log: list[Segment]) -> Process:
        if self.shared.program.borders:
            yield from self._border(step, index, work, log)
        entered = self.env.now
        yield from self._take(work, log)
        for read, channel in zip(work.reads, self.wires[index].reads, strict=True):
            if step or not read.previous_step:
                yield from self._read(step - read.previous_step, read, channel, log)
        owed = self._ask(step, index, work)
        clock = self.env.now + work.fixed_ps
        log.append((clock, work.fixed_cause, None))
        if work.kind is StageKind.EMBED:  # the token's row is a memory access that nothing can hide
            clock += self.shared.times.memory + self.place.start
            log.append((clock, OTHER, None))
        if work.library:
            clock += self.shared.library
            log.append((clock, COLLECTIVE, None))
        if work.slots:
            if self.shared.on_demand:
                self.ring.open(self.last_slot(step, index), clock)
            clock = yield from self._consume(step, index, clock, work, log)
        if work.kv:
            clock = yield from self._attend(step, entered, clock, work, log)
        if work.sample_ps:
            clock += work.sample_ps
            log.append((clock, SAMPLING, None))
        if work.publication is not None and work.publication.pushed and self.shared.further:
            clock += self.shared.further
            log.append((clock, COLLECTIVE, None))
        if clock > self.env.now:
            yield self.env.timeout(clock - self.env.now)
        # behind the work: what is in flight then is what the fence waits among
        fence = work.fence_ps + work.far_fences * self.shared.far_fence
        if fence:
            fence += self.place.package.fencing(self.env.now)
            log.append((self.env.now + fence, HAND_OFF, None))
            yield self.env.timeout(fence)
        if self.scheduler is not None:
            yield from self.scheduler.until(owed, log)
        data = self.env.now
        if work.stored:
            self.ring.loaded.request_now(data, work.stored)
            self.consumed += work.stored
        if work.publication is not None:
            data = self.shared.handoffs.publish(self.place, step, index, work.publication)
        if index in self.shared.gates:
            self.ring.finish(step, index)
        if self.shared.program.barriers:
            yield from self._barrier(step, index, data, log)

    def _ask(self, step: int, index: int, work: StageWork) -> int:
        """The stage's reads have succeeded: the scheduler may begin the sums behind it. How many it
        owes before this stage publishes.
        """
        if self.scheduler is None:
            return 0
        owed = self.scheduler.due
        if work.sums_behind:
            logs: list[list[Segment]] = [[] for _ in range(work.sums_behind)]
            self.sums += logs
            behind = range(index + 1, index + 1 + work.sums_behind)
            self.scheduler.begin(step, [(stage, self.works(step)[stage]) for stage in behind], logs)
        return owed

    def _read(self, step: int, read: ReadWork, channel: int, log: list[Segment]) -> Process:
        """Wait until all the needed elements are visible on this die, then gather them."""
        env, package = self.env, self.place.package
        load = max(0, self.shared.times.loader.look - read.nearer)
        looked = env.now + load
        if load:
            looked += package.fetching(env.now)
        if channel >= 0:
            record, event = self.shared.handoffs.wait(self.place, step, channel)
            if event is not None:
                yield from self._poll(event, read, channel, log)
                assert record.seen is not None
                time, cause, binder = record.seen[self.place.die]
                log.append((time, cause, binder))
                yield from self._resume(log)
        loads = read.rounds + (self.shared.program.fetch_ps > 0)
        fetching = package.fetching(env.now) if loads else 0
        now = max(env.now, looked) + self.shared.program.fetch_ps
        done = now + read.cost_ps + in_time(loads * fetching)
        for pipe in self.place.exchange:
            through = pipe.share(now, read.size)
            if through > done:
                done = through
        if done > env.now:
            yield env.timeout(done - env.now)
        log.append((done, read.cause, None))

    def _poll(
        self, event: simpy.Event, read: ReadWork, channel: int, log: list[Segment]
    ) -> Process:
        """What it looks at again and again occupies the slices where that lies."""
        slices = self.place.slice
        if slices is None:
            yield from self._sleep(event, log)
            return
        counted = self.shared.program.channels[channel].counted
        size = polled_bytes(read.size, counted=counted)
        slices.waiting += size
        yield from self._sleep(event, log)
        slices.waiting -= size

    def _take(self, work: StageWork, log: list[Segment]) -> Process:
        """Waits for the stage's first slots before its reads, and frees them: what they hold lies
        in registers then. A fence comes before the last of a row group.
        """
        env, ring, logged, leave = self.env, self.ring, self.env.now, self.shared.times.loader.leave
        for taken in range(1, len(work.ahead) + 1):
            arrived = yield from self._arrival()
            if arrived > env.now:
                yield env.timeout(arrived - env.now)
            if leave and (taken % work.group == 0 or taken == len(work.ahead)):
                if env.now > logged:
                    log.append((env.now, STREAMING, None))
                yield env.timeout(leave)
                logged = env.now
                log.append((logged, CONSUMER, None))
            ring.free()
        if env.now > logged:
            log.append((env.now, STREAMING, None))

    def _arrival(self) -> Timed:
        """Of the slot that comes next. A kernel's loader starts later than its consumer."""
        arrived = self.ring.arrival()
        while arrived is None:
            yield self.env.timeout(self.ring.wait_ps())
            arrived = self.ring.arrival()
        return arrived

    def _consume(
        self, step: int, index: int, clock: int, work: StageWork, log: list[Segment]
    ) -> Timed:
        """Each slot that is still in the ring, not before its arrival. Late ones are memory time,
        early ones the consumer's own.

        Of a wait for the first slot behind a gate, what the request could not have saved is the
        routing's.
        """
        env, ring = self.env, self.ring
        last = -1
        gate = self.shared.program.plan.stages[index].gate
        first = gate is not None
        if work.ahead:
            clock += sum(work.ahead)
            last = work.fixed_cause
            log.append((clock, last, None))
        for cost in work.slots[len(work.ahead) :]:
            arrived = yield from self._arrival()
            if first and gate is not None:
                first = False
                known = min(arrived, ring.opened_at(step, gate) + ring.loaded.latency)
                if known > clock:
                    log.append((known, ROUTING, None))
            if arrived > clock:
                clock = arrived + cost
                cause = STREAMING
            else:
                clock += cost
                cause = work.fixed_cause
            if cause == last:
                log[-1] = (clock, cause, None)
            else:
                log.append((clock, cause, None))
                last = cause
            yield env.timeout(clock - env.now)
            ring.free()
        return clock

    def _attend(
        self, step: int, entered: int, clock: int, work: StageWork, log: list[Segment]
    ) -> Timed:
        """Cached keys and values are fetched from the stage's start on, `kv_ahead` requests at a
        time.

        Rounds are requested when the block enters the stage, before its queries are there; a ring's
        requests follow its reads.
        """
        env, ring = self.env, self.ring
        ahead = work.kv_ahead or ring.window
        if ring.open_at > env.now:
            yield env.timeout(ring.open_at - env.now)
        arrivals: list[int] = []
        for number, (_, cost) in enumerate(work.kv):
            while len(arrivals) < min(len(work.kv), number + ahead):
                size = work.kv[len(arrivals)][0]
                path = ring.path_of(len(arrivals), warm=step > 0)
                requested = (
                    entered if work.kv_ahead and not arrivals and not work.kv_after else env.now
                )
                arrivals.append(
                    path.request_now(requested, size) + self.place.package.reading(env.now)
                )
                self.consumed += size
            clock = max(clock, arrivals[number]) + cost
            yield env.timeout(clock - env.now)
        log.append((clock, ATTENTION, None))
        return clock

    # ---- borders, barriers, shared cores ---------------------------------------------------------

    def _border(self, step: int, index: int, work: StageWork, log: list[Segment]) -> Process:
        """A kernel starts when all blocks of its GPU have finished the one before; its ring is
        empty.
        """
        border = self.shared.meetings.border(
            self.place, step, index, work.launch_ps, library=work.library
        )
        event = border.arrive(self.place, index)
        yield from self._sleep(event, log)
        log.append((self.env.now, LAUNCH, border.binder))
        restart = self.shared.times.restart if work.touches_memory else 0
        self.ring.open(self.last_slot(step, index), self.env.now + restart)
        yield from self._resume(log)

    def _barrier(self, step: int, index: int, data: int, log: list[Segment]) -> Process:
        barrier = self.shared.meetings.barrier(step, index)
        barrier.arrive(self.place, index, data)
        yield from self._sleep(barrier.events[self.place.rank], log)
        cause, binder = barrier.cause[self.place.rank] or (HAND_OFF, None)
        log.append((self.env.now, cause, binder))
        yield from self._resume(log)

    def _sleep(self, event: simpy.Event, log: list[Segment]) -> Process:
        self._suspend()
        yield event

    def _suspend(self) -> None:
        """A block that waits gives its core away, and its loader stops with it."""
        if self.core is not None:
            self.ring.paused = True
            self.core.release()

    def _resume(self, log: list[Segment]) -> Process:
        if self.core is None:
            return
        start = self.env.now
        yield from self.core.acquire(self.place.number)
        if self.env.now > start:
            log.append((self.env.now, CONSUMER, None))
        self.ring.resume()
