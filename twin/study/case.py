"""What is simulated: a model on a node, with the options that were chosen rather than defaulted."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from twin.errors import InvalidPlan, PlanError, TwinError
from twin.hardware.load import device_names, load_node
from twin.hardware.types import Node
from twin.kernel.defaults import DEFAULT, limits_of, plan_for
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.sim.batch import planned
from twin.sim.run import Result, simulate
from twin.units import format_quantity

GPUS = (1, 2, 4, 8)  # of the nodes that are suggested


@dataclass(frozen=True, slots=True)
class Case:
    spec: ModelSpec
    node: Node
    chosen: dict[str, Any]  # values of Options fields

    def plan(self) -> Plan:
        """Planned and proven. Raises PlanError or InvalidPlan."""
        try:
            return planned(self.spec, self.node, **self.options())
        except InvalidPlan:
            self.check(suggest=True)  # what does not fit is said in GB, with the node that holds it
            raise

    def options(self) -> dict[str, Any]:
        """What was chosen, and a context that fits where none was: no default may exceed the model's positions or the capacity chosen."""
        room = min(self.spec.context, self.chosen.get("max_context", self.spec.context))
        return self.chosen if "context" in self.chosen or room >= DEFAULT.context else {"context": max(1, room), **self.chosen}

    def check(self, *, suggest: bool = False) -> None:
        """Refuses what most cells of a study fail on, in a tenth of the time of a proof: parallelism and memory. Raises PlanError."""
        plan = plan_for(self.spec, self.node, **self.options())
        needed, there = plan.memory_bytes(), plan.limits.memory_bytes
        if needed > there:
            size, room, lacking = (format_quantity(count, "B") for count in (needed, there, needed - there))
            sizes = f"needs {size} of memory per GPU, a {self.node.device.name} has {room}, {lacking} too few"
            advice = self._holding() if suggest else ""
            raise PlanError(f"{plan.name} {sizes}: {advice}choose a node with more memory, more GPUs, or a smaller format (NAME@FORMAT)")

    def _holding(self) -> str:
        """The node with the fewest of these devices, or else of any, that holds it; empty where there is none."""
        devices = [self.node.device.name, *(name for name in device_names() if name != self.node.device.name)]
        for device, count in ((device, count) for device in devices for count in GPUS):
            with suppress(TwinError):  # no such node, or a model that cannot be divided so
                node = load_node(f"{count}x{device}")
                if node.device.sharing is not None or self.spec.stored_bytes > count * limits_of(node).memory_bytes:
                    continue  # emulated, or too small whatever the plan
                plan = plan_for(self.spec, node, **{**self.options(), "gpus": count})
                if plan.memory_bytes() <= plan.limits.memory_bytes:
                    return f"{count}x{device} is the smallest node of {device} that holds it; "
        return ""

    def simulate(self) -> Result:
        return simulate(self.plan(), self.node)
