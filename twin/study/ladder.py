"""A step's speed from kernels launched one by one to the whole monokernel, one idea at a time."""

from __future__ import annotations

from collections.abc import Iterator

from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, HandOffKind, Placement
from twin.study.point import Point

# by the rungs, not by the user
DECIDED = ("execution", "handoff", "collective", "placement", "delay")


def rungs(point: Point) -> list[tuple[str, Point]]:
    """(what is new, point) from the slowest idea to the point itself, which is the last."""
    case = point.case()
    return list(_rungs(point, case.spec, case.node))


def _rungs(point: Point, spec: ModelSpec, node: Node) -> Iterator[tuple[str, Point]]:
    kept = {name: value for name, value in point.options if name not in DECIDED}
    delayed = spec.lanes is not None and node.gpus > 1
    several_dies = node.device.structure.dies.value > 1
    common: dict[str, str | int] = ({"delay": 0} if delayed else {}) | (
        {"placement": Placement.FLAT.value} if several_dies else {}
    )

    def at(**options: str | int) -> Point:
        return Point(
            point.model,
            point.node,
            tuple(sorted((kept | common | options).items())),
            point.settings,
            point.steps,
        )

    yield "a launch for each operation", at(execution=Execution.LAUNCHES.value)
    yield "one graph of kernels", at(execution=Execution.GRAPH.value)
    yield (
        "resident, full barriers",
        at(execution=Execution.RESIDENT.value, handoff=HandOffKind.GRID.value),
    )
    ideas: list[tuple[str, dict[str, str | int]]] = [
        ("data is the flag", {"handoff": HandOffKind.SENTINEL.value})
    ]
    if several_dies:
        ideas.append(("weights by die", {"placement": Placement.DIE_AWARE.value}))
    if delayed and spec.lanes and spec.lanes.delay:
        ideas.append((f"exchange {spec.lanes.delay} layers late", {"delay": spec.lanes.delay}))
    so_far: dict[str, str | int] = {"execution": Execution.RESIDENT.value}
    for name, options in ideas:
        so_far |= options
        yield name, at(**so_far)
    # by default our kernel leaves weights where the GPU puts them
    if several_dies or dict(point.options).keys() & set(DECIDED):
        yield "as chosen here", point
