"""The slices of a last-level cache where the blocks of a GPU exchange words: as pipes that gathers,
publications and polls occupy.

A wave that polls asks again when its answer is there, so a round of all polls that are under way
takes a load's latency, or as long as the slices need for them, whichever is longer. What the second
exceeds the first by is a queue: a store joins it, and a poll finds the word half a round later on
average. So polls are no events: a slice counts the bytes of a round.
"""

from __future__ import annotations

from twin.errors import HardwareError
from twin.hardware.types import Device
from twin.plan.options import Exchanged
from twin.plan.types import Plan
from twin.sim.clock import in_time
from twin.sim.memory import Pipe
from twin.units import picoseconds

# gather_each and relax in native/platform/hip.h: words of a thread under way, threads, cycles
# between two polls
POLLED_BYTES = 4 * 4 * 512
PAUSE_CYCLES = 64
LINE_BYTES = 64  # of a poll of one counter


class Slice(Pipe):
    """What the slices of some I/O dies answer."""

    __slots__ = ("period", "waiting")

    def __init__(self, name: str, bytes_per_s: float, period: int) -> None:
        """`period`: ps of a poll that nothing holds up, and until the next one."""
        super().__init__(name, bytes_per_s)
        self.period = period
        self.waiting = 0  # bytes of a round of polls

    def crowding(self) -> int:
        """By how much later a word that is stored is seen, for all that poll meanwhile."""
        late = -(-self.waiting * self.numerator // self.denominator) - self.period
        return in_time(3 * late // 2) if late > 0 else 0


def polled_bytes(size: int, *, counted: bool) -> int:
    """Of a read of so many bytes, what a block has under way when it waits for it."""
    return LINE_BYTES if counted else min(size, POLLED_BYTES)


def slices_of(device: Device, plan: Plan, name: str) -> tuple[Slice, ...]:
    """Of each I/O die; one for all of them where words are interleaved, as they work in step then.
    Empty where gathers and polls are no load of a cache. Raises HardwareError.
    """
    near = plan.options.exchanged is Exchanged.PER_IO_DIE
    own, llc = device.slices, device.llc
    if own is None or llc is None:
        if near:
            raise HardwareError(
                f"exchanged={plan.options.exchanged.value}: {device.name} has no I/O dies with "
                "slices of a cache; use exchanged=once"
            )
        return ()
    dies, rate = int(device.structure.io_dies.value), own.bytes_per_s.value
    latency = own.near_s if near else llc.latency_s
    period = picoseconds(latency.value + PAUSE_CYCLES / device.block.clock_hz.value)
    if near:
        return tuple(Slice(f"{name}.Iod[{i}].slices", rate, period) for i in range(dies))
    return (Slice(f"{name}.slices", dies * rate, period),)
