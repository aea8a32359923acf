"""What is simulated: a model on a node, with the options that were chosen rather than defaulted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.defaults import plan_for
from twin.plan.types import Plan
from twin.plan.validate import validate
from twin.sim.run import Result, simulate


@dataclass(frozen=True, slots=True)
class Case:
    spec: ModelSpec
    node: Node
    chosen: dict[str, Any]  # values of Options fields

    def plan(self) -> Plan:
        """Planned and proven. Raises PlanError or InvalidPlan."""
        plan = plan_for(self.spec, self.node, **self.chosen)
        validate(plan)
        return plan

    def simulate(self, *, steps: int = 2) -> Result:
        return simulate(self.plan(), self.node, steps=steps)
