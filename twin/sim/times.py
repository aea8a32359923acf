"""What events take on a device, in whole picoseconds: converted once for a machine."""

from __future__ import annotations

from typing import Self

from twin.cost.kinds import Loader
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
            growth=_growth(device.handoff.hop_s, device.handoff.loaded_hop_s),
            fetch_growth=_growth(device.l2.latency_s, device.l2.loaded_latency_s),
            loader=Loader.of(device),
            jitter=picoseconds(jitter.value) if jitter else 0,
            switch=picoseconds(device.sharing.switch_s.value) if device.sharing else 0,
            # restart_s ends when data flow again: latency is in it
            restart=max(0, picoseconds(device.launch.restart_s.value) - memory),
        )


def _growth(idle: Number, loaded: Number | None) -> int:
    """Of a time behind QUEUE of the stream."""
    return max(0, picoseconds(loaded.value) - picoseconds(idle.value)) if loaded else 0
