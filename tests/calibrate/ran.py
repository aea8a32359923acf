"""Engine runs with speeds that a test chooses."""

from __future__ import annotations

from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import TINY
from twin.plan.types import Options


def ran(
    name: str, predicted: float, measured: float = 100.0, spread: float = 0.0, blocks: int = 1
) -> Experiment:
    """Predicted and measured tokens/s; `spread` of three repeats."""
    step_s = 1 / measured
    return Experiment(
        name,
        TINY,
        Options(blocks=blocks),
        16,
        predicted_tokens_per_s=predicted,
        samples=(step_s * (1 - spread / 2), step_s, step_s * (1 + spread / 2)),
    )
