"""What events take on a device, in whole picoseconds: converted once for a machine."""

from __future__ import annotations

from typing import Self

from twin.cost.kinds import Loader
from twin.cost.terms import nearer_ps
from twin.frozen import frozen
from twin.hardware.number import Number
from twin.hardware.types import QUEUE_S, Device
from twin.units import picoseconds

QUEUE = picoseconds(QUEUE_S)


@frozen
class Times:
    memory: int  # latencies
    l2: int
    llc: int
    hop: int
    cross: int  # more, to another die
    atomic: int
    poll: int  # until a poll finds what is there
    # the same of words on the block's own I/O die, which it looks at more often; a hop holds half a
    # round of others, so this may be less than nothing
    near_poll: int
    # of these, [die that publishes][die that reads]: more than a hop inside a die; () elsewhere
    crossings: tuple[tuple[int, ...], ...]
    growth: int  # of a hop, behind QUEUE of the stream
    fetch_growth: int  # of a load that hits the L2
    loader: Loader
    jitter: int
    switch: int  # of a shared core to another block
    restart: int  # of a loader behind a kernel's border, more than memory takes

    @classmethod
    def of(cls, device: Device, *, lone: bool = False) -> Self:
        """`lone`: of a machine's only block. A core then finds its own words in its own cache."""
        near = lone and device.block.loading == "on-demand"
        memory, jitter = picoseconds(device.memory.latency_s.value), device.memory.jitter_s
        several = device.structure.dies.value > 1
        return cls(
            memory=memory,
            l2=picoseconds(device.l2.latency_s.value),
            llc=picoseconds(device.llc.latency_s.value) if device.llc else 0,
            hop=0 if near else picoseconds(device.handoff.hop_s.value),
            cross=picoseconds(device.handoff.cross_die_s.value) if several else 0,
            atomic=0 if near else picoseconds(device.handoff.atomic_s.value),
            # found half a period late, on average
            poll=picoseconds(device.handoff.poll_s.value) // 2,
            near_poll=picoseconds(device.handoff.poll_s.value) // 2 - nearer_ps(device) // 2,
            crossings=_crossings(device),
            growth=_growth(device.handoff.hop_s, device.handoff.loaded_hop_s),
            fetch_growth=_growth(device.l2.latency_s, device.l2.loaded_latency_s),
            loader=Loader.of(device),
            jitter=picoseconds(jitter.value) if jitter else 0,
            switch=picoseconds(device.sharing.switch_s.value) if device.sharing else 0,
            # restart_s ends when data flow again: latency is in it
            restart=max(0, picoseconds(device.launch.restart_s.value) - memory),
        )


def ring_hops(first: int, second: int, io_dies: int) -> int:
    """Between two I/O dies, which form a ring."""
    return min(abs(first - second), io_dies - abs(first - second))


def _crossings(device: Device) -> tuple[tuple[int, ...], ...]:
    """A word that lies anywhere travels from its writer to its I/O die, and from there: twice the
    mean way, which `cross_die_s` was measured with. One that is copied to its reader's I/O die
    travels there alone. Never less than inside a die.
    """
    fabric, structure = device.fabric, device.structure
    if fabric is None or device.slices is None:
        return ()
    dies, io_dies = int(structure.dies.value), int(structure.io_dies.value)
    io_of = [die * io_dies // dies for die in range(dies)]
    anywhere = 2 * sum(ring_hops(0, io, io_dies) for io in range(io_dies)) / io_dies
    one_way = fabric.hop_s.value / 2

    def crossing(source: int, target: int) -> int:
        less = (anywhere - ring_hops(io_of[source], io_of[target], io_dies)) * one_way
        cross = max(0.0, device.handoff.cross_die_s.value - less)
        return picoseconds(cross) if source != target else 0

    every = range(dies)
    return tuple(tuple(crossing(source, target) for target in every) for source in every)


def _growth(idle: Number, loaded: Number | None) -> int:
    """Of a time behind QUEUE of the stream."""
    return max(0, picoseconds(loaded.value) - picoseconds(idle.value)) if loaded else 0
