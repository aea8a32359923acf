"""Recorded runs whose kernel the engine no longer has: the twin's laws are those of the new one, so
how far it is from them says nothing.
"""

from __future__ import annotations

from twin.calibrate.heldout import HeldOut
from twin.calibrate.store import Run
from twin.errors import InvalidPlan
from twin.kernel.teams import hidden_in_quads
from twin.plan.types import Options, Plan, StageKind
from twin.sim.tiles import shaped_team

# Narrow residuals on one NVIDIA GPU come by fours of each thread (cuda_quads.cuh): such steps take
# 2 to 15 % less.
BY_FOURS_SINCE = "2026-11-27T04:00"
# Where threads have none of a slice's columns, output projections of several slices ask for all of
# a round of splits at once (ALL_LOOK in cuda_vector.cuh): long contexts take up to 8 % less.
AT_ONCE_SINCE = "2026-11-27T19:30"


def is_older(record: Run, run: HeldOut, device: str) -> bool:
    """Was a run of a record of another kernel than its plan now has? None of a record without a
    date.
    """
    date = str(record.meta.get("date", AT_ONCE_SINCE))
    by_eights = date < BY_FOURS_SINCE
    # slots of the usual size, which most have, hold tiles of whole teams
    in_turn = date < AT_ONCE_SINCE and run.options.slot_bytes % Options().slot_bytes
    if not by_eights and not in_turn:
        return False
    try:
        plan = run.plan(device)
    except InvalidPlan:
        return False
    return (by_eights and hidden_in_quads(plan)) or _asked_in_turn(plan)


def _asked_in_turn(plan: Plan) -> bool:
    """Did the kernel wait for one slice's part of a round before it asked for the next?"""
    matrices = (s.matrix for s in plan.stages if s.kind is StageKind.O_PROJ and s.matrix)
    matrix = next(matrices, None)
    if not plan.limits.teams or matrix is None or matrix.format is not None:
        return False
    team = shaped_team(matrix, plan.options.weight_dtype)
    return team is not None and team.portions > 1 and not team.full
