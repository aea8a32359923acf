"""Where each value is set back to the sentinel: the first stage at which every reader is known to be done.

A join is a stage where every block waits for something that every block of its rank published. Past a join,
every block knows that all blocks completed the producing stage. This rule is simple on purpose: `validate`
proves the result with vector clocks and shares no code with it.
"""

from __future__ import annotations

from dataclasses import replace

from twin.errors import PlanError
from twin.plan.types import Parts, Plan, Read, Reset, Stage, StageKind, Value

STEPS = 3  # unrolled: a value read late in one step may be reset in the next


def with_resets(plan: Plan) -> Plan:
    """The same plan with each value's reset placed."""
    joins = _joins(plan)
    stages = list(plan.stages)
    count = len(stages)
    for value in plan.values:
        last = _last_read(plan, value)
        place = next((at for at, published in joins if published >= last), None)
        if place is None:
            raise PlanError(f"{value.name}: no later stage proves that all blocks have read it; use fewer blocks")
        step, index = divmod(place, count)
        if step > 1:
            raise PlanError(f"{value.name}: its reset would fall two steps later; use fewer blocks")
        stages[index] = replace(stages[index], resets=(*stages[index].resets, Reset(value.id, previous_step=step == 1)))
    return replace(plan, stages=tuple(stages))


def _last_read(plan: Plan, value: Value) -> int:
    """Position of the last read on the unrolled time line, where step 0 is the step that publishes the value."""
    count = len(plan.stages)
    reads = [stage.index + (count if read.previous_step else 0) for stage in plan.stages for read in stage.reads if read.value == value.id]
    return max(reads, default=value.stage)


def _joins(plan: Plan) -> list[tuple[int, int]]:
    """(position, position of the publication it waited for), in time order over the unrolled steps."""
    count = len(plan.stages)
    found = []
    for step in range(STEPS):
        for stage in plan.stages:
            at = step * count + stage.index
            for read in stage.reads:
                published = _joined(plan, stage, read)
                if published is not None:
                    found.append((at, (step - read.previous_step) * count + published))
    return sorted(found)


def _joined(plan: Plan, stage: Stage, read: Read) -> int | None:
    """The stage that all blocks are known to have completed once this read succeeded in every block."""
    value = plan.values[read.value]
    if stage.kind is StageKind.COLLECTIVE:  # the library resets nothing
        return None
    if stage.kind is StageKind.EMBED:  # the sampler read every block's logits before it published the token
        head = next(s for s in plan.stages if s.kind is StageKind.LM_HEAD)
        return head.index if _complete(plan.values[head.publishes or 0]) else None
    if read.parts is Parts.OTHERS or not _complete(value):
        return None
    whole = ((0, value.elements),)
    return value.stage if all(spans == whole for spans in read.spans) else None


def _complete(value: Value) -> bool:
    return all(lo < hi for lo, hi in value.owned)
