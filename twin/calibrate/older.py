"""Recorded runs whose kernel the engine no longer has: the twin's laws are those of the new one, so
how far it is from them says nothing.
"""

from __future__ import annotations

from twin.calibrate.heldout import HeldOut
from twin.calibrate.store import Run
from twin.errors import InvalidPlan
from twin.kernel.teams import hidden_in_quads

# Narrow residuals on one NVIDIA GPU come by fours of each thread (cuda_quads.cuh): such steps take
# 2 to 15 % less.
BY_FOURS_SINCE = "2026-11-27T04:00"


def is_older(record: Run, run: HeldOut, device: str) -> bool:
    """Was a run of a record of another kernel than its plan now has? None of a record without a
    date.
    """
    if str(record.meta.get("date", BY_FOURS_SINCE)) >= BY_FOURS_SINCE:
        return False
    try:
        return hidden_in_quads(run.plan(device))
    except InvalidPlan:
        return False
