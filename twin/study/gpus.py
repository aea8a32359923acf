"""How many of a node's GPUs a model should run on: each number simulated, and a default that takes
fewer where more of them gain nothing.

Tensor parallelism divides the bytes of a step and adds two exchanges a layer. A small model's step
has few bytes and many exchanges, so the twin decides, not a rule about sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from twin.errors import TwinError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.models.spec import Lanes, ModelSpec
from twin.plan.options import Execution
from twin.plan.ranges import GPUS
from twin.plan.types import Plan
from twin.sim.run import Result
from twin.study.case import Case
from twin.study.hardware import node_on_file

# By how much more GPUs must be predicted faster than fewer: the median error of the twin on engine
# runs of one H200 was 2.2 % (calibration/held-out), and no link is fitted.
MARGIN = 0.03
# of a dense model that are simulated instead of all its layers; the rest is proportional
DEPTHS = (4, 8)


@frozen
class Offer:
    """A number of GPUs, and what the twin says of it."""

    gpus: int
    step_s: float | None  # None: no such plan
    exchange: float = 0.0  # part of the step that waits for other GPUs
    refusal: str = ""

    @property
    def tokens_per_s(self) -> float | None:
        return 1 / self.step_s if self.step_s else None


def offers(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> tuple[Offer, ...]:
    """One for each number of GPUs up to the node's."""
    return tuple(_offer(spec, node, chosen, gpus) for gpus in GPUS if gpus <= node.gpus)


def default_gpus(found: tuple[Offer, ...]) -> int:
    """The fewest that no larger number beats by more than MARGIN; the most where none can be
    planned.
    """
    best = None
    for offer in found:
        if offer.step_s and (best is None or offer.step_s < (best.step_s or 0.0) * (1 - MARGIN)):
            best = offer
    return best.gpus if best else found[-1].gpus


def said(found: tuple[Offer, ...]) -> str:
    """The default and its reason, for people."""
    fewer, most = default_gpus(found), found[-1].gpus
    if fewer == most:
        return f"{most}: predicted faster than fewer by more than {MARGIN:.0%}"
    return f"{fewer}: more GPUs gain less than {MARGIN:.0%} or lose (predicted); --gpus takes more"


def compared(node: Node, plan: Plan) -> bool:
    """Is there a choice? Of what the engine runs on several GPUs."""
    resident = plan.options.execution is Execution.RESIDENT
    return node.gpus > 1 and node.device.nvidia and resident and plan.simulation_only() is None


def as_if_delayed(case: Case) -> Case:
    """An ordinary model on several GPUs with a delay of its own, as lanes: it can be
    simulated, and no engine runs it, because the delay changes what the model computes.
    """
    delay = case.chosen.get("delay")
    if not delay or case.spec.lanes or case.spec.layout or case.node.gpus == 1:
        return case
    name = f"{case.spec.name} as if trained with delay {delay} (in the twin only)"
    lanes = Lanes(case.node.gpus, int(delay))
    return dataclasses.replace(case, spec=dataclasses.replace(case.spec, name=name, lanes=lanes))


def _offer(spec: ModelSpec, node: Node, chosen: Mapping[str, Any], gpus: int) -> Offer:
    try:
        fewer = node if gpus == node.gpus else node_on_file(f"{gpus}x{node.device.name}")
        Case(spec, fewer, dict(chosen)).check()
        return _simulated(spec, fewer, dict(chosen))
    except TwinError as error:
        return Offer(gpus, None, refusal=str(error))


def _simulated(spec: ModelSpec, node: Node, chosen: dict[str, Any]) -> Offer:
    if spec.lanes or spec.layout or spec.layers <= DEPTHS[1]:
        result = Case(spec, node, chosen).simulate()
        return Offer(node.gpus, result.step_s, _waits(result) / result.step_ps)
    few, many = (Case(_of_layers(spec, depth), node, chosen).simulate() for depth in DEPTHS)
    rest = (spec.layers - DEPTHS[1]) / (DEPTHS[1] - DEPTHS[0])
    step = many.step_s + rest * (many.step_s - few.step_s)
    waits = _waits(many) + rest * (_waits(many) - _waits(few))
    return Offer(node.gpus, step, waits / (step * 1e12))


def _of_layers(spec: ModelSpec, layers: int) -> ModelSpec:
    return dataclasses.replace(spec, layers=layers, windows=spec.windows[:layers])


def _waits(result: Result) -> int:
    """Picoseconds of the critical path that another GPU causes."""
    return result.attribution_ps.get("collective", 0)
