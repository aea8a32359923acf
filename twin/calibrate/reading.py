"""From the steps of one call to one number, and from the repeats to the one that counts. Probes and
held-out runs are read alike.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.store import Run

QUIET_PERCENT = 25
STRETCHES = 8


class Reading(Enum):
    """Which time of a plan answers a question."""

    STEP = "step"
    STAGE = "stage"  # mean of a step's stages
    HAND_OFF = "hand-off"  # from the last block that published to the last that has seen it
    BORDER = "border"  # between two kernels that are launched one by one


def quiet(seconds: NDArray[np.floating]) -> float:
    """A CPU's: the lower quartile of the steps.

    Other processes only ever add time, and on a shared computer they do so to more than every
    second step. Repeats are compared by their medians instead: a virtual machine's memory was seen
    to change between 40 and 60 GB/s for minutes.
    """
    return float(np.percentile(seconds, QUIET_PERCENT))


def steady(seconds: NDArray[np.floating]) -> float:
    """A GPU's: the median of the means of STRETCHES stretches of steps.

    Nobody shares the GPU, but its clock was seen to tick in 256 ns: a single step of 10 us is known
    to 3 %, a mean is not rounded.
    """
    return float(
        np.median(
            [stretch.mean() for stretch in np.array_split(seconds, min(STRETCHES, len(seconds)))]
        )
    )


def settled(run: Run) -> dict[str, float]:
    """The middle repeat of each probe or run."""
    return {name: float(np.median(values)) for name, values in run.samples.items()}
