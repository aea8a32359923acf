"""What is simulated: a model on a node, with the options that were chosen rather than defaulted."""

from __future__ import annotations

from typing import Any

from twin.errors import TwinError
from twin.frozen import frozen
from twin.hardware.types import Node
from twin.kernel.room import check_room
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.schedule.options import DEFAULT, plan_for
from twin.sim.batch import planned
from twin.sim.run import Result, simulate
from twin.study.division import Choice, choice
from twin.study.hardware import node_on_file


def nominal(node: Node) -> Node:
    """The node of that name on file, with its fit; one that is not there, such as a test's, is as
    it is.
    """
    try:
        return node_on_file(node.name)
    except TwinError:
        return node


@frozen
class Case:
    spec: ModelSpec
    node: Node
    chosen: dict[str, Any]  # values of Options fields

    def plan(self) -> Plan:
        """Planned and proven. Raises PlanError or InvalidPlan."""
        return planned(self.spec, self.node, suggest=True, **self.options())

    def division(self) -> Choice:
        """The one that the twin predicts to be fastest, by the node as it is on file."""
        return choice(self.spec, nominal(self.node), self.options())

    def options(self) -> dict[str, Any]:
        """What was chosen, and a context that fits where none was: no default may exceed the
        model's positions or the capacity chosen.
        """
        room = min(self.spec.context, self.chosen.get("max_context", self.spec.context))
        return (
            self.chosen
            if "context" in self.chosen or room >= DEFAULT.context
            else {"context": max(1, room), **self.chosen}
        )

    def check(self) -> None:
        """Refuses what most cells of a study fail on, in a tenth of the time of a proof:
        parallelism and memory. Raises PlanError.
        """
        check_room(plan_for(self.spec, self.node, **self.options()), self.node)

    def simulate(self) -> Result:
        return simulate(self.plan(), self.node)
