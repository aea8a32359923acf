"""What the twin gives a step: its seconds, and where they were measured too, those of each kind of
stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twin.calibrate.stages import stage_times
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim.executor import run
from twin.sim.machine import Machine, check
from twin.sim.prepare import prepare
from twin.sim.run import simulate
from twin.sim.trace import marks

STEPS = 2  # simulated: the first is cold


@dataclass(frozen=True, slots=True)
class Simulated:
    step_s: float
    spans_s: dict[str, float] = field(default_factory=dict)  # by kind of stage


def simulated(plan: Plan, node: Node, *, stages: bool = False) -> Simulated:
    """One step; with `stages`, the span of each kind of stage from the same arithmetic as a
    measured one's.
    """
    if not stages:
        return Simulated(simulate(plan, node, steps=STEPS).step_s)
    check(plan, node)
    prepared = prepare(plan, node.device, steps=STEPS)
    machine = Machine(plan, node, steps=STEPS, keep_all=True, program=prepared.program)
    run(machine, prepared)
    ends = [max(block.ended[step] for block in machine.blocks) for step in range(STEPS)]
    spans = stage_times(plan.name, plan, marks(machine) / 1e12)
    return Simulated((ends[-1] - ends[-2]) / 1e12, {one.stage: one.span_s for one in spans})
