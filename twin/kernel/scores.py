"""A router's columns as blocks multiply them (twin/schedule/scores.py)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from twin.kernel.packing import STORAGE
from twin.plan.matrices import stage_matrix
from twin.plan.shards import Weights
from twin.plan.types import Plan, Stage
from twin.schedule.scores import THREADS, own_rows, scores_of


def columns_of(plan: Plan, stage: Stage, weights: Weights) -> NDArray[np.float32]:
    """[blocks][rounds][pairs][threads] words of two numbers of the plan's weight type: the router's
    columns of each block's rows; zeros beyond them.
    """
    made = scores_of(plan)
    assert made is not None
    router = stage_matrix(plan, stage, 0, weights)
    assert isinstance(router, np.ndarray)
    storage = STORAGE[plan.options.weight_dtype]
    held = np.zeros((made.rounds * THREADS // made.parts, made.rows), storage)
    out = []
    for lo, hi in own_rows(plan, stage):
        held[:] = 0
        held[: len(router), : hi - lo] = router[:, lo:hi]
        # [rounds][threads][pairs] words
        words = held.view(np.uint32).reshape(made.rounds, THREADS, made.pairs)
        out.append(words.transpose(0, 2, 1).copy())
    return np.ascontiguousarray(np.stack(out)).view(np.float32)
