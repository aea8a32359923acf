"""Which kind of block a device has, in the one place that looks; and the schedule of a plan."""

from __future__ import annotations

from twin.plan.types import Limits, Plan
from twin.schedule.chooser import Chooser
from twin.schedule.cores import CORES
from twin.schedule.types import BlockOfWarps, Schedule
from twin.schedule.warps import WARPS


def chooser_of(limits: Limits) -> Chooser:
    """What the blocks of a device choose."""
    return WARPS if limits.teams else CORES


def schedule_of(plan: Plan) -> Schedule:
    """Raises PlanError for tiles that the warps of an NVIDIA block cannot share."""
    return chooser_of(plan.limits).schedule(plan)


def priced_schedule(plan: Plan) -> BlockOfWarps:
    """What the twin prices on a device of warps. Raises PlanError as `schedule_of`."""
    return chooser_of(plan.limits).priced(plan)
