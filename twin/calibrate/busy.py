"""Was the computer busy with something else while it was measured? And which rounds of probes
count: the quieter ones.

Others only ever add time, but not to all alike: a probe in a quiet moment and one in a busy moment
say nothing together. So whole rounds are left out, never single samples, and what was run between
the probes of a round counts with them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twin.calibrate.store import Run, Samples
from twin.hardware.activity import Activity

COUNTED, ACTIVITY = "counted", "activity"  # in a run's meta data
QUIETER = 0.5  # of the rounds
LEAST_COUNTED = 3
# from which a measurement is not called one of this computer
MOST_OTHERS = 0.15  # of the cores, in use by others
MOST_STOLEN = 0.05  # of the cores' time, given to other virtual machines
LEAST_OWN = 0.85  # of the time of the cores that a probe's threads spin on
MOST_SPREAD = (
    0.20  # between the quartiles of a probe's rounds, over the middle one; half the probes
)


@dataclass(frozen=True, slots=True)
class Round:
    """What one round over all probes saw of others."""

    others: float  # of the cores
    stolen: float
    own: float  # CPU time of the probes over that of the cores they were on; 1 where nobody can say

    @classmethod
    def of(cls, seen: Activity, cores: int, own: float) -> Round:
        return cls(seen.others / cores, seen.lost / cores, own)


def quieter(samples: Samples) -> list[int]:
    """Numbers of the rounds that count: those in which the probes took least, all alike."""
    rounds = min(map(len, samples.values()), default=0)
    if rounds <= LEAST_COUNTED:
        return list(range(rounds))
    logs = np.log([values[:rounds] for values in samples.values()])
    slow = (logs - np.median(logs, axis=1, keepdims=True)).mean(axis=0)
    chosen = np.argsort(slow, kind="stable")[: max(LEAST_COUNTED, math.ceil(QUIETER * rounds))]
    return sorted(int(at) for at in chosen)


def counted(run: Run) -> Run:
    """The run with the samples of the rounds that count."""
    rounds: Sequence[int] | None = run.meta.get(COUNTED)
    if rounds is None:
        return run
    kept = {name: [values[at] for at in rounds] for name, values in run.samples.items()}
    return replace(run, samples=kept)


def activity(rounds: Sequence[Round], samples: Samples, chosen: Sequence[int]) -> dict[str, float]:
    """What a run's meta data say of others: means over the rounds that count, and the spread of the
    probes over them.
    """
    found = {
        name: statistics.fmean(getattr(rounds[at], name) for at in chosen)
        for name in ("others", "stolen", "own")
    }
    spreads = [_spread([values[at] for at in chosen]) for values in samples.values()]
    return {
        name: round(value, 4)
        for name, value in (found | {"spread": statistics.median(spreads)}).items()
    }


def busy(meta: Mapping[str, Any]) -> str | None:
    """Why a run's times are not those of this computer alone; None if they are."""
    seen: Mapping[str, float] = meta.get(ACTIVITY) or {}
    cores = int(meta.get("cores") or 1)
    if seen.get("stolen", 0.0) > MOST_STOLEN:
        return f"the hypervisor gave {seen['stolen']:.0%} of the cores' time to others"
    if seen.get("others", 0.0) > MOST_OTHERS:
        return f"other programs had {seen['others'] * cores:.1f} of {cores} cores"
    if seen.get("own", 1.0) < LEAST_OWN:
        return f"the probes had only {seen['own']:.0%} of their cores' time"
    if seen.get("spread", 0.0) > MOST_SPREAD:
        return f"repeats of the same probe differed by {seen['spread']:.0%}"
    return None


def _spread(values: Sequence[float]) -> float:
    low, middle, high = np.percentile(values, (25, 50, 75))
    return float((high - low) / middle)
