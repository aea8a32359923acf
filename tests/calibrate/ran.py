"""Engine runs with speeds that a test chooses."""

from __future__ import annotations

from twin.calibrate.experiment import Experiment
from twin.calibrate.held_out import TINY
from twin.calibrate.seen import Features, Seen
from twin.models.kind import ModelKind
from twin.plan.options import Options


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


def seen(
    name: str,
    error: float,
    *,
    record: str = "shapes-1-seed-2",
    kind: ModelKind = ModelKind.DENSE,
    layer_s: float = 5e-5,
    handoff: str = "sentinel",
    gpus: int = 1,
    device: str = "h200-sxm",
    parts: tuple[str, ...] = ("bf16",),
    context: int = 128,
) -> Seen:
    """A run with the error of its predicted speed."""
    about = Features(device, gpus, kind, handoff, parts, 16, context)
    return Seen(record, name, error, layer_s, about)


def shapes(
    errors: dict[str, float],
    record: str,
    kind: ModelKind = ModelKind.DENSE,
    gpus: int = 1,
) -> list[Seen]:
    """Runs of a record."""
    return [
        seen(name, error, record=record, kind=kind, gpus=gpus) for name, error in errors.items()
    ]
