"""The times that a block marks at each stage, measured or simulated."""

from __future__ import annotations

from typing import Any, TypeVar

from numpy.typing import NDArray

from twin.plan.types import Plan

Marks = TypeVar("Marks", bound=NDArray[Any])


def of_consumers(plan: Plan, marks: Marks) -> Marks:
    """`marks` [...][stages][inputs ready, finished] without what a block's keeper makes beside its
    consumers, who pass it by in no time.

    A keeper marks where it begins and where it ends.
    """
    made = marks.copy()
    for stage in plan.stages:
        if plan.by_keeper(stage):
            made[..., stage.index, :] = made[..., stage.index - 1, 1:]
    return made
