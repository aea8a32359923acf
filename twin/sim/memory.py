"""Device memory, caches and the fabric of one package, as first-in-first-out pipes.

A request takes its place in every pipe of its path when it is issued, and is done when the slowest
pipe is (cut-through). Stacks are interleaved far below the size of a request, so the stacks of one
domain always work in step: a domain is one pipe. DIE_AWARE placement has a domain per I/O die, the
others one, all stacks.
"""

from __future__ import annotations

from twin.cost.terms import PS, cost_in_time, kept_share
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.types import Cache, Device
from twin.plan.options import Placement
from twin.sim.clock import FASTEST, LAST_PS, beyond, in_time
from twin.sim.times import QUEUE, Times, ring_hops
from twin.units import picoseconds


class Pipe:
    """Serves requests in the order of their arrival, at a fixed rate.

    Transfers that somebody waits for (gathers, publications, cached keys and values) are a class of
    their own: they queue among themselves, and while streamed requests are waiting too, both
    classes get half of the rate. Neither class loses what the other does not use. In one queue with
    the stream they would wait for every slot that was requested ahead, 5 us on an H200; those wait
    in the blocks' own copy engines, not in front of the memory.
    """

    __slots__ = ("bytes", "costs", "denominator", "free", "name", "numerator", "small_free")

    def __init__(self, name: str, bytes_per_s: float, *, share: int = 1) -> None:
        """One of `share` equal parts of `bytes_per_s`."""
        self.name = name
        self.numerator = PS * share
        self.denominator = max(1, int(bytes_per_s))
        if self.denominator > FASTEST:
            raise HardwareError(
                f"{name}: {bytes_per_s:.6g} bytes/s are more than {FASTEST:.6g}, the fastest that "
                "is simulated: lower the rate"
            )
        self.free = 0  # ps; when the streamed requests taken so far are done
        self.small_free = 0
        self.bytes = 0
        self.costs: dict[int, int] = {}

    def cost(self, size: int) -> int:
        """Service time, rounded up: never faster than the rate."""
        known = self.costs.get(size)
        if known is None:
            known = -(-size * self.numerator // self.denominator)
            self.costs[size] = cost_in_time(f"{self.name}: a transfer of {size} bytes", known)
        return known

    def reserve(self, now: int, size: int) -> int:
        """Queue behind everything streamed; when the last byte is through."""
        free = self.free
        self.free = done = in_time((free if free > now else now) + self.cost(size))
        self.bytes += size
        return done

    def share(self, now: int, size: int) -> int:
        """A transfer next to the stream: full rate on an idle pipe, half while the stream has a
        backlog.
        """
        start = self.small_free if self.small_free > now else now
        cost = self.cost(size)
        backlog = self.free - start
        self.small_free = done = in_time(start + cost + (min(backlog, cost) if backlog > 0 else 0))
        self.free = in_time((self.free if self.free > now else now) + cost)
        self.bytes += size
        return done

    def busy(self, now: int) -> int:
        """Time spent serving so far, within a picosecond a request."""
        return self.bytes * self.numerator // self.denominator - max(0, self.free - now)


@frozen
class Path:
    """From memory (or the cache that holds the weights) to one block."""

    pipes: tuple[Pipe, ...]
    latency: int

    def request(self, now: int, size: int) -> int:
        """Arrival of a request issued now."""
        done = now
        # Pipe.reserve, written out: half of the twin's time goes through here
        for pipe in self.pipes:
            through = pipe.free
            if through < now:
                through = now
            known = pipe.costs.get(size)
            through += pipe.cost(size) if known is None else known
            if through > LAST_PS:
                raise beyond(through)
            pipe.free = through
            pipe.bytes += size
            if through > done:
                done = through
        return done + self.latency

    def request_now(self, now: int, size: int) -> int:
        """The same for a transfer that is not requested ahead."""
        return max(pipe.share(now, size) for pipe in self.pipes) + self.latency


class Package:
    """Memory, caches and fabric of one package. Several emulated GPUs may share one."""

    def __init__(
        self,
        device: Device,
        times: Times,
        placement: Placement,
        index: int,
        *,
        delivered: float = 1.0,
        blocks: int = 1,
    ) -> None:
        """`delivered`: of the memory's rate (twin/cost/under_way.py); `blocks` stream at a time,
        one on each of so many SMs, CUs or cores.
        """
        self.blocks = blocks
        self.device = device
        self.times = times
        self.placement = placement
        self.name = f"Gpu[{index}]"
        structure = device.structure
        self.dies = int(structure.dies.value)
        self.io_dies = int(structure.io_dies.value)
        domains = self.io_dies if placement is Placement.DIE_AWARE else 1
        rate = delivered * device.memory.stream_bytes_per_s.value
        self.domains = [
            Pipe(f"{self.name}.Memory[{i}]", rate, share=domains) for i in range(domains)
        ]
        self.l2 = [
            Pipe(f"{self.name}.Die[{i}].l2", device.l2.bytes_per_s.value) for i in range(self.dies)
        ]
        self.llc: list[Pipe] = []
        if device.llc is not None:
            self.llc = [
                Pipe(f"{self.name}.Llc[{i}]", device.llc.bytes_per_s.value, share=domains)
                for i in range(domains)
            ]
        # by window: when it began, the busy time until then, the load before it
        self._loads: dict[int, tuple[int, int, int]] = {}
        self.near: list[Pipe] = []  # what single blocks load from a cache
        self.ports: list[Pipe] = []
        self.ingress: list[Pipe] = []
        if device.fabric is not None:
            self.ports = [
                Pipe(f"{self.name}.Die[{i}].port", device.fabric.die_port_bytes_per_s.value)
                for i in range(self.dies)
            ]
        self.interleaved = domains == 1
        if device.fabric and self.io_dies > 1 and (self.interleaved or device.slices):
            # of every request of what is interleaved, (io_dies - 1) / io_dies come from other I/O
            # dies
            rate = device.fabric.io_ingress_bytes_per_s.value * self.io_dies / (self.io_dies - 1)
            self.ingress = [Pipe(f"{self.name}.Io[{i}].ingress", rate) for i in range(self.io_dies)]
        self.detours = [self._detour_ps(die) for die in range(self.dies)]

    def io_of(self, die: int) -> int:
        return die * self.io_dies // self.dies

    def memory_path(self, die: int, block_port: Pipe) -> Path:
        """Stacks, fabric, die port, L2, the block's own load limit."""
        domain = self.io_of(die) if self.placement is Placement.DIE_AWARE else 0
        pipes = [self.domains[domain], *self._fabric(die), block_port]
        return Path(tuple(pipes), self.times.memory + self.detours[die])

    def cached_path(self, die: int, block_port: Pipe, footprint: int) -> tuple[Path, float] | None:
        """The path of what a cache still holds after a step, and its share of the step's bytes;
        None if it holds nothing.
        """
        cache, share = self._serving(footprint)
        if share == 0 or cache is None:
            return None
        if cache is self.device.l2:
            return Path((self.l2[die], self._nearer(block_port, cache)), self.times.l2), 1.0
        domain = self.io_of(die) if self.placement is Placement.DIE_AWARE else 0
        pipes = [self.llc[domain], *self._fabric(die), self._nearer(block_port, cache)]
        return Path(tuple(pipes), self.times.llc + self.detours[die]), share

    def cache_bytes_per_s(self, footprint: int) -> float:
        """The ceiling of what cached_path is made of, all dies together."""
        device = self.device
        if device.llc is None or self._serving(footprint)[0] is device.l2:
            return self.dies * device.l2.bytes_per_s.value
        return device.llc.bytes_per_s.value

    def block_bytes_per_s(self, footprint: int) -> float:
        """What one block loads. Where its rate from the cache is known, what comes from there and
        what comes from memory take turns: both need the same few buffers of a core.
        """
        alone = self.device.block.load_bytes_per_s.value
        cache, share = self._serving(footprint)
        if cache is None or cache.block_bytes_per_s is None:
            return alone
        return 1 / (share / cache.block_bytes_per_s.value + (1 - share) / alone)

    def _serving(self, footprint: int) -> tuple[Cache | None, float]:
        """The cache that still holds a share of a step's bytes a step later, and the share."""
        device = self.device
        if kept_share(footprint, device.l2, self.dies, blocks=self.blocks) == 1:
            return device.l2, 1.0
        if device.llc is None:
            return None, 0.0
        return device.llc, kept_share(footprint, device.llc, blocks=self.blocks)

    def _nearer(self, port: Pipe, cache: Cache) -> Pipe:
        """What a block loads from a cache: it keeps the same bytes in flight as from memory, each
        for a shorter time. `port` has the cache's rate where that is known (block_bytes_per_s).
        """
        if cache.block_bytes_per_s is not None:
            return port
        latency = cache.latency_s.value
        behind = self.device.block.load_latency_s or self.device.memory.latency_s
        closer = behind.value / latency if latency else 1.0
        near = Pipe(
            f"{port.name}.cached", self.device.block.load_bytes_per_s.value * max(1.0, closer)
        )
        self.near.append(near)
        return near

    def exchange_pipes(self, die: int) -> tuple[Pipe, ...]:
        """What gathered and published elements pass: the die's L2 and, if there is one, its port to
        the fabric.
        """
        return (self.l2[die], self.ports[die]) if self.ports else (self.l2[die],)

    def queue(self, now: int) -> int:
        """How long memory (or the cache in its place) will take for what is requested of it, ps:
        bytes in flight over bandwidth.
        """
        return sum(
            pipe.free - now for pipe in (*self.domains, *self.llc) if pipe.free > now
        ) // len(self.domains)

    def queueing(self, now: int) -> int:
        """What a hand-off loses to the stream: its store and its polls wait among the bytes in
        flight (Little's law).
        """
        return in_time(self.times.growth * self.queue(now) // QUEUE) if self.times.growth else 0

    def fencing(self, now: int) -> int:
        """What a fence loses to the stream: the block's stores go there, and their answers come
        back.
        """
        return 2 * self.queueing(now)

    def fetching(self, now: int) -> int:
        """What a load that somebody waits for loses to the stream."""
        return (
            in_time(self.times.fetch_growth * self.queue(now) // QUEUE)
            if self.times.fetch_growth
            else 0
        )

    def reading(self, now: int) -> int:
        """What a load from memory loses to the stream: it comes behind all that is in flight."""
        return in_time(self.queue(now)) if self.times.fetch_growth else 0

    def load(self, now: int, window: int) -> int:
        """Thousandths of the last window for which memory (or the cache in its place) was busy;
        kept for one window.
        """
        marked, before, load = self._loads.get(window, (0, 0, 0))
        if now - marked >= max(1, window):
            busy = sum(pipe.busy(now) for pipe in (*self.domains, *self.llc))
            load = min(1000, 1000 * (busy - before) // ((now - marked) * len(self.domains)))
            self._loads[window] = now, busy, load
        return load

    def pipes(self) -> list[Pipe]:
        return [*self.domains, *self.llc, *self.ingress, *self.ports, *self.l2]

    def _fabric(self, die: int) -> list[Pipe]:
        pipes = [self.ingress[self.io_of(die)]] if self.ingress and self.interleaved else []
        if self.ports:
            pipes.append(self.ports[die])
        return [*pipes, self.l2[die]]

    def _detour_ps(self, die: int) -> int:
        """Mean added latency of interleaved memory; the I/O dies form a ring."""
        fabric = self.device.fabric
        if fabric is None or self.placement is Placement.DIE_AWARE:
            return 0
        home = self.io_of(die)
        hops = sum(ring_hops(home, io, self.io_dies) for io in range(self.io_dies))
        return picoseconds(hops * fabric.hop_s.value / self.io_dies)
