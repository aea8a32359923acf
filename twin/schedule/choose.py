"""Makes the schedule of a plan: the one place that asks which kind of device runs it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import lru_cache

from twin.errors import PlanError
from twin.plan.types import Matrix, Plan
from twin.schedule import homes
from twin.schedule.chosen import multiplied
from twin.schedule.memory import simulated_memory, threads_memory, warps_memory
from twin.schedule.passes import passes_of
from twin.schedule.prefetch import prefetches
from twin.schedule.scan import cache_scan
from twin.schedule.teams import NO_TEAM, Team, teams_by_input
from twin.schedule.types import Schedule, WarpSchedule
from twin.schedule.warp_memory import NO_WARPS, needs_of, warp_sizes

MANY_RANKS = 4  # of whose parts a block looks at several together


@lru_cache(maxsize=64)
def schedule_of(plan: Plan) -> Schedule:
    """Raises PlanError for tiles that the warps of an NVIDIA block cannot share."""
    matrices, scan = multiplied(plan), cache_scan(plan)
    shared = plan.limits.teams  # do warps share the rows of a tile?
    spare = shared and plan.options.polled
    warps = _warps(plan, matrices) if shared else None
    sizes, order = NO_WARPS, homes.NormOrder()
    if plan.without_code():
        memory = simulated_memory(plan, in_registers=shared)
    elif warps:
        memory = warps_memory(plan, matrices, needs_of(plan, matrices, warps, scan))
        sizes = NO_WARPS | warp_sizes(plan, warps, scan)
        order = homes.norm_order(warps.residual, warps.teams["hidden"])
    else:
        memory = threads_memory(plan, matrices)
    return Schedule(plan, matrices, scan, warps, passes_of(plan), memory, sizes, order, spare)


@lru_cache(maxsize=64)
def priced_schedule(plan: Plan) -> Schedule:
    """What the twin prices on a device of warps. An AMD block's waves share no rows: the twin
    prices them as teams that prefetch, without what NVIDIA's kernel alone does. Raises PlanError as
    `schedule_of`.
    """
    own = schedule_of(plan)
    if own.warps is not None:
        return own
    like = _warps(plan, own.matrices)
    stand_in = replace(
        like,
        residual=homes.Residual(homes.Home.REGISTERS),
        ffn=replace(like.ffn, rounds=1),
        several_parts=False,
    )
    return replace(own, warps=stand_in)


def _warps(plan: Plan, matrices: tuple[Matrix | None, ...]) -> WarpSchedule:
    teams = _teams(plan, matrices)
    ffn = homes.feed_forward(plan, teams["ffn"])
    return WarpSchedule(
        teams=teams,
        prefetch={}
        if plan.without_code()
        else prefetches(plan, teams, ffn_in_memory=ffn.in_memory),
        residual=homes.residual(plan, teams["hidden"], ffn),
        ffn=ffn,
        several_parts=_several_parts(plan),
    )


def _teams(plan: Plan, matrices: tuple[Matrix | None, ...]) -> Mapping[str, Team]:
    """No block has to share the tiles of a plan that the kernel has no code for."""
    with suppress(PlanError) if plan.without_code() else nullcontext():
        return teams_by_input(plan, matrices)
    return dict.fromkeys(plan.kinds_by_input, NO_TEAM)


def _several_parts(plan: Plan) -> bool:
    """Fewer round trips of four GPUs and more, where registers are left: steps with recurrent
    states spilled. Lanes, and AMD, take parts in turn.
    """
    if plan.ranks < MANY_RANKS or plan.spec is None:
        return False
    return not plan.spec.lanes and not plan.spec.recurs
