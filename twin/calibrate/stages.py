"""The time of each kind of stage, from marks in a measured step or from a simulated one, by the
same arithmetic.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.store import StageTimes
from twin.kernel.marks import of_consumers
from twin.plan.types import Plan

Times = NDArray[np.float64]


def stage_times(run: str, plan: Plan, trace: Times) -> list[StageTimes]:
    """Medians over steps, by kind. `trace`: [steps][ranks][blocks][stages][inputs ready, finished]
    in seconds, consecutive steps.

    The first step only says when the second one began. What a block's scheduler warp makes has
    work, but no span and no wait.
    """
    took = (trace[..., 1] - trace[..., 0]).mean(axis=(1, 2)).reshape(-1)  # [stages in time]
    trace = of_consumers(plan, trace)
    steps, stages = trace.shape[0], trace.shape[3]
    # [all blocks][stages in time]
    flat = trace.reshape(steps, -1, stages, 2).transpose(1, 0, 2, 3).reshape(-1, steps * stages, 2)
    ready, finished = flat[:, :, 0], flat[:, :, 1]
    before = np.concatenate([ready[:, :1], finished[:, :-1]], axis=1)
    span = _spans(finished.max(axis=0))
    wait, work = (ready - before).mean(axis=0), took
    kinds = [stage.kind.value for stage in plan.stages]
    found = []
    for kind in dict.fromkeys(kinds):
        chosen = [at for at, other in enumerate(kinds) if other == kind]
        sums = [
            float(np.median(times.reshape(steps, stages)[1:, chosen].sum(axis=1)))
            for times in (span, wait, work)
        ]
        found.append(StageTimes(run, kind, *sums))
    return found


def _spans(ends: Times) -> Times:
    """From the end of the stage before, over all blocks, to the end of each: they add up to the
    step.
    """
    spans: Times = np.diff(np.concatenate([ends[:1], ends]))
    return spans
