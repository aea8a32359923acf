"""The times that a block marks at each stage, measured or simulated."""

from __future__ import annotations

from typing import Any, TypeVar

from numpy.typing import NDArray

from twin.plan.types import Plan
from twin.schedule.choose import schedule_of

Marks = TypeVar("Marks", bound=NDArray[Any])


def of_consumers(plan: Plan, marks: Marks) -> Marks:
    """`marks` [...][stages][inputs ready, finished] without what a block's scheduler warp makes
    while its consumers pass it by in no time. It marks where it begins and where it ends.
    """
    made, schedule = marks.copy(), schedule_of(plan)
    for stage in plan.stages:
        if schedule.scheduler_makes(stage):
            made[..., stage.index, :] = made[..., stage.index - 1, 1:]
    return made
