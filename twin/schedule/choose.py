"""Which kind of block a device has, in the one place that looks; and the schedule of a plan."""

from __future__ import annotations

from typing import Protocol

from twin.plan.options import Limits
from twin.plan.types import Plan
from twin.schedule.chooser import Chooser
from twin.schedule.cores import CORES
from twin.schedule.tiles import Cutter
from twin.schedule.types import BlockOfWarps, Schedule
from twin.schedule.warps import WARPS


class PlanChooser(Chooser, Protocol):
    """And what it chooses of a plan."""

    def cutter(self, plan: Plan) -> Cutter:
        """Cuts its matrices into tiles."""

    def schedule(self, plan: Plan) -> Schedule:
        """Raises PlanError for tiles that the block's warps cannot share."""

    def priced(self, plan: Plan) -> BlockOfWarps:
        """What the twin prices where a device has warps. Raises PlanError as `schedule`."""

    def check_plan(self, plan: Plan) -> None:
        """Raises PlanError for what the kernel of such blocks cannot run."""


def chooser_of(limits: Limits) -> PlanChooser:
    """What the blocks of a device choose."""
    return WARPS if limits.teams else CORES


def schedule_of(plan: Plan) -> Schedule:
    """Raises PlanError for tiles that the warps of an NVIDIA block cannot share."""
    return chooser_of(plan.limits).schedule(plan)


def priced_schedule(plan: Plan) -> BlockOfWarps:
    """What the twin prices on a device of warps. Raises PlanError as `schedule_of`."""
    return chooser_of(plan.limits).priced(plan)
