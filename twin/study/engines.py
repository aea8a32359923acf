"""The same model and node under four ways to run a step, from launch-bound to resident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twin.plan.options import Execution, HandOffKind
from twin.sim.run import Result
from twin.study.case import Case
from twin.workers import each

# What a kernel border or a barrier decides by itself is not the user's to choose here.
DECIDED = ("execution", "handoff", "collective")
ENGINES: dict[str, dict[str, Any]] = {
    "stream": {"execution": Execution.LAUNCHES},
    "graph": {"execution": Execution.GRAPH},
    "resident, grid": {"execution": Execution.RESIDENT, "handoff": HandOffKind.GRID},
    "resident, sentinel": {"execution": Execution.RESIDENT, "handoff": HandOffKind.SENTINEL},
}


def compare_engines(case: Case, progress: Callable[[str], None]) -> dict[str, Result]:
    """All four, in the order of ENGINES."""
    kept = {name: value for name, value in case.chosen.items() if name not in DECIDED}
    cases = [Case(case.spec, case.node, kept | engine) for engine in ENGINES.values()]
    found: dict[str, Result] = {}
    for name, result in zip(ENGINES, each(Case.simulate, cases), strict=True):
        found[name] = result
        progress(
            f"{case.spec.name} on {case.node.name}: {len(found)}/{len(cases)} engines simulated "
            f"({name})"
        )
    return found
