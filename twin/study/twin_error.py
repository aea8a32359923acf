"""How wrong the twin itself is: engine runs that nothing was fitted to, as factors on its
predictions.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from twin.calibrate import store
from twin.calibrate.engine_runs import runs_of
from twin.errors import CalibrationError
from twin.plan.types import Execution, HandOffKind
from twin.sim.run import simulate
from twin.study.hardware import node_on_file
from twin.study.interval import LEVELS

FEWEST = 5  # held-out runs from which a spread is taken


@dataclass(frozen=True, slots=True)
class TwinError:
    """Measured over predicted speed of each held-out run of a device, resident with sentinels: what
    a projection predicts.
    """

    device: str
    run: str  # id of the measured run
    factors: tuple[float, ...]

    def spread(self, speeds: Sequence[float]) -> tuple[float, float, float]:
        """LEVELS of every speed times every factor: as if the twin were as wrong here as it was
        there.
        """
        products = [speed * factor for speed, factor in itertools.product(speeds, self.factors)]
        low, middle, high = (float(value) for value in np.quantile(products, LEVELS))
        return low, middle, high

    def said(self) -> str:
        middle = statistics.median(self.factors)
        return (
            f"{len(self.factors)} held-out runs on {self.device} ({self.run}) reached {middle:.0%} "
            f"of their prediction in the median, {min(self.factors):.0%} to "
            f"{max(self.factors):.0%} at the ends"
        )


@lru_cache(maxsize=4)
def twin_error(device: str) -> TwinError:
    """From the device's newest record of engine runs. Raises CalibrationError when there is none,
    or too few runs are in it.
    """
    node = node_on_file(f"1x{device}")
    measured = _newest(node.name)
    runs = [
        run
        for run in runs_of(measured, node)
        if run.options.execution is Execution.RESIDENT
        and run.options.handoff is HandOffKind.SENTINEL
    ]
    factors = []
    for run in runs:
        predicted = simulate(run.plan(node.device.name), node)
        factors.append(predicted.step_s / statistics.median(measured.samples[run.name]))
    if len(factors) < FEWEST:
        raise CalibrationError(
            f"{measured.folder}: {len(factors)} held-out runs are too few for a spread, at least "
            f"{FEWEST}; validate again"
        )
    return TwinError(node.device.name, measured.id, tuple(factors))


def _newest(node: str) -> store.Run:
    folders = sorted(store.runs_folder(node).glob("*-engine"))
    if not folders:
        raise CalibrationError(
            f"no engine runs of {node} on record: run `twin validate {node}` on one, or take "
            "another device"
        )
    return store.read_run(folders[-1])
