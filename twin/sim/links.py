"""Stores from one GPU into another's memory."""

from __future__ import annotations

from collections.abc import Sequence

from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.types import Link
from twin.sim.memory import Package, Pipe
from twin.units import picoseconds

TOPOLOGIES = ("mesh", "switch", "memory")


@frozen
class LinkTimes:
    """Of a node's links, in picoseconds; those of a single GPU are nothing."""

    hop: int = 0
    growth: int = 0  # of a hop whose ends' memories are busy
    window: int = 0  # over which their load counts: a loaded hop
    spread: int = 0
    peer: int = 0  # of a block's time
    fence: int = 0
    library: int = 0  # of an all-reduce

    @classmethod
    def of(cls, link: Link | None) -> LinkTimes:
        if link is None:
            return cls()
        hop = picoseconds(link.hop_s.value)
        loaded = max(hop, picoseconds(link.loaded_hop_s.value))
        rest = (link.spread_s, link.peer_s, link.fence_s, link.library_allreduce_s)
        return cls(hop, loaded - hop, loaded, *(picoseconds(number.value) for number in rest))


class Links:
    """A pipe per ordered pair (mesh), or one out of and one into each GPU (switch, memory).

    The hop lies between the idle and the loaded one, in proportion to the load of the less busy
    end's memory over the last window of one loaded hop: a store queues with the stream at both
    ends. A yes-or-no rule was tried first; better hardware could then be slower by a third, because
    a small shift in time turned every idle hop into a loaded one.
    """

    def __init__(self, link: Link, packages: Sequence[Package]) -> None:
        """`packages[gpu]`; emulated GPUs may share one package."""
        if link.topology not in TOPOLOGIES:
            raise HardwareError(
                f"link.topology={link.topology!r}: use one of {', '.join(TOPOLOGIES)}"
            )
        rate = link.bytes_per_s.value
        gpus = range(len(packages))
        self.packages, self.times = packages, LinkTimes.of(link)
        self.meshed = link.topology == "mesh"
        self.routes: dict[tuple[int, int], tuple[Pipe, ...]] = {}
        if self.meshed:
            for a in gpus:
                for b in gpus:
                    self.routes[a, b] = (Pipe(f"Link[{a}>{b}]", rate),)
        else:
            out = [Pipe(f"Gpu[{g}].egress", rate) for g in gpus]
            into = [Pipe(f"Gpu[{g}].ingress", rate) for g in gpus]
            for a in gpus:
                for b in gpus:
                    self.routes[a, b] = (out[a], into[b])

    def send(self, source: int, target: int, now: int, size: int) -> int:
        """When stores issued now are visible to a poll on the target GPU."""
        done = now
        for pipe in self.routes[source, target]:
            through = pipe.reserve(now, size)
            if through > done:
                done = through
        return done + self.hop_between(source, target, now)

    def spread_of(self, sectors: int) -> int:
        """How much later than the last block's first sector all of them are there: each further
        sector takes half of what is left, as all-reduces of 2 to 16 KiB say. `sectors`: of a block
        among several; 0 of a block alone, whose words come together.
        """
        return self.times.spread - (self.times.spread >> sectors)

    def hop_between(self, source: int, target: int, now: int) -> int:
        times = self.times
        ends = (self.packages[gpu].load(now, times.window) for gpu in (source, target))
        return times.hop + times.growth * min(ends) // 1000
