"""Predictions of published figures: a plan of each, and which of its times is meant."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from twin.calibrate.node import calibrated_node
from twin.calibrate.probes import Probe
from twin.calibrate.published import Figure, figures
from twin.calibrate.reading import Reading
from twin.calibrate.recorded import options_of, shape_of
from twin.calibrate.simulated import simulated
from twin.calibrate.store import Run
from twin.errors import CalibrationError, ConfigError
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Limits, Options
from twin.plan.published_allreduce import allreduce_probe
from twin.plan.types import Plan
from twin.schedule.probe import exchange_probe, stream_probe
from twin.schedule.ring import limits_of
from twin.sim.batch import planned
from twin.text import said, shown
from twin.workers import each

COLS = 2048
SLOT_BYTES, RING_SLOTS = 16 * 2**10, 10  # as the probes' (gpu_probes.py)
FLOAT_BYTES = 4
STAGES = 15
FEW = 4  # figures that one process predicts sooner than it starts others


@dataclass(frozen=True, slots=True)
class Question:
    plan: Plan
    reading: Reading = Reading.STEP
    times: int = 1  # how many of them the figure is
    added_s: float = 0.0  # what comes on top, and is not simulated


def question(figure: Figure) -> Question:
    """Raises CalibrationError for words that ask nothing."""
    try:
        wanted = dict(figure.asks)
        times = int(wanted.pop("times", 1))
        ((word, content),) = wanted.items()
        return dataclasses.replace(QUESTIONS[word](figure.node, **content), times=times)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{figure.name}: asks {shown(dict(figure.asks))}, which is none of "
            f"{', '.join(QUESTIONS)} ({said(str(error))})"
        ) from error


def probe(figure: Figure) -> Probe:
    """The figure as a probe of a fit."""
    wanted = question(figure)
    if wanted.times != 1 or wanted.added_s:
        raise CalibrationError(f"{figure.name}: only what runs once can be fitted")
    return Probe(figure.name, figure.group, wanted.plan, 1, wanted.reading)


def predicted_s(figure: Figure, node: Node | None = None) -> float:
    """What the twin says, with the fits on file unless a node is given."""
    wanted, node = question(figure), node or calibrated_node(figure.node)
    found = simulated(wanted.plan, node, reading=wanted.reading).step_s
    return wanted.times * found + wanted.added_s


def compared(record: Run, progress: Callable[[str], None]) -> list[Figure]:
    """Every figure of a record with its prediction, in its order, on all cores."""
    wanted = figures(record.folder, record.meta)
    found: list[Figure] = []
    for figure, seconds in zip(wanted, each(predicted_s, wanted, few=FEW), strict=True):
        progress(f"predicting published figures: {len(found) + 1}/{len(wanted)} {figure.name}")
        found.append(dataclasses.replace(figure, predicted_s=seconds))
    return found


# ---- questions -----------------------------------------------------------------------------------


def _stream(node: str, *, blocks: int, bytes: int) -> Question:
    """All blocks read `bytes` once, and nothing else."""
    options = _options(blocks, weight_dtype=DType.FP16)
    rows = bytes // (COLS * options.weight_dtype.bytes)
    return Question(stream_probe(options, _limits(node), rows=rows, cols=COLS))


def _hop(node: str, *, dies: list[int]) -> Question:
    """One word from a block of one die to a block of another, or of the same."""
    plan = exchange_probe(_options(2), _limits(node), elements=2, stages=STAGES)
    return Question(dataclasses.replace(plan, die_of_block=tuple(dies)), Reading.HAND_OFF)


def _exchange(node: str, *, blocks: int, bytes: int, handoff: str) -> Question:
    """Every block publishes its share of `bytes` and waits for all of them."""
    options = _options(blocks, handoff=HandOffKind(handoff))
    plan = exchange_probe(options, _limits(node), elements=bytes // FLOAT_BYTES, stages=STAGES)
    return Question(plan, Reading.HAND_OFF)


def _launches(node: str, *, blocks: int) -> Question:
    """The border between kernels that do next to nothing, launched one by one."""
    options = _options(blocks, execution=Execution.LAUNCHES)
    plan = exchange_probe(options, _limits(node), elements=blocks, stages=STAGES)
    return Question(plan, Reading.BORDER)


def _allreduce(
    node: str, *, gpus: int, bytes: int, blocks: int, graph_edge: bool = False
) -> Question:
    """Every GPU pushes its vector to all others and sums its peers'. `graph_edge`: as a kernel of
    a graph, whose border between small kernels is added (the hardware file's: a fit's is our
    kernel's).
    """
    options = _options(blocks, gpus=gpus, collective=CollectiveKind.PUSH)
    plan = allreduce_probe(options, _limits(node), elements=bytes // FLOAT_BYTES, stages=STAGES)
    edge_s = load_node(node).device.launch.graph_edge_s.value if graph_edge else 0.0
    return Question(plan, Reading.STAGE, added_s=edge_s)


def _peer_hop(node: str) -> Question:
    """One word from a GPU into another's memory."""
    options = _options(1, gpus=2, collective=CollectiveKind.PUSH)
    plan = allreduce_probe(options, _limits(node), elements=1, stages=STAGES)
    return Question(plan, Reading.HAND_OFF)


def _step(node: str, *, model: str | dict[str, Any], **options: Any) -> Question:
    """A decode step of a model; `model` may be {like: NAME, field: value}."""
    plan = planned(_spec(model), load_node(node), **options_of(options))
    return Question(plan)


def _border(node: str, *, model: str | dict[str, Any]) -> Question:
    """The mean border between two kernels of such a step, a kernel for each operation."""
    return dataclasses.replace(_step(node, model=model, execution="stream"), reading=Reading.BORDER)


QUESTIONS: Mapping[str, Callable[..., Question]] = {
    "stream": _stream,
    "hop": _hop,
    "exchange": _exchange,
    "launches": _launches,
    "all-reduce": _allreduce,
    "peer-hop": _peer_hop,
    "step": _step,
    "border": _border,
}


def _spec(model: str | dict[str, Any]) -> ModelSpec:
    if isinstance(model, str):
        return load_model(model)
    like = dict(model)
    return shape_of(load_model(like.pop("like")), like)


def _options(blocks: int, **changes: Any) -> Options:
    return dataclasses.replace(
        Options(
            blocks=blocks, slot_bytes=SLOT_BYTES, ring_slots=RING_SLOTS, window_slots=RING_SLOTS
        ),
        **changes,
    )


def _limits(node: str) -> Limits:
    return limits_of(load_node(node))
