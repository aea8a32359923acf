"""Stores from one GPU into another's memory."""

from __future__ import annotations

from collections.abc import Sequence

from twin.errors import HardwareError
from twin.hardware.types import Link
from twin.sim.memory import Package, Pipe
from twin.units import picoseconds

TOPOLOGIES = ("mesh", "switch", "memory")


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
        self.packages = packages
        self.hop = picoseconds(link.hop_s.value)
        self.loaded_hop = max(self.hop, picoseconds(link.loaded_hop_s.value))
        self.spread = picoseconds(link.spread_s.value)
        self.peer = picoseconds(link.peer_s.value)  # of a block's time
        self.fence = picoseconds(link.fence_s.value)
        self.library = picoseconds(link.library_allreduce_s.value)
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
        return self.spread - (self.spread >> sectors)

    def hop_between(self, source: int, target: int, now: int) -> int:
        window = self.loaded_hop
        load = min(self.packages[source].load(now, window), self.packages[target].load(now, window))
        return self.hop + (self.loaded_hop - self.hop) * load // 1000
