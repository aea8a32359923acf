"""Where each value is set back to the sentinel: the first stage at which every reader is known to
be done.

A join is a stage where every block waits for something that every block of its rank published. Past
a join, every block knows that all blocks completed the producing stage. This rule is simple on
purpose: `validate` proves the result with vector clocks and shares no code with it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import lru_cache
from itertools import islice

from twin.errors import PlanError
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Span
from twin.plan.types import Parts, Plan, Read, Reset, Stage, Value

STEPS = 3  # unrolled: a value read late in one step may be reset in the next


def with_resets(plan: Plan) -> Plan:
    """The same plan with each value's reset placed."""
    joins = _joins(plan)
    last_read = _last_reads(plan)
    stages = list(plan.stages)
    count = len(stages)
    for value in plan.values:
        last = last_read.get(value.id, value.stage)
        # a join waits for what was published before it
        later = islice(joins, bisect_right(joins, (last, STEPS * count)), None)
        place = next((at for at, published in later if published >= last), None)
        if place is None:
            raise PlanError(
                f"{value.name}: no later stage proves that all blocks have read it; use fewer "
                "blocks"
            )
        step, index = divmod(place, count)
        if step > 1:
            raise PlanError(f"{value.name}: its reset would fall two steps later; use fewer blocks")
        stages[index] = replace(
            stages[index], resets=(*stages[index].resets, Reset(value.id, previous_step=step == 1))
        )
    return replace(plan, stages=tuple(stages))


def _last_reads(plan: Plan) -> dict[int, int]:
    """By value, the position of its last read on the unrolled time line, where step 0 is the step
    that publishes it.
    """
    count = len(plan.stages)
    last: dict[int, int] = {}
    for stage in plan.stages:
        for read in stage.reads:
            last[read.value] = max(
                last.get(read.value, 0), stage.index + (count if read.previous_step else 0)
            )
    return last


def _joins(plan: Plan) -> list[tuple[int, int]]:
    """(position, position of the publication it waited for), in time order over the unrolled
    steps.
    """
    count = len(plan.stages)
    found = []
    for stage in plan.stages:
        for read in stage.reads:
            published = _joined(plan, stage, read)
            if published is not None:
                first = (stage.index, published - read.previous_step * count)
                found += [
                    (first[0] + step * count, first[1] + step * count) for step in range(STEPS)
                ]
    return sorted(found)


def _joined(plan: Plan, stage: Stage, read: Read) -> int | None:
    """The stage that all blocks are known to have completed once this read succeeded in every
    block.
    """
    value = plan.values[read.value]
    if stage.kind is StageKind.COLLECTIVE:  # the library resets nothing
        return None
    # the sampler read every block's logits before it published the token
    if stage.kind is StageKind.EMBED:
        head = next(s for s in plan.stages if s.kind is StageKind.LM_HEAD)
        return head.index if _complete(plan.values[head.publishes or 0]) else None
    if read.parts is Parts.OTHERS or not _complete(value):
        return None
    return value.stage if read.spans == (((0, value.elements),),) * plan.blocks else None


def _complete(value: Value) -> bool:
    return value.summed or _all_own(value.owned)


@lru_cache(maxsize=1024)
def _all_own(owned: tuple[Span, ...]) -> bool:
    return all(lo < hi for lo, hi in owned)
