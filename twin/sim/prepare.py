"""Programs, kept for further machines that run the same one: most what-ifs change a number that no
program depends on.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

from twin.cost.lowering import compile_plan
from twin.cost.program import Program
from twin.cost.routing import Routing
from twin.hardware.override import numbers
from twin.hardware.types import Device
from twin.plan.types import Plan
from twin.sim.compiled.lower import FlatProgram, flatten

KEPT = 8  # programs
KEPT_VARIANTS = 64  # and variants of them together: one takes about 10 MB
# numbers, by the beginning of their path, that compile_plan never looks at
TIMED_BY_THE_MACHINE = (
    "memory.",
    "fabric.",
    "power.",
    "l2.bytes_per_s",
    "l2.capacity_bytes",
    "l2.loaded_latency_s",
    "l2.block_bytes",
    "llc.bytes_per_s",
    "llc.capacity_bytes",
    "llc.block_bytes",
    "sharing.",
    "handoff.hop_s",
    "handoff.loaded_hop_s",
    "handoff.cross_die_s",
    "handoff.atomic_s",
    "handoff.poll_s",
    "block.on_chip_bytes",
    "block.load_bytes_per_s",
    "block.load_latency_s",
    "kernel.copy_s",
    "kernel.watch_s",
    "block.pair_bytes_per_s",
    "kernel.leave_s",
    "launch.restart_s",
)


@dataclass(frozen=True)
class Prepared:
    program: Program
    # of runs of its first GPU alone: did that stand for all?
    enough: list[bool] = field(default_factory=list, compare=False)

    @cached_property
    def flat(self) -> FlatProgram:
        return flatten(self.program)


_kept: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()


def prepare(
    plan: Plan,
    device: Device,
    routing: Routing | None = None,
    steps: int = 2,
    *,
    busiest: bool = False,
) -> Prepared:
    """The program of a plan on a device; of `steps` steps of a routing, where steps differ by
    it. `busiest`: as compile_plan takes it.
    """
    costs = tuple(
        (path, n.value)
        for path, n in numbers(device).items()
        if not path.startswith(TIMED_BY_THE_MACHINE)
    )
    drawn = (routing or Routing(), steps, busiest) if plan.steps_differ else ()
    key = (plan, device.block.loading, *drawn, *costs)
    if key not in _kept:
        _kept[key] = Prepared(compile_plan(plan, device, routing, steps, busiest=busiest))
        while len(_kept) > 1 and (
            len(_kept) > KEPT
            or sum(len(kept.program.variants) for kept in _kept.values()) > KEPT_VARIANTS
        ):
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]
