"""Where blocks multiply a router with what each of them makes of the residual
(`RouterInput.OWN`): which thread has which of a block's columns.

A logit's part of a block is the sum of `parts` neighbouring threads, each of which has `pairs`
pairs of the block's rows; threads take further logits in rounds (scores.cuh).
"""

from __future__ import annotations

from functools import lru_cache

from twin.frozen import frozen
from twin.plan.catalogue import StageKind
from twin.plan.types import Plan, Stage
from twin.schedule.block import TEAM_WARPS, WARP

THREADS = TEAM_WARPS * WARP


@frozen
class Scores:
    """Of all layers of a plan."""

    sums: int  # logits
    parts: int  # threads that share one, a power of two
    pairs: int  # of a thread, in each round
    rounds: int

    @property
    def rows(self) -> int:
        """Of a block, filled up by zeros."""
        return 2 * self.parts * self.pairs

    @property
    def words(self) -> int:
        """Of a block's columns."""
        return self.rounds * self.pairs * THREADS


def by_own_rows(plan: Plan, stage: Stage) -> bool:
    """Is it a router whose logits all blocks add up?"""
    if stage.kind is not StageKind.ROUTER or stage.publishes is None:
        return False
    return plan.values[stage.publishes].summed


@lru_cache(maxsize=8)
def scores_of(plan: Plan) -> Scores | None:
    """None where blocks multiply routers with the whole residual, or there are none."""
    routers = [stage for stage in plan.stages if by_own_rows(plan, stage)]
    if not routers:
        return None
    sums = max(stage.matrix.rows for stage in routers if stage.matrix)
    most = max(hi - lo for stage in routers for lo, hi in own_rows(plan, stage))
    parts = 1
    while 2 * parts * sums <= THREADS and parts < WARP:
        parts *= 2
    pairs = -(-most // (2 * parts))
    return Scores(sums, parts, pairs, -(-sums * parts // THREADS))


def own_rows(plan: Plan, stage: Stage) -> tuple[tuple[int, int], ...]:
    """[blocks] what each makes of the residual in the stage before a router."""
    made = plan.stages[stage.index - 1].matrix
    return made.owned if made else ()
