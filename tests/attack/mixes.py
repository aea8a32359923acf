"""Random mixes of valid options: what can be planned is accepted, runs, and computes what the
reference does.
"""

from __future__ import annotations

import random
from pathlib import Path

from tests.attack.bases import some_plan
from tests.attack.defect import Defect
from tests.attack.plans import describe, run
from twin.proof.prove import violations

NAME = "option mixes"
FIRST, CASES = 43, 8  # many compile a kernel of their own; the first one is refused
JOBS = 3  # their blocks nap most of the time
SPARE_COPIES = 3  # with fewer, reuse may come too early, and is refused


def attack(chance: random.Random, folder: Path) -> str:
    """One plan of the builder's."""
    plan = some_plan(chance)
    found = violations(plan)
    if found and (
        plan.options.copies >= SPARE_COPIES or any(violation.rule != "race" for violation in found)
    ):
        raise Defect(f"the builder's own plan is refused: {found[0]}; {describe(plan)}")
    if found:
        return "refused for its few copies"
    run(plan, naps=chance.random() < 0.5, what=describe(plan))
    return "accepted and right"
