"""What is simulated: a model on a node, with the options that were chosen rather than defaulted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twin.errors import PlanError
from twin.hardware.types import Node
from twin.kernel.defaults import DEFAULT, plan_for
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.sim.batch import planned
from twin.sim.run import Result, simulate
from twin.units import format_quantity


@dataclass(frozen=True, slots=True)
class Case:
    spec: ModelSpec
    node: Node
    chosen: dict[str, Any]  # values of Options fields

    def plan(self) -> Plan:
        """Planned and proven. Raises PlanError or InvalidPlan."""
        return planned(self.spec, self.node, **self.options())

    def options(self) -> dict[str, Any]:
        """What was chosen, and a context that fits where none was: no default may exceed the model's positions or the capacity chosen."""
        room = min(self.spec.context, self.chosen.get("max_context", self.spec.context))
        return self.chosen if "context" in self.chosen or room >= DEFAULT.context else {"context": max(1, room), **self.chosen}

    def check(self) -> None:
        """Refuses what most cells of a study fail on, in a tenth of the time of a proof: parallelism and memory. Raises PlanError."""
        plan = plan_for(self.spec, self.node, **self.options())
        needed, there = plan.memory_bytes(), plan.limits.memory_bytes
        if needed > there:
            sizes = f"needs {format_quantity(needed, 'B')} of memory per GPU, a {self.node.device.name} has {format_quantity(there, 'B')}"
            raise PlanError(f"{plan.name} {sizes}: choose a node with more memory, more GPUs, or a smaller format (NAME@FORMAT)")

    def simulate(self) -> Result:
        return simulate(self.plan(), self.node)
