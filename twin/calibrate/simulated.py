"""What the twin gives a step: its seconds, and where they were measured too, those of each kind of
stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from twin.calibrate.reading import Reading
from twin.calibrate.stages import stage_times
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim.executor import run
from twin.sim.machine import Machine, check
from twin.sim.prepare import prepare
from twin.sim.run import simulate, step_s
from twin.sim.trace import marks

STEPS = 2  # simulated: the first is cold


@dataclass(frozen=True, slots=True)
class Simulated:
    step_s: float
    spans_s: dict[str, float] = field(default_factory=dict)  # by kind of stage


def simulated(
    plan: Plan, node: Node, *, stages: bool = False, reading: Reading = Reading.STEP
) -> Simulated:
    """One step, or what else is read of it; with `stages`, the span of each kind of stage from the
    same arithmetic as a measured one's.
    """
    if reading is Reading.HAND_OFF:
        return Simulated(_hand_off_s(plan, node))
    if reading is Reading.BORDER:
        return Simulated(_border_s(plan, node))
    if reading is Reading.STAGE:
        return Simulated(step_s(plan, node, steps=STEPS) / len(plan.stages))
    if not stages:
        return Simulated(step_s(plan, node, steps=STEPS))
    machine = _traced(plan, node)
    ends = [max(block.ended[step] for block in machine.blocks) for step in range(STEPS)]
    spans = stage_times(plan.name, plan, marks(machine) / 1e12)
    return Simulated((ends[-1] - ends[-2]) / 1e12, {one.stage: one.span_s for one in spans})


def _hand_off_s(plan: Plan, node: Node) -> float:
    """Mean over the stages of a step, all of which exchange."""
    ready, finished = (marks(_traced(plan, node))[-1, ..., mark] for mark in (0, 1))
    published, seen = (times.max(axis=(0, 1)) for times in (finished[..., :-1], ready[..., 1:]))
    return float((seen - published).mean()) / 1e12


def _border_s(plan: Plan, node: Node) -> float:
    """Mean over the kernels of a step: one for each operation of a stage, launched one by one."""
    result = simulate(plan, node, steps=STEPS)
    return result.attribution["launch"] / sum(len(stage.operations) for stage in plan.stages)


def _traced(plan: Plan, node: Node) -> Machine:
    check(plan, node)
    prepared = prepare(plan, node.device, steps=STEPS)
    machine = Machine(plan, node, steps=STEPS, keep_all=True, program=prepared.program)
    run(machine, prepared)
    return machine
