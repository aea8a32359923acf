"""Memory that a plan takes and a node has, and the smallest node on file that holds the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from twin.errors import PlanError, TwinError
from twin.hardware.load import load_node, node_names
from twin.hardware.types import Node
from twin.kernel.prompt import prompt_of
from twin.models.spec import ModelSpec
from twin.plan.settle import runs_on
from twin.plan.types import Plan
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.ring import limits_of
from twin.units import format_quantity

MEMINFO = Path("/proc/meminfo")
TO_PREDICT = "choose a node with more memory, more GPUs, or a smaller format (NAME@FORMAT)"
TO_RUN = (
    "use a smaller model, --dtype bf16 or fp16, --kv-dtype fp8, or a smaller --max-context; `twin "
    "simulate` "
    "predicts nodes that are not here"
)


def check_room(
    plan: Plan,
    node: Node,
    chosen: Mapping[str, Any] | None = None,
    *,
    free_bytes: int | None = None,
    advice: str = TO_PREDICT,
) -> None:
    """Refuses in no time what a node's memory does not hold. Raises PlanError with both sizes.

    `chosen`: values of Options fields; with them the refusal names the smallest node on file that
    holds the model, planned alike. `free_bytes`: of this computer's memory, where the plan is to
    run on it. Emulated GPUs share that memory.
    """
    emulated = node.device.sharing is not None
    needed = plan.memory_bytes() + prompt_of(schedule_of(plan)).gpu_bytes
    needed *= plan.options.gpus if emulated else 1
    there = (
        plan.limits.memory_bytes
        if free_bytes is None
        else min(plan.limits.memory_bytes, free_bytes)
    )
    if needed <= there:
        return
    need, has, lacking = (format_quantity(count, "B") for count in (needed, there, needed - there))
    if emulated:
        sizes = (
            f"needs {need} of memory, this computer has "
            f"{has}{'' if there == plan.limits.memory_bytes else ' free'}, {lacking} too few"
        )
    else:
        sizes = f"needs {need} of memory per GPU, a {node.device.name} has {has}, {lacking} too few"
    holder = smallest_node(plan.spec, node, chosen) if plan.spec and chosen is not None else None
    raise PlanError(f"{plan.name} {sizes}: {f'{holder}; ' if holder else ''}{advice}")


def smallest_node(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> str | None:
    """Which node holds the model, in words: the fewest GPUs of the node's own kind, else the least
    memory of all on file. Of a model that runs on the node none that only simulate it.
    """
    dtype = chosen.get("weight_dtype", spec.dtype)
    least = spec.stored_bytes * min(spec.dtype.bytes, dtype.bytes) // spec.dtype.bytes
    # most nodes are too small for the weights, whatever the plan
    here = runs_on(spec, limits_of(node))
    known = (one for one in _nodes() if not here or runs_on(spec, limits_of(one)))
    sized = ((other.gpus * limits_of(other).memory_bytes, other.gpus, other) for other in known)
    large = sorted((one for one in sized if one[0] >= least), key=lambda one: one[:2])
    nodes = [other for *_, other in large]
    own = [other for other in nodes if other.device.name == node.device.name]
    for among, whose in ((own, f"of {node.device.name}"), (nodes, "on file")):
        for other in among:
            if _holds(other, spec, chosen):
                return f"{other.name} is the smallest node {whose} that holds it"
    return None


def free_bytes() -> int | None:
    """Memory of this computer that can be had without swapping, as the system sees it; None where
    it does not say.
    """
    with suppress(OSError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _nodes() -> Iterator[Node]:
    """All nodes on file that are not emulated."""
    nodes = (load_node(name) for name in node_names())
    return (node for node in nodes if node.device.sharing is None)


def _holds(node: Node, spec: ModelSpec, chosen: Mapping[str, Any]) -> bool:
    """Is there a plan of the model, with these options, that fits?"""
    with suppress(TwinError):  # a model that cannot be divided so
        plan = plan_for(spec, node, **{**chosen, "gpus": node.gpus})
        needed = plan.memory_bytes() + prompt_of(schedule_of(plan)).gpu_bytes
        return needed <= plan.limits.memory_bytes
    return False
