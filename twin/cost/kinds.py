"""Which kind of block a device has, in the one place that looks: a core, or a block of warps."""

from __future__ import annotations

from twin.cost.cores import CoreCosts
from twin.cost.costs import Costs
from twin.cost.warps import WarpCosts
from twin.frozen import frozen
from twin.hardware.kernel import WarpKernel
from twin.hardware.types import Device
from twin.plan.types import Plan
from twin.schedule.choose import priced_schedule, schedule_of
from twin.units import picoseconds


def costs_of(plan: Plan, device: Device) -> Costs:
    """What the works of a plan cost the device's blocks."""
    kernel = device.kernel
    if isinstance(kernel, WarpKernel):
        return WarpCosts(priced_schedule(plan), device, kernel)
    return CoreCosts(schedule_of(plan), device, kernel)


@frozen
class Loader:
    """Times of a block that the machine applies, in picoseconds; a core's are nothing."""

    look: int = 0  # the least that a look at exchanged elements takes
    leave: int = 0  # of a prefetched row group, out of the ring
    copy: int = 0  # from one request of a loader to the next
    watched_copy: int = 0  # of a loader that watches a window smaller than its ring

    @classmethod
    def of(cls, device: Device) -> Loader:
        kernel = device.kernel
        if not isinstance(kernel, WarpKernel):
            return cls()
        return cls(
            look=picoseconds(device.exchange.latency_s.value),
            leave=picoseconds(kernel.leave_s.value),
            copy=picoseconds(kernel.copy_s.value),
            watched_copy=picoseconds(kernel.copy_s.value + kernel.watch_s.value),
        )
