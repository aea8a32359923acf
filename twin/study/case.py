"""What is simulated: a model on a node, with the options that were chosen rather than defaulted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.sim.batch import planned
from twin.sim.run import Result, simulate


@dataclass(frozen=True, slots=True)
class Case:
    spec: ModelSpec
    node: Node
    chosen: dict[str, Any]  # values of Options fields

    def plan(self) -> Plan:
        """Planned and proven. Raises PlanError or InvalidPlan."""
        return planned(self.spec, self.node, **self.chosen)

    def simulate(self) -> Result:
        return simulate(self.plan(), self.node)
